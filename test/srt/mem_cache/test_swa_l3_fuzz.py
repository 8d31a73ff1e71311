"""What comes from storage is what its record saw, on random walks (l3_walk.py).

BITEXACT_L3_SEEDS and BITEXACT_L3_STEPS make it longer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from bitexact_fixtures import cpu_hicache
from l3_fixtures import storage_hooked
from l3_walk import Walk
from tree_driver import Violation

from sglang_bitexact_hicache import storage_guard, storage_kv

SEEDS = int(os.environ.get("BITEXACT_L3_SEEDS", "16"))
STEPS = int(os.environ.get("BITEXACT_L3_STEPS", "150"))


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache(), storage_hooked():
        yield


TOTAL: Counter[str] = Counter()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_comes_from_storage_is_what_its_record_saw(seed, tmp_path):
    walk = Walk(seed, tmp_path / "store")
    walk.run(STEPS)
    TOTAL.update(walk.stats)


def test_the_walks_came_by_what_they_are_for():
    for what in (
        *("records_loaded", "records_written", "records_present", "write_not_own"),
        *("pages_read_back", "refused_kv", "unproved", "unreadable", "hits"),
    ):
        assert TOTAL[what] > 0, (what, TOTAL)


def the_chain_is_not_compared(patch: Callable[..., None]) -> None:
    """A record pairs with whatever KV came with it."""
    patch(storage_guard, "first_doubtful", lambda marks, values, pages: None)


def pages_are_not_compared(patch: Callable[..., None]) -> None:
    """A page that the tree had already passes for the one that was read."""

    class Agreeing(bytes):
        __hash__ = bytes.__hash__

        def __ne__(self, other: object) -> bool:
            return False

    digest = storage_kv.HostKv.digest
    patch(storage_kv.HostKv, "digest", lambda self, page: Agreeing(digest(self, page)))


@pytest.mark.parametrize(
    ("broken", "seeds"), [(the_chain_is_not_compared, range(9)), (pages_are_not_compared, range(9))]
)
def test_control_a_broken_rule_is_found(broken, seeds, tmp_path, monkeypatch):
    broken(monkeypatch.setattr)
    with pytest.raises(Violation):
        for seed in seeds:
            Walk(seed, tmp_path / str(seed)).run(STEPS)
