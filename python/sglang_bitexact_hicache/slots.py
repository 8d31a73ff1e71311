"""Who owns each host slot: free, reserved, owned or dead; locks, copies in flight, recency.

A slot is an index into the three host pools (host_pool.py): one record of one page boundary. This
table decides ownership only. It never sees a byte, a stream or an event, and it never asks whether
a copy has landed: it is told (`copy_started` / `copy_finished`), so that every rank that makes the
same calls in the same order decides alike.

States and moves:

    FREE --take--> RESERVED --own--> OWNED
    RESERVED | OWNED --retire--> FREE, or DEAD while a lock or a copy still uses the bytes
    DEAD --last unlock / last copy_finished--> FREE

Invariants (tests cite them):

S1. Every slot is in exactly one state; FREE slots have no lock, no copy and no owner.
S2. A slot that is locked or has a copy in flight is never handed out by `take`.
S3. `victim` names the least recently used OWNED slot that nothing uses.
S4. A completion that does not belong to a copy in flight of the slot's present life is ignored.

Pure Python. Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum


class SlotError(RuntimeError):
    """A call that the slot's state does not allow: a bug of the caller."""


class SlotState(Enum):
    """What a slot is at this moment; see the module's docstring for the moves."""

    FREE = "free"
    RESERVED = "reserved"
    OWNED = "owned"
    DEAD = "dead"


class _Slot:
    __slots__ = ("copies", "epoch", "locks", "owner", "state")

    def __init__(self) -> None:
        self.state = SlotState.FREE
        self.owner: int | None = None
        self.locks = 0
        self.copies = 0
        self.epoch = 0  # the table's epoch when the slot was last taken

    @property
    def in_use(self) -> bool:
        return self.locks > 0 or self.copies > 0


class SlotTable:
    """The slots of one rank; `capacity` of them, numbered from 0."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must not be negative, got {capacity}")
        self.capacity = capacity
        self.epoch = 0
        self._slots = [_Slot() for _ in range(capacity)]
        self._free: deque[int] = deque(range(capacity))
        # Slots in state OWNED, least recently used first.
        self._recency: OrderedDict[int, None] = OrderedDict()

    # ---- ownership

    def take(self) -> int | None:
        """A free slot, now RESERVED for the caller; None when there is none."""
        if not self._free:
            return None
        index = self._free.popleft()
        slot = self._slots[index]
        slot.state = SlotState.RESERVED
        slot.epoch = self.epoch
        return index

    def own(self, index: int, owner: int) -> None:
        """RESERVED to OWNED by `owner`; the slot becomes the most recently used."""
        slot = self._expect(index, SlotState.RESERVED)
        slot.state = SlotState.OWNED
        slot.owner = owner
        self._recency[index] = None

    def retire(self, index: int) -> None:
        """End the life of a RESERVED or OWNED slot: FREE now, or DEAD until nothing uses it."""
        slot = self._expect(index, SlotState.RESERVED, SlotState.OWNED)
        self._recency.pop(index, None)
        slot.owner = None
        slot.state = SlotState.DEAD
        self._free_if_unused(index)

    def victim(self) -> int | None:
        """The least recently used OWNED slot without a lock or a copy in flight; None if none."""
        return next((index for index in self._recency if not self._slots[index].in_use), None)

    def touch(self, index: int) -> None:
        """Make an OWNED slot the most recently used."""
        self._expect(index, SlotState.OWNED)
        self._recency.move_to_end(index)

    def clear(self) -> None:
        """Retire every RESERVED and OWNED slot and start a new epoch (a flush)."""
        for index, slot in enumerate(self._slots):
            if slot.state in (SlotState.RESERVED, SlotState.OWNED):
                self.retire(index)
        self.epoch += 1

    # ---- use of the bytes

    def lock(self, index: int) -> None:
        """Keep an OWNED slot's bytes until the matching `unlock`; locks are counted."""
        self._expect(index, SlotState.OWNED).locks += 1

    def unlock(self, index: int) -> None:
        """Undo one `lock`; a DEAD slot comes back to FREE with its last use."""
        slot = self._slots[index]
        if slot.locks == 0:
            raise SlotError(f"slot {index} is not locked")
        slot.locks -= 1
        self._free_if_unused(index)

    def copy_started(self, index: int) -> int:
        """A copy from or to the slot's bytes was handed to a device or IO thread.

        Returns the epoch to give back to `copy_finished`.
        """
        slot = self._expect(index, SlotState.RESERVED, SlotState.OWNED, SlotState.DEAD)
        slot.copies += 1
        return slot.epoch

    def copy_finished(self, index: int, epoch: int) -> bool:
        """One copy is done. False, and nothing happens, where no such copy is in flight (S4)."""
        slot = self._slots[index]
        if slot.copies == 0 or slot.epoch != epoch:
            return False
        slot.copies -= 1
        self._free_if_unused(index)
        return True

    # ---- queries

    def state(self, index: int) -> SlotState:
        """The slot's state."""
        return self._slots[index].state

    def owner(self, index: int) -> int | None:
        """The owner of an OWNED slot, else None."""
        return self._slots[index].owner

    def is_used(self, index: int) -> bool:
        """Whether a lock or a copy in flight holds the slot's bytes."""
        return self._slots[index].in_use

    def count(self, state: SlotState) -> int:
        """How many slots are in a state; O(1) for FREE and OWNED."""
        if state is SlotState.FREE:
            return len(self._free)
        if state is SlotState.OWNED:
            return len(self._recency)
        return sum(slot.state is state for slot in self._slots)

    def least_recent_first(self) -> list[int]:
        """The OWNED slots in the order in which `victim` considers them."""
        return list(self._recency)

    def check_integrity(self) -> None:
        """Raise SlotError where the table contradicts itself. O(capacity), for tests."""
        if len(set(self._free)) != len(self._free):
            raise SlotError("a slot is twice in the free list")
        free, recent = set(self._free), set(self._recency)
        for index, slot in enumerate(self._slots):
            if (slot.state is SlotState.FREE) != (index in free):
                raise SlotError(f"slot {index} is {slot.state} but free list says {index in free}")
            if (slot.state is SlotState.OWNED) != (index in recent):
                raise SlotError(f"slot {index} is {slot.state} but recency says {index in recent}")
            if (slot.state is SlotState.OWNED) != (slot.owner is not None):
                raise SlotError(f"slot {index} is {slot.state} with owner {slot.owner}")
            if slot.state is SlotState.FREE and slot.in_use:
                raise SlotError(f"free slot {index} is in use")
            if slot.state is SlotState.DEAD and not slot.in_use:
                raise SlotError(f"dead slot {index} leaked: nothing uses it and it is not free")

    # ---- internals

    def _expect(self, index: int, *states: SlotState) -> _Slot:
        slot = self._slots[index]
        if slot.state not in states:
            allowed = " or ".join(state.value for state in states)
            raise SlotError(f"slot {index} is {slot.state.value}, not {allowed}")
        return slot

    def _free_if_unused(self, index: int) -> None:
        slot = self._slots[index]
        if slot.state is SlotState.DEAD and not slot.in_use:
            slot.state = SlotState.FREE
            self._free.append(index)
