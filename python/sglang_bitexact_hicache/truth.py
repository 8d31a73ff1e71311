"""Which boundary has captured truth: lineages joined with host slots.

`truth[lineage] -> slot`: the window and states captured where the page with that lineage ends.
Truth is published when the forward that computes it is launched, not when its bytes have landed: an
identical request can be matched, admitted and restored in the very next batch, and its copy waits
for the capture's event. Whether bytes have landed is the business of whoever copies them.

Invariants (tests cite them):

T1. At most one slot per lineage, at most one lineage per slot.
T2. A lineage has truth only while a node copy or a running row refers to it.
T3. A slot is reused only when nothing locks it.

On several ranks the calls must come in the same order everywhere, `unlock` included: a locked slot is
not evicted, so unlocking when an event happens to be ready would let ranks evict different truths.

Pure Python. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from sglang_bitexact_hicache.lineage import Lineages
from sglang_bitexact_hicache.policy import Keep
from sglang_bitexact_hicache.slots import SlotError, SlotState, SlotTable


@dataclass
class TruthCounters:
    """What happened to truths since startup."""

    published: int = 0
    """Truths that became visible to the gate."""
    evicted: int = 0
    """Truths given up for a new capture because no slot was free."""
    superseded: int = 0
    """Truths given up by their own request: decode pages off the grid that newer ones replaced."""
    moved: int = 0
    """Truths that a checkpoint moved to the page that the tree kept (healing)."""
    died_with_lineage: int = 0
    """Truths freed because the last copy of their page went away."""
    publish_refused: int = 0
    """Captures whose page was dead, or had truth already, when they were published."""
    reserve_failed: int = 0
    """Captures that found every slot reserved or locked."""


class TruthStore:
    """The truths of one rank: `capacity` host slots and the lineages that own them."""

    def __init__(self, capacity: int) -> None:
        self.slots = SlotTable(capacity)
        self.lineages = Lineages(on_death=self._lineage_died)
        self.counters = TruthCounters()
        self.on_death: Callable[[int], None] | None = None
        """Told of every lineage that nobody refers to any more."""
        self._slot_of: dict[int, int] = {}

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self.slots.capacity

    def reserve(self, keep: Keep = Keep.POINT) -> int | None:
        """A slot for a capture, RESERVED for the caller, who must `publish` or `discard` it.

        When no slot is free, a truth that nothing locks is evicted (SlotTable.victim). FILL takes the
        place of FILL only. None (and a counter) where there is nothing to evict; for FILL that is the
        ordinary case and not counted.
        """
        slot = self.slots.take()
        if slot is not None:
            return slot
        victim = self.slots.victim(Keep.FILL if keep is Keep.FILL else Keep.LIVE)
        if victim is None:
            self.counters.reserve_failed += keep is not Keep.FILL
            return None
        del self._slot_of[cast(int, self.slots.owner(victim))]
        self.slots.retire(victim)
        self.counters.evicted += 1
        return self.slots.take()

    def publish(self, lineage: int, slot: int, keep: Keep = Keep.POINT, worth: int = 1) -> bool:
        """RESERVED to OWNED: the page with this lineage has truth from now on.

        False, and the slot is freed, when nothing refers to the lineage
        or it has truth already.
        """
        if lineage in self._slot_of or not self.lineages.alive(lineage):
            self.discard(slot)
            self.counters.publish_refused += 1
            return False
        self.slots.own(slot, lineage, keep, worth)
        self._slot_of[lineage] = slot
        self.counters.published += 1
        return True

    def discard(self, slot: int) -> None:
        """Give back a RESERVED slot unused."""
        if self.slots.state(slot) is not SlotState.RESERVED:
            raise SlotError(f"slot {slot} is {self.slots.state(slot).value}, not reserved")
        self.slots.retire(slot)

    def move(self, old: int, new: int) -> bool:
        """The truth of one page becomes the truth of another, of which it is as true (healing.py).

        False, and nothing changes, where `old` has none, or `new` has one already or is dead.
        """
        if old not in self._slot_of or new in self._slot_of or not self.lineages.alive(new):
            return False
        slot = self._slot_of[new] = self._slot_of.pop(old)
        self.slots.hand_over(slot, new)
        self.counters.moved += 1
        return True

    def supersede(self, lineage: int) -> None:
        """Give up a page's truth, if it has one; its readers keep their locked slot."""
        slot = self._slot_of.pop(lineage, None)
        if slot is not None:
            self.slots.retire(slot)
            self.counters.superseded += 1

    def passed(self, lineage: int) -> None:
        """Whoever left this page's truth, or was the only one to use it, has a deeper point now."""
        slot = self._slot_of.get(lineage)
        if slot is not None:
            self.slots.passed(slot)

    def reclass(self, lineage: int, keep: Keep) -> None:
        """Hold a page's truth, if it has one, as dearly as `keep` from now on."""
        slot = self._slot_of.get(lineage)
        if slot is not None:
            self.slots.reclass(slot, keep)

    def lookup(self, lineage: int) -> int | None:
        """The slot with the lineage's truth, or None. Not a use: recency does not change."""
        return self._slot_of.get(lineage)

    def __contains__(self, lineage: object) -> bool:
        return lineage in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def touch(self, lineage: int) -> None:
        """A hit used this truth: it becomes the most recently used. KeyError if there is none."""
        self.slots.touch(self._slot_of[lineage])

    def lock(self, slot: int) -> None:
        """Keep an owned slot's bytes for a reader until `unlock`; counted.

        If its lineage dies meanwhile, the truth is gone at once and the slot comes back at unlock.
        """
        self.slots.lock(slot)

    def unlock(self, slot: int) -> None:
        """Undo one `lock`."""
        self.slots.unlock(slot)

    def in_use(self) -> int:
        """Slots that are not free."""
        return self.capacity - self.slots.count(SlotState.FREE)

    def reset(self) -> None:
        """A flush: every truth, reservation and reference is forgotten.

        Slots that are locked come back at their last unlock.
        """
        self._slot_of.clear()
        self.lineages.reset()
        self.slots.clear()

    def check_integrity(self) -> None:
        """Raise SlotError where store, slots and lineages contradict each other (for tests)."""
        self.slots.check_integrity()
        for lineage, slot in self._slot_of.items():
            if self.slots.owner(slot) != lineage:
                raise SlotError(f"lineage {lineage} claims slot {slot} of {self.slots.owner(slot)}")
            if not self.lineages.alive(lineage):
                raise SlotError(f"dead lineage {lineage} still holds slot {slot}")
        if self.slots.count(SlotState.OWNED) != len(self._slot_of):
            raise SlotError("an owned slot has no lineage")

    def _lineage_died(self, lineage: int) -> None:
        slot = self._slot_of.pop(lineage, None)
        if slot is not None:
            self.slots.retire(slot)
            self.counters.died_with_lineage += 1
        if self.on_death is not None:
            self.on_death(lineage)
