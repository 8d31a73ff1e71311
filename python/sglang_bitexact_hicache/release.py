"""The plugin's form of the question which SGLang this is: the one that is installed."""

from __future__ import annotations

import importlib.metadata

SGLANG_VERSION = "0.5.23"
"""The SGLang release that the table was checked against, and the only one that is accepted."""


def sglang_version() -> str:
    """The installed SGLang's version, without a local suffix ("0.5.23+rocm" is "0.5.23").

    Raises:
        ValueError: SGLang is not installed.
    """
    try:
        return importlib.metadata.version("sglang").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("SGLang is not installed") from None


def version_problem() -> str | None:
    """What is wrong with the installed SGLang's version, or None."""
    found = sglang_version()
    if found == SGLANG_VERSION:
        return None
    return f"SGLang {SGLANG_VERSION} is needed, {found} is installed"
