"""The platform's variant on an NVIDIA GPU: SGLang's own Triton and JIT kernels, no sgl_kernel.

Chosen by ``DSV4_REFERENCE_DEVICE=cuda``. The unified_kv path is written for ROCm, but most of its
kernels are Triton or JIT-compiled C++ that an NVIDIA GPU runs as well, so only what exists nowhere but
in sgl_kernel or aiter is replaced (``install.py``); nothing is made invariant to chunking here.
"""

from __future__ import annotations

import torch
from sglang.srt.platforms.cuda import CudaDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from dsv4_reference_platform.platform_base import ReferencePlatform


class ReferenceCudaPlatform(CudaDeviceMixin, ReferencePlatform):
    """The unified_kv path on CUDA tensors, pinned host pools, eager forwards (no graphs)."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=True)

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        """The rank's own GPU (the base class says CPU)."""
        return torch.device("cuda", local_rank)
