"""The host header of a record in storage: nothing passes but the record that was asked for, whole."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bitexact_hicache import record
from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.kv_chain import mark_pages
from sglang_bitexact_hicache.layout import (
    C4_POOL,
    HOST_FIXED_BYTES,
    INDEXER_POOL,
    KV_DIGEST_BYTES,
    KV_MARKS,
    POOLS,
    SECTION_HASH_BYTES,
    WINDOW_POOL,
    RecordLayout,
)
from sglang_bitexact_hicache.record import IDENTITY_BYTES, RecordRefused, Seal, check, seal

LAYERS, RATIOS = (7, 8, 9, 10), (0, 4, 128, 4)
SMALL = RecordLayout(LAYERS, RATIOS, 32, 64, 64)
FEW = RecordLayout(LAYERS, RATIOS, 1024, 8192, 2048)
"""Sections as large as DeepSeek-V4-Pro's, a few of them."""
REAL = RecordLayout(tuple(range(61)), (0, *[4, 128] * 30), 1024, 8192, 2048)

IDENTITY = bytes(range(IDENTITY_BYTES))
PAGE_HASH = hashlib.sha256(b"page").hexdigest()
BOUNDARY = 70 * PAGE_SIZE
ASKED = {"identity": IDENTITY, "boundary": BOUNDARY, "page_hash": PAGE_HASH}

# The stored format, written down a second time: field -> (offset, bytes).
FIELDS = {
    "magic": (0, 8),
    "version": (8, 8),
    "identity": (16, 16),
    "boundary": (32, 8),
    "page hash": (40, 32),
    "header length": (72, 8),
    "sections": (80, 8),
    "marks": (88, 8),
    "window length": (96, 8),
    "c4 length": (104, 8),
    "indexer length": (112, 8),
    "kv chain": (120, 16),
}
CHECKSUM = (136, 8)


def some_marks(boundary: int, seed: int = 0) -> list[bytes]:
    count = len(mark_pages(boundary // PAGE_SIZE))
    return list(map(bytes, np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)))


def captured(layout: RecordLayout, seed: int = 0) -> dict[str, np.ndarray]:
    """Records as a capture leaves them, in a slot that was used before: random bytes everywhere."""
    rng = np.random.default_rng(seed)
    return {pool: rng.integers(0, 256, layout.record_bytes(pool), np.uint8) for pool in POOLS}


def sealed(layout: RecordLayout, seed: int = 0, **other) -> dict[str, np.ndarray]:
    records = captured(layout, seed)
    asked = {**ASKED, **other}
    seal(records, layout, **asked, marks=some_marks(asked["boundary"], seed))
    return records


def reason(records: dict[str, np.ndarray], layout: RecordLayout, **other) -> str | None:
    """Why the reader refuses, None if it does not."""
    try:
        check(records, layout, **{**ASKED, **other})
    except RecordRefused as refused:
        assert str(refused) == refused.reason
        return refused.reason
    return None


def fix_checksum(window: np.ndarray, layout: RecordLayout) -> None:
    """What a writer of other fields would have left."""
    start, size = CHECKSUM
    window[start : start + size] = 0
    value = xxhash.xxh3_64_intdigest(window[: layout.header_bytes].tobytes())
    window[start : start + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)


def rows_of(records: dict[str, np.ndarray], layout: RecordLayout, pool: str, i: int) -> np.ndarray:
    section = layout.sections(pool)[i]
    return records[pool][section.offset : section.offset + section.nbytes]


def swap(a: np.ndarray, b: np.ndarray) -> None:
    a[:], b[:] = b.copy(), a.copy()


# ---- what is right passes


@pytest.mark.parametrize(
    ("layout", "pages"),
    [(SMALL, pages) for pages in (1, 2, KV_MARKS, KV_MARKS + 1, 4096)]
    + [(FEW, pages) for pages in (1, 800)]
    + [(REAL, pages) for pages in (1, 800)],
)
def test_what_was_sealed_is_read_back(layout, pages):
    records = captured(layout)
    before = {pool: records[pool].copy() for pool in POOLS}
    boundary = pages * PAGE_SIZE
    marks = some_marks(boundary)
    seal(records, layout, **{**ASKED, "boundary": boundary}, marks=marks)
    start = layout.host_header_bytes
    assert np.array_equal(records[WINDOW_POOL][start:], before[WINDOW_POOL][start:])
    assert all(np.array_equal(records[pool], before[pool]) for pool in POOLS[1:])
    for pool in POOLS:
        records[pool].flags.writeable = False
    found = check(records, layout, **{**ASKED, "boundary": boundary})
    assert found == Seal(boundary, marks[-1], tuple(marks))


def test_a_stage_without_ratio_4_layers_has_records_too():
    layout = RecordLayout((0, 1), (0, 128), 32, 64, 64)
    records = sealed(layout)
    assert reason(records, layout) is None
    rows_of(records, layout, WINDOW_POOL, 1)[-1] ^= 1
    assert reason(records, layout) == "section swa_window layer 1"


def test_a_header_does_not_depend_on_what_the_slot_held():
    a, b = captured(SMALL), captured(SMALL)
    b[WINDOW_POOL][: SMALL.host_header_bytes] = 0xFF
    for records in (a, b):
        seal(records, SMALL, **ASKED, marks=some_marks(BOUNDARY))
    assert np.array_equal(a[WINDOW_POOL], b[WINDOW_POOL])


def test_the_header_is_where_the_format_says():
    records = sealed(SMALL)
    header = records[WINDOW_POOL][: SMALL.host_header_bytes].tobytes()
    at = {name: header[start : start + size] for name, (start, size) in FIELDS.items()}
    marks = some_marks(BOUNDARY)
    assert at["magic"] == b"DSV4SWA\0"
    assert at["identity"] == IDENTITY
    assert at["page hash"].hex() == PAGE_HASH
    assert at["kv chain"] == marks[-1]
    numbers = {
        "version": 1,
        "boundary": BOUNDARY,
        "header length": SMALL.header_bytes,
        "sections": SMALL.num_sections,
        "marks": KV_MARKS,
        "window length": SMALL.record_bytes(WINDOW_POOL),
        "c4 length": SMALL.record_bytes(C4_POOL),
        "indexer length": SMALL.record_bytes(INDEXER_POOL),
    }
    assert {name: int.from_bytes(at[name], "little") for name in numbers} == numbers
    assert not any(header[sum(CHECKSUM) : HOST_FIXED_BYTES])
    hashes = HOST_FIXED_BYTES + SECTION_HASH_BYTES * SMALL.num_sections
    for pool in POOLS:
        for i, section in enumerate(SMALL.sections(pool)):
            start = HOST_FIXED_BYTES + SECTION_HASH_BYTES * section.index
            stored = int.from_bytes(header[start : start + SECTION_HASH_BYTES], "little")
            assert stored == xxhash.xxh3_64_intdigest(rows_of(records, SMALL, pool, i).tobytes())
    assert header[hashes : hashes + KV_DIGEST_BYTES * KV_MARKS] == b"".join(marks)
    assert not any(header[hashes + KV_DIGEST_BYTES * KV_MARKS :])


def test_marks_that_are_not_used_are_zero():
    header = sealed(SMALL, boundary=2 * PAGE_SIZE)[WINDOW_POOL][: SMALL.host_header_bytes]
    hashes = HOST_FIXED_BYTES + SECTION_HASH_BYTES * SMALL.num_sections
    assert header[hashes : hashes + 2 * KV_DIGEST_BYTES].any()
    assert not header[hashes + 2 * KV_DIGEST_BYTES :].any()


def test_version_1_is_these_bytes():
    """Whoever changes what a header says or covers meets this, and raises VERSION."""
    records = {pool: np.zeros(SMALL.record_bytes(pool), np.uint8) for pool in POOLS}
    marks = [bytes([i]) * KV_DIGEST_BYTES for i in range(KV_MARKS)]
    seal(records, SMALL, **ASKED, marks=marks)
    header = records[WINDOW_POOL][: SMALL.header_bytes]
    assert record.VERSION == 1
    assert hashlib.sha256(header).hexdigest()[:16] == "38112d30feb1a867"


# ---- damage


def test_no_bit_of_the_header_can_flip():
    records = sealed(SMALL)
    window = records[WINDOW_POOL]
    for byte in range(SMALL.header_bytes):
        for bit in range(8):
            window[byte] ^= 1 << bit
            assert reason(records, SMALL) == "header checksum", (byte, bit)
            window[byte] ^= 1 << bit
    assert reason(records, SMALL) is None


_FEW_SEALED = sealed(FEW)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_bit_of_a_section_can_flip(data):
    pool = data.draw(st.sampled_from(POOLS))
    i = data.draw(st.integers(0, len(FEW.sections(pool)) - 1))
    section = FEW.sections(pool)[i]
    byte = data.draw(st.integers(0, section.nbytes - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    rows = rows_of(_FEW_SEALED, FEW, pool, i)
    rows[byte] ^= bit
    try:
        assert reason(_FEW_SEALED, FEW) == f"section {pool} layer {section.layer}"
    finally:
        rows[byte] ^= bit


def test_the_edges_of_every_section_of_a_real_model_are_covered():
    records = sealed(REAL)
    for pool in POOLS:
        for i, section in enumerate(REAL.sections(pool)):
            if i in (0, 1, len(REAL.sections(pool)) - 1):
                rows = rows_of(records, REAL, pool, i)
                for byte in (0, -1):
                    rows[byte] ^= 0x80
                    assert reason(records, REAL) == f"section {pool} layer {section.layer}"
                    rows[byte] ^= 0x80
    assert reason(records, REAL) is None


def test_alignment_behind_the_last_section_is_not_covered():
    layout = RecordLayout((0,), (4,), 32, 68, 64)
    records = sealed(layout)
    end = layout.sections(C4_POOL)[-1].nbytes
    assert end < layout.record_bytes(C4_POOL)
    records[C4_POOL][end:] ^= 0xFF
    assert reason(records, layout) is None
    records[C4_POOL][end - 1] ^= 1
    assert reason(records, layout) == "section c4_state layer 0"


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "change", ["empty", "short", "long", "half", "words", "signed", "two-dimensional"]
)
def test_records_of_another_length_are_refused_unread(pool, change):
    records = sealed(SMALL)
    right = records[pool]
    records[pool] = {
        "empty": right[:0],
        "short": right[:-1],
        "long": np.append(right, np.uint8(0)),
        "half": right[: right.size // 2],
        "words": right.view(np.uint32),
        "signed": right.view(np.int8),
        "two-dimensional": right.reshape(2, -1),
    }[change]
    assert reason(records, SMALL) == "length"


@pytest.mark.parametrize("value", [0, 0xFF])
def test_blank_records_are_refused(value):
    records = {pool: np.full(SMALL.record_bytes(pool), value, np.uint8) for pool in POOLS}
    assert reason(records, SMALL) == "header checksum"


def test_a_record_that_was_never_sealed_is_refused():
    assert reason(captured(SMALL), SMALL) == "header checksum"


# ---- mix-ups


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_refused_by_its_name_only_under_a_right_checksum(name):
    start, size = FIELDS[name]
    for byte in range(start, start + size):
        records = sealed(SMALL)
        window = records[WINDOW_POOL]
        window[byte] ^= 0x40
        assert reason(records, SMALL) == "header checksum"
        fix_checksum(window, SMALL)
        assert reason(records, SMALL) == name


def test_a_last_mark_that_is_not_the_chain_is_refused():
    records = sealed(SMALL)
    window = records[WINDOW_POOL]
    hashes = HOST_FIXED_BYTES + SECTION_HASH_BYTES * SMALL.num_sections
    window[hashes + KV_DIGEST_BYTES * KV_MARKS - 1] ^= 1
    fix_checksum(window, SMALL)
    assert reason(records, SMALL) == "kv chain"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"identity": bytes(IDENTITY_BYTES)}, "identity"),
        ({"boundary": BOUNDARY + PAGE_SIZE}, "boundary"),
        ({"boundary": PAGE_SIZE}, "boundary"),
        ({"page_hash": "0" * 64}, "page hash"),
        ({"boundary": PAGE_SIZE, "page_hash": "0" * 64}, "boundary"),
        ({"identity": bytes(16), "boundary": PAGE_SIZE, "page_hash": "0" * 64}, "identity"),
    ],
)
def test_another_record_is_refused_for_what_differs(other, expected):
    records = sealed(SMALL, **other)
    assert reason(records, SMALL, **other) is None
    assert reason(records, SMALL) == expected
    # Another configuration is the first thing to say, another format before it.
    for name in ("version", "magic"):
        records[WINDOW_POOL][FIELDS[name][0]] ^= 1
        fix_checksum(records[WINDOW_POOL], SMALL)
        assert reason(records, SMALL) == name


def test_records_of_another_geometry_are_refused():
    assert reason(sealed(FEW), SMALL) == "length"
    assert reason(sealed(SMALL), RecordLayout(LAYERS, (0, 4, 128, 0), 32, 64, 64)) == "length"


@pytest.mark.parametrize("pool", POOLS)
def test_layers_swapped_are_refused(pool):
    records = sealed(SMALL)
    swap(rows_of(records, SMALL, pool, 0), rows_of(records, SMALL, pool, 1))
    assert reason(records, SMALL) == f"section {pool} layer {SMALL.sections(pool)[0].layer}"


def test_positions_swapped_are_refused():
    records = sealed(SMALL)
    rows = rows_of(records, SMALL, WINDOW_POOL, 2).reshape(128, -1)
    swap(rows[3], rows[4])
    assert reason(records, SMALL) == "section swa_window layer 9"


def test_state_records_swapped_are_refused():
    """Where both have the same size, only the hashes can tell."""
    records = sealed(SMALL)
    assert SMALL.record_bytes(C4_POOL) == SMALL.record_bytes(INDEXER_POOL)
    swapped = {**records, C4_POOL: records[INDEXER_POOL], INDEXER_POOL: records[C4_POOL]}
    assert reason(swapped, SMALL) == "section c4_state layer 8"


@pytest.mark.parametrize("pool", POOLS)
def test_a_record_of_another_capture_is_refused(pool):
    """Same key, same configuration, other bytes: what two writers of one key leave behind."""
    a, b = sealed(SMALL, seed=1), sealed(SMALL, seed=2)
    assert reason(a, SMALL) is None and reason(b, SMALL) is None
    a[pool] = b[pool]
    first = C4_POOL if pool == WINDOW_POOL else pool
    assert reason(a, SMALL) == f"section {first} layer {SMALL.sections(first)[0].layer}"


def test_the_rows_of_another_capture_under_this_header_are_refused():
    a, b = sealed(SMALL, seed=1), sealed(SMALL, seed=2)
    a[WINDOW_POOL][SMALL.header_bytes :] = b[WINDOW_POOL][SMALL.header_bytes :]
    assert reason(a, SMALL) == "section swa_window layer 7"


# ---- controls: without the hashes the same damage passes, so it is they that catch it


def test_control_without_the_header_checksum_damage_of_the_header_passes(monkeypatch):
    records = sealed(SMALL, boundary=PAGE_SIZE)
    window = records[WINDOW_POOL]
    window[SMALL.host_header_bytes] ^= 1  # a device checksum
    window[SMALL.host_header_bytes - 1] ^= 1  # padding
    assert reason(records, SMALL, boundary=PAGE_SIZE) == "header checksum"
    start, size = CHECKSUM
    stored = int.from_bytes(window[start : start + size].tobytes(), "little")
    monkeypatch.setattr(record, "_header_checksum", lambda window, layout: stored)
    assert reason(records, SMALL, boundary=PAGE_SIZE) is None


def test_control_without_the_section_hashes_damage_of_rows_passes(monkeypatch):
    records = sealed(SMALL)
    hash_of = record._section_hash
    right = {s.index: hash_of(records, s) for pool in POOLS for s in SMALL.sections(pool)}
    swap(rows_of(records, SMALL, WINDOW_POOL, 0), rows_of(records, SMALL, WINDOW_POOL, 1))
    rows_of(records, SMALL, C4_POOL, 0)[0] ^= 1
    assert reason(records, SMALL) == "section swa_window layer 7"
    monkeypatch.setattr(record, "_section_hash", lambda records, section: right[section.index])
    assert reason(records, SMALL) is None


# ---- arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"identity": b"short"},
        {"boundary": 0},
        {"boundary": -PAGE_SIZE},
        {"boundary": PAGE_SIZE + 1},
        {"page_hash": ""},
        {"page_hash": PAGE_HASH[:-1]},
        {"page_hash": PAGE_HASH + "0"},
        {"page_hash": PAGE_HASH + "\n"},
        {"page_hash": PAGE_HASH.upper()},
        {"page_hash": "g" * 64},
        {"page_hash": " ".join(["ab"] * 32)},
    ],
)
def test_arguments_that_name_no_record_are_the_callers_mistake(wrong):
    records = sealed(SMALL)
    before = {pool: records[pool].copy() for pool in POOLS}
    with pytest.raises(ValueError):
        check(records, SMALL, **{**ASKED, **wrong})
    with pytest.raises(ValueError):
        seal(records, SMALL, **{**ASKED, **wrong}, marks=some_marks(BOUNDARY))
    assert all(np.array_equal(records[pool], before[pool]) for pool in POOLS)


@pytest.mark.parametrize(
    "marks",
    [
        [],
        some_marks(BOUNDARY)[:-1],
        [*some_marks(BOUNDARY), bytes(16)],
        [*some_marks(BOUNDARY)[:-1], bytes(15)],
    ],
    ids=["none", "one less", "one more", "short"],
)
def test_marks_that_do_not_fit_the_boundary_are_not_sealed(marks):
    records = captured(SMALL)
    before = records[WINDOW_POOL].copy()
    with pytest.raises(ValueError, match="marks"):
        seal(records, SMALL, **ASKED, marks=marks)
    assert np.array_equal(records[WINDOW_POOL], before)


def test_records_of_another_length_are_not_sealed():
    records = captured(SMALL)
    records[C4_POOL] = records[C4_POOL][:-1]
    with pytest.raises(ValueError, match="length"):
        seal(records, SMALL, **ASKED, marks=some_marks(BOUNDARY))
