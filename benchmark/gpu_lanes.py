"""Capture and restore on a real GPU: right bytes with nothing but events in between, and no
synchronisation of the device.

Drives the shipped pipelines (capture.py, restore.py, transfer.StreamLane) over rings of the geometry
of a 61-layer model, without SGLang: what a CPU cannot show is the ordering of real streams. Each
round captures a chunk's boundaries, restores some of them at once into other rows (the copies are
still in flight), reuses host slots that are being read, and overwrites the sources right behind.
`torch.cuda.set_sync_debug_mode("error")` makes any synchronising call an exception meanwhile.

    PYTHONPATH=python python benchmark/gpu_lanes.py

Prints one line of key=value pairs; exit status 0 if every byte was right.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import SimpleNamespace

import torch

from sglang_bitexact_hicache.capture import CapturePipeline
from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.gather import Source
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.layout import POOLS, WINDOW_POOL
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.restore import Restore, RestorePipeline
from sglang_bitexact_hicache.transfer import StreamLane

PAGE = 256
RATIOS = [0] + [4, 128] * 30
ROWS = 32
STATE_RING = 8


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
        """Capture every boundary of the chunk into the host slots; the event of the host bytes."""
        plan = self.capture.begin(self.sources)
        for layer in range(len(RATIOS)):
            self.capture.gather_window(plan, layer, self.chunks[layer])
        for pool in POOLS[1:]:
            for ring in self.view.rings[pool]:
                self.capture.gather_state(plan, ring, self.chunks[ring.section.index])
        return self.capture.finish(plan, slots, after)

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
    print(
        f"device={torch.cuda.get_device_name(0).replace(' ', '_')} torch={torch.__version__} "
        f"boundaries={bench.boundaries} record_bytes={record} rounds={options.rounds} "
        f"wrong_sections={wrong} control={int(control)} waves={bench.counters.restore_waves} "
        f"gather_ms={gather:.2f} capture_ms={whole:.2f} "
        f"capture_floor_ms={bench.boundaries * record / 55e6:.2f} restore8_ms={back:.2f} "
        f"restore8_floor_ms={8 * record / 55e6:.2f}"
    )
    return 1 if wrong or not control else 0


def control_is_noticed(bench: Bench) -> bool:
    """Without the event between a capture and its restore, the comparison must find it."""
    finish = bench.capture.finish
    unordered = bench.out_lane.mark()

    def forgetful(plan: object, slots: list[int], after: list) -> object:
        # The copy is held back behind a long kernel; the restore is told that it already ran.
        torch.cuda._sleep(200_000_000)
        finish(plan, slots, after)
        return unordered

    for pool in POOLS:
        bench.pools.buffers[pool].zero_()
    bench.capture.finish = forgetful
    try:
        return run_rounds(bench, 1, 4) > 0
    finally:
        bench.capture.finish = finish
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
