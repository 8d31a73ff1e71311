"""SlotTable and TruthStore against a plain model, step by step (invariants S1-S3, T1-T3)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from unittest import mock

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

from sglang_bitexact_hicache import slots as slots_module
from sglang_bitexact_hicache.policy import EVICTION_ORDER, WEIGHT, Keep
from sglang_bitexact_hicache.slots import SlotError, SlotState, SlotTable
from sglang_bitexact_hicache.truth import TruthStore

CAPACITY = 4
CLASSES = st.sampled_from(Keep)
WORTHS = st.sampled_from([1, 2, 3, 4, 7, 8, 9, 100, 0, -1])
"""Pages; what is below one counts as one."""
PASSABLE = (Keep.POINT, Keep.USED, Keep.LIVE)


@dataclass
class Held:
    """What a caller knows of one truth."""

    keep: Keep
    worth: int
    uses: int
    since: int
    """When it was captured, used or reclassed: a count of such events, over all truths."""


class TruthMachine(RuleBasedStateMachine):
    """Drives a TruthStore as capture, restore, tree, healing and flush do, in any order.

    The model knows only what the caller knows: which slots it holds reserved or locked,
    which ids it holds, when truths were last used, by how many, and how dearly each is held.
    """

    store_class = TruthStore

    @initialize()
    def start(self) -> None:
        self.store = self.store_class(CAPACITY)
        self.held: Counter[int] = Counter()
        self.reserved: list[int] = []
        self.locked: list[int] = []
        self.truths: dict[int, Held] = {}
        self.clock = 0

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
            self.truths.pop(lineage, None)
        self.store.lineages.release((lineage,))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Healing: all that is known goes with the truth; a page that has one keeps its own."""
        old = data.draw(st.sampled_from(sorted(self.held)))
        new = data.draw(st.sampled_from(sorted(self.held)) | st.just(10**6))
        moves = old in self.truths and new in self.held and new not in self.truths
        slot = self.store.lookup(old)
        assert self.store.move(old, new) is moves
        if moves:
            assert self.store.lookup(new) == slot and old not in self.store
            self.truths[new] = self.truths.pop(old)

    # ---- capture

    @rule(keep=CLASSES)
    def reserve(self, keep: Keep) -> None:
        """When nothing is free, the victim goes, and only that one. FILL takes the place of FILL
        only."""
        free = CAPACITY - self.store.in_use()
        victim = self._victim(Keep.FILL if keep is Keep.FILL else Keep.LIVE)
        failed = self.store.counters.reserve_failed
        slot = self.store.reserve(keep)
        if not free and victim is None:
            assert slot is None
            assert self.store.counters.reserve_failed == failed + (keep is not Keep.FILL)
            return
        assert slot is not None
        if not free:
            del self.truths[victim]
        assert slot not in self.reserved and slot not in self.locked
        self.reserved.append(slot)

    @precondition(lambda self: self.reserved and self.held)
    @rule(data=st.data(), keep=CLASSES, worth=WORTHS)
    def publish(self, data: st.DataObject, keep: Keep, worth: int) -> None:
        slot = self._pop(data, self.reserved)
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        had = lineage in self.store
        assert self.store.publish(lineage, slot, keep, worth) is (not had)
        if not had:
            assert self.store.lookup(lineage) == slot
            self._published(lineage, keep, worth)

    @rule(keep=CLASSES, worth=WORTHS)
    def capture(self, keep: Keep, worth: int) -> None:
        """What happens most: a page is computed and its truth published at once."""
        self.reserve(keep)
        if self.reserved:
            lineage = self.store.lineages.mint()
            self._hold(lineage)
            assert self.store.publish(lineage, self.reserved.pop(), keep, worth)
            self._published(lineage, keep, worth)

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
    @rule(data=st.data(), keep=CLASSES, times=st.sampled_from([1, 1, 2, 7, 8, 9, 64]))
    def reclass(self, data: st.DataObject, keep: Keep, times: int) -> None:
        """As if just captured, the others so much older; nothing happens to a page without truth."""
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        for _ in range(times):
            self.store.reclass(lineage, keep)
            if lineage in self.truths:
                self._renew(lineage, keep)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def passed(self, data: st.DataObject) -> None:
        """Only what one request at most has used, and what was held more dearly. Again: nothing."""
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        self.store.passed(lineage)
        held = self.truths.get(lineage)
        if held is not None and held.uses < 2 and held.keep in PASSABLE:
            self._renew(lineage, Keep.PASSED)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def supersede(self, data: st.DataObject) -> None:
        """The truth is gone at once; a reader keeps its slot."""
        lineage = data.draw(st.sampled_from(sorted(self.held)))
        self.store.supersede(lineage)
        self.truths.pop(lineage, None)
        assert lineage not in self.store

    # ---- restore

    @precondition(lambda self: self.truths)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """Counted, and USED from then on; LIVE stays LIVE."""
        lineage = data.draw(st.sampled_from(sorted(self.truths)))
        slot = self.store.lookup(lineage)
        self.store.lock(slot)
        self.store.touch(lineage)
        self.locked.append(slot)
        self.truths[lineage].uses += 1
        was_live = self.truths[lineage].keep is Keep.LIVE
        self._renew(lineage, Keep.LIVE if was_live else Keep.USED)

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
        self.truths.clear()

    # ---- always

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        store = self.store
        store.check_integrity()
        assert store.lineages.references() == dict(self.held)
        # T1, T2
        slots = {lineage: store.lookup(lineage) for lineage in self.truths}
        assert None not in slots.values()
        assert len(set(slots.values())) == len(slots) == len(store)
        for lineage, slot in slots.items():
            held, table = self.truths[lineage], store.slots
            known = table.keep(slot), table.worth(slot), table.uses(slot)
            assert known == (held.keep, held.worth, held.uses)
        owners = [store.slots.owner(slot) for slot in store.slots.least_recent_first()]
        assert owners == sorted(self.truths, key=lambda lineage: self.truths[lineage].since)
        # S3: whoever asks
        for dearest in Keep:
            victim = store.slots.victim(dearest)
            assert (None if victim is None else store.slots.owner(victim)) == self._victim(dearest)
        # S2, T3 and nothing leaked: a slot is in use exactly while somebody needs it.
        needed = {*slots.values(), *self.reserved, *self.locked}
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

    def _victim(self, dearest: Keep) -> int | None:
        """Of the first group with a truth that nothing locks, the one unused for longest for what it
        saves."""
        for group in EVICTION_ORDER:
            idle = [
                lineage
                for lineage, held in self.truths.items()
                if held.keep in group
                and held.keep <= dearest
                and self.store.lookup(lineage) not in self.locked
            ]
            if idle:
                return max(idle, key=self._staleness)
        return None

    def _staleness(self, lineage: int) -> tuple[float, int]:
        held = self.truths[lineage]
        age = self.clock - held.since
        return age / (WEIGHT[held.keep] * 2 ** math.floor(math.log2(held.worth))), age

    def _published(self, lineage: int, keep: Keep, worth: int) -> None:
        """Where prompts are known to part, one has come this way already."""
        self.truths[lineage] = Held(keep, max(worth, 1), int(keep is Keep.USED), 0)
        self._renew(lineage, keep)

    def _renew(self, lineage: int, keep: Keep) -> None:
        self.clock += 1
        self.truths[lineage].keep = keep
        self.truths[lineage].since = self.clock

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
            locks = [slot.locks for slot in self._slots]
            for slot in self._slots:
                slot.locks = 0
            victim = super().victim(dearest)
            for slot, held in zip(self._slots, locks, strict=True):
                slot.locks = held
            return victim


class EvictsTheNewest(_BrokenTable):
    class table(SlotTable):
        def _staleness(self, keep, bucket, index):
            return tuple(-x for x in super()._staleness(keep, bucket, index))


class IgnoresWorth(_BrokenTable):
    class table(SlotTable):
        def _staleness(self, keep, bucket, index):
            return super()._staleness(keep, 0, index)


class WorthIsLostInUse(_BrokenTable):
    class table(SlotTable):
        def touch(self, index):
            slot = self._slots[index]
            self._dequeue(index, slot)
            slot.worth = 1
            self._enqueue(index, slot, slot.keep)
            super().touch(index)


class IgnoresTheClass(_BrokenTable):
    class table(SlotTable):
        def _staleness(self, keep, bucket, index):
            return super()._staleness(Keep.POINT, bucket, index)


class WeighsWorthTwice(_BrokenTable):
    class table(SlotTable):
        def _staleness(self, keep, bucket, index):
            return super()._staleness(keep, 2 * bucket, index)


class EvictsByAgeAloneOnATie(_BrokenTable):
    """Of two that are as stale the younger."""

    class table(SlotTable):
        def _staleness(self, keep, bucket, index):
            stale, age = super()._staleness(keep, bucket, index)
            return stale, -age


def _with_groups(*groups: Iterable[Keep]) -> type[_BrokenTable]:
    class Broken(_BrokenTable):
        class table(SlotTable):
            def victim(self, dearest=Keep.LIVE):
                with mock.patch.object(slots_module, "EVICTION_ORDER", groups):
                    return super().victim(dearest)

    return Broken


UNUSED, KNOWN = (Keep.FILL, Keep.GRID), (Keep.PASSED, Keep.POINT, Keep.USED)
GROUPS = {
    "grid before fill": ((Keep.GRID,), (Keep.FILL,), KNOWN, (Keep.LIVE,)),
    "points before the grid": ((Keep.FILL,), KNOWN, (Keep.GRID,), (Keep.LIVE,)),
    "the grid among the points": ((Keep.FILL,), (Keep.GRID, *KNOWN), (Keep.LIVE,)),
    "fill and grid alike": (UNUSED, KNOWN, (Keep.LIVE,)),
    "live among the points": ((Keep.FILL,), (Keep.GRID,), (*KNOWN, Keep.LIVE)),
    "live before the points": ((Keep.FILL,), (Keep.GRID,), (Keep.LIVE,), KNOWN),
    "class by class": tuple((keep,) for keep in Keep),
    "never a live one": ((Keep.FILL,), (Keep.GRID,), KNOWN),
}


class UsedStaysWhatItWas(_BrokenTable):
    class table(SlotTable):
        def touch(self, index):
            self._slots[index].uses += 1
            self.reclass(index, self.keep(index))


class UsesAreNotCounted(_BrokenTable):
    class table(SlotTable):
        def touch(self, index):
            self.reclass(index, max(self.keep(index), Keep.USED))


class AJunctionIsUnused(_BrokenTable):
    class table(SlotTable):
        def own(self, index, owner, keep=Keep.POINT, worth=1):
            super().own(index, owner, keep, worth)
            self._slots[index].uses = 0


class NothingPasses(TruthStore):
    def passed(self, lineage):
        pass


class PassesWhatOthersUse(_BrokenTable):
    class table(SlotTable):
        def passed(self, index):
            if self.keep(index) > Keep.PASSED:
                self.reclass(index, Keep.PASSED)


class PassesOnlyTheUnused(_BrokenTable):
    class table(SlotTable):
        def passed(self, index):
            if not self.uses(index):
                super().passed(index)


class PassingRaisesFill(_BrokenTable):
    class table(SlotTable):
        def passed(self, index):
            if self.uses(index) <= 1 and self.keep(index) is not Keep.PASSED:
                self.reclass(index, Keep.PASSED)


class PassingAgainRefreshes(_BrokenTable):
    class table(SlotTable):
        def passed(self, index):
            if self.uses(index) <= 1 and self.keep(index) >= Keep.PASSED:
                self.reclass(index, Keep.PASSED)


class ReclassedKeepsItsAge(_BrokenTable):
    class table(SlotTable):
        def reclass(self, index, keep):
            stamp = self._slots[index].stamp
            super().reclass(index, keep)
            self._slots[index].stamp = stamp


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
            self.reclass(new, self.slots.keep(self.lookup(new)))
        return moved


class SupersededKeepsItsSlot(TruthStore):
    def supersede(self, lineage):
        self._slot_of.pop(lineage, None)


class KeepsTruthOfTheDead(TruthStore):
    def _lineage_died(self, lineage):
        pass


BROKEN = (
    EvictsLocked,
    EvictsTheNewest,
    IgnoresWorth,
    WorthIsLostInUse,
    IgnoresTheClass,
    WeighsWorthTwice,
    EvictsByAgeAloneOnATie,
    UsedStaysWhatItWas,
    UsesAreNotCounted,
    AJunctionIsUnused,
    NothingPasses,
    PassesWhatOthersUse,
    PassesOnlyTheUnused,
    PassingRaisesFill,
    PassingAgainRefreshes,
    ReclassedKeepsItsAge,
    FillDisplacesAnything,
    MoveLeavesTheOldOwner,
    MoveRefreshes,
    SupersededKeepsItsSlot,
    KeepsTruthOfTheDead,
)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_control_another_order_of_the_classes_is_found(groups):
    _is_found(_with_groups(*groups))


@pytest.mark.parametrize("broken", BROKEN)
def test_control_a_broken_store_is_found(broken):
    _is_found(broken)


def _is_found(broken: type[TruthStore]) -> None:
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
                derandomize=True,
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


# ---- what goes first, by example


def stored(capacity: int) -> tuple[TruthStore, list[int]]:
    """A store, and pages that somebody holds."""
    store = TruthStore(capacity)
    pages = [store.lineages.mint() for _ in range(300)]
    store.lineages.hold(pages)
    return store, pages


def capture(store: TruthStore, page: int, keep: Keep = Keep.POINT, worth: int = 1) -> None:
    assert store.publish(page, store.reserve(keep), keep, worth)


def newer_ones_outlived(keep: Keep, worth: int, crowd: Keep = Keep.POINT) -> int:
    """Captures of worth 1, one after the other, that a truth outlives in a store of three. The older
    of the two that are there with it is its rival: its age is 1."""
    store, (page, *others) = stored(3)
    capture(store, page, keep, worth)
    for count, other in enumerate(others):
        capture(store, other, crowd)
        if page not in store:
            return count
    return len(others)


@pytest.mark.parametrize(
    ("keep", "worth", "outlived"),
    [
        (Keep.POINT, 1, 2),
        (Keep.POINT, 8, 8),
        (Keep.POINT, 15, 8),
        (Keep.POINT, 100, 64),
        (Keep.USED, 1, 8),
        (Keep.USED, 4, 32),
        (Keep.PASSED, 8, 2),
        (Keep.PASSED, 64, 8),
        (Keep.GRID, 64, 2),
        (Keep.FILL, 64, 2),
        (Keep.LIVE, 1, 299),
    ],
)
def test_what_a_truth_saves_is_how_long_it_waits(keep, worth, outlived):
    assert newer_ones_outlived(keep, worth) == outlived


def test_a_crowd_of_live_ones_displaces_the_dearest_point():
    assert newer_ones_outlived(Keep.USED, 100, crowd=Keep.LIVE) == 2


@pytest.mark.parametrize("users", [1, 2])
def test_what_one_request_used_and_passed_goes_but_not_what_two_used(users):
    store, (stem, point, *others) = stored(3)
    capture(store, stem, worth=4)
    store.passed(stem)
    capture(store, point, worth=4)
    for _ in range(users):
        store.touch(stem)
    store.passed(stem)
    for other in others[:2]:
        capture(store, other)
    assert (stem in store, point in store) == (users == 2, users == 1)
