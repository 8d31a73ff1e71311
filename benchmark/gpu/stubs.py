"""Makes SGLang importable, and its unified_kv path reachable, on a GPU that is no ROCm.

Three things are stood in for, each only where it is missing: the package `sgl_kernel` (its kernels are
not on this path; its modules are imported), the gate that asks for HIP, and the count of compute units
that stock asks aiter for.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from typing import Any

import torch

STUBBED = "sgl_kernel"


class _Anything:
    """Any attribute of a stubbed module: can be named, called, used as a decorator; does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else _Anything(f"{self._name}()")


class _StubModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 (a module's attribute)

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")


class _StubFinder:
    """Finds the stubbed package and everything below it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare(device: str = "cuda") -> None:
    """Before anything of SGLang is imported."""
    os.environ["SGLANG_HACK_FLASHMLA_BACKEND"] = "unified_kv_triton"
    logging.getLogger("sglang").setLevel(logging.WARNING)
    if importlib.util.find_spec(STUBBED) is None:
        sys.meta_path.insert(0, _StubFinder())

    from sglang.srt.runtime_context import publish, reset_context
    from sglang.srt.server_args import ServerArgs

    reset_context()
    arguments = ServerArgs(model_path="dummy", device=device)
    arguments._mamba_cache_chunk_size = 64
    publish(arguments, role="tokenizer")
    open_gate()


def open_gate() -> None:
    """unified_kv on any device, bf16; nothing else of SGLang sees a ROCm where there is none."""
    if torch.version.hip is not None:
        return
    from sglang.srt.layers.attention.dsv4 import unified_kv_gate

    unified_kv_gate.is_hip = lambda: True
    unified_kv_gate.is_unified_kv_triton.cache_clear()
    unified_kv_gate.is_unified_kv_fp8.cache_clear()

    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import paged_decode, runtime
    from sglang.srt.layers.attention import deepseek_v4_backend_hip_radix as backend

    paged_decode._cu_count = runtime._cu_count = compute_units
    # As on HIP, where the FlashMLA kernels do not exist.
    backend._create_flashmla_metadata = lambda: None


def compute_units() -> int:
    """Multiprocessors of the device."""
    return torch.cuda.get_device_properties(0).multi_processor_count
