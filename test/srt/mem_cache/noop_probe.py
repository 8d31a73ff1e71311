"""A process that loads SGLang's plugins, builds prefix caches as a scheduler does, and says what it
found of this package: `python noop_probe.py CASE...`, one JSON object a case, on stdout.

Run by test_swa_noop.py, in a process of its own because hooks stay where they are once applied.
The feature must not engage in any of the cases.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from attachment import entered
from bitexact_fixtures import PAGE, WINDOW, cpu_hicache, make_server_args
from startup_fixtures import build_context, environment, our_log

CASES = {
    "flag off": {},
    "not HIP": {"SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP": "0"},
    "another backend": {"SGLANG_HACK_FLASHMLA_BACKEND": "auto"},
    "HiCache off": {},
    "another model": {},
}
"""The environment of each case, on top of the process's own."""


def main(cases: list[str]) -> None:
    """Prints the findings of each case."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    after_loading = facts()
    with cpu_hicache():
        for case in cases:
            with environment(**CASES[case]), our_log() as messages:
                cache = build(case)
            found = {
                "case": case,
                "flag": os.environ.get("SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"),
                "after_loading": after_loading,
                "after_building": facts(),
                "messages": messages,
                "cache": type(cache).__name__,
                "tree_core": type(cache.tree_core).__name__,
                "host_pools": host_pools(cache),
                "components": sorted(type(c).__name__ for c in cache.components.values()),
            }
            print(json.dumps(found), flush=True)


def build(case: str) -> Any:
    """The prefix cache of a case, built by SGLang's registry from a record no launcher has seen."""
    from sglang.srt.layers.attention.dsv4 import unified_kv_gate
    from sglang.srt.mem_cache.registry import create_tree_cache

    unified_kv_gate.is_unified_kv_triton.cache_clear()
    # Only the unified pools have a host stack that a CPU can build.
    hicache = case in ("flag off", "not HIP")
    server_args = make_server_args(enable_hierarchical_cache=hicache)
    ctx = build_context(server_args, pool=paged_pool() if case == "another backend" else None)
    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    assert kvcache._unified_kv == (case != "another backend")
    if case == "another model":
        ctx.is_hybrid_swa = False
        ctx.params.token_to_kv_pool_allocator = plain_allocator()
    return create_tree_cache(ctx)


def paged_pool() -> Any:
    """The DeepSeek-V4 KV pool of the other backends; it knows the model's own sizes only."""
    import torch
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    return DeepSeekV4TokenToKVPool(
        max_num_reqs=4,
        swa_size=8 * PAGE,
        c4_size=8 * PAGE // 4,
        c128_size=16,
        c4_state_pool_size=64,
        c128_state_pool_size=1024,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=[4, 128],
        sliding_window=WINDOW,
        start_layer=0,
        end_layer=2,
        num_req_slots=5,
    )


def plain_allocator() -> Any:
    """The KV pool of a model with plain attention, in its allocator."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=8 * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=16,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    return PagedTokenToKVPoolAllocator(
        size=8 * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )


def facts() -> dict[str, Any]:
    """What there is of this package in this process."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.environ import Envs

    found: dict[str, Any] = {
        "patches": sorted(entered()),
        "modules": sorted(m for m in sys.modules if m.startswith("sglang_bitexact_hicache.")),
        "resolution": sorted(resolution_hooks._HOOKS),
        "environment": sorted(n for n in vars(Envs) if "BIT_EXACT" in n or "SWA_OFFLOAD" in n),
    }
    registry = sys.modules.get("sglang.srt.mem_cache.unified_cache.tree_core_registry")
    if registry is not None:
        found["tree_cores"] = sorted(registry._TREE_CORE_REGISTRY)
    assembler = sys.modules.get("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler")
    if assembler is not None:
        found["strategies"] = sorted({type(s).__module__ for s in assembler._STRATEGIES})
    return found


def host_pools(cache: Any) -> list[str]:
    """Names of the host pools that the cache has."""
    group = cache.host_pool_group
    return [] if group is None else sorted(str(name) for name in group.entry_map)


if __name__ == "__main__":
    main(sys.argv[1:])
