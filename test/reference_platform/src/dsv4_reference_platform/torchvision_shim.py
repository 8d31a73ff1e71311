"""Lets PyPI's torchvision wheel be imported beside a CPU-only torch.

That wheel's C extension is linked to CUDA; beside a CPU torch it does not load, and
torchvision then fails while it registers shape functions for operators that nobody declared.
Declaring their schemas is enough for the pure-Python part, which is all that SGLang's imports
need. On a torch built for CUDA or HIP nothing is declared.
"""

from __future__ import annotations

import importlib.machinery
import sys

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _TorchvisionFinder:
    """Meta path finder that declares the missing schemas once, right before the import."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        _declare_operators()
        return importlib.machinery.PathFinder.find_spec(name, path)


def _declare_operators() -> None:
    import torch

    if torch.version.cuda or torch.version.hip:
        return
    for op in ("nms", "qnms"):
        try:
            torch.library.define(f"torchvision::{op}", _SCHEMA)
        except RuntimeError:
            # The extension did load and declared the operator itself.
            continue


def install() -> None:
    """Put the finder on ``sys.meta_path``; called at interpreter start, does nothing twice."""
    if "torchvision" in sys.modules:
        return
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())
