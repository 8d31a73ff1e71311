"""Who owns each host slot: free, reserved, owned or dead; locks, recency.

A slot is an index into the three host pools (host_pool.py): one record of one page boundary. This
table decides ownership only. It never sees a byte, a stream or an event: whether a copy has landed
decides nothing (a slot may be handed out again at once, because its next copy waits for the event of
the last one: runtime.py), so every rank that makes the same calls in the same order decides alike.

States and moves:

    FREE --take--> RESERVED --own--> OWNED
    RESERVED | OWNED --retire--> FREE, or DEAD while it is locked
    DEAD --last unlock--> FREE

Invariants (tests cite them):

S1. Every slot is in exactly one state; FREE slots have no lock and no owner.
S2. A locked slot is never handed out by `take`.
S3. `victim` names an OWNED slot that is not locked, of the first group of policy.EVICTION_ORDER that has
    one: the one that was unused for longest in proportion to its worth (rounded down to a power of two)
    and its class's weight.

Pure Python. Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from enum import Enum

from sglang_bitexact_hicache.policy import EVICTION_ORDER, WEIGHT, Keep


class SlotError(RuntimeError):
    """A call that the slot's state does not allow: a bug of the caller."""


class SlotState(Enum):
    """What a slot is at this moment; see the module's docstring for the moves."""

    FREE = "free"
    RESERVED = "reserved"
    OWNED = "owned"
    DEAD = "dead"


class _Slot:
    __slots__ = ("keep", "locks", "owner", "stamp", "state", "uses", "worth")

    def __init__(self) -> None:
        self.state = SlotState.FREE
        self.owner: int | None = None
        self.keep = Keep.FILL
        self.worth = 1
        self.uses = 0
        self.stamp = 0
        self.locks = 0


class SlotTable:
    """The slots of one rank; `capacity` of them, numbered from 0."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must not be negative, got {capacity}")
        self.capacity = capacity
        self._slots = [_Slot() for _ in range(capacity)]
        self._free: deque[int] = deque(range(capacity))
        # Slots in state OWNED by class and by the power of two below their worth, least recently used
        # first: few lists, and only their heads have to be compared to find a victim.
        self._recency: dict[Keep, defaultdict[int, OrderedDict[int, None]]] = {
            keep: defaultdict(OrderedDict) for keep in Keep
        }
        # Counts captures and uses: the age of a slot is how many came after its own.
        self._clock = 0

    # ---- ownership

    def take(self) -> int | None:
        """A free slot, now RESERVED for the caller; None when there is none."""
        if not self._free:
            return None
        index = self._free.popleft()
        slot = self._slots[index]
        slot.state = SlotState.RESERVED
        return index

    def own(self, index: int, owner: int, keep: Keep = Keep.POINT, worth: int = 1) -> None:
        """RESERVED to OWNED by `owner`; the slot becomes the most recently used of its class.

        `worth`: pages that would be computed again without it.
        """
        slot = self._expect(index, SlotState.RESERVED)
        slot.state = SlotState.OWNED
        slot.owner = owner
        slot.worth = max(1, worth)
        # Where prompts are known to part, one has come this way already.
        slot.uses = int(keep is Keep.USED)
        self._enqueue(index, slot, keep)

    def hand_over(self, index: int, owner: int) -> None:
        """An OWNED slot has another owner from now on. Class and recency do not change."""
        self._expect(index, SlotState.OWNED).owner = owner

    def reclass(self, index: int, keep: Keep) -> None:
        """An OWNED slot is of this class from now on, and the most recently used of it."""
        slot = self._expect(index, SlotState.OWNED)
        self._dequeue(index, slot)
        self._enqueue(index, slot, keep)

    def retire(self, index: int) -> None:
        """End the life of a RESERVED or OWNED slot: FREE now, or DEAD while it is locked."""
        slot = self._expect(index, SlotState.RESERVED, SlotState.OWNED)
        if slot.state is SlotState.OWNED:
            self._dequeue(index, slot)
        slot.owner = None
        slot.state = SlotState.DEAD
        self._free_if_unlocked(index)

    def victim(self, dearest: Keep = Keep.LIVE) -> int | None:
        """The OWNED slot to give up next (S3), of class `dearest` at most; None if all are locked."""
        for group in EVICTION_ORDER:
            heads = [
                (keep, bucket, index)
                for keep in group
                if keep <= dearest
                for bucket, slots in self._recency[keep].items()
                if (index := next((i for i in slots if not self._slots[i].locks), None)) is not None
            ]
            if heads:
                return max(heads, key=lambda head: self._staleness(*head))[2]
        return None

    def touch(self, index: int) -> None:
        """A hit used an OWNED slot: the most recently used, and USED if it was less."""
        slot = self._expect(index, SlotState.OWNED)
        slot.uses += 1
        self.reclass(index, max(slot.keep, Keep.USED))

    def passed(self, index: int) -> None:
        """Whoever made an OWNED slot, or was the only one to use it, has a deeper point now."""
        slot = self._expect(index, SlotState.OWNED)
        if slot.uses <= 1 and slot.keep > Keep.PASSED:
            self.reclass(index, Keep.PASSED)

    def clear(self) -> None:
        """Retire every RESERVED and OWNED slot (a flush)."""
        for index, slot in enumerate(self._slots):
            if slot.state in (SlotState.RESERVED, SlotState.OWNED):
                self.retire(index)

    # ---- use of the bytes

    def lock(self, index: int) -> None:
        """Keep an OWNED slot's bytes until the matching `unlock`; locks are counted."""
        self._expect(index, SlotState.OWNED).locks += 1

    def unlock(self, index: int) -> None:
        """Undo one `lock`; a DEAD slot comes back to FREE with its last lock."""
        slot = self._slots[index]
        if slot.locks == 0:
            raise SlotError(f"slot {index} is not locked")
        slot.locks -= 1
        self._free_if_unlocked(index)

    # ---- queries

    def state(self, index: int) -> SlotState:
        """The slot's state."""
        return self._slots[index].state

    def owner(self, index: int) -> int | None:
        """The owner of an OWNED slot, else None."""
        return self._slots[index].owner

    def keep(self, index: int) -> Keep:
        """The class of an OWNED slot."""
        return self._expect(index, SlotState.OWNED).keep

    def worth(self, index: int) -> int:
        """Pages that would be computed again without an OWNED slot."""
        return self._expect(index, SlotState.OWNED).worth

    def uses(self, index: int) -> int:
        """How many requests are known to have used an OWNED slot, or to have come past it."""
        return self._expect(index, SlotState.OWNED).uses

    def is_locked(self, index: int) -> bool:
        """Whether a reader holds the slot's bytes."""
        return self._slots[index].locks > 0

    def count(self, state: SlotState) -> int:
        """How many slots are in a state; O(1) for FREE and OWNED."""
        if state is SlotState.FREE:
            return len(self._free)
        if state is SlotState.OWNED:
            return sum(len(slots) for lists in self._recency.values() for slots in lists.values())
        return sum(slot.state is state for slot in self._slots)

    def least_recent_first(self) -> list[int]:
        """The OWNED slots, least recently captured or used first, whatever their class."""
        owned = [i for lists in self._recency.values() for slots in lists.values() for i in slots]
        return sorted(owned, key=lambda index: self._slots[index].stamp)

    def check_integrity(self) -> None:
        """Raise SlotError where the table contradicts itself. O(capacity), for tests."""
        if len(set(self._free)) != len(self._free):
            raise SlotError("a slot is twice in the free list")
        free, recent = set(self._free), set(self.least_recent_first())
        for index, slot in enumerate(self._slots):
            if (slot.state is SlotState.FREE) != (index in free):
                raise SlotError(f"slot {index} is {slot.state} but free list says {index in free}")
            if (slot.state is SlotState.OWNED) != (index in recent):
                raise SlotError(f"slot {index} is {slot.state} but recency says {index in recent}")
            if (slot.state is SlotState.OWNED) != (slot.owner is not None):
                raise SlotError(f"slot {index} is {slot.state} with owner {slot.owner}")
            if slot.state is SlotState.FREE and slot.locks:
                raise SlotError(f"free slot {index} is locked")
            if slot.state is SlotState.DEAD and not slot.locks:
                raise SlotError(f"dead slot {index} leaked: nothing locks it and it is not free")

    # ---- internals

    def _enqueue(self, index: int, slot: _Slot, keep: Keep) -> None:
        self._clock += 1
        slot.keep = keep
        slot.stamp = self._clock
        self._recency[keep][_bucket(slot)][index] = None

    def _dequeue(self, index: int, slot: _Slot) -> None:
        del self._recency[slot.keep][_bucket(slot)][index]

    def _staleness(self, keep: Keep, bucket: int, index: int) -> tuple[float, int]:
        age = self._clock - self._slots[index].stamp
        return age / (WEIGHT[keep] * (1 << bucket)), age

    def _expect(self, index: int, *states: SlotState) -> _Slot:
        slot = self._slots[index]
        if slot.state not in states:
            allowed = " or ".join(state.value for state in states)
            raise SlotError(f"slot {index} is {slot.state.value}, not {allowed}")
        return slot

    def _free_if_unlocked(self, index: int) -> None:
        slot = self._slots[index]
        if slot.state is SlotState.DEAD and not slot.locks:
            slot.state = SlotState.FREE
            self._free.append(index)


def _bucket(slot: _Slot) -> int:
    return slot.worth.bit_length() - 1
