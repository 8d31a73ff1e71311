"""What the startup tests share: real ServerArgs, real build contexts, and hooks that are undone.

Arguments are SGLang's own, resolved by its own pipeline for a DeepSeek-V4 model directory of which
only the configuration is read. Build contexts hold real pools on a CPU (bitexact_fixtures).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ENGAGING_ENV = {
    "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1",
    "SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP": "1",
    "SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton",
}
"""The environment in which the feature engages on a machine without ROCm."""

ENGAGING_ARGS = (
    "--device", "cpu",
    "--load-format", "dummy",
    "--skip-tokenizer-init",
    "--page-size", "256",
    "--enable-hierarchical-cache",
    "--hicache-io-backend", "direct",
    "--hicache-mem-layout", "layer_first",
    "--hicache-ratio", "2",
)  # fmt: skip
"""Arguments with which the feature engages."""

MODEL_CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
    "hidden_act": "silu",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "v_head_dim": 512,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 448,
    "qk_rope_head_dim": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "sliding_window": 128,
    "max_position_embeddings": 16384,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "compress_rope_theta": 40000,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "n_hash_layers": 1,
    "hc_mult": 4,
    "num_nextn_predict_layers": 0,
}
"""A DeepSeek-V4 configuration, enough for argument resolution."""

OTHER_MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
"""A model that the feature is not for."""


def write_model(folder: Path, **changes: Any) -> Path:
    """A model directory with MODEL_CONFIG, `changes` applied."""
    return write_config(folder, {**MODEL_CONFIG, **changes})


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A model directory that holds nothing but a configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parse(model: Path, args: Sequence[str] = (), base: Sequence[str] = ENGAGING_ARGS) -> Any:
    """ServerArgs from a command line, not yet resolved."""
    from sglang.srt.server_args import prepare_server_args

    quiet = ("--log-level", "warning")
    return prepare_server_args(["--model-path", str(model), *base, *quiet, *args])


def resolve(model: Path, args: Sequence[str] = (), base: Sequence[str] = ENGAGING_ARGS) -> Any:
    """ServerArgs from a command line, resolved as a launcher does it."""
    server_args = parse(model, args, base)
    server_args.resolve_once()
    return server_args


def publish(server_args: Any) -> None:
    """Makes the record the process's configuration, as a scheduler does."""
    from sglang.srt.runtime_context import SpawnRanks
    from sglang.srt.runtime_context import publish as publish_config

    publish_config(
        server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    )


def build_context(
    server_args: Any, *, pages: int = 8, rows: int = 4, pool: Any = None, drafts: Sequence[Any] = ()
) -> Any:
    """A TreeCacheBuildContext with real pools, as `build_kv_cache` hands it to the registry.

    Args:
        server_args: published.
        pages: device pages of compressed KV. rows: request rows.
        pool: the device KV pool, a unified_kv one by default.
        drafts: the KV pools of a draft's layers.
    """
    import torch
    from bitexact_fixtures import PAGE, WINDOW, make_kv_pool
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    req_to_token = ReqToTokenPool(
        size=rows, max_context_len=4096, device="cpu", enable_memory_saver=False
    )
    allocator = SWATokenToKVPoolAllocator(
        size=pages * PAGE,
        size_swa=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=pool or make_kv_pool(pages=pages, rows=rows),
        need_sort=False,
        req_to_token_pool=req_to_token,
    )
    return TreeCacheBuildContext(
        server_args=server_args,
        params=CacheInitParams(
            disable=False,
            req_to_token_pool=req_to_token,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            sliding_window_size=WINDOW,
            swa_gates_prefix_match=False,
            mtp_draft_device_pools=tuple(drafts),
        ),
        is_hybrid_swa=True,
        is_hybrid_ssm=False,
        enable_hierarchical_cache=resolving_view(server_args).enable_hierarchical_cache,
        disable_radix_cache=False,
        tp_worker=types.SimpleNamespace(register_hicache_layer_transfer_counter=lambda _c: None),
        model_config=None,
        tp_size=1,
        tp_rank=0,
        tp_group=None,
    )


@contextlib.contextmanager
def environment(**changes: str | None) -> Iterator[None]:
    """Environment variables, None to remove one; undone on exit."""
    with mock.patch.dict(os.environ):
        for name, value in changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield


@contextlib.contextmanager
def our_log() -> Iterator[list[str]]:
    """What this package logs from INFO up, as "LEVEL message".

    Not caplog: SGLang's argument parsing replaces the root logger's handlers.
    """
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname} {record.getMessage()}")

    logger, handler = logging.getLogger("sglang_bitexact_hicache"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def seam_named(name: str) -> Any:
    """The row of the seam table whose target ends with this name."""
    from sglang_bitexact_hicache import seam_table

    (seam,) = (seam for seam in seam_table.SEAMS if seam.target.endswith(f".{name}"))
    return seam


def our_patches() -> set[str]:
    """Every function of SGLang that runs code of this package, by its own qualified name.

    Looks at the functions themselves, in every loaded module and class of SGLang, and not at what
    the hook registry says of them.
    """
    from sglang_bitexact_hicache.seam import wrapped_values

    found = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "sglang" or module is None:
            continue
        for value in list(vars(module).values()):
            candidates = [value]
            if isinstance(value, type) and value.__module__.partition(".")[0] == "sglang":
                candidates += vars(value).values()
            for candidate in candidates:
                function = getattr(candidate, "__func__", candidate)
                if isinstance(function, types.FunctionType) and any(
                    _is_ours(inner) for inner in wrapped_values(function)
                ):
                    found.add(f"{function.__module__}.{function.__qualname__}")
    return found


def _is_ours(value: Any) -> bool:
    from sglang_bitexact_hicache.seam import PACKAGE

    module = getattr(value, "__module__", None)
    return isinstance(module, str) and module.startswith(f"{PACKAGE}.")
