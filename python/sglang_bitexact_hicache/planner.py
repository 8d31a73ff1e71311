"""CapturePlanner: which boundaries of a forward get a host slot, and what becomes of the slots.

The decisions between policy.py (what is worth a slot) and the byte side (runtime.py): it mints the
pages that a forward completes, reserves slots, publishes truth, keeps the newest decode pages of
running requests and lets go of the ones that newer ones replace, and bounds what one request may
hold before a tree node owns it. It never sees a byte, a stream or an event.

Scheduler thread only; from host integers that are equal on all ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.policy import (
    DEFAULT_KINDS,
    NEWEST_DECODE,
    Keep,
    Kind,
    dearest_first,
    most_wanted,
    on_grid,
    prefill_points,
)

if TYPE_CHECKING:
    from sglang_bitexact_hicache.tree import BxCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """One boundary (tokens) that a forward captures: its page's lineage, its slot, its class."""

    boundary: int
    lineage: int
    slot: int
    keep: Keep


class CapturePlanner:
    """See the module's docstring.

    Args:
        cache: the tree; owns lineages, rows and the truth store.
        stride: of the grid, in pages.
        kinds: the kinds of reuse point that are switched on.
        row_limit: the most slots that one request may hold for pages that no tree node has, or None.
        counters: bumped here.
    """

    def __init__(
        self,
        cache: BxCache,
        *,
        stride: int,
        kinds: Container[Kind] = DEFAULT_KINDS,
        row_limit: int | None = None,
        counters: Counters,
    ) -> None:
        self.cache = cache
        self.store = cache.store
        self._stride = stride
        self._kinds = kinds
        self._row_limit = row_limit
        self._counters = counters
        # Per running request, its newest decode boundaries with truth: (boundary, lineage).
        self._newest: dict[Any, deque[tuple[int, int]]] = {}
        cache.track_junctions = Kind.JUNCTION in kinds

    def prefill(
        self, req: Any, start: int, end: int, prompt_len: int, room: int | None = None
    ) -> list[Wanted]:
        """Mint the pages that a chunk [start, end) completes and reserve slots for its boundaries.

        `room`: boundaries that the device staging can still take (None: any number). The caller must
        `publish` or `discard` each result.
        """
        self.cache.row_launched(req, end // PAGE_SIZE)
        if req.skip_radix_cache_insert:
            return []
        junction = self.cache.junction(req)
        points = prefill_points(
            start,
            end,
            prompt_len,
            self._stride,
            junction=0 if junction is None else junction.tokens,
            kinds=self._kinds,
            unit=PAGE_SIZE if self.cache.aligned is None else self.cache.aligned.chunk,
        )
        allowed = self._allowed(req)
        kept = points if allowed is None else most_wanted(points, allowed)
        self._counters.capture_over_row_limit += len(points) - len(kept)
        if room is not None and len(kept) > room:
            self._counters.capture_over_staging += len(kept) - room
            kept = most_wanted(kept, room)
        wanted = (self._reserve(req, boundary, keep) for boundary, keep in dearest_first(kept))
        return sorted((w for w in wanted if w is not None), key=lambda w: w.boundary)

    def decode(self, req: Any, boundary: int, room: int | None = None) -> Wanted | None:
        """Mint the page that a decode step completes at `boundary` tokens and reserve its slot.

        None where decode boundaries are switched off and it is not on the grid, or no slot or staging
        (`room`, as in `prefill`) is to be had, or the page will not enter the tree: then the request's
        older pages stay as they are. The caller must `publish` or `discard` the result.
        """
        self.cache.row_launched(req, boundary // PAGE_SIZE)
        if req.skip_radix_cache_insert or self.cache.aligned is not None:
            return None
        live = Kind.DECODE in self._kinds
        if not live and not (Kind.GRID in self._kinds and on_grid(boundary, self._stride)):
            return None
        if room is not None and room < 1:
            self._counters.capture_over_staging += 1
            return None
        wanted = self._reserve(req, boundary, Keep.LIVE if live else Keep.GRID)
        if live and wanted is not None:
            self._renew(req, boundary, wanted.lineage)
        return wanted

    def publish(self, wanted: Wanted) -> bool:
        """The forward is launched: the page has truth, unless it died or has one already."""
        published = self.store.publish(wanted.lineage, wanted.slot, wanted.keep)
        if published:
            self._counters.captured += 1
        else:
            self._counters.capture_unpublished += 1
        return published

    def discard(self, wanted: Wanted) -> None:
        """The forward failed: the slot goes back."""
        self.store.discard(wanted.slot)

    def forget(self, req: Any) -> None:
        """The request gave its row back: what it kept as its newest is held like any other point.

        Of an aborted or retracted request there is nothing left to hold: its pages are dead.
        """
        for _, lineage in self._newest.pop(req, ()):
            self.store.reclass(lineage, Keep.POINT)

    def flush(self) -> None:
        """The tree was reset."""
        self._newest.clear()

    # ---- internals

    def _allowed(self, req: Any) -> int | None:
        if self._row_limit is None:
            return None
        return max(0, self._row_limit - self.cache.row_truths(req))

    def _renew(self, req: Any, boundary: int, lineage: int) -> None:
        """A new decode boundary: the third newest is kept only as far as the grid and the limit do."""
        newest = self._newest.setdefault(req, deque())
        newest.append((boundary, lineage))
        if len(newest) <= NEWEST_DECODE:
            return
        old, old_lineage = newest.popleft()
        within_limit = self._row_limit is None or self.cache.row_truths(req) < self._row_limit
        if Kind.GRID in self._kinds and on_grid(old, self._stride) and within_limit:
            self.store.reclass(old_lineage, Keep.GRID)
        else:
            self.store.supersede(old_lineage)

    def _reserve(self, req: Any, boundary: int, keep: Keep) -> Wanted | None:
        slot = self.store.reserve(keep)
        if slot is None:
            if keep is not Keep.FILL:
                self._counters.capture_no_slot += 1
                self._warn_of_full_pool()
            return None
        lineage = self.cache.row_lineage(req, boundary // PAGE_SIZE)
        return Wanted(boundary, lineage, slot, keep)

    def _warn_of_full_pool(self) -> None:
        """One line at the first, second, fourth, ... boundary that found no slot."""
        count = self._counters.capture_no_slot
        if count & (count - 1) == 0:
            logger.warning(
                "bit-exact HiCache: %d boundaries not captured, all %d host slots were locked or "
                "reserved; these prefixes will be computed again. Raise "
                "--hicache-swa-offload-tail-slots or --hicache-ratio.",
                count,
                self.store.capacity,
            )
