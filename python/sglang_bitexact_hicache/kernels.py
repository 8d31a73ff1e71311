"""Triton kernels between rings and staging records. Imported only where a device can run them.

A table on the device describes the sections in blocks of `BLOCK_SEGMENTS` segments; a segment is a few
32-bit words of one row. So one kernel serves rows of every width and dtype (fp8 planes too), all
layers, all boundaries, in one launch. Nothing in them is not portable to ROCm, and they run under
Triton's interpreter on a CPU (tests).

Table, int64 ``[blocks, 8]``: address of the ring buffer, rows of a ring a request row, rows of the
section, segments of a row, first segment of the block, where the section starts in a staging record
(words), its index among the checksums, and which chunk it is gathered from.

Where, int64 ``[3 or 5, boundaries]``: staging slot, request row, boundary; for a gather also the
position of the first token that the forward computes for that request, and its row in the chunks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang_bitexact_hicache import checksum

BLOCK_SEGMENTS = 32
"""Segments of a block: 4 KiB where a segment is full."""

GATHER_WARPS = 2
SCATTER_WARPS = 4
"""Warps that move a block, as measured on an H200."""

MAX_SEGMENT_WORDS = 32
"""Words of a segment at most: a line of the caches."""

ALIGNED_WORDS = 4
"""Words that one thread moves at once where every row begins at a multiple of that."""

FIELDS = tl.constexpr(8)
MULTIPLIER = tl.constexpr(checksum.MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(checksum.SECOND_MULTIPLIER)
SHIFT = tl.constexpr(checksum.SHIFT)


@triton.jit
def _ring_rows(entry, at, boundaries, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """(segments, which are inside, their positions and columns, pointers into the ring)."""
    request = tl.load(at + boundaries).to(tl.int32)
    boundary = tl.load(at + 2 * boundaries).to(tl.int32)
    ring = tl.load(entry).to(tl.pointer_type(tl.int32))
    size = tl.load(entry + 1).to(tl.int32)
    rows = tl.load(entry + 2).to(tl.int32)
    row_segments = tl.load(entry + 3).to(tl.int32)
    segment = tl.load(entry + 4).to(tl.int32) + tl.arange(0, BLOCK)
    row = segment // row_segments
    column = (segment - row * row_segments) * WORDS
    position = boundary - rows + row
    at = (request * size + position % size).to(tl.int64) * (row_segments * WORDS) + column
    return segment, segment < rows * row_segments, position, column, ring + at


@triton.jit
def _load(rows, mask, ALIGNED: tl.constexpr, WORDS: tl.constexpr):
    """Segments that begin where `rows` points, ``[segments, words]``."""
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    return tl.load(rows[:, None] + tl.arange(0, WORDS)[None, :], mask=mask[:, None], other=0)


@triton.jit
def _bf16_bits(bits):
    """Bits of the bf16 nearest to an fp32 (ties to even), in the low half of a word; a NaN stays one.

    By integers: the same on every device, and Triton's interpreter does not round.
    """
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)


@triton.jit
def _load_narrowed(rows, mask, WORDS: tl.constexpr):
    """Segments of a bf16 ring out of the fp32 elements where `rows` points: two make a word."""
    pairs = rows[:, None] + 2 * tl.arange(0, WORDS)[None, :]
    low = tl.load(pairs, mask=mask[:, None], other=0)
    high = tl.load(pairs + 1, mask=mask[:, None], other=0)
    return _bf16_bits(low) | (_bf16_bits(high) << 16)


@triton.jit
def _weights(word):
    """checksum.weights of word positions, int32."""
    x = (word + 1).to(tl.uint32) * MULTIPLIER
    x = (x ^ (x >> SHIFT)) * SECOND_MULTIPLIER
    return ((x ^ (x >> SHIFT)) | 1).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["boundaries", "stride0", "stride1", "stride2", "stride3"])
def _gather(
    table,
    where,
    boundaries,
    staging,
    staging_stride,
    sums,
    sums_stride,
    chunk0,
    stride0,
    chunk1,
    stride1,
    chunk2,
    stride2,
    chunk3,
    stride3,
    FROM_CHUNK: tl.constexpr,
    READS_RING: tl.constexpr,
    NARROW: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one boundary: rows of the chunk or the ring to staging, and their checksum."""
    entry = table + tl.program_id(0) * FIELDS
    at = where + tl.program_id(1)
    slot = tl.load(at)
    segment, inside, position, column, old = _ring_rows(entry, at, boundaries, BLOCK, WORDS)
    if FROM_CHUNK:
        start = tl.load(at + 3 * boundaries).to(tl.int32)
        row = (tl.load(at + 4 * boundaries) + position - start).to(tl.int64)
        part = tl.load(entry + 7)
        chunk = chunk0.to(tl.pointer_type(tl.int32))
        stride = stride0
        if part == 1:
            chunk = chunk1.to(tl.pointer_type(tl.int32))
            stride = stride1
        elif part == 2:
            chunk = chunk2.to(tl.pointer_type(tl.int32))
            stride = stride2
        elif part == 3:
            chunk = chunk3.to(tl.pointer_type(tl.int32))
            stride = stride3
        computed = inside
        if READS_RING:
            computed = inside & (position >= start)
        if NARROW:
            if part > 0:
                value = _load_narrowed(chunk + row * stride + 2 * column, computed, WORDS)
            else:
                value = _load(chunk + row * stride + column, computed, ALIGNED, WORDS)
        else:
            value = _load(chunk + row * stride + column, computed, ALIGNED, WORDS)
        if READS_RING:
            kept = inside & (position < start)
            value = tl.where(kept[:, None], _load(old, kept, ALIGNED, WORDS), value)
    else:
        value = _load(old, inside, ALIGNED, WORDS)
    lane = tl.arange(0, WORDS)
    word = (segment * WORDS)[:, None] + lane[None, :]
    into = staging + slot * staging_stride + tl.load(entry + 5)
    tl.store(into + word, value, mask=inside[:, None])
    total = tl.sum(value.to(tl.int64) * _weights(word).to(tl.int64))
    tl.atomic_add(sums + slot * sums_stride + tl.load(entry + 6), total, sem="relaxed")


@triton.jit(do_not_specialize=["boundaries"])
def _scatter(
    table,
    where,
    boundaries,
    staging,
    staging_stride,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one boundary: rows of staging to the ring."""
    entry = table + tl.program_id(0) * FIELDS
    at = where + tl.program_id(1)
    slot = tl.load(at)
    segment, inside, _, _, target = _ring_rows(entry, at, boundaries, BLOCK, WORDS)
    source = staging + slot * staging_stride + tl.load(entry + 5) + segment * WORDS
    value = _load(source, inside, ALIGNED, WORDS)
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    tl.store(target[:, None] + tl.arange(0, WORDS)[None, :], value, mask=inside[:, None])


def gather(
    table: torch.Tensor,
    where: torch.Tensor,
    *,
    staging: torch.Tensor,
    sums: torch.Tensor,
    segment_words: int,
    chunks: Mapping[int, torch.Tensor] | None = None,
    narrow_state: bool = False,
    reads_ring: bool = True,
) -> None:
    """Queue the gather of the table's blocks for every boundary, one launch on the current stream.

    Args:
        table, where: see the module's docstring.
        staging: int32 ``[slots, words of a record]``.
        sums: int64 ``[slots, sections]``, zero where it is added to.
        segment_words: words of a segment, a power of two that divides every row.
        chunks: by part, ``[tokens, row]``, elements of a row contiguous, rows of whole words; None:
            every row is in a ring.
        narrow_state: the chunks but the first are fp32 and their rings bf16.
        reads_ring: whether some row is before its chunk.
    """
    operands: list[torch.Tensor | int] = []
    aligned = segment_words % ALIGNED_WORDS == 0
    for part in range(4):
        chunk = (chunks or {}).get(part)
        if chunk is None:
            operands += [table, 0]  # never looked at, but of a type that can be
        else:
            row_bytes = chunk.stride(0) * chunk.element_size()
            aligned &= (chunk.data_ptr() | row_bytes) % (4 * ALIGNED_WORDS) == 0
            operands += [chunk, row_bytes // 4]
    _gather[(table.shape[0], where.shape[1])](
        table,
        where,
        where.shape[1],
        staging,
        staging.stride(0),
        sums,
        sums.stride(0),
        *operands,
        FROM_CHUNK=chunks is not None,
        READS_RING=reads_ring,
        NARROW=narrow_state,
        ALIGNED=aligned,
        WORDS=segment_words,
        BLOCK=BLOCK_SEGMENTS,
        num_warps=GATHER_WARPS,
    )


def scatter(
    table: torch.Tensor, where: torch.Tensor, *, staging: torch.Tensor, segment_words: int
) -> None:
    """Queue the scatter of the table's blocks for every boundary, one launch on the current stream.
    Arguments as in `gather`."""
    _scatter[(table.shape[0], where.shape[1])](
        table,
        where,
        where.shape[1],
        staging,
        staging.stride(0),
        ALIGNED=segment_words % ALIGNED_WORDS == 0,
        WORDS=segment_words,
        BLOCK=BLOCK_SEGMENTS,
        num_warps=SCATTER_WARPS,
    )
