"""Every fault of storage (L3) that one process can suffer ends in the answer of a cold run.

Each test here injects one fault into a real scheduler with SGLang's file backend (l3_faults.py), and
asserts that both requests after it answer bit for bit what the cold run answered, how much of the prompt
they reused, what the counters say, and that one log line names the key and the reason. What leaks, the
scenarios notice (`leak_free`). The controls break the verification and must get a wrong answer.
"""

from __future__ import annotations

import json
import math

import l3_faults as faults
import pytest
from l3_faults import C4, C128, FAULTS, MARKER, PAGE, READING
from scheduler_harness import failure_lines

from sglang_bitexact_hicache.layout import C4_POOL, POOLS, WINDOW_POOL


@pytest.fixture(scope="module")
def process(scheduler_process, tmp_path_factory):
    config = {"file_storage_path": str(tmp_path_factory.mktemp("l3") / "store")}
    args = [
        *("--chunked-prefill-size", "512", "--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
    ]
    with scheduler_process("faults", args) as running:
        yield running
        log = running.log()
    # Only the controls, which break something on purpose, may say so.
    lines = failure_lines(log)
    assert all("MISMATCH" in line and "tier=storage" in line for line in lines), lines[:5]


@pytest.fixture
def said(process):
    """The lines that the feature logged since the test began, but for those of each restore."""
    start = len(process.log())
    return lambda: [
        line for line in process.log()[start:].splitlines() if "bit-exact HiCache: " in line
    ]


def assert_exact(answer, hit, gains, cached: int) -> None:
    assert hit.error is None
    assert hit.cached == hit.storage == cached
    assert gains["checks_verified"] == gains["restored"] == (cached > 0)
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert hit.ids == answer.ids
    assert hit.logprobs == answer.logprobs
    assert len(set(hit.logprobs)) > 1, "flat logprobs prove nothing"


def nonzero(gains, names=None):
    return {name: n for name, n in gains.items() if n and (names is None or name in names)}


# ---- what is stored is wrong, too short, or not there


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_stored_bytes(process, said, name):
    fault = FAULTS[name]
    suffered = process.run(faults.suffer, name)
    first, gains, stored = suffered.first
    assert_exact(suffered.cold, first, gains, fault.first * PAGE)
    assert nonzero(stored) == suffered.gains(fault.read, fault.counts, used=fault.first > 0)

    again, gains, stored = suffered.again
    assert_exact(suffered.cold, again, gains, fault.again * PAGE)
    found = fault.again > 0
    counts = {**fault.later, "records_read": found, "records_loaded": found}
    # What is refused is not read again, and what is read is used.
    assert nonzero(stored) == suffered.gains(faults.pages(fault.again), counts, used=True)

    lines = said()
    if fault.page is None:
        assert lines == []
    else:
        (line,) = lines
        assert suffered.keys[fault.page] in line
        assert fault.says in line


@pytest.mark.parametrize(
    ("name", "first", "again"),
    [
        ("bit in first layer of swa_window", (1, 0), (1, 0)),
        (f"another run's last {C4} page", (1, 0), (1, 1)),
        # Nobody reads the page that is in the tree; later, nothing is read behind it.
        (f"another run's first {C4} page", (1, 2), (1, 0)),
    ],
)
def test_fault_behind_a_cached_prefix(process, name, first, again):
    """Pages that are reused, (from the device, from storage), with the first page in the tree."""
    suffered = process.run(faults.suffer_behind_a_prefix, name)
    for (result, _, stored), (device, storage) in (
        (suffered.first, first),
        (suffered.again, again),
    ):
        assert result.same_answer(suffered.cold)
        assert (result.device, result.storage) == (device * PAGE, storage * PAGE)
        assert stored["records_loaded"] == (storage > 0)
    assert suffered.again[2]["bytes_read"] == suffered.again[2]["bytes_used"]


def test_fault_a_short_record_costs_no_boundary_behind_it(process, said):
    suffered = process.run(faults.short_record_inside, 2, 3)
    for hit, gains, stored in (suffered.first, suffered.again):
        assert hit.same_answer(suffered.cold)
        assert (hit.cached, stored["unreadable"]) == (3 * PAGE, 0)
        assert gains["checks_verified"] == 1
    assert len(said()) == 1


# ---- storage fails while it is read


@pytest.mark.parametrize(
    ("page", "pool", "how"),
    [
        *((1, MARKER, how) for how in ("gives nothing", "raises", "deleted")),
        *((1, C4, how) for how in ("gives nothing", "raises", "deleted")),
        (0, C128, "raises"),
        *((2, WINDOW_POOL, how) for how in ("gives nothing", "raises", "deleted")),
        (2, C4_POOL, "raises"),
    ],
)
def test_fault_found_and_then_not_read(process, said, page, pool, how):
    suffered = process.run(faults.failing_read, page, pool, how)
    first, _, stored = suffered.first
    assert first.cached == 0
    assert first.same_answer(suffered.cold)
    # All pages of the other pools are read at once, a pool that raises page by page.
    lost = {C4: page if how == "raises" else 2, C128: page}.get(pool, 3)
    read = {**faults.pages(3), **({pool: lost} if pool in (C4, C128) else {})}
    assert nonzero(stored, READING) == suffered.gains(read, {"unreadable": 1}, used=False)

    again, gains, stored = suffered.again
    # A record that was deleted was written again, which is known; KV only waits for its time.
    found = 3 if pool in POOLS and how == "deleted" else page
    assert_exact(suffered.cold, again, gains, found * PAGE)
    counts = {"records_read": found > 0, "records_loaded": found > 0}
    assert nonzero(stored, READING) == suffered.gains(faults.pages(found), counts, used=True)

    (line,) = said()
    assert suffered.keys[page] in line
    reason = "OSError: no route to storage" if how == "raises" else "not there any more"
    assert f"in storage is unreadable: {reason}" in line


def test_fault_what_could_not_be_read_is_asked_for_again_after_a_minute(process):
    suffered = process.run(faults.failing_read, 1, C4, "gives nothing")
    assert suffered.again[0].cached == PAGE
    hit, gains, _ = process.run(faults.after_a_minute, faults.prompt_of(3))
    assert_exact(suffered.cold, hit, gains, 3 * PAGE)


def test_fault_storage_cannot_be_asked(process, said):
    suffered = process.run(faults.failing_query)
    first, _, stored = suffered.first
    assert first.cached == 0
    assert first.same_answer(suffered.cold)
    assert nonzero(stored) == {"unreadable": 1}
    assert_exact(suffered.cold, *suffered.again[:2], 2 * PAGE)
    (line,) = said()
    assert f"cannot be asked for {suffered.keys[0]}: OSError: no route to storage" in line


def test_fault_a_flush_while_a_read_hangs(process, said):
    """SGLang would wait for its thread and then end the scheduler."""
    cold, answer, flushed = process.run(faults.flush_while_reading)
    assert answer.cached == 0
    assert answer.same_answer(cold)
    assert flushed == [False, True]
    (line,) = said()
    assert "cache not flushed, a call of the storage backend has not returned" in line


@pytest.mark.parametrize(
    ("pool", "policy", "abort"),
    [
        ("query", "timeout", False),
        *((pool, "timeout", False) for pool in (MARKER, C4, WINDOW_POOL)),
        *((pool, "best_effort", False) for pool in (C4, WINDOW_POOL)),
        *((pool, "wait_complete", abort) for pool in (C4, C4_POOL) for abort in (False, True)),
    ],
)
def test_fault_a_read_hangs(process, said, pool, policy, abort):
    suffered, answered, scribbled, beside, other_cold = process.run(
        faults.hanging_read, pool, policy, abort
    )
    assert beside.same_answer(other_cold), "the server did not go on"
    waits = policy == "wait_complete"
    assert answered == (not waits)
    first, _, stored = suffered.first
    if not abort:
        assert first.same_answer(suffered.cold)
        assert first.cached == (3 * PAGE if waits else 0)
    # What came back late is neither used nor held against storage.
    used = waits and not abort
    late = {"records_read": used or pool in POOLS, "records_loaded": used}
    read = faults.pages(0 if pool == "query" else 3)
    assert nonzero(stored, READING) == suffered.gains(read, late, used=used)
    if pool in POOLS and not used:
        assert scribbled == 3, "nobody else had the pages when the record was verified"
    assert said() == []
    assert_exact(suffered.cold, *suffered.again[:2], 3 * PAGE)


# ---- storage comes and goes


@pytest.mark.parametrize("pool", [C4, WINDOW_POOL])
@pytest.mark.parametrize("abort", [False, True], ids=["waiting", "aborted"])
def test_fault_detached_while_a_prefetch_is_read(process, pool, abort):
    refused, done, left, suffered = process.run(faults.detached_while_reading, pool, abort)
    assert not refused[0]
    assert "not idle" in refused[1]
    assert done == (True, "Detached HiCache storage backend successfully.")
    assert left == (0, 0)
    first, _, stored = suffered.first
    if not abort:
        assert first.same_answer(suffered.cold)
        assert first.cached == 0
    assert stored["records_loaded"] == stored["bytes_used"] == 0
    assert_exact(suffered.cold, *suffered.again[:2], 3 * PAGE)


@pytest.mark.parametrize("attached", [True, False], ids=["attached", "detached"])
@pytest.mark.parametrize(
    ("backend", "write_policy", "problem"),
    [
        ("mooncake", None, "the storage backend must be one of file, nixl"),
        ("file", "write_back", "the write policy must stay write_through"),
        ("file", "write_through_selective", "the write policy must stay write_through"),
    ],
)
def test_fault_attached_what_is_not_supported(process, backend, write_policy, problem, attached):
    args = faults.refused_attach, backend, write_policy, attached
    outcome, changed, answer, hit, gains = process.run(*args)
    assert outcome[0] is False
    assert outcome[1].startswith(f"bit-exact HiCache: {problem}")
    assert changed == set()
    assert_exact(answer, hit, gains, PAGE)


@pytest.mark.parametrize("how", ["is gone", "is a file", "takes no files"])
def test_fault_a_directory_that(process, how):
    assert_nothing_lost(process.run(faults.lost_directory, how))


def assert_nothing_lost(lost, believed=False):
    for result, gains in lost.meanwhile:
        assert result.same_answer(lost.cold)
        assert result.cached == 0
        assert nonzero(gains) == {"write_failed": 3}
    assert lost.believed == believed
    (first, written), (again, read) = lost.afterwards
    assert first.cached == 0
    assert first.same_answer(lost.cold)
    assert written["records_written"] == 3
    assert written["write_failed"] == written["write_not_own"] == 0
    assert again.cached == again.storage == 3 * PAGE
    assert again.same_answer(lost.cold)
    assert read["records_loaded"] == 1


# ---- controls: without the verification the same faults are answered


@pytest.mark.parametrize("pool", ["swa_window", "c4_state"])
def test_control_a_record_that_is_believed_is_a_mismatch(process, pool):
    _, hit, gains = process.run(faults.unverified, f"bit in last layer of {pool}", "record", True)
    assert gains["checks_failed"] == 1
    assert "differ" in hit.error
    assert "MISMATCH" in process.log()


@pytest.mark.parametrize("pool", ["swa_window", "c4_state"])
def test_control_a_record_that_is_believed_changes_the_answer(process, pool):
    answer, hit, _ = process.run(faults.unverified, f"bit in last layer of {pool}", "record", False)
    assert hit.cached == 2 * PAGE
    assert all(math.isfinite(x) for x in hit.logprobs)
    assert hit.logprobs != answer.logprobs


@pytest.mark.parametrize("pool", [C4, C128])
@pytest.mark.parametrize("page", ["first", "middle", "last"])
def test_control_kv_that_is_believed_changes_the_answer(process, pool, page):
    answer, hit, gains = process.run(
        faults.unverified, f"another run's {page} {pool} page", "kv", True
    )
    assert hit.cached == 3 * PAGE
    # The record is true of other KV: nothing that looks at the record alone can notice.
    assert gains["checks_verified"] == 1
    assert gains["checks_failed"] == 0
    assert all(math.isfinite(x) for x in hit.logprobs)
    assert hit.logprobs != answer.logprobs
