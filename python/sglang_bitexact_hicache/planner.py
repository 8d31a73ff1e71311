"""CapturePlanner: which boundaries of a forward get a host slot, and what becomes of the slots.

The decisions between policy.py (what is worth a slot) and the byte side (runtime.py): it mints the
pages that a forward completes, reserves slots, publishes truth, keeps the newest decode pages of
running requests and lets go of the ones that newer ones replace, and bounds what one request may
hold before a tree node owns it. It never sees a byte, a stream or an event.

Scheduler thread only; from host integers that are equal on all ranks.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.lineage import UNKNOWN
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
from sglang_bitexact_hicache.slots import SlotState

if TYPE_CHECKING:
    from sglang_bitexact_hicache.tree import BxCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """One boundary (tokens) that a forward captures: its page's lineage, its slot, how dearly that is
    held, and the pages that would be computed again without it."""

    boundary: int
    lineage: int
    slot: int
    keep: Keep
    worth: int


@dataclass
class _Trail:
    """The points of one running request, for which it holds no lock: truths may be gone."""

    base: int = 0
    """Pages up to the deepest point above that others use as well."""
    came_from: int = UNKNOWN
    """Lineage of its hit."""
    prompt: list[int] = field(default_factory=list)
    """Lineages of its prompt's points, shallowest first."""
    newest: deque[tuple[int, int]] = field(default_factory=deque)
    """Its newest decode boundaries with truth: (boundary, lineage)."""


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
        self._trails: defaultdict[Any, _Trail] = defaultdict(_Trail)
        cache.track_junctions = Kind.JUNCTION in kinds

    def hit(self, req: Any, lineage: int) -> None:
        """The request resumes at its final `prefix_len` from this page's truth."""
        slots, slot = self.store.slots, cast(int, self.store.lookup(lineage))
        trail = self._trails[req]
        # A point that nobody else used hangs, for its worth, on the one above it.
        below = 0 if slots.uses(slot) else slots.worth(slot)
        trail.base = max(0, req.prefix_len // PAGE_SIZE - below)
        trail.came_from = lineage
        self.store.touch(lineage)

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
            parts=junction is not None and junction.parts,
            kinds=self._kinds,
            unit=PAGE_SIZE if self.cache.aligned is None else self.cache.aligned.chunk,
            key_tokens=self.cache.key_tokens,
        )
        allowed = self._allowed(req)
        kept = points if allowed is None else most_wanted(points, allowed)
        self._counters.capture_over_row_limit += len(points) - len(kept)
        if room is not None and len(kept) > room:
            self._counters.capture_over_staging += len(kept) - room
            kept = most_wanted(kept, room)
        wanted = (self._reserve(req, boundary, keep) for boundary, keep in dearest_first(kept))
        found = sorted((w for w in wanted if w is not None), key=lambda w: w.boundary)
        lineages = [w.lineage for w in found if w.keep is Keep.POINT]
        if lineages:
            self._pass(req)
            self._trails[req].prompt += lineages
        return found

    def decode(self, req: Any, boundary: int, room: int | None = None) -> Wanted | None:
        """Mint the page that a decode step completes at `boundary` tokens and reserve its slot.

        None where decode boundaries are switched off and it is not on the grid, or no slot or staging
        (`room`, as in `prefill`) is to be had, or the page will not enter the tree: then the request's
        older pages stay as they are. The caller must `publish` or `discard` the result.
        """
        wanted = self.candidate(req, boundary, room)
        if wanted is not None and wanted.keep is Keep.LIVE:
            self._renew(req, wanted)
        return wanted

    def candidate(self, req: Any, boundary: int, room: int | None = None) -> Wanted | None:
        """As `decode`, for a round of speculative decoding, of which nobody knows yet whether it
        completes the page: nothing of the request changes. The caller must `commit` or `discard` the
        result.

        The page's identity may be minted before the round that completes it. Nobody sees it before then,
        and the pages that the row reads now are those it reads then, or the identity dies (Row.rebase).
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
        return self._reserve(req, boundary, Keep.LIVE if live else Keep.GRID)

    def commit(self, req: Any, wanted: Wanted) -> bool:
        """The round has completed the candidate's page: publish its truth."""
        published = self.publish(wanted)
        if published and wanted.keep is Keep.LIVE:
            self._renew(req, wanted)
        return published

    def publish(self, wanted: Wanted) -> bool:
        """The forward is launched: the page has truth, unless it died or has one already."""
        published = self.store.publish(wanted.lineage, wanted.slot, wanted.keep, wanted.worth)
        if published:
            self._counters.captured += 1
        else:
            self._counters.capture_unpublished += 1
        return published

    def discard(self, wanted: Wanted) -> None:
        """The forward failed, or did not complete the page after all: the slot goes back."""
        self.store.discard(wanted.slot)

    def forget(self, req: Any) -> None:
        """The request gave its row back: the deepest point that it left is where it would go on (others
        may have used it meanwhile); those before it, and the one that it came from, it has passed.

        Of a retracted request nothing is left: its pages are dead.
        """
        trail = self._trails.pop(req, None)
        if trail is None:
            return
        left = [*trail.prompt, *(lineage for _, lineage in trail.newest)]
        left = [lineage for lineage in left if lineage in self.store]
        if left:
            if self.store.slots.keep(cast(int, self.store.lookup(left[-1]))) is not Keep.USED:
                self.store.reclass(left[-1], Keep.POINT)
            for lineage in (trail.came_from, *left[:-1]):
                self.store.passed(lineage)

    def flush(self) -> None:
        """The tree was reset."""
        self._trails.clear()

    # ---- internals

    def _allowed(self, req: Any) -> int | None:
        if self._row_limit is None:
            return None
        return max(0, self._row_limit - self.cache.row_truths(req))

    def _pass(self, req: Any) -> None:
        """The request has a deeper point now than its hit and its prompt's."""
        trail = self._trails[req]
        for lineage in (trail.came_from, *trail.prompt):
            self.store.passed(lineage)

    def _release_spares(self) -> None:
        """The older of two newest decode pages is there in case the newer one's step is thrown away. Once
        tokens behind the newer one are accepted that cannot be."""
        for req, trail in self._trails.items():
            if len(trail.newest) == NEWEST_DECODE and req.seqlen > trail.newest[-1][0]:
                self.store.passed(trail.newest[0][1])

    def _renew(self, req: Any, wanted: Wanted) -> None:
        """A new decode boundary: the third newest is kept only as far as the grid and the limit do."""
        self._pass(req)
        newest = self._trails[req].newest
        newest.append((wanted.boundary, wanted.lineage))
        if len(newest) <= NEWEST_DECODE:
            return
        old, old_lineage = newest.popleft()
        within_limit = self._row_limit is None or self.cache.row_truths(req) < self._row_limit
        if Kind.GRID in self._kinds and on_grid(old, self._stride) and within_limit:
            self.store.reclass(old_lineage, Keep.GRID)
        else:
            self.store.supersede(old_lineage)

    def _reserve(self, req: Any, boundary: int, keep: Keep) -> Wanted | None:
        if not self.store.slots.count(SlotState.FREE):
            self._release_spares()
        slot = self.store.reserve(keep)
        if slot is None:
            if keep is not Keep.FILL:
                self._counters.capture_no_slot += 1
                self._warn_of_full_pool()
            return None
        pages = boundary // PAGE_SIZE
        lineage = self.cache.row_lineage(req, pages)
        # What nobody has a reason to come back to yet is held by age alone.
        worth = pages - self._trails[req].base if keep > Keep.GRID else 1
        if keep is Keep.USED:
            self._trails[req].base = pages
        return Wanted(boundary, lineage, slot, keep, worth)

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
