"""The in-tree form of the question which SGLang this is: the one that the package is part of."""

from __future__ import annotations


def sglang_version() -> str:
    """SGLang's version, for messages."""
    from sglang.version import __version__

    return __version__


def version_problem() -> str | None:
    """None: whether a tree fits was asked when the package was put into it."""
    return None
