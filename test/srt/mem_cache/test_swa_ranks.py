"""Eight ranks decide alike, whatever their copies, checks and storage do (rank_replicas.py).

The property, for any script: every rank has the same trace (matches, admissions, slots captured into,
evictions, discards, free pages, counters), comes to every collective, and holds nothing at the end. The
controls let one rank decide by itself, each in a way that is easily written by mistake.
"""

from __future__ import annotations

from collections import Counter

import pytest
import rank_replicas
import torch
from bitexact_fixtures import cpu_hicache, make_server_args
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_replicas import RANKS, differences, play, random_script
from tree_driver import Violation

from sglang_bitexact_hicache.ranks import Ranks
from sglang_bitexact_hicache.staging import DeviceStaging

SEEDS = range(4)
STEPS = 120

numbers = st.integers(0, 1 << 16)


@pytest.fixture(scope="module", autouse=True)
def hicache():
    with cpu_hicache():
        yield


@pytest.fixture(scope="module")
def server_args(hicache):
    return make_server_args()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=10, max_size=50))
def test_ranks_decide_alike(server_args, script):
    traces, _ = play(server_args, script)
    assert differences(traces) == []


def test_long_scripts_with_all_that_can_happen(server_args):
    met: Counter[str] = Counter()
    for seed in SEEDS:
        traces, happened = play(server_args, random_script(seed, STEPS))
        assert differences(traces) == []
        met += happened
    # Ranks that do nothing are alike too.
    for what in ("hit", "discarded", "evicted", "captured", "loaded", "dropped", "finished"):
        assert met[what] >= RANKS, (what, met)


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


CONTROLS = (
    every_rank_by_itself,
    ask_only_when_something_is_wrong,
    staging_is_free_when_its_copy_has_landed,
    acknowledged_when_this_rank_is_done,
)


@pytest.mark.parametrize("broken", CONTROLS, ids=lambda f: f.__name__)
def test_control_a_decision_of_one_rank_is_found(monkeypatch, server_args, broken):
    broken(monkeypatch.setattr)
    with pytest.raises(Violation):
        for seed in range(8):
            found = differences(play(server_args, random_script(seed, STEPS))[0])
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
