"""Capture and restore move the right bytes: the real device pool against reads written by hand.

The expected bytes are found position by position with scalar loops; the pipelines find theirs with
index tensors. Whole sections are compared, byte for byte.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import bitexact_fixtures as fixtures
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bitexact_hicache.capture import CapturePipeline
from sglang_bitexact_hicache.checksum import section_checksums
from sglang_bitexact_hicache.checksum import weights as checksum_weights
from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.gather import Source, SpanGather, SpanScatter
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.layout import C4_POOL, INDEXER_POOL, POOLS, WINDOW_POOL
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.restore import Restore, RestorePipeline
from sglang_bitexact_hicache.row_mover import Part
from sglang_bitexact_hicache.runtime import check_rings
from sglang_bitexact_hicache.staging import DeviceStaging
from sglang_bitexact_hicache.transfer import ThreadLane

CPU = torch.device("cpu")
ROWS = 6
LAYERS = (0, 4, 128, 4)


@pytest.fixture(scope="module", autouse=True)
def hicache():
    with fixtures.cpu_hicache():
        fixtures.make_server_args()
        yield


def noise(rows, width, dtype, generator):
    """Random rows; of packed fp8 rows any bytes."""
    if dtype == torch.uint8:
        return torch.randint(256, (rows, width), dtype=dtype, generator=generator)
    return torch.randn(rows, width, generator=generator).to(dtype)


class Bench:
    """The real pool with random rings, and both pipelines over it."""

    def __init__(
        self, slots: int = 8, staging: int = 4, fp8: bool = False, drafts: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        pool = fixtures.make_kv_pool(pages=2, rows=ROWS, layers=LAYERS, nope=448, rope=64, fp8=fp8)
        geometry = {"pages": 2, "rows": ROWS, "nope": 448, "rope": 64}
        self.drafts = [
            fixtures.make_kv_pool(layers=(0,), fp8=fp8, **geometry) for _ in range(drafts)
        ]
        self.view = DeviceView(pool, self.drafts)
        for rings in self.view.rings.values():
            for ring in rings:
                ring.buffer.copy_(noise(*ring.buffer.shape, ring.buffer.dtype, generator))
        self.counters = Counters()
        self.pools = TruthHostPools(self.view.layout, slots, pin=False)
        self.out_lane, self.in_lane = ThreadLane("test-out"), ThreadLane("test-in")
        self.capture = CapturePipeline(
            self.view, self.pools, staging, self.out_lane, self.counters, pin=False
        )
        self.restore = RestorePipeline(
            self.view, self.pools, 2, self.in_lane, self.counters, pin=False
        )
        self._generator = generator

    def chunks(self, tokens: int):
        """Random K and compressor inputs of one forward, by section."""
        return {
            ring.section.index: noise(
                tokens, ring.buffer.shape[1], ring.buffer.dtype, self._generator
            )
            for pool in POOLS
            for ring in self.view.rings[pool]
        }

    def run_capture(self, sources, host_slots, chunks, after=()):
        plan = self.capture.begin(sources)
        self.pass_layers(plan, chunks)
        return self.capture.finish(plan, host_slots, after)

    def pass_layers(self, plan, chunks):
        """What a forward's hooks do: layer by layer, its compressors and then its window."""
        for layer in self.view.layout.layers:
            for pool in (INDEXER_POOL, C4_POOL):
                for ring in self.view.rings[pool]:
                    if ring.section.layer == layer:
                        self.capture.gather_state(plan, ring, chunks[ring.section.index])
            planes = self.view.window_rings(layer)
            windows = [chunks[ring.section.index] for ring in planes]
            self.capture.gather_window(plan, layer, windows)

    def expected(self, source, ring, chunk):
        """The bytes of one section, position by position."""
        rows = []
        for position in range(source.boundary - ring.section.rows, source.boundary):
            if position >= source.chunk_start:
                row = chunk[source.chunk_row + position - source.chunk_start]
            else:
                row = ring.buffer[source.slot * ring.size + position % ring.size]
            rows.append(row.to(ring.buffer.dtype))
        return torch.stack(rows).view(torch.uint8).flatten()

    def stored(self, host_slot, section):
        record = self.pools.record(section.pool, host_slot)
        return record[section.offset : section.offset + section.nbytes]

    def landed(self, row, boundary, ring):
        """What the rings of a row hold for the positions before a boundary."""
        rows = [
            ring.buffer[row * ring.size + p % ring.size]
            for p in range(boundary - ring.section.rows, boundary)
        ]
        return torch.stack(rows).view(torch.uint8).flatten()

    def close(self) -> None:
        self.out_lane.close()
        self.in_lane.close()


@pytest.fixture(params=["bf16", "fp8", "bf16 with a draft", "fp8 with a draft"])
def bench(request):
    before = set(threading.enumerate())
    made = Bench(fp8="fp8" in request.param, drafts="with a draft" in request.param)
    yield made
    made.close()
    assert set(threading.enumerate()) <= before, "a lane's thread was left"


def all_rings(view):
    return [ring for pool in POOLS for ring in view.rings[pool]]


@pytest.mark.parametrize(
    ("start", "boundary"),
    [
        (0, 256),  # first page of a prompt
        (256, 512),  # chunk begins a page before
        (256, 768),  # interior of a longer chunk
        (511, 512),  # a one-token row: all but one position are still in the ring
        (400, 512),  # the window begins before the chunk
        (384, 512),  # the window begins where the chunk does
        (510, 512),  # the state begins before the chunk
    ],
)
def test_captured_bytes_are_what_the_forward_produced(bench, start, boundary):
    # Two other requests' tokens lie before and after in the flat tensors.
    length = boundary - start + 40
    chunks = bench.chunks(10 + length + 5)
    source = Source(slot=3, chunk_start=start, chunk_row=10, boundary=boundary)
    bench.run_capture([source], [5], chunks).synchronize()
    sums = bench.pools.checksums(5)
    for ring in all_rings(bench.view):
        section = ring.section
        expected = bench.expected(source, ring, chunks[section.index])
        assert torch.equal(bench.stored(5, section), expected), section
        typed = expected.view(ring.buffer.dtype).view(1, section.rows, -1)
        assert int(sums[section.index]) == int(section_checksums(typed))


def test_rows_that_the_layer_would_cast_are_not_taken_for_its_bytes(bench):
    for ring in all_rings(bench.view):
        wider = torch.zeros(4, ring.buffer.shape[1], dtype=torch.float64)
        with pytest.raises(ValueError, match=f"rows of torch.float64, not of {ring.buffer.dtype}"):
            Part(ring, wider)


def test_every_boundary_of_a_batch_is_captured_in_one_go(bench):
    sources = [
        Source(slot=1, chunk_start=0, chunk_row=0, boundary=256),
        Source(slot=1, chunk_start=0, chunk_row=0, boundary=512),
        Source(slot=4, chunk_start=1024, chunk_row=600, boundary=1280),
        Source(slot=2, chunk_start=255, chunk_row=900, boundary=256),
    ]
    chunks = bench.chunks(901)
    bench.run_capture(sources, [0, 7, 3, 4], chunks).synchronize()
    for source, slot in zip(sources, [0, 7, 3, 4], strict=True):
        for ring in all_rings(bench.view):
            expected = bench.expected(source, ring, chunks[ring.section.index])
            assert torch.equal(bench.stored(slot, ring.section), expected)


def test_a_restore_lands_at_buf_lo_of_any_other_row_and_touches_nothing_else(bench):
    sources = [
        Source(slot=1, chunk_start=256, chunk_row=0, boundary=512),
        Source(slot=1, chunk_start=256, chunk_row=0, boundary=768),
        Source(slot=2, chunk_start=0, chunk_row=512, boundary=256),
    ]
    written = bench.run_capture(sources, [2, 0, 6], bench.chunks(800))
    before = {ring.section: ring.buffer.clone() for ring in all_rings(bench.view)}
    # Three restores, two staging records: a second wave.
    restores = [
        Restore(row=5, boundary=512, host_slot=2, written=written),
        Restore(row=3, boundary=768, host_slot=0, written=written),
        Restore(row=4, boundary=256, host_slot=6, written=written),
    ]
    assert [bench.restore.stage(r) for r in restores] == [True, True, False]
    bench.restore.apply(restores)
    assert bench.counters.restore_waves == 1
    for ring in all_rings(bench.view):
        touched = set()
        for restore in restores:
            stored = bench.stored(restore.host_slot, ring.section)
            assert torch.equal(bench.landed(restore.row, restore.boundary, ring), stored)
            for p in range(restore.boundary - ring.section.rows, restore.boundary):
                touched.add(restore.row * ring.size + p % ring.size)
        rest = [i for i in range(ring.buffer.shape[0]) if i not in touched]
        assert torch.equal(ring.buffer[rest], before[ring.section][rest])
    assert bench.restore.staging.free == bench.restore.staging.slots


def test_control_one_flipped_bit_in_host_memory_is_one_flipped_bit_on_the_device(bench):
    source = Source(slot=1, chunk_start=0, chunk_row=0, boundary=256)
    written = bench.run_capture([source], [1], bench.chunks(256))
    written.synchronize()
    ring = bench.view.rings[C4_POOL][1]
    bench.stored(1, ring.section)[7] ^= 4
    bench.restore.apply([Restore(row=2, boundary=256, host_slot=1, written=written)])
    landed = bench.landed(2, 256, ring)
    assert torch.equal(landed, bench.stored(1, ring.section))
    typed = landed.view(ring.buffer.dtype).view(1, ring.section.rows, -1)
    carried = bench.pools.checksums(1)[ring.section.index]
    assert int(section_checksums(typed)) != int(carried)


def test_a_forward_that_skips_a_layer_is_not_stored(bench):
    plan = bench.capture.begin([Source(slot=1, chunk_start=0, chunk_row=0, boundary=256)])
    chunks = bench.chunks(256)
    windows = [chunks[ring.section.index] for ring in bench.view.window_rings(0)]
    bench.capture.gather_window(plan, 0, windows)
    with pytest.raises(RuntimeError, match="skipped"):
        bench.capture.finish(plan, [0], [])
    assert bench.capture.staging.free == bench.capture.staging.slots


def test_a_restore_waits_for_a_capture_that_is_still_in_flight(bench):
    source = Source(slot=1, chunk_start=0, chunk_row=0, boundary=256)
    chunks = bench.chunks(256)
    bench.pools.record(WINDOW_POOL, 3).fill_(0x55)
    with bench.out_lane.held():
        written = bench.run_capture([source], [3], chunks)
        restore = Restore(row=2, boundary=256, host_slot=3, written=written)
        bench.restore.stage(restore)
        assert not restore.copied.done()
    bench.restore.apply([restore])
    for ring in all_rings(bench.view):
        expected = bench.expected(source, ring, chunks[ring.section.index])
        assert torch.equal(bench.landed(2, 256, ring), expected)


def test_a_capture_into_a_slot_waits_for_a_restore_that_still_reads_it(bench):
    first = Source(slot=1, chunk_start=0, chunk_row=0, boundary=256)
    old, new = bench.chunks(256), bench.chunks(256)
    written = bench.run_capture([first], [0], old)
    restore = Restore(row=2, boundary=256, host_slot=0, written=written)
    with bench.in_lane.held():
        bench.restore.stage(restore)
        again = bench.run_capture([first], [0], new, [restore.copied])
        assert not again.done()
    bench.restore.apply([restore])
    again.synchronize()
    ring = bench.view.window_rings(0)[0]
    assert torch.equal(bench.landed(2, 256, ring), bench.expected(first, ring, old[0]))
    assert torch.equal(bench.stored(0, ring.section), bench.expected(first, ring, new[0]))


def test_a_forward_waits_for_staging_that_an_older_capture_still_leaves(bench):
    sources = [Source(slot=1, chunk_start=0, chunk_row=0, boundary=256)] * 4
    one, two = bench.chunks(256), bench.chunks(256)
    with bench.out_lane.held():
        bench.run_capture(sources, [0, 1, 2, 3], one)
        threading.Timer(0.2, bench.out_lane._open.set).start()
        bench.run_capture(sources, [4, 5, 6, 7], two).synchronize()
    assert bench.counters.staging_waits > 0
    ring = bench.view.window_rings(0)[0]
    for slots, chunks in (([0, 1, 2, 3], one), ([4, 5, 6, 7], two)):
        for slot in slots:
            expected = bench.expected(sources[0], ring, chunks[0])
            assert torch.equal(bench.stored(slot, ring.section), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(128, 200),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 600)),
        min_size=1,
        max_size=4,
        unique_by=lambda t: t[0],
    ),
    st.sampled_from([4, 128]),
)
def test_gather_then_scatter_into_any_other_ring_keeps_positions(ring, requests, rows):
    """Hypothesis: any ring size, any chunk start before the boundary, several requests a batch."""
    generator = torch.Generator().manual_seed(1)
    sources, flat = [], 0
    for slot, page, before in requests:
        start = max(0, page * 256 - before)
        sources.append(Source(slot, start, flat, page * 256))
        flat += page * 256 - start
    chunk = torch.randn(flat, 8, generator=generator)
    buffer = torch.randn(6 * ring, 8, generator=generator)
    count = len(sources)
    staged, sums = torch.zeros(count, rows, 8), torch.zeros(count, dtype=torch.int64)
    order = list(reversed(range(count)))
    SpanGather(sources, rows, ring, order, CPU, pin=False).run(chunk, buffer, staged, sums)
    other = ring + 3
    target = torch.zeros(6 * other, 8)
    into = [(s.slot + 1) % 6 for s in sources]
    SpanScatter(into, [s.boundary for s in sources], rows, other, order, CPU, pin=False).run(
        staged, target
    )
    for source, slot in zip(sources, into, strict=True):
        for p in range(source.boundary - rows, source.boundary):
            if p >= source.chunk_start:
                expected = chunk[source.chunk_row + p - source.chunk_start]
            else:
                expected = buffer[source.slot * ring + p % ring]
            assert torch.equal(target[slot * other + p % other], expected)


def test_no_two_words_of_a_section_have_the_same_weight_and_each_is_odd():
    # The largest section: 128 rows of 512 bf16 elements.
    found = checksum_weights(128 * 1024 // 4)
    assert len(set(found.tolist())) == len(found)
    assert (found & 1).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 127), st.integers(0, 63), st.integers(0, 15), st.integers(1, 127))
def test_a_checksum_sees_one_bit_two_rows_swapped_and_a_shift(row, column, bit, other):
    rows = torch.randn(1, 128, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    right = int(section_checksums(rows))
    flipped = rows.clone()
    flipped.view(torch.int16)[0, row, column] ^= 1 << bit if bit < 15 else -(1 << 15)
    swapped = rows.clone()
    swapped[0, [row, (row + other) % 128]] = rows[0, [(row + other) % 128, row]]
    assert int(section_checksums(flipped)) != right
    assert int(section_checksums(swapped)) != right
    assert int(section_checksums(rows.roll(other, 1))) != right
    assert int(section_checksums(rows.clone())) == right


def test_staging_refuses_more_than_it_has_and_hands_slots_out_once(bench):
    staging = DeviceStaging(bench.view.layout, 3, CPU)
    one, _ = staging.take(2)
    with pytest.raises(ValueError, match="do not fit"):
        staging.take(2)
    two, _ = staging.take(1)
    assert sorted([*one, *two]) == [0, 1, 2]
    staging.give_back(one, None)
    assert sorted(staging.take(2)[0]) == sorted(one)


def test_staging_without_a_record_is_refused(bench):
    with pytest.raises(ValueError, match="at least one"):
        DeviceStaging(bench.view.layout, 0, CPU)


# ---- a draft's rings


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_drafts_layers_are_layers_behind_the_targets(fp8):
    made = Bench(drafts=2, fp8=fp8)
    made.close()
    layout = made.view.layout
    assert made.view.draft_base == len(LAYERS)
    assert layout.layers == (0, 1, 2, 3, 4, 5)
    assert (layout.ratios, layout.draft_layers) == ((*LAYERS, 0, 0), 2)
    assert [ring.section.layer for ring in made.view.rings[C4_POOL]] == [1, 3]
    for layer, draft in enumerate(made.drafts, made.view.draft_base):
        own = draft.unified_kv_pool
        planes = [own.get_unified_kv(0), *([own.get_unified_kv_rope(0)] if fp8 else [])]
        rings = made.view.window_rings(layer)
        assert [r.buffer.data_ptr() for r in rings] == [p.data_ptr() for p in planes]


@pytest.mark.parametrize(
    ("target", "draft", "problem"),
    [
        ({}, {"layers": (4,)}, "windows and nothing else"),
        ({}, {"fp8": True}, "rings .* differ"),
        ({"fp8": True}, {}, "rings .* differ"),
        ({}, {"nope": 64}, "rings .* differ"),
    ],
)
def test_a_draft_with_other_rings_is_refused(target, draft, problem):
    geometry = {"pages": 2, "rows": ROWS, "nope": 448, "rope": 64}
    pool = fixtures.make_kv_pool(**{**geometry, "layers": LAYERS, **target})
    other = fixtures.make_kv_pool(**{**geometry, "layers": (0,), **draft})
    with pytest.raises(ValueError, match=f"--speculative-draft-model-path: .*{problem}"):
        DeviceView(pool, [other])


@pytest.mark.parametrize(("tokens", "fits"), [(0, True), (1, True), (2, False)])
def test_rings_that_a_round_would_overrun_are_refused(tokens, fits):
    """These rings have 128 rows: a round of two tokens needs one more."""
    view = DeviceView(fixtures.make_kv_pool(pages=2, rows=ROWS, layers=LAYERS))
    assert view.ring_size == 128
    with nullcontext() if fits else pytest.raises(ValueError, match="--speculative-num-draft"):
        check_rings(view, tokens)
