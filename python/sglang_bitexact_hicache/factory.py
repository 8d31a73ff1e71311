"""Seam: how the feature gets into a server, in the launcher and in each scheduler.

Launcher (`resolve_hicache`, while arguments are resolved): the gate, the version and the seams'
targets, the refusals, and the one reading of free host memory.

Scheduler (`around_create_unified_radix_cache`, in the place of SGLang's one call that builds the
prefix cache): the gate again with the real KV pool, the refusals again over the final values, the
remaining seams, the pools' size. Only then does SGLang build the cache, with our class, and pin its
host pools; the byte side is attached to the result.

The stock host-stack strategy for DeepSeek-V4 is used as it is: the truth pools are not part of it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bitexact_hicache import attach, engagement, refusals, seam_checks, sizing
from sglang_bitexact_hicache.aligned import AlignedPrefill
from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.options import Options, carry_available_dram, check_env_flags
from sglang_bitexact_hicache.seam import When

if TYPE_CHECKING:
    from sglang_bitexact_hicache.storage import TruthStorage

logger = logging.getLogger(__name__)


def resolve_hicache(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Wrapper of the resolution step `handle_hicache`. Runs once per server, in the launcher.

    Raises:
        ValueError: the configuration or the installed SGLang is refused.
    """
    check_env_flags()
    previous(server_args)
    if not engagement.settle(server_args):
        return
    seam_checks.require_source()
    seam_checks.require_live(When.ALWAYS, When.FLAG)
    refusals.check(refusals.Startup.of_record(server_args))
    # One reading for all ranks of the host: once they pin, each would see less than the one before.
    carry_available_dram(server_args, free_host_memory())


def around_create_unified_radix_cache(
    original: Callable[..., Any], ctx: Any, *, cache_class: type | None = None
) -> Any:
    """AROUND `create_unified_radix_cache`: the stock cache, or ours with the byte side attached.

    Args:
        original: SGLang's function.
        ctx: its `TreeCacheBuildContext`; the device KV pool exists, no host memory is pinned.
        cache_class: as stock; ours takes the place of the default only.

    Raises:
        ValueError: the configuration, a seam or the pools' size is refused.
    """
    if not engagement.settle(
        ctx.server_args, lambda: ctx.params.token_to_kv_pool_allocator.get_kvcache()
    ):
        return original(ctx, cache_class=cache_class)
    if cache_class is not None:
        raise ValueError(
            f"bit-exact HiCache needs a cache class of its own, but {cache_class.__name__} was "
            "asked for; unset the option that selects it"
        )
    refusals.check(refusals.Startup.of_context(ctx))
    require_draft(ctx.params)
    phases = [When.ENGAGED]
    if ctx.params.is_eagle:
        phases.append(When.SPECULATING)
    attach.install(*phases)
    seam_checks.require_live(*phases)

    from sglang_bitexact_hicache.runtime import TruthRuntime
    from sglang_bitexact_hicache.tree import BxCache
    from sglang_bitexact_hicache.tree_writers import check_tree_writers

    check_tree_writers()
    options = plan_pools(ctx)
    aligned = aligned_rules(ctx.server_args, options)
    # SGLang attaches its storage backend while it builds the host pools.
    storage = plan_storage(ctx, aligned)
    cache = original(ctx, cache_class=BxCache)
    cache.aligned = aligned
    runtime = TruthRuntime.build(cache, ctx.server_args, options)
    cache.truth_runtime = runtime
    cache.truth_storage = storage
    storage.bind(cache)
    logger.info(
        "%s",
        sizing.startup_line(
            options.planned,
            stride=options.stride,
            ranks=ranks_of_host(ctx.server_args),
            staging_bytes=runtime.staging_bytes,
            layout=f"{runtime.view.layout.digest()} ({storage.names.tagged(None)} in storage)",
            checked=options.checksum,
        ),
    )
    return cache


def require_draft(params: Any) -> None:
    """Refuses a draft whose window nobody could restore.

    SGLang names the pools of a draft that is the target's own NextN layer; with any other it keeps
    something of its own in host memory, or nothing.

    Raises:
        ValueError: there is a draft, and not exactly one such pool.
    """
    if params.is_eagle and len(params.mtp_draft_device_pools) != 1:
        raise ValueError(
            "--speculative-draft-model-path: the draft must be DeepSeek-V4's NextN layer, one of it; "
            f"SGLang names {len(params.mtp_draft_device_pools)} such pools"
        )


def plan_pools(ctx: Any) -> Options:
    """The options with the pools' size, which is checked against host memory.

    The number of host pages comes from the function that the stock strategy will ask, after
    SGLang's own auto-sizing has settled the ratio.

    Raises:
        ValueError: the pools do not fit (sizing.check).
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
        _deepseek_v4_num_host_pages,
    )

    from sglang_bitexact_hicache.device_view import DeviceView

    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    full_host_pages, _, _ = _deepseek_v4_num_host_pages(
        params=ctx.params,
        kvcache=kvcache,
        page_size=ctx.params.page_size,
        swa_page_size=kvcache.swa_page_size,
    )
    options = Options.of(ctx.server_args)
    aligned = aligned_rules(ctx.server_args, options)
    if aligned is not None:
        # A grid of other boundaries would have slots that nothing can fill.
        options = dataclasses.replace(options, stride=aligned.spacing(options.stride))
    planned = sizing.size(
        full_host_pages=full_host_pages,
        stride=options.stride,
        request_rows=ctx.params.req_to_token_pool.size,
        slot_bytes=DeviceView(kvcache, ctx.params.mtp_draft_device_pools).layout.slot_bytes,
        context_length=model_config_of(ctx.server_args).context_len,
        tail_slots=options.tail_slots,
        row_limit_override=options.row_limit,
    )
    available = options.available_dram
    sizing.check(
        planned,
        stride=options.stride,
        available_dram=free_host_memory() if available is None else available,
        ranks=ranks_of_host(ctx.server_args),
    )
    return dataclasses.replace(options, sizing=planned)


def plan_storage(ctx: Any, aligned: AlignedPrefill | None) -> TruthStorage:
    """What storage is written and read under, active from here on in this process."""
    from sglang_bitexact_hicache import storage, storage_backends, storage_hooks
    from sglang_bitexact_hicache.device_view import DeviceView
    from sglang_bitexact_hicache.storage_names import StorageNames, facts_of

    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    layout = DeviceView(kvcache, ctx.params.mtp_draft_device_pools).layout
    unit = 0 if aligned is None else aligned.chunk
    names = StorageNames.of(facts_of(ctx.server_args, kvcache, layout, unit))
    planned = storage.TruthStorage(names, layout, unit or PAGE_SIZE)
    storage_hooks.activate(planned)
    storage_backends.register_backends()
    return planned


def aligned_rules(server_args: Any, options: Options) -> AlignedPrefill | None:
    """The rules of aligned prefill for the server's chunk size; None where the option is off."""
    if not options.aligned_prefill:
        return None
    from sglang.srt.arg_groups.overrides import resolving_view

    return AlignedPrefill(resolving_view(server_args).chunked_prefill_size)


def ranks_of_host(server_args: Any) -> int:
    """Scheduler ranks of this server that run on one host."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import compute_world_size

    cfg = resolving_view(server_args)
    world = compute_world_size(dp_size=cfg.dp_size, tp_size=cfg.tp_size, pp_size=cfg.pp_size)
    return max(1, world // cfg.nnodes)


def free_host_memory() -> int:
    """Free bytes of host memory for pools, as SGLang counts them."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes

    return available_host_memory_bytes(allow_cgroup_fallback=True)
