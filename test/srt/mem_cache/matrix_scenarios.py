"""What a cell of the matrix runs on each rank (matrix.py); see scenarios.py for the building blocks."""

from __future__ import annotations

from collections.abc import Sequence

import scenarios
from scenarios import cold, hit_over_dirt, patched
from scheduler_harness import Harness, Steps


def fork(h: Harness, stem: Sequence[int], tail: Sequence[int], new: int, tier: str) -> Steps:
    """A prompt that leaves a cached one, from a tier: (cold, hit, counter gains)."""
    ids = [*stem, *tail]
    # Or storage would have all of it, and not only what it shares.
    with patched(h.cache, "write_backup_storage", lambda node_id: None):
        first = yield from cold(h, ids, new)
        yield from h.flush()
    yield from h.generate([*stem, *reversed(tail)], 1)
    hit, gains = yield from hit_over_dirt(h, ids, new, tier)
    return first, hit, gains


def without_restore(h: Harness, ids: Sequence[int], new: int, tier: str) -> Steps:
    """A repeat with the restore left out and not checked: (cold, hit)."""
    first = yield from cold(h, ids, new)
    return first, (yield from scenarios.without_restore(h, ids, new, tier))
