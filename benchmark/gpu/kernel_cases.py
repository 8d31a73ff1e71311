"""The Triton kernels against their plain torch reference, byte for byte, on any device, without SGLang.

    PYTHONPATH=python python benchmark/gpu/kernel_cases.py [--device cuda]

On a CPU it needs TRITON_INTERPRET=1 in the environment. Each case fills staging (or the rings) with
noise, runs `RowMover` and `KernelMover` on the same inputs and compares all of the memory that either
could have written, bytes and checksums. A line a case: ``name equal`` or ``name differ N`` with the
number of bytes; then the controls, in which one bit of an input is changed in between or rows are
moved: ``control name noticed`` or ``missed``. Exit status 0 if every line is as it should be.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import torch

from sglang_bitexact_hicache.checksum import section_checksums
from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.gather import Source
from sglang_bitexact_hicache.kernel_mover import KernelMover
from sglang_bitexact_hicache.layout import C4_POOL, POOLS, WINDOW_POOL
from sglang_bitexact_hicache.row_mover import Part, RowMover
from sglang_bitexact_hicache.staging import DeviceStaging

RATIOS = (0, 4, 128, 4)
REQUESTS = 6
ROPE = 64
"""Elements of a rope row, where a window has two planes."""
SLOTS = 5
"""Staging slots: more than the boundaries of any case."""

CHUNK = [
    Source(slot=1, chunk_start=0, chunk_row=3, boundary=256),
    Source(slot=1, chunk_start=0, chunk_row=3, boundary=512),
    Source(slot=4, chunk_start=1024, chunk_row=520, boundary=1280),
]
"""A prompt from its start, and one that goes on: every row is in the chunk."""
REACH_BACK = [
    *CHUNK[:1],
    Source(slot=2, chunk_start=255, chunk_row=520, boundary=256),
    Source(slot=5, chunk_start=400, chunk_row=530, boundary=512),
    Source(slot=3, chunk_start=510, chunk_row=650, boundary=512),
]
"""Windows, and some states, that begin before the chunk."""
DECODED = [Source(row, end, 0, end) for row, end in ((3, 512), (1, 256), (5, 1024), (2, 25600))]
"""Boundaries that the rings hold whole."""


class World:
    """Random rings and chunks, and both movers over the same staging.

    `draft`: one layer more, in a pool of its own.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        ring: int = 128,
        state_ring: int = 8,
        head: int = 64,
        gap: int = 0,
        fp8: bool = False,
        draft: bool = False,
    ) -> None:
        self._random = torch.Generator(device).manual_seed(5)
        self.device = device
        rows = (REQUESTS + 1) * ring
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        windows = [self._noise(rows, head, dtype) for _ in RATIOS]
        ropes = [self._noise(rows, ROPE, torch.bfloat16) for _ in RATIOS]

        def states(width: int) -> list:
            return [
                SimpleNamespace(
                    kv_score_buffer=SimpleNamespace(
                        kv_score=self._noise((REQUESTS + 1) * state_ring, width, torch.float32)
                    ),
                    ring_size=state_ring,
                )
                if ratio == 4
                else None
                for ratio in RATIOS
            ]

        drafted = SimpleNamespace(
            unified_kv_pool=SimpleNamespace(
                get_unified_kv=[self._noise(rows, head, dtype)].__getitem__
            ),
            _unified_kv_fp8=False,
            compression_ratios=[0],
            unified_swa_ring_size=ring,
        )
        self.view = DeviceView(
            SimpleNamespace(
                unified_kv_pool=SimpleNamespace(
                    get_unified_kv=windows.__getitem__, get_unified_kv_rope=ropes.__getitem__
                ),
                _unified_kv_fp8=fp8,
                _stage_start=0,
                _stage_end=len(RATIOS),
                compression_ratios=RATIOS,
                compress_state_pools=states(4 * head),
                indexer_compress_state_pools=states(head),
                unified_swa_ring_size=ring,
            ),
            [drafted] if draft else [],
        )
        self.staging = DeviceStaging(self.view.layout, SLOTS, device)
        self.movers = [
            mover(self.view, self.staging, pin=device.type != "cpu")
            for mover in (RowMover, KernelMover)
        ]
        self.chunks = {
            ring.section.index: self._noise(800, ring.buffer.shape[1] + gap, ring.buffer.dtype)[
                :, gap:
            ]
            for pool in POOLS
            for ring in self.view.rings[pool]
        }

    def _noise(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        if dtype.itemsize == 1:
            shape = (rows, width)
            noise = torch.randint(256, shape, generator=self._random, device=self.device)
            return noise.to(torch.uint8).view(dtype)
        return torch.randn(rows, width, generator=self._random, device=self.device).to(dtype)

    def captured(self, sources: Sequence[Source], layers: bool, mover: RowMover) -> torch.Tensor:
        """Staging after a capture: of a forward, layer by layer, or after it, from the rings."""
        self.staging.memory.fill_(0xA5)
        index = mover.capture_index(sources, list(range(SLOTS - 1, -1, -1))[: len(sources)])
        if not layers:
            mover.gather_rings(index)
            return self.staging.memory.clone()
        for layer in self.view.layout.layers:
            parts = [
                Part(ring, self.chunks[ring.section.index])
                for pool in POOLS
                for ring in self.view.rings[pool]
                if ring.section.layer == layer
            ]
            if any(s.reads_ring_for(4) for s in sources):
                # As CapturePipeline does: each state before its compressor runs.
                for part in reversed(parts[1:]):
                    mover.gather_layer(index, [part])
                parts = parts[:1]
            mover.gather_layer(index, parts)
        return self.staging.memory.clone()

    def restored(self, restores: Sequence[Source], mover: RowMover) -> torch.Tensor:
        """All rings after a restore of staged noise; they are put back afterwards."""
        rings = [ring.buffer for pool in POOLS for ring in self.view.rings[pool]]
        before = [buffer.clone() for buffer in rings]
        index = mover.scatter_index(
            [s.slot for s in restores],
            [s.boundary for s in restores],
            list(range(SLOTS - 1, -1, -1))[: len(restores)],
        )
        mover.scatter(index)
        after = torch.cat([buffer.view(torch.uint8).flatten() for buffer in rings])
        for buffer, old in zip(rings, before, strict=True):
            buffer.copy_(old)
        return after


def compare(run: Callable[[RowMover], torch.Tensor], world: World, between: Callable = int) -> int:
    """Bytes that differ between the movers; `between` runs between them (controls)."""
    plain = run(world.movers[0])
    between()
    return int((plain != run(world.movers[1])).sum())


def cases(device: torch.device) -> dict[str, int]:
    """Bytes that differ, by case."""
    worlds = {
        "as the model": World(device, head=512),
        "rings of a draft": World(device, ring=131, state_ring=16, draft=True),
        "fp8 rows": World(device, head=512, fp8=True),
        "narrow rows": World(device, head=20),
        "chunks that are views": World(device, gap=8),
        "chunks that are not aligned": World(device, gap=6),
    }
    found = {}
    for name, world in worlds.items():
        for what, sources in (("chunk", CHUNK), ("reach back", REACH_BACK)):
            found[f"{name}: {what}"] = compare(partial(world.captured, sources, True), world)
        found[f"{name}: rings"] = compare(partial(world.captured, DECODED, False), world)
        world.staging.memory.copy_(torch.randint_like(world.staging.memory, 256))
        for what, restores in (("restores", DECODED), ("restore of one", DECODED[:1])):
            found[f"{name}: {what}"] = compare(partial(world.restored, restores), world)
    return found


def controls(device: torch.device) -> dict[str, bool]:
    """Whether each thing that is broken on purpose was noticed."""
    world = World(device)
    window = world.view.window_rings(0)[0]
    state = world.view.rings[C4_POOL][1]

    def flip(tensor: torch.Tensor, row: int) -> Callable[[], None]:
        def now() -> None:
            tensor.view(torch.int32)[row, 1] ^= 1 << 9

        return now

    noticed = {}
    for name, run, tensor, row in (
        ("a bit of K", True, world.chunks[window.section.index], 3 + 255),
        ("a bit of a compressor's input", True, world.chunks[state.section.index], 3 + 252),
        ("a bit of a ring", False, window.buffer, 3 * 128 + 5),
        ("a bit of a state ring", False, state.buffer, 3 * 8 + 4),
    ):
        sources = CHUNK if run else DECODED
        count = compare(partial(world.captured, sources, run), world, flip(tensor, row))
        # The word, and the checksum of its section.
        noticed[name] = 1 < count <= 1 + 8
    # A row that no boundary of the case needs.
    spare = flip(world.chunks[window.section.index], 2)
    count = compare(partial(world.captured, CHUNK, True), world, spare)
    noticed["nothing, where the bit is not in a window"] = count == 0
    noticed |= sums_of_moved_windows(world)
    noticed["a ring of every other row"] = refused(world, window.buffer[::2])
    noticed["a ring that begins within a word"] = refused(
        world, window.buffer.flatten()[1:-63].view(-1, 64)
    )
    return noticed


def refused(world: World, buffer: torch.Tensor) -> bool:
    """Whether kernels are not made for rings of which the first window is this one."""
    first, *others = world.view.rings[WINDOW_POOL]
    rings = {**world.view.rings, WINDOW_POOL: (dataclasses.replace(first, buffer=buffer), *others)}
    view = SimpleNamespace(rings=rings, layout=world.view.layout, device=world.device)
    try:
        KernelMover(view, world.staging, pin=False)
    except ValueError:
        return True
    return False


def sums_of_moved_windows(world: World) -> dict[str, bool]:
    """The kernel's checksum of a window whose rows are swapped, or all moved on by one."""
    ring = world.view.window_rings(0)[0]
    rows = slice(3 * 128, 4 * 128)

    def checksum() -> int:
        world.captured(DECODED[:1], False, world.movers[1])
        return int(world.staging.checksums[SLOTS - 1, ring.section.index])

    right = checksum()
    before = ring.buffer[rows].clone()
    noticed = {}
    for name, moved in (
        ("two rows swapped", before[[1, 0, *range(2, 128)]]),
        ("a window that is moved on", before.roll(1, 0)),
    ):
        ring.buffer[rows] = moved
        noticed[name] = checksum() != right
        # Not only different: what the reference makes of those rows.
        expected = int(section_checksums(moved.unsqueeze(0)))
        noticed[name] &= int(world.staging.checksums[SLOTS - 1, ring.section.index]) == expected
    ring.buffer[rows] = before
    noticed["nothing, where they are back"] = checksum() == right
    return noticed


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    found = cases(device)
    noticed = controls(device)
    for name, count in found.items():
        print(name, f"differ {count}" if count else "equal")
    for name, seen in noticed.items():
        print("control", name, "noticed" if seen else "missed")
    return 0 if not any(found.values()) and all(noticed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
