"""SlotTable and TruthStore against a plain model, step by step (invariants S1-S4, T1-T3)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_bitexact_hicache.policy import Keep
from sglang_bitexact_hicache.slots import SlotError, SlotState, SlotTable
from sglang_bitexact_hicache.truth import TruthStore

CAPACITY = 3
CLASSES = st.sampled_from(Keep)


class TruthMachine(RuleBasedStateMachine):
    """Drives a TruthStore as capture, restore, tree, healing and flush do, in any order.

    The model knows only what the caller knows: which slots it holds reserved or locked,
    which ids it holds, in which order truths were last used, and how dearly each is held.
    """

    store_class = TruthStore

    @initialize()
    def start(self) -> None:
        self.store = self.store_class(CAPACITY)
        self.held: Counter[int] = Counter()
        self.reserved: list[int] = []
        self.locked: list[int] = []
        self.recency: list[int] = []  # lineages with truth, least recently used first
        self.keep: dict[int, Keep] = {}  # of each lineage with truth

    # ---- the tree and the rows

    @rule()
    def mint(self) -> None:
        lineage = self.store.lineages.mint()
        assert lineage not in self.held
        self._hold(lineage)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold_again(self, data: st.DataObject) -> None:
        self._hold(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        self.held[lineage] -= 1
        if not self.held[lineage]:
            del self.held[lineage]
            self._forget(lineage)
        self.store.lineages.release((lineage,))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Healing: recency and class go with the truth; a page that has one keeps its own."""
        old = data.draw(st.sampled_from(sorted(self.held)))
        new = data.draw(st.sampled_from(sorted(self.held)) | st.just(10**6))
        moves = old in self.keep and new in self.held and new not in self.keep
        slot = self.store.lookup(old)
        assert self.store.move(old, new) is moves
        if moves:
            assert self.store.lookup(new) == slot and old not in self.store
            self.recency[self.recency.index(old)] = new
            self.keep[new] = self.keep.pop(old)

    # ---- capture

    @rule(keep=CLASSES)
    def reserve(self, keep: Keep) -> None:
        """When nothing is free, the oldest truth of the lowest class that nothing uses goes, and
        only that one. FILL takes the place of FILL only."""
        free = CAPACITY - self.store.in_use()
        idle = [
            x
            for x in self._eviction_order()
            if self.store.lookup(x) not in self.locked
            and (keep is not Keep.FILL or self.keep[x] is Keep.FILL)
        ]
        failed = self.store.counters.reserve_failed
        slot = self.store.reserve(keep)
        if not free and not idle:
            assert slot is None
            assert self.store.counters.reserve_failed == failed + (keep is not Keep.FILL)
            return
        assert slot is not None
        if not free:
            self._forget(idle[0])
        assert slot not in self.reserved and slot not in self.locked
        self.reserved.append(slot)

    @precondition(lambda self: self.reserved and self.held)
    @rule(data=st.data(), keep=CLASSES)
    def publish(self, data: st.DataObject, keep: Keep) -> None:
        slot = self._pop(data, self.reserved)
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        had = lineage in self.store
        assert self.store.publish(lineage, slot, keep) is (not had)
        if not had:
            assert self.store.lookup(lineage) == slot
            self._note(lineage, keep)

    @rule(keep=CLASSES)
    def capture(self, keep: Keep) -> None:
        """What happens most: a page is computed and its truth published at once."""
        self.reserve(keep)
        if self.reserved:
            lineage = self.store.lineages.mint()
            self._hold(lineage)
            assert self.store.publish(lineage, self.reserved.pop(), keep)
            self._note(lineage, keep)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def publish_for_a_dead_page(self, data: st.DataObject) -> None:
        dead = self.store.lineages.mint()
        assert self.store.publish(dead, self._pop(data, self.reserved)) is False
        assert dead not in self.store

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.store.discard(self._pop(data, self.reserved))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=CLASSES)
    def reclass(self, data: st.DataObject, keep: Keep) -> None:
        """The most recently used of its new class; nothing happens to a page without truth."""
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        self.store.reclass(lineage, keep)
        if lineage in self.keep:
            self._forget(lineage)
            self._note(lineage, keep)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def supersede(self, data: st.DataObject) -> None:
        """The truth is gone at once; a reader keeps its slot."""
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        self.store.supersede(lineage)
        self._forget(lineage)
        assert lineage not in self.store

    # ---- restore

    @precondition(lambda self: self.recency)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """A used GRID or FILL is a POINT from then on; LIVE stays LIVE."""
        lineage = data.draw(st.sampled_from(self.recency))
        slot = self.store.lookup(lineage)
        self.store.lock(slot)
        self.store.touch(lineage)
        self.locked.append(slot)
        keep = Keep.LIVE if self.keep[lineage] is Keep.LIVE else Keep.POINT
        self._forget(lineage)
        self._note(lineage, keep)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.store.unlock(self._pop(data, self.locked))

    # ---- flush

    @rule(dice=st.integers(0, 7))
    def flush(self, dice: int) -> None:
        if dice:
            return  # seldom, or the store would never fill
        self.store.reset()
        assert len(self.store) == 0
        self.held.clear()
        self.reserved.clear()
        self.recency.clear()
        self.keep.clear()

    # ---- always

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        store = self.store
        store.check_integrity()
        assert store.lineages.references() == dict(self.held)
        # T1, T2
        slots = [store.lookup(lineage) for lineage in self.recency]
        assert None not in slots and len(set(slots)) == len(slots) == len(store)
        assert {x: store.slots.keep(store.lookup(x)) for x in self.recency} == self.keep
        # S3: the order in which truths would be evicted
        owners = [store.slots.owner(slot) for slot in store.slots.least_recent_first()]
        assert owners == self._eviction_order()
        # S2, T3 and nothing leaked: a slot is in use exactly while somebody needs it.
        needed = {*slots, *self.reserved, *self.locked}
        in_use = {s for s in range(CAPACITY) if store.slots.state(s) is not SlotState.FREE}
        assert in_use == needed and store.in_use() == len(needed)
        for slot in range(CAPACITY):
            assert store.slots.is_locked(slot) == (slot in self.locked)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for lineage, times in self.held.items():
            self.store.lineages.release((lineage,) * times)
        for slot in self.reserved:
            self.store.discard(slot)
        for slot in self.locked:
            self.store.unlock(slot)
        assert self.store.in_use() == 0 and len(self.store) == 0
        self.store.check_integrity()

    # ---- the model

    def _eviction_order(self) -> list[int]:
        """Lowest class first, least recently used first within a class."""
        return sorted(self.recency, key=self.keep.__getitem__)

    def _note(self, lineage: int, keep: Keep) -> None:
        self.recency.append(lineage)
        self.keep[lineage] = keep

    def _forget(self, lineage: int) -> None:
        if self.keep.pop(lineage, None) is not None:
            self.recency.remove(lineage)

    def _hold(self, lineage: int) -> None:
        self.store.lineages.hold((lineage,))
        self.held[lineage] += 1

    @staticmethod
    def _pop(data: st.DataObject, items: list) -> object:
        return items.pop(data.draw(st.integers(0, len(items) - 1)))


TestTruthMachine = TruthMachine.TestCase
TestTruthMachine.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


# ---- controls: the machine finds a broken rule


class _BrokenTable(TruthStore):
    """A store whose slot table breaks a rule."""

    table: type[SlotTable]

    def __init__(self, capacity):
        super().__init__(capacity)
        self.slots = self.table(capacity)


class EvictsLocked(_BrokenTable):
    class table(SlotTable):
        def victim(self, dearest=Keep.LIVE):
            allowed = [i for i in self.least_recent_first() if self.keep(i) <= dearest]
            return allowed[0] if allowed else None


class EvictsTheNewest(_BrokenTable):
    class table(SlotTable):
        def victim(self, dearest=Keep.LIVE):
            for slots in self._recency.values():
                idle = [i for i in slots if not self.is_locked(i) and self.keep(i) <= dearest]
                if idle:
                    return idle[-1]
            return None


class EvictsGridBeforeFill(_BrokenTable):
    class table(SlotTable):
        def victim(self, dearest=Keep.LIVE):
            for keep in (Keep.GRID, Keep.FILL, Keep.POINT, Keep.LIVE):
                for index in self._recency[keep]:
                    if keep <= dearest and not self.is_locked(index):
                        return index
            return None


class UsedStaysWhatItWas(_BrokenTable):
    class table(SlotTable):
        def touch(self, index):
            self.reclass(index, self.keep(index))


class FillDisplacesAnything(TruthStore):
    def reserve(self, keep=Keep.POINT):
        return super().reserve(Keep.POINT if keep is Keep.FILL else keep)


class MoveLeavesTheOldOwner(TruthStore):
    def move(self, old, new):
        slot = self.lookup(old)
        moved = super().move(old, new)
        if moved:
            self.slots.hand_over(slot, old)
        return moved


class MoveRefreshes(TruthStore):
    def move(self, old, new):
        moved = super().move(old, new)
        if moved:
            self.touch(new)
        return moved


class SupersededKeepsItsSlot(TruthStore):
    def supersede(self, lineage):
        self._slot_of.pop(lineage, None)


class KeepsTruthOfTheDead(TruthStore):
    def _lineage_died(self, lineage):
        pass


@pytest.mark.parametrize(
    "broken",
    [
        EvictsLocked,
        EvictsTheNewest,
        EvictsGridBeforeFill,
        UsedStaysWhatItWas,
        FillDisplacesAnything,
        MoveLeavesTheOldOwner,
        MoveRefreshes,
        SupersededKeepsItsSlot,
        KeepsTruthOfTheDead,
    ],
)
def test_control_a_broken_store_is_found(broken):
    class Machine(TruthMachine):
        store_class = broken

        def teardown(self) -> None:
            pass

    with pytest.raises((AssertionError, SlotError, KeyError)):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=400,
                stateful_step_count=40,
                deadline=None,
                database=None,
                # Found is enough: no shrinking, no explaining.
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )


# ---- what a caller may not do, and sizes at the edge


def test_wrong_calls_are_refused():
    store = TruthStore(2)
    lineage = store.lineages.mint()
    store.lineages.hold((lineage,))
    slot = store.reserve()
    with pytest.raises(SlotError, match="not owned"):
        store.lock(slot)
    with pytest.raises(SlotError, match="not locked"):
        store.unlock(slot)
    assert store.publish(lineage, slot)
    with pytest.raises(SlotError, match="not reserved"):
        store.discard(slot)
    with pytest.raises(SlotError, match="not reserved"):
        store.publish(store.lineages.mint(), slot)
    with pytest.raises(KeyError):
        store.touch(10**6)
    with pytest.raises(ValueError, match="negative"):
        SlotTable(-1)


def test_a_store_without_slots_holds_nothing():
    store = TruthStore(0)
    assert store.reserve() is None and store.counters.reserve_failed == 1
    assert 5 not in store and store.lookup(5) is None and store.in_use() == 0
    store.reset()
    store.check_integrity()


def test_a_locked_slot_outlives_its_lineage_but_not_its_lock():
    store = TruthStore(1)
    lineage = store.lineages.mint()
    store.lineages.hold((lineage,))
    slot = store.reserve()
    store.publish(lineage, slot)
    store.lock(slot)
    store.lineages.release((lineage,))
    assert lineage not in store and store.slots.state(slot) is SlotState.DEAD
    assert store.reserve() is None, "its bytes are being read"
    store.unlock(slot)
    assert store.reserve() == slot
    assert store.counters.died_with_lineage == 1


def test_counters_tell_what_happened():
    store = TruthStore(1)
    ids = [store.lineages.mint() for _ in range(3)]
    store.lineages.hold(ids)
    for lineage in ids[:2]:
        assert store.publish(lineage, store.reserve())
    slot = store.reserve()
    assert not store.publish(10**6, slot)
    assert store.counters.published == 2
    assert store.counters.evicted == 2
    assert store.counters.publish_refused == 1


def test_fill_that_finds_no_room_is_not_a_failure():
    store = TruthStore(1)
    ids = [store.lineages.mint() for _ in range(2)]
    store.lineages.hold(ids)
    assert store.publish(ids[0], store.reserve(Keep.GRID), Keep.GRID)
    assert store.reserve(Keep.FILL) is None and store.counters.reserve_failed == 0
    assert store.counters.evicted == 0 and ids[0] in store
    slot = store.reserve(Keep.GRID)
    assert store.publish(ids[1], slot, Keep.FILL) and ids[0] not in store
    assert store.reserve(Keep.FILL) == slot, "unused fill makes room for fill"


def test_superseded_while_it_is_read():
    store = TruthStore(1)
    lineage = store.lineages.mint()
    store.lineages.hold((lineage,))
    slot = store.reserve()
    store.publish(lineage, slot, Keep.LIVE)
    store.lock(slot)
    store.supersede(lineage)
    assert lineage not in store and store.counters.superseded == 1
    assert store.reserve() is None, "its bytes are being read"
    store.unlock(slot)
    assert store.reserve() == slot
