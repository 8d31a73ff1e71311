"""Every SGLang name that the reference platform replaces, and the code that replaces it.

``KERNELS`` is the table: stock dotted name -> function of ``dsv4_reference_platform.kernels``
that does the same job in plain torch. ``install`` puts each function at its stock name and at
every name in a loaded SGLang module that was bound to the same object earlier (``from x import
f``). The rest of the module is what is not a kernel: the gates that ask for HIP, the rope
factory, host memory registration, dummy weights.

On an NVIDIA GPU SGLang's own kernels stay, Triton and JIT-compiled ones, and only ``_install_cuda`` and
the HiCache copy that stock takes from sgl_kernel are put in. ``DSV4_REFERENCE_KERNELS`` names kernels of
the table (``attention.store_swa_into_unified,...`` or whole modules: ``attention``) to replace there
too, to find out which one of stock's is at fault when something is.

Nothing here replaces a function of the request path above the kernels (scheduler, memory pools,
cache tree, attention backend methods): those run as they are in production.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dsv4_reference_platform import activation, invariant, several_ranks, weights

_OPS = "sglang.kernels.ops"
_DSV4 = f"{_OPS}.attention.dsv4"
_UNIFIED = f"{_DSV4}.unified_kv_kernels"
_STORE = f"{_OPS}.kvcache.dsv4_unified_kv_store"
_SPEC = f"{_OPS}.speculative"
_OURS = "dsv4_reference_platform.kernels"

KERNELS: dict[str, str] = {
    # attention over ring and compressed rows, and its index lists
    f"{_UNIFIED}.paged_prefill.sparse_attn_v4_paged_prefill": "attention.sparse_attn_v4_paged_prefill",
    f"{_UNIFIED}.paged_decode.sparse_attn_v4_paged_decode": "attention.sparse_attn_v4_paged_decode",
    f"{_UNIFIED}.runtime.prefill_fp8_2buff": "attention.prefill_fp8_2buff",
    f"{_UNIFIED}.runtime.decode_fp8_2buff": "attention.decode_fp8_2buff",
    f"{_UNIFIED}.runtime.build_prefill_indices": "attention.build_prefill_indices",
    f"{_UNIFIED}.runtime.build_decode_streams": "attention.build_decode_streams",
    f"{_UNIFIED}.runtime.fill_compress_tail": "attention.fill_compress_tail",
    f"{_STORE}.store_swa_into_unified": "attention.store_swa_into_unified",
    f"{_STORE}.scatter_bf16_into_unified": "attention.scatter_bf16_into_unified",
    # compressor
    f"{_DSV4}.compress.CompressorPrefillPlan.generate": "compressor.generate_prefill_plan",
    f"{_DSV4}.compress.CompressorDecodePlan.generate": "compressor.generate_decode_plan",
    f"{_DSV4}.compress.compress_forward": "compressor.compress_forward",
    f"{_DSV4}.compress.compress_norm_rope_store": "compressor.compress_norm_rope_store",
    # norm and rope
    f"{_DSV4}.norm_rope.fused_q_norm_rope": "norm_rope.fused_q_norm_rope",
    f"{_DSV4}.norm_rope.fused_norm_rope_inplace": "norm_rope.fused_norm_rope_inplace",
    f"{_DSV4}.norm_rope.fused_rope_inplace": "norm_rope.fused_rope_inplace",
    f"{_OPS}.attention.fused_qk_norm_rope_store.fused_qk_norm_rope_swa_store": (
        "norm_rope.fused_qk_norm_rope_swa_store"
    ),
    # indexer
    f"{_DSV4}.norm_rope.fused_q_indexer_rope_hadamard_quant": (
        "indexer.fused_q_indexer_rope_hadamard_quant"
    ),
    f"{_DSV4}.topk.topk_transform_paged": "indexer.topk_transform_paged",
    "sglang.srt.layers.attention.dsv4.indexer.fp8_paged_mqa_logits_torch": (
        "indexer.fp8_paged_mqa_logits"
    ),
    # per-forward metadata
    f"{_DSV4}.attn_metadata_kernels.expand_prefill_causally": "metadata.expand_prefill_causally",
    f"{_DSV4}.metadata_kernel.init_compression_metadata": "metadata.init_compression_metadata",
    f"{_DSV4}.attn_glue_hip.low_ratio_compression_metadata": (
        "metadata.low_ratio_compression_metadata"
    ),
    f"{_DSV4}.attn_glue_hip.sparse_buffers": "metadata.sparse_buffers",
    f"{_DSV4}.attn_glue_hip.page_table_from_req_to_token": "metadata.page_table_from_req_to_token",
    # speculative decoding
    f"{_OPS}.memory.common.get_last_loc_triton": "speculative.get_last_loc_triton",
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": (
        "speculative.assign_req_to_token_pool_func"
    ),
    f"{_SPEC}.cache_locs.assign_draft_cache_locs_contiguous_func": (
        "speculative.assign_draft_cache_locs_contiguous_func"
    ),
    f"{_SPEC}.gather_spec_extras.gather_spec_extras": "speculative.gather_spec_extras",
    f"{_SPEC}.spec_tree.build_tree_kernel_efficient_func": (
        "speculative.build_tree_kernel_efficient_func"
    ),
    f"{_SPEC}.spec_tree.verify_tree_greedy_func": "speculative.verify_tree_greedy_func",
    f"{_SPEC}.eagle.fill_bonus_tokens_func": "speculative.fill_bonus_tokens_func",
    f"{_OPS}.kvcache.dsv4_c128_cleanup.clear_unaccepted_c128_draft_states": (
        "speculative.clear_unaccepted_c128_draft_states"
    ),
    # mHC
    f"{_OPS}.layernorm.mhc.hc_split_sinkhorn": "mhc.hc_split_sinkhorn",
    f"{_OPS}.layernorm.mhc.mhc_combine": "mhc.mhc_combine",
    f"{_OPS}.layernorm.mhc_head.fused_hc_head": "mhc.fused_hc_head",
    # MoE
    f"{_OPS}.moe.dsv4.hash_topk": "moe.hash_topk",
    f"{_OPS}.moe.dsv4.mask_topk_ids": "moe.mask_topk_ids",
    f"{_OPS}.activation.silu_and_mul_clamp.silu_and_mul_clamp": "moe.silu_and_mul_clamp",
    "sglang.srt.layers.moe.topk.biased_topk_jit_kernel_impl": "moe.biased_topk_impl",
    "sglang.srt.layers.moe.topk.biased_topk_impl": "moe.biased_topk_impl",
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": "moe.moe_forward_native",
}

# HiCache copy kernels exist only where sgl_kernel does; elsewhere the importing modules simply
# lack the names, so they are put into each module that would have imported them.
_TRANSFER_USERS = (
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "sglang.srt.mem_cache.pool_host.unified",
    "sglang.srt.mem_cache.pool_host.dsa",
)

# The only one that reads and writes tensors of two devices; the rest take raw addresses, or pools that
# lie in one memory.
_CUDA_TRANSFERS = ("transfer_kv_direct",)

KERNELS_VARIABLE = "DSV4_REFERENCE_KERNELS"

_installed = False


def install() -> None:
    """Install every replacement in this process; a second call does nothing.

    Raises:
        AttributeError, ImportError: this SGLang has no such name (wrong version).
        ValueError: ``DSV4_REFERENCE_KERNELS`` names a kernel that is not in ``KERNELS``.
    """
    global _installed
    if _installed:
        return
    _installed = True
    open_unified_kv_gate()
    if activation.device() == "cuda":
        _install_cuda()
    else:
        invariant.install()
        _no_host_registration()
        several_ranks.install(rebind)
        _complete_device_module()
    _install_kernels()
    _install_transfers()
    _install_model_shims()


def open_unified_kv_gate() -> None:
    """Make ``is_unified_kv_triton`` depend on its environment variable alone, and on a CPU
    ``is_unified_kv_fp8`` too. On an NVIDIA GPU nothing stands in for aiter's fp8 kernels: there SGLang
    falls back to bf16 rows.

    Only the gate's own view of the device changes; everything else still sees a CPU.
    """
    gate = importlib.import_module("sglang.srt.layers.attention.dsv4.unified_kv_gate")
    gate.is_hip = lambda: True
    if activation.device() == "cpu":
        gate.is_gfx95_supported = lambda: True
    gate.is_unified_kv_triton.cache_clear()
    gate.is_unified_kv_fp8.cache_clear()


def drop_chat_encoder() -> None:
    """Serve without DeepSeek's chat prompt encoder where its package is not installed.

    SGLang builds the encoder when the HTTP server starts. /generate and /v1/completions do not
    use it; /v1/chat/completions is not offered on this platform.
    """
    if importlib.util.find_spec("deepseek_recipe") is None:
        adapters = importlib.import_module("sglang.srt.entrypoints.openai.chat_encoding_adapters")
        adapters._BUILDERS["dsv4"]["builtin"] = lambda context: None


def wait_before_freeze_gc() -> None:
    """Make the launcher's first request to itself wait until it listens.

    With --skip-server-warmup SGLang posts /freeze_gc while the HTTP server is still starting; when
    it loses that race it logs a harmless traceback, and checks that look for tracebacks in a
    server's log find it.
    """
    server = importlib.import_module("sglang.srt.entrypoints.http_server")
    stock = server._freeze_gc_after_server_warmup

    def freeze_gc_when_listening(server_args: Any) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection((server_args.host, server_args.port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        stock(server_args)

    server._freeze_gc_after_server_warmup = freeze_gc_when_listening


def keep_overlap_with_speculation() -> None:
    """Let the overlap schedule stay on with EAGLE, as on a GPU.

    SGLang turns it off on a CPU because its CPU engine lacks it; the scheduler itself needs nothing
    but streams and events, which ``torch.cpu`` has. Call it before the arguments are resolved.
    """
    hook = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    hook._disable_overlap_schedule_for_cpu = _overlap_as_asked


def _overlap_as_asked(_server_args: Any) -> None:
    """Stands for ``_disable_overlap_schedule_for_cpu``."""


def add_hip_rope_tables(model: torch.nn.Module) -> None:
    """Give each attention layer the bf16 ``cos_cache``/``sin_cache`` that it builds on HIP.

    The decode path's fused store reads them; shape [max_positions, 1, 1, rope_dim / 2].
    """
    for layer in model.modules():
        if type(layer).__name__ == "MQALayer":
            table = layer.freqs_cis
            layer.cos_cache = table.real.to(torch.bfloat16)[:, None, None, :].contiguous()
            layer.sin_cache = table.imag.to(torch.bfloat16)[:, None, None, :].contiguous()


def rebind(target: str, ours: Callable[..., Any]) -> None:
    """Put ``ours`` at the dotted name ``target`` and wherever a module bound the stock object.

    Raises:
        AttributeError, ImportError: there is no such name.
    """
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    # Through __dict__: a static method must be replaced by a static method.
    stock = vars(owner)[name]
    if isinstance(owner, type):
        setattr(owner, name, staticmethod(ours) if isinstance(stock, staticmethod) else ours)
        return
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith("sglang"):
            continue
        for bound, value in list(vars(module).items()):
            if value is stock:
                setattr(module, bound, ours)


def not_installed() -> list[str]:
    """Targets of ``replaced_kernels`` that do not lead to this distribution's function in this
    process."""
    wrong = []
    for target, ours in replaced_kernels().items():
        found = pkgutil.resolve_name(target)
        if getattr(found, "__wrapped__", found) is not pkgutil.resolve_name(f"{_OURS}.{ours}"):
            wrong.append(target)
    return wrong


def replaced_kernels() -> dict[str, str]:
    """The part of ``KERNELS`` that is installed: all of it on a CPU, what was asked for on a GPU."""
    if activation.device() == "cpu":
        return KERNELS
    asked = [name for name in os.environ.get(KERNELS_VARIABLE, "").split(",") if name]
    chosen = {
        target: ours
        for target, ours in KERNELS.items()
        if ours in asked or ours.partition(".")[0] in asked
    }
    known = {*KERNELS.values(), *(ours.partition(".")[0] for ours in KERNELS.values())}
    if unknown := sorted(set(asked) - known):
        raise ValueError(f"{KERNELS_VARIABLE}: no such kernels: {unknown}")
    return chosen


def _install_kernels() -> None:
    for target, ours in replaced_kernels().items():
        kernel = pkgutil.resolve_name(f"{_OURS}.{ours}")
        rebind(target, kernel if activation.device() == "cpu" else _on_cuda(kernel))


def _on_cuda(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with its new tensors on the GPU: the kernels are written for the default device."""

    @functools.wraps(kernel)
    def on_cuda(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cuda"):
            return kernel(*args, **kwargs)

    return on_cuda


def _install_cuda() -> None:
    """Choose among SGLang's own kernels, where it would take one that is not here or does not fit."""
    for module in ("paged_decode", "runtime"):
        rebind(f"{_UNIFIED}.{module}._cu_count", _multiprocessors)
    # The Triton port of the tilelang kernel; only this module's view of the device changes.
    importlib.import_module(f"{_OPS}.layernorm.mhc").is_gfx1250_supported = lambda: True
    # ROCm's: the JIT-compiled one for CUDA takes fp32 router logits only.
    triton_hash_topk = importlib.import_module(f"{_OPS}.moe.triton_hash_topk")
    rebind(f"{_OPS}.moe.dsv4.hash_topk", triton_hash_topk.hash_topk_triton)
    # The JIT-compiled one returns the selected rows in another order each time, and the attention adds
    # them in the order of the list: no two runs of a long prompt would be equal.
    indexer = importlib.import_module("sglang.srt.layers.attention.dsv4.indexer")
    rebind(f"{_DSV4}.topk.topk_transform_paged", indexer.topk_transform_pytorch_vectorized)


@functools.cache
def _multiprocessors() -> int:
    """Stands for ``_cu_count``, which asks aiter for the compute units of the GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _install_transfers() -> None:
    transfer = importlib.import_module(f"{_OURS}.transfer_kv")
    kernels = {
        name: kernel
        for name, kernel in vars(transfer).items()
        if name.startswith("transfer_kv_")
        and (activation.device() == "cpu" or name in _CUDA_TRANSFERS)
    }
    for user in _TRANSFER_USERS:
        module = importlib.import_module(user)
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def _no_host_registration() -> None:
    """Keep host pools in ordinary memory: there is no device to register it with."""
    rebind("sglang.srt.mem_cache.pool_host.common._cuda_host_register", _leave_pageable)
    rebind(
        "sglang.srt.mem_cache.memory_pool_host.DeepSeekV4PagedHostPool.get_dummy_flat_data_page",
        _pageable_page,
    )
    rebind(
        "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.get_dummy_flat_data_page",
        _pageable_kv_page,
    )
    rebind(
        "sglang.srt.layers.attention.deepseek_v4_backend_hip_radix"
        ".DeepseekV4HipRadixBackend._move_to_device",
        _lengths_on_cpu,
    )


def _leave_pageable(*_args: Any, **_kwargs: Any) -> None:
    """Stands for ``_cuda_host_register``."""


def _pageable_page(pool: Any) -> torch.Tensor:
    """Stands for ``DeepSeekV4PagedHostPool.get_dummy_flat_data_page``, whose buffer is pinned."""
    return torch.zeros(pool.layer_num * pool.item_bytes, dtype=pool.dtype)


def _pageable_kv_page(pool: Any) -> torch.Tensor:
    """Stands for ``MHATokenToKVPoolHost.get_dummy_flat_data_page``, the same for other models' pools."""
    return torch.zeros(pool.page_size * pool.get_size_per_token(), dtype=torch.uint8).view(
        pool.dtype
    )


def _lengths_on_cpu(_backend: Any, lengths: list[int]) -> torch.Tensor:
    """Stands for ``DeepseekV4HipRadixBackend._move_to_device``, which goes through pinned memory."""
    return torch.tensor(lengths, dtype=torch.int32)


def _complete_device_module() -> None:
    """Give ``torch.cpu`` the one function of a device module that sharing a draft's embedding calls."""
    if not hasattr(torch.cpu, "empty_cache"):
        torch.cpu.empty_cache = _nothing_cached


def _nothing_cached() -> None:
    """Stands for ``torch.cuda.empty_cache``."""


def _install_model_shims() -> None:
    rebind(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", weights.initialize_weights
    )
    rebind("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", _rope_wrapper)
    # SGLang refuses out-of-tree platforms where it has no seam for their memory pool; the pool
    # classes themselves run on CPU tensors as they are.
    rebind("sglang.srt.platforms.interface.reject_out_of_tree_path", _accept_out_of_tree_path)
    rebind(
        "sglang.srt.layers.attention.deepseek_v4_backend_hip_radix._create_flashmla_metadata",
        _no_flashmla_metadata,
    )
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    registry.ATTENTION_BACKENDS["dsv4"] = _hip_radix_backend
    # The draft's backends: only this module's view of the device changes.
    importlib.import_module("sglang.srt.speculative.draft_utils").is_hip = lambda: True


def _rope_wrapper(*args: Any, device: str | None = None, **kwargs: Any) -> Any:
    """Stands for ``get_rope_wrapper``, whose cpu arm knows only the AMX kernel's rope."""
    factory = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")
    return factory.get_rope(*args, **kwargs)


def _accept_out_of_tree_path(*_args: Any, **_kwargs: Any) -> None:
    """Stands for ``reject_out_of_tree_path``."""


def _no_flashmla_metadata() -> None:
    """Stands for ``_create_flashmla_metadata``, which returns None on HIP."""
    return None


def _hip_radix_backend(runner: Any) -> Any:
    """Stands for the "dsv4" attention backend factory, which asks whether this is HIP."""
    module = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend_hip_radix")
    return module.DeepseekV4HipRadixBackend(runner)
