"""Tells SGLang that its compiled CUDA kernels (``sgl_kernel``) are not there.

SGLang takes ``is_cuda()`` for "sgl_kernel, deep_gemm and flashinfer are installed": modules import them
at load time where it is true. The platform's CUDA variant runs without them, so in its processes
``is_cuda()`` says False and SGLang takes the branches of a device that it has no compiled kernels for;
tensors live on ``cuda`` all the same. The function must be replaced before anything asks it, hence a
meta path finder, installed at interpreter start (the distribution's .pth file).
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys

from dsv4_reference_platform import activation

_MODULE = "sglang.srt.utils.common"


class _CommonFinder:
    """Meta path finder that replaces ``is_cuda`` once ``sglang.srt.utils.common`` has run."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        stock = spec.loader.exec_module

        def exec_module(module):
            stock(module)
            # With a cache, as stock's: SGLang clears it in places.
            module.is_cuda = functools.lru_cache(maxsize=1)(_no)

        spec.loader.exec_module = exec_module
        return spec


def _no() -> bool:
    """Stands for ``is_cuda``."""
    return False


def install() -> None:
    """Put the finder on ``sys.meta_path`` in processes of the CUDA variant; nothing elsewhere, nor twice.

    Raises:
        RuntimeError: SGLang was imported before.
    """
    if any(isinstance(finder, _CommonFinder) for finder in sys.meta_path):
        return
    if not activation.selected() or os.environ.get(activation.DEVICE_VARIABLE) != "cuda":
        return
    if _MODULE in sys.modules:
        raise RuntimeError(f"{_MODULE} was imported before the reference platform's CUDA variant")
    sys.meta_path.insert(0, _CommonFinder())
