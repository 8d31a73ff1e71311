"""What is measured. Medians of several repeats, with Python's garbage collector off."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bitexact_fixtures import PAGE
from tree_driver import tokens

from collector import no_collector
from l3.parts import Call, Parts
from l3.world import PRO, TINY, Geometry, World
from sglang_bitexact_hicache import storage_guard, storage_writer
from sglang_bitexact_hicache.kv_chain import START, mark_pages
from sglang_bitexact_hicache.layout import POOLS
from sglang_bitexact_hicache.record import check, seal


def medians(samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """By label, where a sample that lacks one counts as 0."""
    samples = list(samples)
    labels = dict.fromkeys(label for sample in samples for label in sample)
    return {label: median(sample.get(label, 0.0) for sample in samples) for label in labels}


# ---- restore

OURS, STOCK = "ours", "SGLang"

SUBMIT = "prefetch submitted"
QUERY = "keys of the pages hashed, files looked up"
KV_FILES = "KV: files read"
KV_TENSORS = "KV: a zeroed tensor for each"
KV_COPIES = "KV: copied from there into the layers"
KV_REST = "KV: the rest"
RECORD_FILES = "record: files read, into its slot"
RECORD_REST = "record: the rest of its read"
CHECK = "record: sections hashed"
DIGESTS = "KV: pages hashed"
CHAIN = "KV: chain compared with the record's"
INSERT = "pages inserted into the tree"
COMMIT = "proved and published"
THREADS = "between the threads"

RESTORE_PARTS = {
    SUBMIT: STOCK,
    QUERY: STOCK,
    KV_FILES: STOCK,
    KV_TENSORS: STOCK,
    KV_COPIES: STOCK,
    KV_REST: STOCK,
    RECORD_FILES: OURS,
    RECORD_REST: OURS,
    CHECK: OURS,
    DIGESTS: OURS,
    CHAIN: OURS,
    INSERT: STOCK,
    COMMIT: OURS,
    THREADS: STOCK,
}
"""The parts of a restore in their order, and whose they are."""


@dataclass(frozen=True)
class Restored:
    """Medians, in seconds.

    Attributes:
        pages, files, nbytes: what came.
        seconds: from `prefetch_from_storage` until its truth is published.
        plain: the same files, read one after the other into memory that is there.
        wall, cpu: of each of RESTORE_PARTS.
    """

    pages: int
    files: int
    nbytes: int
    seconds: float
    plain: float
    wall: Mapping[str, float]
    cpu: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Restore time divided by plain time: 1.0 is as fast."""
        return self.seconds / self.plain

    @property
    def verify_gb_per_s(self) -> float:
        """GB/s at which one core verifies what came, over the time for which it computes."""
        return self.nbytes / sum(self.cpu[part] for part in (CHECK, DIGESTS, CHAIN)) / 1e9

    def seconds_of(self, whose: str) -> float:
        """What the parts of SGLang, or ours, take."""
        return sum(self.wall.get(part, 0.0) for part, by in RESTORE_PARTS.items() if by == whose)


class PlainReader:
    """Reads files as plainly as Python can: open, readinto, one thread, into buffers made before."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = [(path, memoryview(bytearray(path.read_bytes()))) for path in files]

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(len(buffer) for _, buffer in self._files)

    def read(self) -> float:
        """Seconds for all of them."""
        start = time.perf_counter()
        for path, buffer in self._files:
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)
        return time.perf_counter() - start


def restore(pages: int, repeats: int, geometry: Geometry = PRO) -> Restored:
    """A prompt of so many pages, with the record at its end, from storage; and its files, plainly. In
    turns, all files in the page cache."""
    with (
        TemporaryDirectory() as directory,
        World(Path(directory), pages, lambda page: page == pages, 4, geometry) as world,
        Parts() as parts,
    ):
        world.write()
        reader = PlainReader(world.files())
        _watch_restore(world, parts)
        world.flush()
        world.restore()  # the first one touches new memory
        seconds, plain, wall, cpu = [], [], [], []
        for _ in range(repeats):
            world.flush()
            parts.reset()
            with no_collector():
                plain.append(reader.read())
                world.restore()
            seconds.append(parts.ended[COMMIT] - parts.began[SUBMIT])
            parts.wall[THREADS] = seconds[-1] - sum(parts.wall.values())
            wall.append(parts.wall)
            cpu.append(parts.cpu)
        return Restored(
            pages,
            len(world.files()),
            reader.nbytes,
            median(seconds),
            median(plain),
            medians(wall),
            medians(cpu),
        )


def _watch_restore(world: World, parts: Parts) -> None:
    landing = world.storage.landing

    def of(kv: str, record: str) -> Callable[[], str]:
        return lambda: kv if landing.slot is None else record

    parts.watch(world.cache, "prefetch_from_storage", SUBMIT)
    parts.watch(world.controller, "_storage_hit_query", QUERY)
    parts.watch(world.controller, "_page_transfer_kv_batch", KV_REST)
    parts.watch(world.guard.backend, "get", of(KV_FILES, RECORD_FILES))
    for pool in world.host_pools():
        parts.watch(pool, "get_dummy_flat_data_page", KV_TENSORS)
        parts.watch(pool, "set_from_flat_data_page", KV_COPIES)
    parts.watch(world.controller, "_page_transfer_sidecar", RECORD_REST)
    parts.watch(world.guard, "_verify", CHAIN)
    parts.watch(storage_guard, "check", CHECK)
    parts.watch(world.storage.kv, "digest", DIGESTS)
    parts.watch(world.cache, "_handle_prefetch_result", INSERT)
    parts.watch(world.storage, "commit", COMMIT)


# ---- write

WRITE = "the rest"
WRITE_KV = "KV: SGLang's own write"
WRITE_OWN = "KV: which pages storage holds with these bytes"
WRITE_SEAL = "records: packed (sections hashed, header)"
WRITE_RECORDS = "records: written"

WRITE_PARTS = (WRITE_KV, DIGESTS, WRITE_OWN, WRITE_SEAL, WRITE_RECORDS, WRITE)
"""The parts of a write."""


@dataclass(frozen=True)
class Written:
    """Medians, in seconds of the backup thread.

    Attributes:
        pages, records: what went to storage; kv_bytes, record_bytes: how much.
        seconds: of all of it; wall: of WRITE_PARTS.
    """

    pages: int
    records: int
    kv_bytes: int
    record_bytes: int
    seconds: float
    wall: Mapping[str, float]


def write(pages: int, records: int, repeats: int, geometry: Geometry = PRO) -> Written:
    """A prompt of so many pages to an empty storage, with the records of its last pages.

    Raises:
        RuntimeError: storage has other records than these.
    """
    with (
        TemporaryDirectory() as directory,
        World(
            Path(directory), pages, lambda page: page > pages - records, records + 2, geometry
        ) as world,
        Parts() as parts,
    ):
        world.write()
        _watch_write(world, parts)
        seconds, wall = [], []
        for _ in range(repeats):
            world.clear()
            parts.reset()
            with no_collector():
                world.write()
            seconds.append(sum(call.wall for call in parts.calls[WRITE]))
            wall.append(parts.wall)
        stored = sum("_swa_window_" in path.name for path in world.files())
        if stored != records:
            raise RuntimeError(f"storage has {stored} records, not {records}")
        return Written(
            pages,
            records,
            pages * world.storage.kv.nbytes(),
            records * world.storage.layout.slot_bytes,
            median(seconds),
            medians(wall),
        )


def _watch_write(world: World, parts: Parts) -> None:
    parts.watch(storage_writer.Write, "run", WRITE)
    parts.watch(world.controller, "_page_backup_with_stable_layout", WRITE_KV)
    parts.watch(world.storage.kv, "digest", DIGESTS)
    parts.watch(storage_writer.Write, "_write_records", WRITE_RECORDS)
    parts.watch(storage_writer, "own_pages", WRITE_OWN)
    parts.watch(storage_writer, "seal", WRITE_SEAL)


# ---- hashing


@dataclass(frozen=True)
class Hashing:
    """GB/s of one core that does nothing else, over the time for which it computes.

    Attributes:
        check, seal: over records; digest: over pages of KV.
    """

    check: float
    seal: float
    digest: float


def hashing(pages: int, repeats: int, geometry: Geometry = PRO, records: int = 16) -> Hashing:
    """`seal` and `check` over records, `HostKv.digest` over pages: one after the other, more of them than
    fit the caches of a core."""
    with (
        TemporaryDirectory() as directory,
        World(Path(directory), pages, lambda _page: False, records, geometry) as world,
    ):
        storage = world.storage
        layout = storage.layout
        slots = [
            {pool: storage.pools.record(pool, slot).numpy() for pool in POOLS}
            for slot in range(records)
        ]
        fields = {
            "identity": storage.names.identity,
            "boundary": pages * PAGE,
            "page_hash": hashlib.sha256(b"page").hexdigest(),
        }
        marks = [START] * len(mark_pages(pages))

        def cost(work: Callable[[Any], object], items: Iterable[Any]) -> float:
            seconds = []
            with no_collector():
                for item in list(items) * repeats:
                    begin = time.thread_time()
                    work(item)
                    seconds.append(time.thread_time() - begin)
            return median(seconds)

        sealing = cost(lambda slot: seal(slot, layout, marks=marks, **fields), slots)
        checking = cost(lambda slot: check(slot, layout, **fields), slots)
        digesting = cost(storage.kv.digest, range(pages))
        page, record = storage.kv.nbytes(), layout.slot_bytes
        return Hashing(
            check=record / checking / 1e9,
            seal=record / sealing / 1e9,
            digest=page / digesting / 1e9,
        )


# ---- the scheduler thread

NODE_WRITE = "a node goes to storage"
PROVABLE = "a request arrives: can its prefix be proved"
FETCH = "its prefetch begins"
ANCHOR = "a request for KV that lost its records: where to begin"
RESTORED = "all of its pages came from storage"

SCHEDULER_CALLS = {
    NODE_WRITE: "write_transfers",
    PROVABLE: "provable",
    FETCH: "fetch_transfers",
    ANCHOR: "anchor_of",
    RESTORED: "commit",
}
"""Methods of TruthStorage that the scheduler thread calls."""


@dataclass(frozen=True)
class Scheduler:
    """The scheduler thread's time in TruthStorage, for one long prompt.

    Attributes:
        tokens, writes: of the prompt; how many writes SGLang makes of it.
        typical, longest: one call, by SCHEDULER_CALLS: medians over the repeats.
        writing: all of its writes together.
    """

    tokens: int
    writes: int
    typical: Mapping[str, Call]
    longest: Mapping[str, Call]
    writing: Call


def scheduler(pages: int, repeats: int) -> Scheduler:
    """A prompt is written chunk by chunk, with a record at each page; a request wants more behind it; its
    KV is still there but no record is, and it is asked for; all of it is restored from nothing.

    Bookkeeping only, so the geometry is tiny.
    """
    with (
        TemporaryDirectory() as directory,
        World(Path(directory), pages, lambda _page: True, pages + 8, TINY) as world,
        Parts() as parts,
    ):
        for label, name in SCHEDULER_CALLS.items():
            parts.watch(world.storage, name, label)
        more = tokens(pages + 2, 20)
        rounds: list[dict[str, list[Call]]] = []
        for _ in range(repeats):
            world.clear()
            parts.reset()
            with no_collector():
                world.write()
                world.submit(more)
                world.server.settle()
                calls = dict(parts.calls)
                world.driver.forget_truth(lambda _lineage: False)
                parts.reset()
                world.submit(world.prompt)
                world.server.settle()
                calls[ANCHOR] = parts.calls[ANCHOR]
                world.flush()
                parts.reset()
                world.restore()
            # There was nothing before it, so only its end counts.
            calls[RESTORED] = parts.calls[RESTORED]
            rounds.append(calls)

        def over_rounds(of_calls: Callable[[list[float]], float], label: str) -> Call:
            wall = [of_calls([call.wall for call in calls[label]]) for calls in rounds]
            cpu = [of_calls([call.cpu for call in calls[label]]) for calls in rounds]
            return Call(median(wall), median(cpu))

        return Scheduler(
            tokens=pages * PAGE,
            writes=len(rounds[0][NODE_WRITE]),
            typical={label: over_rounds(median, label) for label in SCHEDULER_CALLS},
            longest={label: over_rounds(max, label) for label in SCHEDULER_CALLS},
            writing=over_rounds(sum, NODE_WRITE),
        )
