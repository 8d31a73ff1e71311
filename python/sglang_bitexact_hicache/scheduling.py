"""Seam handlers on the scheduler's batch (see seam_table.py for their targets). Scheduler thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bitexact_hicache.tree import runtime_of


def around_prepare_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """AROUND ScheduleBatch.prepare_for_extend: a request without a row before has one after; its
    prefix is final, so this is where a hit is bound and its restore begins."""
    runtime = runtime_of(batch)
    if runtime is None:
        return original(batch)
    fresh = [req for req in batch.reqs if not req.kv.holds_kv]
    result = original(batch)
    runtime.admit(fresh)
    correct_tier_split(batch.tree_cache, fresh)
    return result


def correct_tier_split(cache: Any, fresh: list[Any]) -> None:
    """Report the pages between the two anchors that were device-resident as device hits.

    Stock counts everything below the last gated device node as loaded from host memory
    (`Req.materialized_host_hit_len`); with a gate that skips pages without truth, part of that span
    was on the device all along. Only the reported numbers change.
    """
    for req in fresh:
        loaded = cache.pop_loaded_tokens(req)
        if req.cached_tokens_host > loaded:
            req.cached_tokens_device += req.cached_tokens_host - loaded
            req.cached_tokens_host = loaded
