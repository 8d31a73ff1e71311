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
S3. `victim` names the least recently used OWNED slot that is not locked, of the lowest class that has
    one (policy.Keep).

Pure Python. Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum

from sglang_bitexact_hicache.policy import Keep


class SlotError(RuntimeError):
    """A call that the slot's state does not allow: a bug of the caller."""


class SlotState(Enum):
    """What a slot is at this moment; see the module's docstring for the moves."""

    FREE = "free"
    RESERVED = "reserved"
    OWNED = "owned"
    DEAD = "dead"


class _Slot:
    __slots__ = ("keep", "locks", "owner", "state")

    def __init__(self) -> None:
        self.state = SlotState.FREE
        self.owner: int | None = None
        self.keep = Keep.FILL
        self.locks = 0


class SlotTable:
    """The slots of one rank; `capacity` of them, numbered from 0."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must not be negative, got {capacity}")
        self.capacity = capacity
        self._slots = [_Slot() for _ in range(capacity)]
        self._free: deque[int] = deque(range(capacity))
        # Slots in state OWNED by class, least recently used first.
        self._recency: dict[Keep, OrderedDict[int, None]] = {k: OrderedDict() for k in Keep}

    # ---- ownership

    def take(self) -> int | None:
        """A free slot, now RESERVED for the caller; None when there is none."""
        if not self._free:
            return None
        index = self._free.popleft()
        slot = self._slots[index]
        slot.state = SlotState.RESERVED
        return index

    def own(self, index: int, owner: int, keep: Keep = Keep.POINT) -> None:
        """RESERVED to OWNED by `owner`; the slot becomes the most recently used of its class."""
        slot = self._expect(index, SlotState.RESERVED)
        slot.state = SlotState.OWNED
        slot.owner = owner
        slot.keep = keep
        self._recency[keep][index] = None

    def hand_over(self, index: int, owner: int) -> None:
        """An OWNED slot has another owner from now on. Class and recency do not change."""
        self._expect(index, SlotState.OWNED).owner = owner

    def reclass(self, index: int, keep: Keep) -> None:
        """An OWNED slot is of this class from now on, and the most recently used of it."""
        slot = self._expect(index, SlotState.OWNED)
        del self._recency[slot.keep][index]
        slot.keep = keep
        self._recency[keep][index] = None

    def retire(self, index: int) -> None:
        """End the life of a RESERVED or OWNED slot: FREE now, or DEAD while it is locked."""
        slot = self._expect(index, SlotState.RESERVED, SlotState.OWNED)
        self._recency[slot.keep].pop(index, None)
        slot.owner = None
        slot.state = SlotState.DEAD
        self._free_if_unlocked(index)

    def victim(self, dearest: Keep = Keep.LIVE) -> int | None:
        """The OWNED slot to give up next, of class `dearest` at most; None if all are locked."""
        for keep in Keep:
            if keep > dearest:
                break
            for index in self._recency[keep]:
                if not self._slots[index].locks:
                    return index
        return None

    def touch(self, index: int) -> None:
        """Something used an OWNED slot: the most recently used, and a POINT if it was less."""
        keep = self._expect(index, SlotState.OWNED).keep
        self.reclass(index, max(keep, Keep.POINT))

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

    def is_locked(self, index: int) -> bool:
        """Whether a reader holds the slot's bytes."""
        return self._slots[index].locks > 0

    def count(self, state: SlotState) -> int:
        """How many slots are in a state; O(1) for FREE and OWNED."""
        if state is SlotState.FREE:
            return len(self._free)
        if state is SlotState.OWNED:
            return sum(len(slots) for slots in self._recency.values())
        return sum(slot.state is state for slot in self._slots)

    def least_recent_first(self) -> list[int]:
        """The OWNED slots in the order in which `victim` considers them."""
        return [index for keep in Keep for index in self._recency[keep]]

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
