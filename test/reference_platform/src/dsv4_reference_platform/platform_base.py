"""What the platform's two variants (CPU, NVIDIA GPU) have in common."""

from __future__ import annotations

import sys

import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class ReferencePlatform(SRTPlatform):
    """Out-of-tree platform that runs the unified_kv path of DeepSeek-V4 without sgl_kernel.

    As on every out-of-tree platform the model's layers take their ``forward_native`` methods.
    """

    _enum = PlatformEnum.OOT

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
