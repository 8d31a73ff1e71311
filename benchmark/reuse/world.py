"""The real tree, controller and pools on a CPU, for each arm of the measurement.

The stand-ins for a device are those of the tests (`test/srt/mem_cache/bitexact_fixtures.py`), which
says what is real and what is not. Copies of a page are real but a few bytes long, and happen when
they are asked for, so a replay is deterministic.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from bitexact_fixtures import CpuStack, cpu_hicache, make_cache, make_server_args

ONE_SMALL_LAYER = (128,)
"""Compression ratios of the model whose pages are copied: two rows a page."""


@contextlib.contextmanager
def quiet_cpu_hicache() -> Iterator[None]:
    """`cpu_hicache` without SGLang's log lines."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with cpu_hicache():
            yield
    finally:
        logging.disable(previous)


def build(
    *,
    device_pages: int,
    host_pages: int,
    rows: int,
    context: int,
    slots: int | None,
    tree_core: str | None = None,
    hicache: bool = True,
) -> CpuStack:
    """Pools and a cache: BxCache with a store of `slots` slots, or the stock class for None.

    Args:
        device_pages: pages of compressed KV on the device.
        host_pages: pages of the host pool.
        rows: requests that can run at once.
        context: tokens that a request can hold.
        slots: truth slots, or None for the stock class.
        tree_core: the stock class's tree core by its registered name.
        hicache: whether there is a host tier at all.
    """
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def stock(params: Any) -> UnifiedRadixCache:
        params.tree_core_backend = tree_core
        return UnifiedRadixCache(params)

    return make_cache(
        make_server_args(hicache_ratio=host_pages / device_pages),
        pages=device_pages,
        slots=slots or 0,
        rows=rows,
        context=context,
        layers=ONE_SMALL_LAYER,
        cls=stock if slots is None else None,
        hicache=hicache,
    )
