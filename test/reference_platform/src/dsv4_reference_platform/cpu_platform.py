"""The SGLang platform class: plain CPU, with the kernels of this distribution installed."""

from __future__ import annotations

import sys

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class ReferenceCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree platform on CPU tensors that runs the unified_kv path of DeepSeek-V4.

    SGLang's own CPU engine is a different platform (it needs a CPU build of sgl_kernel); as an
    out-of-tree platform the model's layers take their ``forward_native`` methods.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device=None) -> bool:
        """Never: there is no device that memory could be pinned for."""
        return False

    def get_default_attention_backend(self) -> str:
        """For models other than DeepSeek-V4 (which names its own backend)."""
        return "torch_native"

    def apply_server_args_defaults(self, server_args) -> None:
        """Prepares the launcher, which resolves the arguments before it starts the server.

        Other processes resolve arguments too (tests, for one); they have no HTTP server.
        """
        from dsv4_reference_platform import install

        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name == "sglang.launch_server":
            install.drop_chat_encoder()
            install.wait_before_freeze_gc()

    def init_backend(self) -> None:
        """Installs every replacement; SGLang calls this when a worker imports its model runner."""
        from dsv4_reference_platform import install

        install.install()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Adds what the model builds only on HIP, and test access where a test asks for it."""
        from dsv4_reference_platform import install, poke

        install.add_hip_rope_tables(model)
        poke.attach(model)
