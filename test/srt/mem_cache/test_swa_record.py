"""Record geometry: which positions a boundary owns, and where a record keeps them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bitexact_hicache.constants import C4_RATIO, PAGE_SIZE, STATE_ROWS, WINDOW
from sglang_bitexact_hicache.geometry import boundaries, ring_row, state_span, window_span
from sglang_bitexact_hicache.layout import (
    ALIGNMENT,
    C4_POOL,
    CHECKSUM_BYTES,
    HOST_FIXED_BYTES,
    INDEXER_POOL,
    KV_DIGEST_BYTES,
    KV_MARKS,
    POOLS,
    SECTION_HASH_BYTES,
    WINDOW_POOL,
    RecordLayout,
)
from sglang_bitexact_hicache.policy import Keep, Kind, most_wanted, prefill_points, prompt_points

ratios = st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=61)


@st.composite
def layouts(draw):
    kinds = tuple(draw(ratios))
    first = draw(st.integers(0, 100))
    drafts = draw(st.integers(0, 2))
    drafts = drafts if drafts < len(kinds) and not any(kinds[len(kinds) - drafts :]) else 0
    return RecordLayout(
        layers=tuple(range(first, first + len(kinds))),
        ratios=kinds,
        window_row_bytes=draw(st.sampled_from([32, 640, 1024])),
        c4_row_bytes=draw(st.sampled_from([64, 4096, 8192])),
        indexer_row_bytes=draw(st.sampled_from([64, 1024, 2048])),
        rope_row_bytes=draw(st.sampled_from([0, 4, 128])),
        draft_layers=drafts,
    )


@given(layouts())
def test_sections_tile_each_record_without_overlap(layout):
    indices = []
    for pool in POOLS:
        end = layout.header_bytes if pool == WINDOW_POOL else 0
        layers = layout.layers if pool == WINDOW_POOL else layout.c4_layers
        planes = len(layout.window_planes) if pool == WINDOW_POOL else 1
        sections = layout.sections(pool)
        places = [(layer, plane) for layer in layers for plane in range(planes)]
        assert [(s.layer, s.plane) for s in sections] == places
        for section in sections:
            assert section.offset == end
            assert section.rows == (WINDOW if pool == WINDOW_POOL else STATE_ROWS)
            end += section.nbytes
            indices.append(section.index)
        assert end <= layout.record_bytes(pool) < end + ALIGNMENT
        assert layout.record_bytes(pool) % ALIGNMENT == 0
    assert indices == list(range(layout.num_sections))
    assert layout.slot_bytes == sum(layout.record_bytes(pool) for pool in POOLS)


@given(layouts())
def test_the_header_has_room_for_every_part(layout):
    host = HOST_FIXED_BYTES + SECTION_HASH_BYTES * layout.num_sections + KV_DIGEST_BYTES * KV_MARKS
    assert host <= layout.host_header_bytes < host + ALIGNMENT
    whole = layout.host_header_bytes + CHECKSUM_BYTES * layout.num_sections
    assert whole <= layout.header_bytes < whole + ALIGNMENT
    # The device part of a record is as aligned as the record.
    assert layout.host_header_bytes % ALIGNMENT == layout.header_bytes % ALIGNMENT == 0


def test_the_header_of_a_real_model():
    layout = RecordLayout(tuple(range(61)), (0, *[4, 128] * 30), 1024, 8192, 2048)
    assert layout.num_sections == 121
    assert (layout.host_header_bytes, layout.header_bytes) == (2304, 3328)
    assert layout.slot_bytes == 9_227_520


def test_the_sizes_of_a_real_model_with_fp8_rows():
    layout = RecordLayout(
        tuple(range(61)), (0, *[4, 128] * 30), 512, 8192, 2048, "float8_e4m3fn", rope_row_bytes=128
    )
    assert layout.num_sections == 182
    assert layout.slot_bytes == 4352 + 61 * 128 * (512 + 128) + 30 * 4 * (8192 + 2048)


@given(layouts(), layouts())
def test_digest_is_equal_exactly_when_the_layouts_are(a, b):
    assert (a.digest() == b.digest()) == (a == b)


def test_a_record_with_a_drafts_window_is_no_record_without_one():
    target = RecordLayout((0, 1), (0, 4), 1024, 8192, 2048)
    longer = RecordLayout((0, 1, 2), (0, 4, 0), 1024, 8192, 2048)
    drafting = dataclasses.replace(longer, draft_layers=1)
    assert drafting.slot_bytes == longer.slot_bytes == target.slot_bytes + 128 * 1024
    assert len({layout.digest() for layout in (target, longer, drafting)}) == 3


def test_a_draft_with_fp8_rows_has_both_planes_in_the_record():
    target = RecordLayout(
        (0, 1), (0, 4), 512, 8192, 2048, window_dtype="float8_e4m3fn", rope_row_bytes=128
    )
    drafting = dataclasses.replace(target, layers=(0, 1, 2), ratios=(0, 4, 0), draft_layers=1)
    assert drafting.slot_bytes == target.slot_bytes + 128 * (512 + 128)
    last = drafting.sections(WINDOW_POOL)[-2:]
    assert [(s.layer, s.plane, s.row_bytes) for s in last] == [(2, 0, 512), (2, 1, 128)]
    bf16 = dataclasses.replace(
        drafting, window_row_bytes=1024, window_dtype="bfloat16", rope_row_bytes=0
    )
    assert len({layout.digest() for layout in (target, drafting, bf16)}) == 3


def test_state_pools_hold_ratio_4_layers_only():
    layout = RecordLayout((3, 4, 5, 6), (0, 4, 128, 4), 1024, 8192, 2048)
    assert layout.c4_layers == (4, 6)
    assert [s.layer for s in layout.sections(C4_POOL)] == [4, 6]
    assert layout.record_bytes(INDEXER_POOL) == 2 * STATE_ROWS * 2048


@pytest.mark.parametrize(
    "change",
    [
        {"layers": ()},
        {"layers": (1, 1)},
        {"layers": (0, 1, 2)},
        {"window_row_bytes": 0},
        {"c4_row_bytes": 6},
        {"rope_row_bytes": 130},
        {"draft_layers": -1},
        {"draft_layers": 1},
        {"ratios": (0, 0), "draft_layers": 2},
    ],
)
def test_an_impossible_layout_is_refused(change):
    right = {
        "layers": (0, 1),
        "ratios": (0, 4),
        "window_row_bytes": 1024,
        "c4_row_bytes": 8192,
        "indexer_row_bytes": 2048,
    }
    RecordLayout(**right)
    with pytest.raises(ValueError):
        RecordLayout(**{**right, **change})


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_boundaries_are_the_pages_that_a_chunk_completes(start, length):
    end = start + length
    by_hand = [p for p in range(start + 1, end + 1) if p % PAGE_SIZE == 0]
    assert list(boundaries(start, end)) == by_hand


@given(st.integers(1, 100), st.integers(0, 40), st.integers(WINDOW, 300))
def test_a_window_has_a_row_of_its_own_for_each_position(page, slot, ring):
    lo, hi = window_span(page * PAGE_SIZE)
    assert hi - lo == WINDOW
    rows = [ring_row(slot, ring, p) for p in range(lo, hi)]
    assert len(set(rows)) == WINDOW
    assert all(slot * ring <= r < (slot + 1) * ring for r in rows)


def test_the_state_ends_where_the_window_ends():
    assert state_span(512) == (508, 512)
    assert window_span(512) == (384, 512)
    assert STATE_ROWS == C4_RATIO


@pytest.mark.parametrize("wrong", [0, -256, 255, 257])
def test_only_page_boundaries_have_a_window(wrong):
    with pytest.raises(ValueError):
        window_span(wrong)


@given(
    st.integers(1, 40 * PAGE_SIZE),
    st.sampled_from([256, 512, 2560]),
    st.integers(1, 12),
    st.integers(0, 40),
    st.booleans(),
    st.sets(st.sampled_from(Kind)),
)
def test_every_boundary_is_kept_once_and_as_dearly_as_its_best_reason(
    prompt, chunk, stride, junction, parts, kinds
):
    junction *= PAGE_SIZE
    kept = []
    for start in range(0, prompt, chunk):
        end = min(start + chunk, prompt)
        kept += prefill_points(
            start, end, prompt, stride, junction=junction, parts=parts, kinds=kinds
        )
    expected = {}
    for boundary in range(PAGE_SIZE, prompt + 1, PAGE_SIZE):
        if Kind.FILL in kinds:
            expected[boundary] = Keep.FILL
        if Kind.GRID in kinds and boundary % (stride * PAGE_SIZE) == 0:
            expected[boundary] = Keep.GRID
        if Kind.PROMPT in kinds and boundary in prompt_points(prompt):
            expected[boundary] = Keep.POINT
        if Kind.JUNCTION in kinds and boundary == junction:
            expected[boundary] = Keep.USED if parts else Keep.POINT
    assert kept == sorted(expected.items())


@given(st.lists(st.sampled_from(Keep), max_size=12), st.integers(-1, 14))
def test_what_does_not_fit_is_the_least_wanted_and_the_shallowest(keeps, room):
    points = prefill_points(0, len(keeps) * PAGE_SIZE, 1, 1)
    points = [p._replace(keep=keep) for p, keep in zip(points, keeps, strict=True)]
    kept = most_wanted(points, room)
    assert len(kept) == min(max(room, 0), len(points))
    assert kept == sorted(kept)
    left = set(points) - set(kept)
    assert all((a.keep, a.boundary) < (b.keep, b.boundary) for a in left for b in kept)


@pytest.mark.parametrize(
    ("prompt", "points"),
    [
        (255, set()),
        (256, {256}),
        (257, {256}),
        (512, {256, 512}),
        (513, {512}),
        (700, {512}),
    ],
)
def test_a_repeat_and_a_longer_prompt_both_find_their_point(prompt, points):
    assert prompt_points(prompt) == points


@pytest.mark.parametrize(
    ("prompt", "points"),
    [(255, set()), (256, {256}), (257, {256}), (258, {256}), (513, {256, 512}), (514, {512})],
)
def test_with_pairs_of_tokens_a_repeat_resumes_before_its_last_two(prompt, points):
    assert prompt_points(prompt, key_tokens=2) == points


def test_a_stride_below_one_page_is_refused():
    with pytest.raises(ValueError, match="stride"):
        prefill_points(0, 512, 512, 0)
