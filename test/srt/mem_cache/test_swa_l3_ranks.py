"""Eight ranks with storage (L3) decide alike, whatever each finds out about its own (l3_rank_walk.py).

On every rank every hit is compared byte by byte with what its record was captured over; after every
step the ranks compare slots, identities, free pages, counters and operations under way. The controls let
a rank decide by itself, or come to a collective only when it has something to say.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from bitexact_fixtures import cpu_hicache
from l3_fixtures import storage_hooked
from l3_rank_walk import walk_together
from rank_replicas import RANKS
from tree_driver import Violation

from sglang_bitexact_hicache.ranks import Ranks

SEEDS = int(os.environ.get("BITEXACT_L3_RANK_SEEDS", "3"))
STEPS = int(os.environ.get("BITEXACT_L3_RANK_STEPS", "30"))


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache(), storage_hooked():
        yield


def test_ranks_take_the_same_of_what_each_finds(tmp_path):
    met: Counter[str] = Counter()
    for seed in range(SEEDS):
        met += walk_together(seed, tmp_path / str(seed), STEPS)
    # Ranks that do nothing are alike too; and one of them at least was other than the rest.
    for what in ("hits", "records_written", "records_loaded", "unproved", "restart", "flush"):
        assert met[what] >= RANKS, (what, met)
    assert met["refused_record"] + met["refused_kv"] + met["unreadable"] > 0, met


def every_rank_by_itself(patch) -> None:
    """What a rank's threads found out is acted upon there."""
    patch(Ranks, "least", lambda self, numbers: list(numbers))


def ask_only_about_a_record(patch) -> None:
    """A rank that knows of no record begins where it is, and asks nobody."""
    least = Ranks.least
    patch(Ranks, "least", lambda self, n: list(n) if list(n) == [0] else least(self, n))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("broken", [every_rank_by_itself, ask_only_about_a_record])
def test_control_a_decision_of_one_rank_is_found(broken, tmp_path, monkeypatch):
    broken(monkeypatch.setattr)
    with pytest.raises(Violation):
        for seed in range(8):
            walk_together(seed, tmp_path / str(seed), STEPS)
