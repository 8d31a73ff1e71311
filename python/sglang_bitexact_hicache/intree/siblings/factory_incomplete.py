"""Seam: the parts of the feature before its last one, where nothing can be restored yet.

In the place of factory.py in the first patches of the series. The switch stays without effect where the
feature would not engage; where it would, the server says what is missing, and does not start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bitexact_hicache import engagement
from sglang_bitexact_hicache.options import check_env_flags
from sglang_bitexact_hicache.settings import ENV_FLAG


def resolve_hicache(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Wrapper of the resolution step `handle_hicache`. Runs once per server, in the launcher.

    Raises:
        ValueError: the feature would engage.
    """
    check_env_flags()
    previous(server_args)
    _require_nothing(engagement.settle(server_args))


def around_create_unified_radix_cache(
    original: Callable[..., Any], ctx: Any, *, cache_class: type | None = None
) -> Any:
    """AROUND `create_unified_radix_cache`: the stock cache.

    Raises:
        ValueError: the feature would engage.
    """
    _require_nothing(
        engagement.settle(
            ctx.server_args, lambda: ctx.params.token_to_kv_pool_allocator.get_kvcache()
        )
    )
    return original(ctx, cache_class=cache_class)


def _require_nothing(verdict: engagement.Engagement) -> None:
    if verdict:
        raise ValueError(
            f"{ENV_FLAG}=1: this tree has not all parts of bit-exact HiCache: the one that restores "
            f"(reuse) is missing; unset {ENV_FLAG} to start without it"
        )
