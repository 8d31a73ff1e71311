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

    def apply_server_args_defaults(self, server_args) -> None:
        """As every variant, and keeps the overlap schedule for EAGLE."""
        from dsv4_reference_platform import install

        super().apply_server_args_defaults(server_args)
        install.keep_overlap_with_speculation()

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """EAGLE (DeepSeek's NextN layer), whose kernels are stood in for."""
        return algorithm == "EAGLE"

    def get_speculative_cache_locs_fn(self):
        """The stand-in of the kernel that SGLang asks the platform for."""
        from dsv4_reference_platform.kernels import speculative

        return speculative.assign_extend_cache_locs
