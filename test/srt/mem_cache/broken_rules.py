"""Rules of the cache, each broken on purpose: what the controls of the tree tests put in its place.

Each function takes `monkeypatch.setattr`.
"""

from __future__ import annotations

from collections.abc import Callable

from bitexact_fixtures import PAGE

from sglang_bitexact_hicache import healing, planner, tree
from sglang_bitexact_hicache.lineage import Copy, Row, RowTable
from sglang_bitexact_hicache.truth import TruthStore

Patch = Callable[[object, str, object], None]


def marks_of_finished_requests_stay(patch: Patch) -> None:
    """The newest decode pages of a request that is gone are held as if it ran."""
    patch(planner.CapturePlanner, "forget", lambda self, req: self._trails.pop(req, None))


def newest_decode_page_is_let_go(patch: Patch) -> None:
    """For want of slots not the older one of two is let go, but the one that is needed."""

    def release(self):
        for trail in self._trails.values():
            if trail.newest:
                self.store.passed(trail.newest[-1][1])

    patch(planner.CapturePlanner, "_release_spares", release)


def truth_of_an_aborted_request_stays(patch: Patch) -> None:
    """A row that ends keeps its references, so the pages nobody has keep their truth."""

    def close(self):
        self.ids, self.parents = [], []

    patch(Row, "close", close)


def row_from_before_a_retraction_is_read_on(patch: Patch) -> None:
    """A resumed request goes on with the row that it had before."""
    opened, dropped = RowTable.open, RowTable.drop
    patch(RowTable, "drop", lambda self, req: dropped(self, req) if req.finished() else None)
    patch(
        RowTable,
        "open",
        lambda self, req, tail, base: self.get(req) or opened(self, req, tail, base),
    )


def marks_outlive_a_flush(patch: Patch) -> None:
    """The planner is not told of releases nor of a flush."""
    patch(planner.CapturePlanner, "flush", lambda self: None)
    patch(planner.CapturePlanner, "forget", lambda self, req: None)


def slot_of_a_waiting_hit_is_not_locked(patch: Patch) -> None:
    """Between admission and the forward that reads it a truth can be evicted."""
    patch(TruthStore, "lock", lambda self, slot: None)
    patch(TruthStore, "unlock", lambda self, slot: None)


def interior_truth_moves(patch: Patch) -> None:
    """Healing gives the truth of every recomputed page to the page that the tree kept."""
    settled = tree.BxCache.insert_settled

    def careless(self, req, *, inserted, finished):
        row = self.rows.get(req)
        own = [] if row is None else list(zip(range(row.base, row.pages), row.ids, strict=True))
        base = req.kv.cache_protected_len // PAGE
        if inserted and own:
            self._rehang(req.last_node)
            path = [self.copies.of(node.id).dev.ids for node in self._path(req.last_node)]
            kept = [lineage for ids in path for lineage in ids]
            for page, lineage in own:
                if page < base:
                    self.store.move(lineage, kept[page])
        settled(self, req, inserted=inserted, finished=finished)

    patch(tree.BxCache, "insert_settled", careless)


def truth_moves_after_another_forward(patch: Patch) -> None:
    """Healing moves truth although a later forward read the row as it was before."""
    settled = tree.BxCache.insert_settled

    def careless(self, req, **how):
        allocated = req.kv.kv_allocated_len
        req.kv.kv_allocated_len = req.kv.cache_protected_len
        settled(self, req, **how)
        req.kv.kv_allocated_len = allocated

    patch(tree.BxCache, "insert_settled", careless)


def mended_pages_keep_their_truth(patch: Patch) -> None:
    """Healing hangs pages on a path that they were not computed over, truth and all."""

    def same_ids(copy, kept, previous, mint):
        return Copy(copy.ids, (previous, *copy.ids[:-1]))

    patch(healing, "_chained", same_ids)


def page_in_flight_at_a_checkpoint_keeps_its_truth(patch: Patch) -> None:
    """A page launched before a checkpoint hangs on the pages that the checkpoint gave the row."""

    def rebase(self, tail, base):
        gone = self.ids[: base - self.base]
        del self.ids[: len(gone)]
        del self.parents[: len(gone)]
        self.tail, self.base = tail, base
        if self.ids:
            self.parents[0] = tail
        self._lineages.release(gone)

    patch(Row, "rebase", rebase)


def truth_without_a_chain(patch: Patch) -> None:
    """A hit ends wherever there is truth."""

    def step(self, copy, pages):
        self._pages += pages
        found = copy is not None and copy.last_id in self._truth
        self.best = self._pages if found else self.best
        return found

    patch(tree.Walk, "step", step)
    patch(tree, "chain_end", lambda copies: [tree.ROOT, *(c.last_id for c in copies)][-1])
