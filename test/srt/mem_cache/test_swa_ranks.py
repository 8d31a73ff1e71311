"""Eight ranks decide alike, whatever their copies, checks and storage do (rank_replicas.py).

The property, for any script, whether answers grow by decode steps or by speculative rounds: every rank
has the same trace (matches, admissions, slots captured into, evictions, discards, free pages, counters),
comes to every collective, and holds nothing at the end. The controls let one rank decide by itself, each
in a way that is easily written by mistake, or keep what is to be given back.
"""

from __future__ import annotations

from collections import Counter

import pytest
import rank_replicas
import torch
from bitexact_fixtures import cpu_hicache
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_replicas import RANKS, differences, play, random_script
from tree_driver import Violation

from sglang_bitexact_hicache.planner import CapturePlanner
from sglang_bitexact_hicache.ranks import Ranks
from sglang_bitexact_hicache.runtime import TruthRuntime
from sglang_bitexact_hicache.staging import DeviceStaging

SEEDS = range(4)
STEPS = 120

EVENTS = {"hit", "discarded", "evicted", "captured", "loaded", "dropped", "finished"}
OF_ROUNDS = {"decode_captured", "round_discarded"}

numbers = st.integers(0, 1 << 16)


@pytest.fixture(scope="module", autouse=True)
def hicache():
    with cpu_hicache():
        yield


drafting = pytest.mark.parametrize("drafting", [False, True], ids=["steps", "rounds"])
"""How answers grow: by decode steps, or by speculative rounds."""


@drafting
@settings(max_examples=10, deadline=None)
@given(script=st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=10, max_size=50))
def test_ranks_decide_alike(drafting, script):
    traces, _ = play(script, drafting=drafting)
    assert differences(traces) == []


@pytest.mark.parametrize(
    ("answers", "steps", "events"),
    [
        ({}, STEPS, EVENTS),
        ({"drafting": True}, 2 * STEPS, EVENTS | OF_ROUNDS),
        # So few that a candidate finds all of them locked.
        (
            {"drafting": True, "slots": 3},
            2 * STEPS,
            (EVENTS - {"loaded"}) | OF_ROUNDS | {"no slot"},
        ),
    ],
    ids=["steps", "rounds", "rounds with few slots"],
)
def test_long_scripts_with_all_that_can_happen(answers, steps, events):
    met: Counter[str] = Counter()
    for seed in SEEDS:
        traces, happened = play(random_script(seed, steps), **answers)
        assert differences(traces) == []
        met += happened
    # Ranks that do nothing are alike too.
    assert all(met[what] >= RANKS for what in events), met


def every_rank_by_itself(patch) -> None:
    """What is wrong on one rank is dealt with there."""
    patch(Ranks, "all_of", lambda self, flags: list(flags))


def ask_only_when_something_is_wrong(patch) -> None:
    """A collective that a rank comes to when it has something to say."""
    all_of = Ranks.all_of
    patch(Ranks, "all_of", lambda self, f: list(f) if all(f) else all_of(self, f))


def staging_is_free_when_its_copy_has_landed(patch) -> None:
    """How many boundaries are captured depends on how fast the rank's copies are."""

    def free(self) -> int:
        return sum(event is None or event.done() for _, event in self._free)

    patch(DeviceStaging, "free", property(free))


def acknowledged_when_this_rank_is_done(patch) -> None:
    """The tree's copies are complete when this rank's are."""

    def no_meeting(self, rank, tensor, _op):
        return None

    patch(rank_replicas.Meeting, "all_reduce", no_meeting)


def a_round_counts_when_its_copy_has_landed(patch) -> None:
    """What a round completed is published if this rank has its bytes by then."""
    commit = CapturePlanner.commit

    def landed(self, req, wanted):
        if self.cache.truth_runtime._written[wanted.slot].done():
            return commit(self, req, wanted)
        self.discard(wanted)
        return False

    patch(CapturePlanner, "commit", landed)


def what_a_round_did_not_complete_stays(patch) -> None:
    """The slot of a discarded candidate is not given back."""
    patch(TruthRuntime, "_not_completed", lambda self, wanted: None)


CONTROLS = (
    every_rank_by_itself,
    ask_only_when_something_is_wrong,
    staging_is_free_when_its_copy_has_landed,
    acknowledged_when_this_rank_is_done,
)

CONTROLS_OF_ROUNDS = (
    a_round_counts_when_its_copy_has_landed,
    what_a_round_did_not_complete_stays,
)


@pytest.mark.parametrize(
    ("broken", "drafting"),
    [*((c, False) for c in CONTROLS), *((c, True) for c in (*CONTROLS, *CONTROLS_OF_ROUNDS))],
    ids=lambda value: getattr(value, "__name__", "rounds" if value else "steps"),
)
def test_control_a_decision_of_one_rank_is_found(monkeypatch, broken, drafting):
    broken(monkeypatch.setattr)
    with pytest.raises(Violation):
        for seed in range(8):
            script = random_script(seed, STEPS)
            found = differences(play(script, drafting=drafting)[0])
            if found:
                raise Violation(found)


# ---- what is compared at startup


def reduced_with(other: dict[str, int]):
    """An all-reduce with one other rank, which has these numbers."""

    def reduce(tensor, _op) -> None:
        theirs = [n for value in other.values() for n in (value, ~value)]
        tensor.copy_(torch.minimum(tensor, torch.tensor(theirs)))

    return reduce


@given(st.lists(st.tuples(st.integers(-(2**62), 2**62), st.integers(-2, 2)), min_size=1))
def test_ranks_that_were_started_differently_say_so_on_each(pairs):
    here = {f"n{i}": value for i, (value, _) in enumerate(pairs)}
    there = {f"n{i}": value + change for i, (value, change) in enumerate(pairs)}
    wrong = [name for name in here if here[name] != there[name]]
    for mine, theirs in ((here, there), (there, here)):
        ranks = Ranks(reduced_with(theirs))
        if not wrong:
            ranks.require_same(mine)
            continue
        with pytest.raises(ValueError, match="the ranks of this server differ in ") as error:
            ranks.require_same(mine)
        assert [name for name in mine if f"{name} (here" in str(error.value)] == wrong


def test_one_rank_asks_nobody():
    ranks = Ranks()
    assert ranks.all_of([True, False]) == [True, False]
    ranks.require_same({"slots": 1})
