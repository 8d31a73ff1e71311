"""Storage (L3): a hit from it equals a cold run, on a real scheduler with SGLang's file backend.

As everywhere, an exactness test asserts the cached tokens, the tier, the restores verified on the device
by persisted checksums, ids and logprobs; rings are scribbled before each hit.
"""

from __future__ import annotations

import math
import os

import l3_scenarios as l3
import pytest
import scenarios
from scenarios import PAGE, prompt
from scheduler_harness import failure_lines

ARGS = [
    *("--chunked-prefill-size", "512", "--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
]


def directory(path) -> dict[str, str]:
    return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(path)}


def assert_clean(log: str) -> None:
    lines = failure_lines(log)
    assert not lines, lines[:5]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("l3") / "store"


@pytest.fixture(scope="module")
def process(scheduler_process, store):
    with scheduler_process("l3", ARGS, **directory(store)) as running:
        yield running
        log = running.log()
    assert_clean(log)


def assert_exact(first, hit, gains, cached: int, tier: str = "storage") -> None:
    assert hit.error is None
    assert hit.cached == cached
    assert {t: getattr(hit, t) for t in ("device", "host", "storage")} == {
        **dict.fromkeys(("device", "host", "storage"), 0),
        tier: cached,
    }
    assert gains["checks_verified"] == gains["restored"] == (cached > 0)
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert hit.ids == first.ids
    assert hit.logprobs == first.logprobs
    assert len(set(hit.logprobs)) > 1, "flat logprobs prove nothing"


# ---- hits


@pytest.mark.parametrize("beyond", [-1, 0, 1, 127, 129])
def test_a_repeat_hits_the_last_page_before_its_last_token(process, beyond):
    length = 3 * PAGE + beyond
    ids = prompt(2000 + beyond, length)
    first = process.run(l3.populate, ids, 3)
    hit, gains, stored = process.run(l3.from_storage, ids, 3)
    assert_exact(first, hit, gains, (length - 1) // PAGE * PAGE)
    assert stored["records_loaded"] == stored["records_read"] == 1
    assert stored["bytes_used"] == stored["bytes_read"] > 0


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_fork_hits_where_it_leaves(process, pages):
    stem, tail = prompt(2100 + pages, pages * PAGE), prompt(2200 + pages, 700)
    first, hit, gains, stored = process.run(l3.fork_from_storage, stem, tail, 4)
    assert_exact(first, hit, gains, pages * PAGE)
    # Of the stored prompt's pages only the shared ones were read.
    assert stored["bytes_read"] == stored["bytes_used"]


def test_control_without_the_restore_the_answer_differs(process):
    ids = prompt(2300, 700)
    first = process.run(l3.populate, ids, 4)
    hit = process.run(scenarios.without_restore, ids, 4, "storage")
    assert hit.cached == hit.storage == 2 * PAGE
    assert all(math.isfinite(x) for x in hit.logprobs)
    assert hit.logprobs != first.logprobs


def test_the_next_turn_resumes_from_storage_on_the_last_page_of_the_answer(process):
    """Claim 2 through storage: the second turn equals the writer, continued from its own ring rows."""
    ids = prompt(2400, 2 * PAGE - 20)
    length, results, _, gains = process.run(scenarios.chat, ids, 40, 50, 4, "storage")
    restored, placed, without = results
    assert length == 2 * PAGE + 70
    for result in results:
        assert result.error is None
        assert result.cached == result.storage == 2 * PAGE
    assert gains["checks_verified"] == gains["restored"] == 1
    assert restored.same_answer(placed)
    assert not without.same_answer(placed), "the control noticed nothing"


def test_storage_goes_on_where_the_tree_ends(process):
    ids = prompt(2500, 5 * PAGE + 30)
    first = process.run(l3.populate, ids, 3)
    hit, gains, stored = process.run(l3.behind_a_prefix, ids, 2, 3)
    assert hit.cached == 5 * PAGE
    assert (hit.device, hit.host, hit.storage) == (2 * PAGE, 0, 3 * PAGE)
    assert gains["checks_verified"] == gains["restored"] == 1
    assert hit.same_answer(first)
    assert stored["records_loaded"] == 1


@pytest.mark.parametrize("tier", ["device", "host"])
def test_pages_that_are_cached_get_their_truth_back_from_storage(process, tier):
    """The pages that survive in the tree are proved equal to the ones in storage by what is known of
    their bytes, and the hit uses the ones in the tree."""
    ids = prompt(2600 + len(tier), 3 * PAGE + 30)
    hit, gains, stored, one_page = process.run(l3.truth_only_in_storage, ids, 3, tier)
    assert hit.cached == getattr(hit, tier) == 3 * PAGE
    assert gains["checks_verified"] == gains["restored"] == 1
    assert stored["records_loaded"] == 1
    assert stored["unproved"] == 0
    # Of the KV that is there only the record's own page was read again.
    assert stored["bytes_read"] == one_page


@pytest.mark.parametrize(("page", "refusal"), [(0, "refused_kv"), (2, "unproved")])
def test_pages_of_another_computation_in_the_tree_never_pair_with_a_record(process, page, refusal):
    """Before the pages that are read: found by the thread that verifies. Among them: at the commit."""
    ids = prompt(2700 + page, 3 * PAGE + 30)
    args = l3.another_page_survives, ids, page, bytes(16), 3
    (first, gains), (again, second) = process.run(*args)
    assert first.cached == 0
    assert gains[refusal] == 1
    assert gains["records_loaded"] == 0
    # The pages before it are what they should be, and so is the record behind them.
    assert again.cached == page * PAGE
    assert again.same_answer(first)
    assert second["records_loaded"] == (page > 0)
    # As long as the tree holds that page, storage is not read for nothing.
    assert second["bytes_read"] == second["bytes_used"]


def test_a_page_that_nobody_has_hashed_yet_is_hashed_and_not_held_against_storage(process):
    ids = prompt(2750, 3 * PAGE + 30)
    args = l3.another_page_survives, ids, 2, None, 3
    (first, gains), (again, second) = process.run(*args)
    assert first.cached == 0
    assert gains["unproved"] == 1
    assert again.cached == 3 * PAGE
    assert again.same_answer(first)
    assert second["records_loaded"] == 1
    assert second["unproved"] == 0


# ---- writing


def test_a_truth_that_comes_after_its_kv_was_stored_is_stored_too(process):
    ids = prompt(2800, 3 * PAGE + 30)
    first, healed, hit, healing, loading = process.run(l3.late_truth, ids, 3)
    assert healed.cached == 0
    assert healed.same_answer(first)
    # Chunks of 512 end at page 2, the junction is at page 3: a truth at each.
    assert healing["records_written"] == 2
    # Nothing was known of the stored pages: they were read back, and are what this server computed.
    assert healing["pages_read_back"] == 3
    assert healing["write_not_own"] == 0
    assert hit.cached == hit.storage == 3 * PAGE
    assert hit.same_answer(first)
    assert loading["records_loaded"] == 1


def test_a_record_is_not_written_behind_kv_of_another_computation(process, store):
    """A page in storage that is not what this server computes: no record goes behind it, and none is
    read; the ones before it are."""
    ids = prompt(2900, 4 * PAGE + 30)
    before = set(os.listdir(store)) if store.exists() else set()
    first = process.run(l3.kv_without_records, ids, 3)
    pages = sorted(
        (os.stat(store / name).st_mtime_ns, name)
        for name in set(os.listdir(store)) - before
        if ".deepseek_v4_c4_-" in name
    )
    assert len(pages) == 4
    third = store / pages[2][1]
    data = bytearray(third.read_bytes())
    data[100] ^= 1
    third.write_bytes(data)
    result, gains = process.run(l3.recomputed_over_stored_kv, ids, 3)
    assert result.same_answer(first)
    assert gains["records_written"] == 2
    assert gains["write_not_own"] == 2
    hit, restored, stored = process.run(l3.from_storage, ids, 3)
    assert_exact(first, hit, restored, 2 * PAGE)
    assert stored["records_loaded"] == 1


def test_what_is_stored_is_not_written_again(process):
    ids = prompt(3000, 2 * PAGE + 30)
    process.run(l3.populate, ids, 3)
    process.run(l3.from_storage, ids, 3)
    _, gains = process.run(l3.recomputed_over_stored_kv, [*ids[: 2 * PAGE], *prompt(1, 40)], 3)
    assert gains["records_written"] == 0
    assert gains["records_loaded"] == 1


# ---- other processes


@pytest.mark.parametrize(
    "args",
    [
        ["--hicache-swa-offload-page-stride", "4", "--hicache-swa-offload-tail-slots", "9"],
        ["--max-running-requests", "24", "--hicache-ratio", "3"],
        ["--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"],
    ],
    ids=["another stride and slot count", "other rows and host pages", "another host layout"],
)
def test_a_new_server_with_other_sizes_starts_with_a_hit(
    process, scheduler_process, store, args, request
):
    ids = prompt(3100 + len(args[0]), 5 * PAGE + 30)
    first = process.run(l3.populate, ids, 3)
    with scheduler_process("restarted", [*ARGS, *args], **directory(store)) as other:
        hit, gains, _ = other.run(l3.from_storage, ids, 3)
        log = other.log()
        assert other.run(l3.names) == process.run(l3.names)
    assert_exact(first, hit, gains, 5 * PAGE)
    assert f"completed={5 * PAGE} matched=0 loaded={5 * PAGE}" in log
    for line in (
        "[SWA-DBG] restore verified",
        "[LB-DEV] device landing byte-exact",
        "[C4-STATE-DBG] state ride bit-exact",
    ):
        assert log.count(line) == 1, line
    assert_clean(log)


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_the_same_through_nixl(scheduler_process, tmp_path, layout):
    """The real nixl package with its POSIX plugin."""
    args = [
        *ARGS[:2],
        "--hicache-storage-backend",
        "nixl",
        *ARGS[4:],
        "--hicache-mem-layout",
        layout,
    ]
    env = {"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(tmp_path / "nixl")}
    ids, fork = prompt(3150, 5 * PAGE + 30), prompt(3151, 300)
    with scheduler_process("nixl", args, **env) as running:
        first = running.run(l3.populate, ids, 3)
        hit, gains, stored = running.run(l3.from_storage, ids, 3)
        forked = running.run(l3.fork_from_storage, prompt(3152, 2 * PAGE), fork, 3)
        log = running.log()
    assert_exact(first, hit, gains, 5 * PAGE)
    assert stored["records_loaded"] == stored["records_read"] == 1
    assert_exact(*forked[:3], 2 * PAGE)
    assert_clean(log)


def test_aligned_prefill_has_names_of_its_own_and_hits_at_whole_chunks(
    process, scheduler_process, store
):
    ids = prompt(3200, 5 * PAGE + 30)
    process.run(l3.populate, ids, 3)
    args = [*ARGS, "--hicache-swa-offload-aligned-prefill"]
    with scheduler_process("aligned", args, **directory(store)) as other:
        first = other.run(l3.populate, ids, 3)
        assert first.cached == 0, "bytes of chunks that end anywhere were reused"
        hit, gains, _ = other.run(l3.from_storage, ids, 3)
        assert not set(other.run(l3.names)[0]) & set(process.run(l3.names)[0])
    assert_exact(first, hit, gains, 4 * PAGE)


def test_the_truth_pools_as_sglang_sees_them(process):
    pools = process.run(l3.pool_groups)
    assert list(pools) == ["swa_window", "c4_state", "c4_indexer_state"]
    for page_size, size, nbytes in pools.values():
        assert page_size == 1
        assert size > 0
        assert len(set(nbytes)) == 1


def test_after_the_weights_changed_storage_is_left_alone(process, store):
    """Last: the process does not use storage any more."""
    ids = prompt(3300, 3 * PAGE + 30)
    first = process.run(l3.populate, ids, 3)
    files = sorted(os.listdir(store))
    closed, result, other, gains, attached = process.run(l3.weights_change, ids, 3)
    assert closed == {
        "the same version": False,
        "written from outside": True,
        "loaded": True,
        "another version": True,
    }
    assert result.cached == other.cached == 0
    assert result.same_answer(first)
    assert not any(gains.values()), gains
    assert sorted(os.listdir(store)) == files
    assert attached == (
        False,
        "bit-exact HiCache: the model's weights changed since this server started; restart it",
    )
    assert "storage (L3) is neither read nor written any more" in process.log()
