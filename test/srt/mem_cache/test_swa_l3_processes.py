"""Faults of storage (L3) that take several processes, or one that is started for them.

Writers that die or write at once, a server without the feature on the same directory, a full disk,
SGLang's own failure injector. One server, started without storage, is the reader of all of them: it
attaches to one directory after the other (l3_faults.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import l3_faults as faults
import l3_scenarios as l3
import pytest
from l3_faults import C4, NEW, PAGE, prompt_of
from scenarios import prompt
from scheduler_harness import SchedulerProcess, failure_lines

KILLED = {"one": "KV", "two": "record", "three": "between"}
"""Where each writer is killed in the end: with half a page of KV written, between KV and record, between
the record's files."""


@pytest.fixture(scope="module")
def started(scheduler_process) -> Callable:
    """`with started({name: directory}) as processes`: servers with a file backend there, or with no
    storage, that start beside each other. Their logs must be clean at the end."""

    @contextmanager
    def start(
        directories: Mapping[str, Path | None], envs: Mapping[str, dict[str, str]] | None = None
    ) -> Iterator[dict[str, SchedulerProcess]]:
        processes = {}
        for name, directory in directories.items():
            args = ["--hicache-storage-prefetch-policy", "wait_complete"]
            if directory is not None:
                config = json.dumps({"file_storage_path": str(directory)})
                args += ["--hicache-storage-backend", "file"]
                args += ["--hicache-storage-backend-extra-config", config]
            args += ["--chunked-prefill-size", "512"]
            processes[name] = scheduler_process(name, args, **(envs or {}).get(name, {}))
        with ExitStack() as stack:
            for one in processes.values():
                # It tells once it is ready, and the others start meanwhile.
                with mock.patch.object(one, "_receive", return_value=["ready"]):
                    stack.enter_context(one)
            for one in processes.values():
                assert one._receive(240) == ["ready"]
            yield processes
            for one in processes.values():
                lines = failure_lines(one.log())
                assert not lines, lines[:5]

    return start


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """The directory of both writers."""
    return tmp_path_factory.mktemp("l3") / "store"


@pytest.fixture(scope="module")
def servers(started, store):
    """Three servers on one directory, and one that was started without storage."""
    with started({**dict.fromkeys(KILLED, store), "reader": None}) as processes:
        yield processes


def assert_hit(answer, outcome, pages: int) -> None:
    hit, gains, stored = outcome
    assert hit.error is None
    assert hit.cached == hit.storage == pages * PAGE
    assert gains["checks_verified"] == gains["restored"] == (pages > 0)
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert hit.ids == answer.ids
    assert hit.logprobs == answer.logprobs
    assert len(set(hit.logprobs)) > 1, "flat logprobs prove nothing"
    assert stored["records_loaded"] == (pages > 0)
    # Nothing that a dead or another writer left was read for nothing.
    assert stored["bytes_read"] == stored["bytes_used"]


# ---- a disk that takes no more


@pytest.mark.parametrize(
    ("limit", "what"), [(100_000, "a page of KV"), (400_000, "a window record")]
)
def test_fault_a_full_disk(servers, tmp_path, limit, what):
    """First of all: the kernel's limit holds for every file of the process, and its log must be
    shorter."""
    process = servers["one"]
    assert process.log_path.stat().st_size < limit // 2
    lost = process.run(faults.full_disk, tmp_path / "store", limit)
    kv_fits = what == "a window record"
    assert lost.believed == kv_fits
    assert any(f".{C4}_-" in name for name in lost.files) == kv_fits
    assert not any("swa_window" in name for name in lost.files)
    assert not lost.leftovers, "a part of a file was left"
    for result, gains in lost.meanwhile:
        assert result.cached == 0
        assert result.same_answer(lost.cold)
        assert gains["write_failed"] == 3
        assert gains["records_written"] == gains["bytes_read"] == 0
    (first, gains), (again, read) = lost.afterwards
    assert first.cached == 0
    assert first.same_answer(lost.cold)
    assert (gains["records_written"], gains["write_failed"]) == (3, 0)
    assert again.cached == again.storage == 3 * PAGE
    assert again.same_answer(lost.cold)
    assert read["bytes_read"] == read["bytes_used"] > 0


# ---- storage comes at run time


def test_fault_detached_before_anything_was_attached(servers, tmp_path):
    reader = servers["reader"]
    assert reader.run(faults.detach)[0]
    assert reader.run(faults.answer_of, prompt_of(1)).error is None


def test_fault_attached_at_run_time(servers, store):
    """A server that was started without storage takes the directory of one that writes there."""
    reader, writer = servers["reader"], servers["one"]
    ids, others = prompt(4300, 3 * PAGE + 20), prompt(4301, 2 * PAGE + 20)
    answer = writer.run(l3.populate, ids, NEW)
    # What was cached before, storage has not; it is no obstacle.
    assert reader.run(faults.answer_of, ids).same_answer(answer)
    reader.run(faults.move_to, store)
    assert_hit(answer, reader.run(l3.from_storage, ids, NEW), 3)
    # And what it computes itself is there for the other.
    answer = reader.run(l3.populate, others, NEW)
    assert_hit(answer, writer.run(l3.from_storage, others, NEW), 2)


# ---- several writers


def test_fault_two_writers_of_the_same_keys(servers, store, tmp_path):
    prompts = [prompt(4310 + i, pages * PAGE + 20) for i, pages in enumerate((2, 3, 3))]

    def write(name: str):
        return servers[name].run(faults.written_together, prompts, tmp_path)

    with ThreadPoolExecutor(2) as threads:
        (answers, gains), (others, other_gains) = threads.map(write, ("one", "two"))
    assert all(a.same_answer(b) for a, b in zip(answers, others, strict=True))
    for counts in (gains, other_gains):
        assert counts["records_written"] == 8, "they did not write at once"
        assert counts["write_failed"] == counts["write_not_own"] == 0
    servers["reader"].run(faults.move_to, store)
    for ids, answer in zip(prompts, answers, strict=True):
        outcome = servers["reader"].run(l3.from_storage, ids, NEW)
        assert_hit(answer, outcome, len(ids) // PAGE)


# ---- a server without the feature


@pytest.fixture(scope="module")
def others(started, store, tmp_path_factory):
    """A server without the feature on the writers' directory, and one whose storage fails at random."""
    directories = {"off": store, "random": tmp_path_factory.mktemp("l3") / "store"}
    envs = {
        "off": {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0"},
        "random": {
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.1",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.002",
        },
    }
    with started(directories, envs) as processes:
        yield processes


def test_fault_a_server_without_the_feature_on_the_same_directory(servers, others):
    on, off = servers["one"], others["off"]
    ours, theirs = prompt(4320, 2 * PAGE + 20), prompt(4321, 2 * PAGE + 20)
    answer = on.run(l3.populate, ours, NEW)
    result = off.run(faults.answer_of, ours)
    assert result.cached == 0
    assert result.same_answer(answer)
    # And the other way round; each goes on with its own.
    answer = off.run(faults.answer_of, theirs)
    assert answer.cached == 0
    result = on.run(faults.answer_of, theirs)
    assert result.cached == 0
    assert result.same_answer(answer)
    assert_hit(answer, on.run(l3.from_storage, theirs, NEW), 2)


def test_fault_of_every_kind_at_random(others):
    """SGLang's injector: each call to storage fails with a probability of 0.1, or takes its time."""
    wrong, from_storage, gains = others["random"].run(faults.at_random, 1, 200)
    assert wrong == []
    assert from_storage > 0
    for name in ("records_loaded", "unreadable", "write_failed"):
        assert gains[name] > 0, "it was not at random"


# ---- a writer dies: last, it is not started again


@pytest.mark.parametrize("name", KILLED, ids=KILLED.get)
def test_fault_a_writer_is_killed(servers, tmp_path, name):
    """What is complete is used; whoever computes the rest completes it."""
    victim, reader, ids = servers[name], servers["reader"], prompt_of(3)
    victim.run(faults.move_to, tmp_path / "store")
    answer = victim.run(faults.dies_writing, ids, KILLED[name])
    victim._processes[0].kill()
    victim._processes[0].join()
    reader.run(faults.move_to, tmp_path / "store")
    assert list((tmp_path / "store").glob(".*.tmp")), "it did not die in a write"
    assert reader.run(faults.deepest_stored, ids) == 1
    assert_hit(answer, reader.run(l3.from_storage, ids, NEW), 1)
    assert_hit(answer, reader.run(l3.from_storage, ids, NEW), 3)
