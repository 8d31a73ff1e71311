"""Capture and restore on a real GPU: right bytes with nothing but events in between, and no
synchronisation of the device.

Drives what is shipped over rings of the geometry of a 61-layer model, without SGLang: what a CPU
cannot show is the ordering of real streams. `torch.cuda.set_sync_debug_mode("error")` makes any
synchronising call an exception meanwhile. Four parts:

* prefill (capture.py, restore.py, transfer.StreamLane): each round captures a chunk's boundaries,
  restores some of them at once into other rows (the copies are still in flight), reuses host slots
  that are being read, and overwrites the sources right behind;
* decode (runtime.TruthRuntime itself): steps that complete 1, 8 and 32 pages, each captured from the
  rings, which the next step overwrites right behind; what such a step costs, and one without a page;
* the row race: a row is released while its gather is still queued, and its next owner clears its
  state rows from another stream;
* storage's threads: a record is read by another thread, which waits for the capture's event, while the
  copy is in flight; and another record lands in a slot as soon as the restore that reads it has.

    PYTHONPATH=python python benchmark/gpu_lanes.py

Prints one line of key=value pairs; exit status 0 if every byte was right.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch

from sglang_bitexact_hicache.capture import CapturePipeline
from sglang_bitexact_hicache.checksum import section_checksums
from sglang_bitexact_hicache.device_view import DeviceView, Ring
from sglang_bitexact_hicache.gather import Source
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.layout import POOLS, WINDOW_POOL
from sglang_bitexact_hicache.lineage import ROOT, RowTable
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.restore import Restore, RestorePipeline
from sglang_bitexact_hicache.runtime import TruthRuntime
from sglang_bitexact_hicache.transfer import StreamLane
from sglang_bitexact_hicache.truth import TruthStore

PAGE = 256
RATIOS = [0] + [4, 128] * 30
ROWS = 32
STATE_RING = 8
BATCH = 256
"""Requests of a decode step."""
DECODED = (1, 8, 32)
"""Pages that a measured decode step completes."""
BYTES_PER_MS = 55e6
"""One pinned copy between host and device, as measured on an H200: the floor of a transfer."""
BUSY_CYCLES = 150_000_000
"""A kernel that outlasts the launching of any step here: about 80 ms."""


def make_view(device: torch.device) -> DeviceView:
    """Rings as `DeepSeekV4TokenToKVPool` lays them out: 61 windows, 30 pairs of states."""

    def state(width: int) -> SimpleNamespace:
        rows = torch.randn((ROWS + 1) * STATE_RING + 4, width, device=device)
        return SimpleNamespace(kv_score_buffer=SimpleNamespace(kv_score=rows), ring_size=STATE_RING)

    windows = [
        torch.randn((ROWS + 1) * 128, 512, device=device, dtype=torch.bfloat16) for _ in RATIOS
    ]
    return DeviceView(
        SimpleNamespace(
            unified_kv_pool=SimpleNamespace(get_unified_kv=windows.__getitem__),
            _unified_kv_fp8=False,
            _stage_start=0,
            _stage_end=len(RATIOS),
            compression_ratios=RATIOS,
            compress_state_pools=[state(2048) if r == 4 else None for r in RATIOS],
            indexer_compress_state_pools=[state(512) if r == 4 else None for r in RATIOS],
            num_req_slots=ROWS + 1,
            unified_swa_ring_size=128,
        )
    )


class Bench:
    """The pipelines over one view, and the chunk tensors of one forward (reused every round)."""

    def __init__(self, device: torch.device, chunk: int) -> None:
        self.view = make_view(device)
        self.boundaries = chunk // PAGE
        self.counters = Counters()
        self.pools = TruthHostPools(self.view.layout, 2 * self.boundaries, pin=True)
        self.out_lane, self.in_lane = StreamLane(device), StreamLane(device)
        self.capture = CapturePipeline(
            self.view, self.pools, 2 * self.boundaries, self.out_lane, self.counters, pin=True
        )
        self.restore = RestorePipeline(
            self.view, self.pools, 8, self.in_lane, self.counters, pin=True
        )
        self.sources = [
            Source(slot=1, chunk_start=0, chunk_row=0, boundary=PAGE * (i + 1))
            for i in range(self.boundaries)
        ]
        self.chunks = {
            ring.section.index: torch.randn(
                chunk,
                ring.buffer.shape[1],
                device=device,
                dtype=torch.bfloat16 if pool == WINDOW_POOL else torch.float32,
            )
            for pool in POOLS
            for ring in self.view.rings[pool]
        }

    def forward(self, slots: list[int], after: list) -> object:
        """Capture every boundary of the chunk into the host slots; the event of the host bytes.

        `after`: events of what still reads the slots.
        """
        plan = self.capture.begin(self.sources)
        states = {}
        for pool in POOLS[1:]:
            for ring in self.view.rings[pool]:
                states.setdefault(ring.section.layer, []).append(ring)
        for layer in range(len(RATIOS)):
            for ring in states.get(layer, ()):
                self.capture.gather_state(plan, ring, self.chunks[ring.section.index])
            self.capture.gather_window(plan, layer, [self.chunks[layer]])
        return self.capture.finish(plan, slots, [self.out_lane.mark(), *after])

    def scramble(self) -> None:
        """Overwrite the sources, as the next forward does, right behind the gather."""
        for chunk in self.chunks.values():
            chunk.mul_(1.25).add_(0.5)


def run_rounds(bench: Bench, rounds: int, restores: int) -> int:
    """Rounds of capture, scramble, restore of what was just captured; sections found different."""
    written = read = None
    wrong = 0
    for number in range(rounds):
        slots = [(number * 7 + i) % bench.pools.slots for i in range(bench.boundaries)]
        picked = [(number * 5 + 3 * i) % bench.boundaries for i in range(restores)]
        picked = list(dict.fromkeys(picked))
        wanted = {
            (i, ring.section.index): bench.chunks[ring.section.index][
                PAGE * (i + 1) - ring.section.rows : PAGE * (i + 1)
            ].clone()
            for i in picked
            for pool in POOLS
            for ring in bench.view.rings[pool]
        }
        torch.cuda.set_sync_debug_mode("error")
        written = bench.forward(slots, [] if read is None else [read])
        bench.scramble()
        batch = [
            Restore(row=2 + k, boundary=PAGE * (i + 1), host_slot=slots[i], written=written)
            for k, i in enumerate(picked)
        ]
        for restore in batch:
            bench.restore.stage(restore)
        bench.restore.apply(batch)
        read = batch[-1].copied
        torch.cuda.set_sync_debug_mode("default")
        for (i, index), rows in wanted.items():
            ring = next(r for p in POOLS for r in bench.view.rings[p] if r.section.index == index)
            start = PAGE * (i + 1) - ring.section.rows
            at = [
                (2 + picked.index(i)) * ring.size + (start + n) % ring.size
                for n in range(ring.section.rows)
            ]
            wrong += not torch.equal(ring.buffer[at], rows)
    return wrong


def timed(bench: Bench, repeats: int) -> tuple[float, float, float]:
    """Median ms of the forward stream's part of a capture, of a whole capture, of 8 restores."""
    slots = list(range(bench.boundaries))
    gather, whole, back = [], [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        written = bench.forward(slots, [])
        torch.cuda.current_stream().synchronize()
        gather.append(time.perf_counter() - start)
        written.synchronize()
        whole.append(time.perf_counter() - start)
        batch = [
            Restore(row=2 + i, boundary=PAGE * (i + 1), host_slot=slots[i], written=written)
            for i in range(8)
        ]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for restore in batch:
            bench.restore.stage(restore)
        bench.restore.apply(batch)
        torch.cuda.synchronize()
        back.append(time.perf_counter() - start)
    return tuple(1e3 * sorted(x)[len(x) // 2] for x in (gather, whole, back))


def control_is_noticed(bench: Bench) -> bool:
    """Without the event between a capture and its restore, the comparison must find it."""
    finish = bench.capture.finish
    unordered = bench.out_lane.mark()

    def forgetful(plan: object, slots: list[int], after: list) -> object:
        # The copy is held back behind a long kernel; the restore is told that it already ran.
        torch.cuda._sleep(200_000_000)
        finish(plan, slots, [bench.out_lane.mark(), *after])
        return unordered

    bench.pools.memory.zero_()
    bench.capture.finish = forgetful
    try:
        return run_rounds(bench, 1, 4) > 0
    finally:
        bench.capture.finish = finish
        torch.cuda.synchronize()


def storage_threads(bench: Bench, rounds: int, *, wait: bool) -> int:
    """Rounds in which the threads of storage read and write host slots; records found wrong.

    Each round captures a chunk behind a long kernel; a thread reads the records at once, as a storage
    write does. Then half of them are restored, behind a long kernel again, while a thread puts other
    bytes into those slots, as a record from storage does. `wait`: whether the threads wait for the
    events that they are given; without, the comparison must notice.
    """
    wrong = 0
    slots = list(range(bench.boundaries))
    with ThreadPoolExecutor(max_workers=1) as thread:
        for number in range(rounds):
            bench.pools.memory.fill_(number % 251)
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY_CYCLES)
            written = bench.forward(slots, [])
            bench.scramble()
            seen = thread.submit(_records, bench, slots, [written] if wait else []).result()
            torch.cuda.synchronize()
            wrong += sum(
                not torch.equal(record, bench.pools.device_part(slot))
                for slot, record in seen.items()
            )
            half = slots[: min(8, len(slots))]
            batch = [
                Restore(row=2 + i, boundary=PAGE * (i + 1), host_slot=slot, written=written)
                for i, slot in enumerate(half)
            ]
            busy = _held_back(bench.in_lane)
            for restore in batch:
                bench.restore.stage(restore)
            landing = thread.submit(_land, bench, half, [batch[-1].copied] if wait else [])
            bench.restore.apply(batch)
            landing.result()
            busy.synchronize()
            torch.cuda.synchronize()
            wrong += sum(
                not _holds(bench, ring, 2 + i, PAGE * (i + 1), seen[slot])
                for i, slot in enumerate(half)
                for pool in POOLS
                for ring in bench.view.rings[pool]
            )
    return wrong


def _records(bench: Bench, slots: list[int], events: list) -> dict[int, torch.Tensor]:
    """What the thread of a storage write sees of the slots' records."""
    for event in events:
        event.synchronize()
    return {slot: bench.pools.device_part(slot).clone() for slot in slots}


def _land(bench: Bench, slots: list[int], events: list) -> None:
    """Other bytes into the slots, as the thread of a prefetch puts there."""
    for event in events:
        event.synchronize()
    for slot in slots:
        bench.pools.device_part(slot).fill_(0xEE)


def _held_back(lane: StreamLane) -> torch.cuda.Event:
    """The lane's copies come behind a long kernel; when that is over."""
    with torch.cuda.stream(lane._stream):
        torch.cuda._sleep(BUSY_CYCLES)
        event = torch.cuda.Event()
        event.record()
    return event


def _holds(bench: Bench, ring: Ring, row: int, boundary: int, record: torch.Tensor) -> bool:
    """Whether a request's ring rows are the section of a record."""
    section = ring.section
    start = bench.view.layout.device_offset(section)
    first = boundary - section.rows
    at = [row * ring.size + (first + n) % ring.size for n in range(section.rows)]
    rows = ring.buffer[at].contiguous().view(torch.uint8).flatten().cpu()
    return torch.equal(rows, record[start : start + section.nbytes])


@contextmanager
def no_sync() -> Iterator[None]:
    """Any call that synchronises the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class RowCache:
    """What TruthRuntime asks of its tree about requests that only decode: their pages and truth."""

    aligned = None
    key_tokens = 1
    track_junctions = False

    def __init__(self, slots: int) -> None:
        self.store = TruthStore(slots)
        self.rows = RowTable(self.store.lineages)

    def row_launched(self, req: Req, pages: int) -> None:
        """See tree.BxCache."""
        self.rows.get(req).upto(pages)

    def row_lineage(self, req: Req, pages: int) -> int:
        """See tree.BxCache."""
        return self.rows.get(req).id_of(pages)


@dataclass(eq=False)
class Req:
    """What TruthRuntime reads of a request that decodes."""

    kv: SimpleNamespace
    skip_radix_cache_insert: bool = False
    seqlen: int = 0
    """Tokens accepted so far: none of them makes an older page spare."""


class DecodeBench:
    """TruthRuntime over one view, and a batch of which the first `ROWS` requests have rows there.

    All of these complete their pages together; the others are there because a step looks at them.
    """

    def __init__(self, device: torch.device) -> None:
        self.view = make_view(device)
        # Two pages a request stay, whatever the next step captures.
        self.pools = TruthHostPools(self.view.layout, 3 * ROWS, pin=True)
        self.cache = RowCache(self.pools.slots)
        self.runtime = TruthRuntime(
            self.cache, self.view, self.pools, stride=1, chunk_tokens=8192, debug=False, pin=True
        )
        self.reqs = [
            # Not in row order: a gather that ignored its slots would be found.
            self.open(1 + i * 5 % ROWS) if i < ROWS else Req(SimpleNamespace(req_pool_idx=0))
            for i in range(BATCH)
        ]
        self.pages = 0

    def open(self, row: int) -> Req:
        """A request in that row, with nothing computed."""
        req = Req(SimpleNamespace(req_pool_idx=row))
        self.cache.rows.open(req, ROOT, 0)
        return req

    def batch(self, count: int) -> SimpleNamespace:
        """The step in which the first `count` requests complete their next page."""
        lens = torch.full((BATCH,), self.pages * PAGE + 1)
        lens[:count] = (self.pages + 1) * PAGE
        mode = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: True)
        return SimpleNamespace(forward_mode=mode, reqs=self.reqs, seq_lens_cpu=lens)

    def step(self, batch: SimpleNamespace) -> None:
        """The feature's part of a decode step, on the current (forward) stream."""
        with self.runtime.forward(batch):
            pass
        self.pages += 1

    def slots(self, reqs: Sequence[Req]) -> list[int]:
        """The host slots with the truth of the newest page of each."""
        lineages = [self.cache.row_lineage(req, self.pages) for req in reqs]
        return [self.cache.store.lookup(lineage) for lineage in lineages]

    def ring_bytes(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """A copy of what those rows hold at a boundary: pool -> uint8 ``[rows, sections, bytes]``.

        Both ring sizes divide a page, so a boundary's positions are the last of the ring.
        """
        copies = {}
        for pool in POOLS:
            parts = [
                torch.stack(
                    [ring.buffer[(row + 1) * ring.size - n : (row + 1) * ring.size] for row in rows]
                )
                for ring in self.view.rings[pool]
                for n in (ring.section.rows,)
            ]
            copies[pool] = torch.stack(parts, dim=1).flatten(2).view(torch.uint8)
        return copies

    def overwrite(self) -> None:
        """New rows everywhere, on the current stream: what the next forward does, and more."""
        for pool in POOLS:
            for ring in self.view.rings[pool]:
                ring.buffer.normal_()

    def clear_states(self, row: int) -> None:
        """`DeepSeekV4TokenToKVPool.clear_c4_req_states` for one row, on the current stream.

        Less its index tensor: stock makes that from a list, which synchronises the stream and would
        order by accident what is to be ordered by an event.
        """
        rows = slice(row * STATE_RING, (row + 1) * STATE_RING)
        for pool in POOLS[1:]:
            for ring in self.view.rings[pool]:
                half = ring.buffer.shape[1] // 2
                ring.buffer[rows, :half] = 0
                ring.buffer[rows, half:] = float("-inf")

    def wrong_sections(self, wanted: dict[str, torch.Tensor], slots: Sequence[int]) -> int:
        """Sections of host records that differ from `wanted`, by bytes or by their checksum."""
        wrong = 0
        sums = torch.stack([self.pools.checksums(slot) for slot in slots]).to(self.view.device)
        for pool, rows in wanted.items():
            sections = self.view.layout.sections(pool)
            first, last = sections[0], sections[-1]
            host = self.pools.buffers[pool][slots, first.offset : last.offset + last.nbytes]
            differ = (host.to(rows.device).view(rows.shape) != rows).any(dim=2)
            for i, section in enumerate(sections):
                differ[:, i] |= sums[:, section.index] != section_checksums(rows[:, i : i + 1])
            wrong += int(differ.sum())
        return wrong


def decode_rounds(bench: DecodeBench, rounds: int, count: int) -> int:
    """Pairs of steps that complete `count` pages each, the second right behind the first; sections
    found different in the two pages of every request."""
    wrong = 0
    reqs = bench.reqs[:count]
    rows = [req.kv.req_pool_idx for req in reqs]
    for _ in range(rounds):
        captured = []
        with no_sync():
            for _ in range(2):
                wanted = bench.ring_bytes(rows)
                bench.step(bench.batch(count))
                bench.overwrite()
                captured.append((wanted, bench.slots(reqs)))
        bench.runtime.drain()
        wrong += sum(bench.wrong_sections(*pair) for pair in captured)
    return wrong


def decode_timed(bench: DecodeBench, count: int, repeats: int) -> dict[str, float]:
    """Medians, in ms, of a step that completes `count` pages.

    `host`: until everything is launched; `stream`: what the forward stream spends, from an idle
    device; `done`: until the host has the bytes. `busy_host` and `busy_stream`: the first two where
    the device is still busy with earlier work, as under the overlap schedule: the host runs ahead,
    and the stream waits for no launch.
    """
    taken: dict[str, list[float]] = {}
    for _ in range(repeats):
        for prefix in ("", "busy_"):
            batch = bench.batch(count)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            with no_sync():
                if prefix:
                    torch.cuda._sleep(BUSY_CYCLES)
                begin.record()
                start = time.perf_counter()
                bench.step(batch)
                host = time.perf_counter() - start
                end.record()
            bench.runtime.drain()
            done = time.perf_counter() - start
            end.synchronize()
            taken.setdefault(f"{prefix}host", []).append(1e3 * host)
            taken.setdefault(f"{prefix}stream", []).append(begin.elapsed_time(end))
            if not prefix:
                taken.setdefault("done", []).append(1e3 * done)
    return {name: sorted(values)[repeats // 2] for name, values in taken.items()}


def launches(work: Callable[[], None]) -> tuple[int, int]:
    """Kernels and copies that `work` launches, by the profiler's record of the calls."""
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    calls = {entry.key: entry.count for entry in profile.key_averages()}
    kernels = sum(n for key, n in calls.items() if key.startswith(("cudaLaunch", "cuLaunch")))
    return kernels, sum(n for key, n in calls.items() if key.startswith("cudaMemcpy"))


def quiet_step(bench: DecodeBench, repeats: int) -> tuple[float, float]:
    """Host microseconds of a step that completes no page: the check alone, and all of ours."""
    batch = bench.batch(0)
    start = time.perf_counter()
    for _ in range(repeats):
        (batch.seq_lens_cpu % PAGE == 0).nonzero().flatten().tolist()
    middle = time.perf_counter()
    for _ in range(repeats):
        with bench.runtime.forward(batch):
            pass
    end = time.perf_counter()
    return 1e6 * (middle - start) / repeats, 1e6 * (end - middle) / repeats


class Race(NamedTuple):
    """What `row_race` saw: rounds in which the gather was still queued, rounds with wrong bytes, and
    the median ms for which the host was held by the copy that stock's clear begins with."""

    queued: int
    wrong: int
    held_ms: float


def row_race(bench: DecodeBench, rounds: int, *, wait: bool) -> Race:
    """A row's next owner clears its states while the capture of its last page is queued behind a busy
    forward stream. Without `wait` the runtime forgets the event of that gather."""
    forward, schedule = torch.cuda.Stream(), torch.cuda.Stream()
    queued = wrong = 0
    held = []
    for number in range(rounds):
        row = 1 + number % ROWS
        req = bench.open(row)
        bench.reqs[0], running = req, bench.reqs[0]
        gathered = torch.cuda.Event()
        torch.cuda.synchronize()
        with torch.cuda.stream(schedule), no_sync():
            with torch.cuda.stream(forward):
                forward.wait_stream(schedule)
                bench.overwrite()
                wanted = bench.ring_bytes([row])
                torch.cuda._sleep(BUSY_CYCLES)
                bench.step(bench.batch(1))
                gathered.record()
            slots = bench.slots([req])
            if not wait:
                bench.runtime._row_read.clear()
            bench.runtime.forget(req)
            bench.clear_states(row)
            queued += not gathered.query()
        with torch.cuda.stream(schedule):
            start = time.perf_counter()
            torch.as_tensor([row], device=bench.view.device)
            held.append(1e3 * (time.perf_counter() - start))
        bench.runtime.drain()
        wrong += bench.wrong_sections(wanted, slots) > 0
        bench.cache.rows.drop(req)
        bench.reqs[0] = running
    return Race(queued, wrong, sorted(held)[rounds // 2])


def decode_report(bench: DecodeBench, rounds: int) -> tuple[bool, dict[str, object]]:
    """The decode part and the row race: whether all was right, and what was measured."""
    decode_rounds(bench, 2, ROWS)  # compile, allocate
    wrong = sum(decode_rounds(bench, rounds, count) for count in DECODED)
    found: dict[str, object] = {"decode_rounds": rounds, "decode_wrong_sections": wrong}
    for count in DECODED:
        for name, value in decode_timed(bench, count, 15).items():
            found[f"decode{count}_{name}_ms"] = f"{value:.2f}"
        floor = count * bench.view.layout.slot_bytes / BYTES_PER_MS
        found[f"decode{count}_floor_ms"] = f"{floor:.2f}"
    check, step = quiet_step(bench, 5000)
    found |= {"quiet_check_us": f"{check:.1f}", "quiet_step_us": f"{step:.1f}"}
    row_race(bench, 1, wait=True)  # compile
    race = row_race(bench, rounds, wait=True)
    control = row_race(bench, 5, wait=False)
    found |= {
        "race_rounds": rounds,
        "race_queued": race.queued,
        "race_wrong_rounds": race.wrong,
        "race_held_ms": f"{race.held_ms:.2f}",
        "race_control": f"{control.wrong}/{control.queued}",
        "race_control_held_ms": f"{control.held_ms:.2f}",
    }
    # Last: launches cost more in a process that has been profiled.
    for count in DECODED:
        kernels, copies = launches(lambda n=count: bench.step(bench.batch(n)))
        found |= {f"decode{count}_kernels": kernels, f"decode{count}_copies": copies}
    # A race in which the gather had already run would prove nothing.
    raced = race.queued == rounds and control.wrong > 0
    return raced and not wrong and not race.wrong, found


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of one forward")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a GPU that torch can use")
        return 2
    device = torch.device("cuda", 0)
    bench = Bench(device, options.chunk)
    run_rounds(bench, 2, 8)  # compile, allocate
    wrong = run_rounds(bench, options.rounds, 12)
    control = control_is_noticed(bench)
    gather, whole, back = timed(bench, 15)
    record = bench.view.layout.slot_bytes
    threads = storage_threads(bench, 6, wait=True)
    unordered = storage_threads(bench, 2, wait=False)
    right, decode = decode_report(DecodeBench(device), options.rounds)
    print(
        f"device={torch.cuda.get_device_name(0).replace(' ', '_')} torch={torch.__version__} "
        f"boundaries={bench.boundaries} record_bytes={record} rounds={options.rounds} "
        f"wrong_sections={wrong} control={int(control)} wrong_in_storage_threads={threads} "
        f"control_storage_threads={int(unordered > 0)} waves={bench.counters.restore_waves} "
        f"gather_ms={gather:.2f} capture_ms={whole:.2f} "
        f"capture_floor_ms={bench.boundaries * record / BYTES_PER_MS:.2f} restore8_ms={back:.2f} "
        f"restore8_floor_ms={8 * record / BYTES_PER_MS:.2f} "
        + " ".join(f"{name}={value}" for name, value in decode.items())
    )
    ordered = not wrong and not threads
    return 0 if right and ordered and control and unordered else 1


if __name__ == "__main__":
    sys.exit(main())
