"""The SGLang platform class: plain CPU, with the kernels of this distribution installed."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from dsv4_reference_platform.platform_base import ReferencePlatform


class ReferenceCpuPlatform(CpuDeviceMixin, ReferencePlatform):
    """The unified_kv path on CPU tensors.

    SGLang's own CPU engine is a different platform (it needs a CPU build of sgl_kernel).
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device=None) -> bool:
        """Never: there is no device that memory could be pinned for."""
        return False
