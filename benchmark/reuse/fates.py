"""A TruthStore that remembers what became of each page's truth, to say why a hit was missed."""

from __future__ import annotations

from sglang_bitexact_hicache.policy import Keep
from sglang_bitexact_hicache.truth import TruthStore


class NotingStore(TruthStore):
    """The shipped store; only `fate` is new."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._last_owner: dict[int, int] = {}
        self._evicted: set[int] = set()
        self._superseded: set[int] = set()

    def fate(self, lineage: int) -> str:
        """Why a page has no truth: "evicted", "superseded", or "never" captured."""
        if lineage in self._evicted:
            return "evicted"
        return "superseded" if lineage in self._superseded else "never"

    def reserve(self, keep: Keep = Keep.POINT) -> int | None:
        """As the base class; notes whose slot it was."""
        before = self.counters.evicted
        slot = super().reserve(keep)
        if self.counters.evicted > before:
            self._evicted.add(self._last_owner[slot])
        return slot

    def publish(self, lineage: int, slot: int, keep: Keep = Keep.POINT, worth: int = 1) -> bool:
        """As the base class."""
        self._last_owner[slot] = lineage
        return super().publish(lineage, slot, keep, worth)

    def move(self, old: int, new: int) -> bool:
        """As the base class."""
        moved = super().move(old, new)
        if moved:
            self._last_owner[self.lookup(new)] = new
        return moved

    def supersede(self, lineage: int) -> None:
        """As the base class."""
        self._superseded.add(lineage)
        super().supersede(lineage)
