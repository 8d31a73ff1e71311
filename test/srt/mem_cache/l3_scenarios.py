"""Scenarios of storage (L3), run inside a scheduler process (scheduler_harness.py)."""

from __future__ import annotations

from collections.abc import Sequence

from scenarios import cold, counters, dirty_rings, leak_free, since
from scheduler_harness import Harness, Steps


def settle_storage(h: Harness) -> Steps:
    """Step until storage has everything that is on its way there."""
    yield from h.settle()
    while h.cache.ongoing_backup or h.cache.ongoing_prefetch:
        yield
    yield from h.settle()


def populate(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """Cold, and everything of it in storage."""
    result = yield from cold(h, ids, new)
    yield from settle_storage(h)
    return result


def from_storage(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """The prompt with empty L1 and L2, over dirty rings: (result, counter gains, storage gains)."""
    yield from settle_storage(h)
    yield from h.flush()
    dirty_rings(h)
    before, stored = counters(h), h.cache.truth_storage.counters.snapshot()
    hit = yield from h.generate(ids, new)
    yield from settle_storage(h)
    gains = since(h, before)
    now = h.cache.truth_storage.counters.snapshot()
    yield from leak_free(h)
    return hit, gains, {name: now[name] - stored[name] for name in now}
