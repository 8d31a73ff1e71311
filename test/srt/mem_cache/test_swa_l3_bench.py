"""The storage benchmark: what it measures is there, whole, and its faults are counted right."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from bitexact_fixtures import PAGE
from l3_fixtures import storage_hooked

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark"))

from l3 import faults, measure, report
from l3.faults import Faults
from l3.parts import Parts
from l3.world import TINY
from reuse.world import quiet_cpu_hicache

PAGES = 5


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with quiet_cpu_hicache(), storage_hooked():
        yield


def test_parts_are_less_what_is_inside_and_put_back():
    class Work:
        def outer(self):
            time.sleep(0.02)
            self.inner()

        def inner(self):
            time.sleep(0.03)

    work = Work()
    with Parts() as parts:
        parts.watch(work, "outer", "out")
        parts.watch(work, "inner", lambda: "in")
        work.outer()
        work.inner()
    assert not vars(work)
    assert [len(parts.calls[label]) for label in ("out", "in")] == [1, 2]
    (outer,) = parts.calls["out"]
    assert outer.wall >= 0.05 and 0.02 <= parts.wall["out"] <= outer.wall - 0.03
    assert parts.wall["in"] >= 0.06 and parts.cpu["in"] < 0.03
    assert parts.ended["in"] - parts.began["out"] >= outer.wall + 0.03


def test_restore_and_plain_read_the_same_bytes():
    restored = measure.restore(PAGES, 2, TINY)
    # Three KV pools and the empty file of each page, and one record.
    assert restored.files == 4 * PAGES + 3
    assert restored.nbytes > 0 and restored.seconds > 0 and restored.plain > 0
    assert set(restored.wall) == set(measure.RESTORE_PARTS)
    both = restored.seconds_of(measure.OURS) + restored.seconds_of(measure.STOCK)
    assert both == pytest.approx(sum(restored.wall.values()))
    assert "restore / plain" in report.restore_table([restored, restored])
    assert report.last_line(restored, Faults(9, 8)).endswith("faults_injected=9 faults_survived=8")


@pytest.mark.parametrize("records", [1, PAGES])
def test_a_write_has_the_records(records):
    written = measure.write(PAGES, records, 2, TINY)
    assert written.record_bytes % records == 0 and written.kv_bytes % PAGES == 0
    assert set(written.wall) == set(measure.WRITE_PARTS)
    assert written.wall[measure.WRITE_KV] < written.seconds
    assert "KV alone" in report.write_table([written])


def test_hashing_and_the_scheduler_are_measured():
    hashing = measure.hashing(PAGES, 2, TINY, records=2)
    assert min(hashing.check, hashing.seal, hashing.digest) > 0
    assert "HostKv.digest" in report.hashing_table(hashing)
    found = measure.scheduler(40, 1)
    assert found.tokens == 40 * PAGE
    # Two chunks, and what the tree makes nodes of in each.
    assert found.writes >= 4
    assert found.typical.keys() == found.longest.keys() == measure.SCHEDULER_CALLS.keys()
    assert all(found.longest[label].wall >= call.wall for label, call in found.typical.items())
    assert f"all {found.writes} writes" in report.scheduler_table(found)


def test_faults_are_counted_as_pytest_finds_them(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_fault_one(n): assert n != 1\n"
        "def test_fault_two(): pytest.skip('not here')\n"
        "def test_of_something_else(): pass\n"
    )
    assert faults.run([tests], workers=0) == Faults(4, 2)
    assert not Faults(4, 2).all_survived and not Faults(0, 0).all_survived
    assert Faults(4, 4).all_survived
    missing = faults.run([tests, tmp_path / "test_missing.py"], workers=0)
    assert not missing.all_survived
