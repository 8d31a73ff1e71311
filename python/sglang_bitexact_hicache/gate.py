"""Where a match may end: the gate behind the tree's validators, as pure rules over copies.

A match may end at page P when, along the copies that the hit would use, the pages [0, P) hang
together from the root and the page that ends at P has truth. Then a hit at P is exactly the request
that computed that page, continued from there.

The tree shows its validators one node at a time, from the root down, and goes on after a refusal.
So a `Walk` keeps where it stands: position, the id before it, whether the chain still holds. Node
ends are judged on the way; pages inside nodes afterwards (`deepest`), from the deepest up.

Pure Python. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from sglang_bitexact_hicache.lineage import ROOT, Copy


@dataclass
class GateCounters:
    """What the gate did since startup."""

    matches: int = 0
    """Prefix matches answered."""
    second_walks: int = 0
    """Matches repeated because the deepest boundary with truth lay inside a node."""
    device_walks: int = 0
    """Extra walks that cut a node at the boundary a declined load-back falls back to."""
    load_backs_declined: int = 0
    """Load-backs declined because the path changed, or its truth went, after the match."""
    bound: int = 0
    """Truths whose page the tree took from the request that computed it."""
    healed: int = 0
    """Truths that a checkpoint gave to a page the tree had kept without one (healing.py, H2)."""
    rehung_pages: int = 0
    """Pages that got a fresh identity because their chain was broken (healing.py, H1)."""
    loaded_for_healing: int = 0
    """Host-only pages brought back so that a checkpoint joins them instead of replacing them."""
    chunks_cut: int = 0
    """Prefill chunks that end at a junction (chunking.py)."""
    unknown_pages: int = 0
    """Pages that entered the tree without identity (never a hit)."""
    host_inserts_dropped: int = 0
    """Storage inserts dropped because the node they hang on has no host copy."""


class Walk:
    """One validator set's way down the tree during one match.

    `truth` answers whether a lineage has truth (TruthStore). Counts are in pages.
    """

    __slots__ = ("_intact", "_pages", "_previous", "_spans", "_truth", "best")

    def __init__(self, truth: Container[int]) -> None:
        self._truth = truth
        self._pages = 0
        self._previous = ROOT
        self._intact = True
        self._spans: list[tuple[int, Copy]] = []
        self.best = 0
        """Pages up to the deepest node end accepted so far."""

    def step(self, copy: Copy | None, pages: int) -> bool:
        """The next node down: `pages` pages, of which `copy` is what a hit would use (or None).

        Returns whether a match may end at the node's end.
        """
        start = self._pages
        self._pages = start + pages
        if not self._intact:
            return False
        if copy is None or copy.first_parent != self._previous or copy.intact == 0:
            self._intact = False
            return False
        self._spans.append((start, copy))
        if not copy.whole:
            self._intact = False
            return False
        self._previous = copy.last_id
        if copy.last_id in self._truth:
            self.best = self._pages
            return True
        return False

    def deepest(self) -> int:
        """The deepest page, node end or not, at which a match may end; 0 for none."""
        for start, copy in reversed(self._spans):
            if start + copy.intact <= self.best:
                break
            for page in range(copy.intact, 0, -1):
                if start + page <= self.best:
                    break
                if copy.ids[page - 1] in self._truth:
                    return start + page
        return self.best


def chain_end(copies: Iterable[Copy | None]) -> int | None:
    """The last lineage of a path given root first, or None where its pages do not hang together.

    O(nodes): each copy knows its first parent, last id and intact length. ROOT for an empty path.
    """
    previous = ROOT
    for copy in copies:
        if copy is None or copy.first_parent != previous or not copy.whole:
            return None
        previous = copy.last_id
    return previous
