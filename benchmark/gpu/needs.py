"""What a machine needs to run the benchmark. Imports nothing that it may lack."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("torch", "triton", "sglang", "tabulate", "xxhash", "msgspec")


def missing() -> str | None:
    """Why this machine cannot run the benchmark, in words, or None."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if "torch" not in absent:
        import torch

        if not torch.cuda.is_available():
            return "this needs a GPU that torch can use"
    if absent:
        return f"this needs a GPU, and in this Python also {', '.join(absent)}"
    return None
