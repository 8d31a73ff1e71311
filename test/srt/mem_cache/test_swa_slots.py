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

from sglang_bitexact_hicache.slots import SlotError, SlotState, SlotTable
from sglang_bitexact_hicache.truth import TruthStore

CAPACITY = 3


class TruthMachine(RuleBasedStateMachine):
    """Drives a TruthStore as capture, restore, tree and flush do, in any order.

    The model knows only what the caller knows: which slots it holds reserved or locked,
    which ids it holds, and in which order truths were last used.
    """

    store_class = TruthStore

    @initialize()
    def start(self) -> None:
        self.store = self.store_class(CAPACITY)
        self.held: Counter[int] = Counter()
        self.reserved: list[int] = []
        self.locked: list[int] = []
        self.recency: list[int] = []  # lineages with truth, least recently used first

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
            if lineage in self.recency:
                self.recency.remove(lineage)
        self.store.lineages.release((lineage,))

    # ---- capture

    @rule()
    def reserve(self) -> None:
        """LRU: when nothing is free, the oldest truth that nothing uses goes, and only that one."""
        free = CAPACITY - self.store.in_use()
        idle = [x for x in self.recency if self.store.lookup(x) not in self.locked]
        slot = self.store.reserve()
        if free:
            assert slot is not None
        elif idle:
            assert slot is not None
            self.recency.remove(idle[0])
        else:
            assert slot is None
            return
        assert slot not in self.reserved and slot not in self.locked
        self.reserved.append(slot)

    @precondition(lambda self: self.reserved and self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slot = self._pop(data, self.reserved)
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        had = lineage in self.store
        assert self.store.publish(lineage, slot) is (not had)
        if not had:
            assert self.store.lookup(lineage) == slot
            self.recency.append(lineage)

    @rule()
    def capture(self) -> None:
        """What happens most: a page is computed and its truth published at once."""
        self.reserve()
        if self.reserved:
            lineage = self.store.lineages.mint()
            self._hold(lineage)
            assert self.store.publish(lineage, self.reserved.pop())
            self.recency.append(lineage)

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

    # ---- restore

    @precondition(lambda self: self.recency)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        lineage = data.draw(st.sampled_from(self.recency))
        slot = self.store.lookup(lineage)
        self.store.lock(slot)
        self.store.touch(lineage)
        self.locked.append(slot)
        self.recency.remove(lineage)
        self.recency.append(lineage)

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
        # The order in which truths would be evicted
        owners = [store.slots.owner(slot) for slot in store.slots.least_recent_first()]
        assert owners == self.recency
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


class ReusesLocked(TruthStore):
    def reserve(self):
        slot = self.slots.take()
        if slot is not None or not self._slot_of:
            return slot
        victim = self.slots.least_recent_first()[0]
        del self._slot_of[self.slots.owner(victim)]
        self.slots._slots[victim].locks = 0
        self.slots.retire(victim)
        return self.slots.take()


class EvictsTheNewest(TruthStore):
    def reserve(self):
        order = self.slots._recency
        for slot in reversed(list(order)):
            order.move_to_end(slot)
        chosen = super().reserve()
        for slot in reversed(list(order)):
            order.move_to_end(slot)
        return chosen


class KeepsTruthOfTheDead(TruthStore):
    def _lineage_died(self, lineage):
        pass


@pytest.mark.parametrize("broken", [ReusesLocked, EvictsTheNewest, KeepsTruthOfTheDead])
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
