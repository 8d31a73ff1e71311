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
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_bitexact_hicache import checksum

BLOCK_SEGMENTS = 32
"""Segments of a block: 4 KiB where a segment is full."""

WARPS = 2
"""Warps that move a block, as measured on an H200."""

MAX_SEGMENT_WORDS = 32
"""Words of a segment at most: a line of the caches."""

ALIGNED_WORDS = 4
"""Words that one thread moves at once where every row begins at a multiple of that."""

FIELDS = tl.constexpr(8)
MULTIPLIER = tl.constexpr(checksum.MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(checksum.SECOND_MULTIPLIER)
COLUMN_MULTIPLIER = tl.constexpr(checksum.COLUMN_MULTIPLIER)
SHIFT = tl.constexpr(checksum.SHIFT)
LINE = tl.constexpr(checksum.LINE)


_SCATTER_NUMBERS = ("boundaries", "staging_stride")
_GATHER_NUMBERS = (
    *_SCATTER_NUMBERS,
    "sums_stride",
    *(f"{what}{part}" for part in range(4) for what in ("chunk", "stride")),
)
"""Arguments that Triton need not look at, of the types that the kernels say: the addresses of chunks are
numbers, whatever their dtype (`_Launcher`)."""


@triton.jit
def _segments(entry, at, boundaries, BLOCK: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr):
    """(segments, which of them are the section's, their rows and columns, the first row's position,
    pointers into the ring). What is the same for all of them stays scalar: the rest is paid per word."""
    request = tl.load(at + boundaries)
    boundary = tl.load(at + 2 * boundaries).to(tl.int32)
    size = tl.load(entry + 1)
    rows = tl.load(entry + 2).to(tl.int32)
    row_segments = tl.load(entry + 3).to(tl.int32)
    segment = tl.load(entry + 4).to(tl.int32) + tl.arange(0, BLOCK)
    row = (segment.to(tl.uint32) // row_segments.to(tl.uint32)).to(tl.int32)
    inside = tl.full((BLOCK,), True, tl.int1) if WHOLE else segment < rows * row_segments
    column = (segment - row * row_segments) * WORDS
    row_words = row_segments * WORDS
    ring = tl.load(entry).to(tl.pointer_type(tl.int32)) + request * size * row_words
    # A section has no more rows than its ring.
    size = size.to(tl.int32)
    ring_row = ((boundary - rows).to(tl.uint32) % size.to(tl.uint32)).to(tl.int32) + row
    ring_row = tl.where(ring_row >= size, ring_row - size, ring_row)
    return segment, inside, row, column, boundary - rows, ring + (ring_row * row_words + column)


@triton.jit
def _words(rows, ALIGNED: tl.constexpr, WORDS: tl.constexpr):
    """Pointers to every word of the segments that begin where `rows` points."""
    words = rows[:, None] + tl.arange(0, WORDS)[None, :]
    if ALIGNED:
        # Here, not on `rows`: what is said of a function's argument is lost where it is inlined.
        words = tl.multiple_of(words, (1, 16))
    return words


@triton.jit
def _load(rows, mask, ALIGNED: tl.constexpr, WORDS: tl.constexpr):
    """Segments that begin where `rows` points, ``[segments, words]``."""
    return tl.load(_words(rows, ALIGNED, WORDS), mask=mask[:, None], other=0)


@triton.jit
def _weights(segment, WORDS: tl.constexpr):
    """checksum.weights of the segments' words, int32."""
    first = segment * WORDS
    x = (first // LINE + 1).to(tl.uint32) * MULTIPLIER
    x = (x ^ (x >> SHIFT)) * SECOND_MULTIPLIER
    x = x ^ (x >> SHIFT)
    column = (first % LINE)[:, None] + tl.arange(0, WORDS)[None, :]
    weights = (x[:, None] ^ (column.to(tl.uint32) * COLUMN_MULTIPLIER)) | 1
    return weights.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=_GATHER_NUMBERS)
def _gather(
    table,
    where,
    boundaries: tl.int32,
    staging,
    staging_stride: tl.int64,
    sums,
    sums_stride: tl.int32,
    chunk0: tl.int64,
    stride0: tl.int32,
    chunk1: tl.int64,
    stride1: tl.int32,
    chunk2: tl.int64,
    stride2: tl.int32,
    chunk3: tl.int64,
    stride3: tl.int32,
    FROM_CHUNK: tl.constexpr,
    READS_RING: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one boundary: rows of the chunk or the ring to staging, and their checksum."""
    entry = table + tl.program_id(0) * FIELDS
    at = where + tl.program_id(1)
    slot = tl.load(at)
    segment, inside, row, column, first, old = _segments(entry, at, boundaries, BLOCK, WORDS, WHOLE)
    if FROM_CHUNK:
        start = tl.load(at + 3 * boundaries).to(tl.int32)
        skipped = tl.load(at + 4 * boundaries) + first - start
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
        chunk += skipped * stride
        computed = inside
        if READS_RING:
            computed = inside & (first + row >= start)
        value = _load(chunk + (row * stride + column), computed, ALIGNED, WORDS)
        if READS_RING:
            kept = inside & (first + row < start)
            value = tl.where(kept[:, None], _load(old, kept, ALIGNED, WORDS), value)
    else:
        value = _load(old, inside, ALIGNED, WORDS)
    into = staging + slot * staging_stride + tl.load(entry + 5)
    tl.store(_words(into + segment * WORDS, ALIGNED, WORDS), value, mask=inside[:, None])
    total = tl.sum(value.to(tl.int64) * _weights(segment, WORDS).to(tl.int64))
    tl.atomic_add(sums + slot * sums_stride + tl.load(entry + 6), total, sem="relaxed")


@triton.jit(do_not_specialize=_SCATTER_NUMBERS)
def _scatter(
    table,
    where,
    boundaries: tl.int32,
    staging,
    staging_stride: tl.int64,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one boundary: rows of staging to the ring."""
    entry = table + tl.program_id(0) * FIELDS
    at = where + tl.program_id(1)
    slot = tl.load(at)
    segment, inside, _, _, _, target = _segments(entry, at, boundaries, BLOCK, WORDS, WHOLE)
    source = staging + slot * staging_stride + tl.load(entry + 5)
    value = _load(source + segment * WORDS, inside, ALIGNED, WORDS)
    tl.store(_words(target, ALIGNED, WORDS), value, mask=inside[:, None])


class _Launcher:
    """Launches one kernel for one `Kernels`, on the current stream.

    Triton looks at each argument at each launch, for what it may have been compiled with (dtypes, aligned
    addresses; on ROCm, tensors below 2 GiB). Here none of that changes but the constants. So what Triton
    returned for them is launched directly the next time, in a fraction of the host's time, which counts
    where a layer is one launch. Under the interpreter it returns nothing.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, table: torch.Tensor, where: torch.Tensor, *rest: torch.Tensor | int, **constants: Any
    ) -> None:
        """One program for each block of the table and each boundary."""
        grid = (table.shape[0], where.shape[1], 1)
        arguments = (table, where, grid[1], *rest)
        key = tuple(constants.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, *key)
            return
        self._compiled[key] = self._function[grid](*arguments, **constants, num_warps=WARPS)


class Kernels:
    """The kernels over one staging, which stays where it is.

    Args:
        staging: int32 ``[slots, words of a record]``.
        sums: int64 ``[slots, sections]``.
        segment_words: words of a segment, a power of two that divides every row.
        whole_blocks: every section is a number of whole blocks.
    """

    def __init__(
        self, staging: torch.Tensor, sums: torch.Tensor, *, segment_words: int, whole_blocks: bool
    ) -> None:
        self._staging = (staging, staging.stride(0))
        self._sums = (sums, sums.stride(0))
        self._aligned = segment_words % ALIGNED_WORDS == 0
        self._shape = {"WHOLE": whole_blocks, "WORDS": segment_words, "BLOCK": BLOCK_SEGMENTS}
        self._gather = _Launcher(_gather)
        self._scatter = _Launcher(_scatter)

    def gather(
        self,
        table: torch.Tensor,
        where: torch.Tensor,
        *,
        chunks: Mapping[int, torch.Tensor] | None = None,
        reads_ring: bool = True,
    ) -> None:
        """Queue the gather of the table's blocks for every boundary, one launch on the current stream.
        Its checksums are added to the sums.

        Args:
            table, where: see the module's docstring; aligned to 16 bytes, as fresh tensors and whole
                entries of a table are.
            chunks: by part, ``[tokens, row]``, elements of a row contiguous, rows of whole words; None:
                every row is in a ring.
            reads_ring: whether some row is before its chunk.

        Raises:
            ValueError: rows of a chunk are not whole words.
        """
        operands: list[int] = []
        aligned = self._aligned
        nothing = table.data_ptr()  # never looked at, but of a type that can be
        for part in range(4):
            chunk = None if chunks is None else chunks.get(part)
            if chunk is None:
                operands += (nothing, 0)
            else:
                address = chunk.data_ptr() or nothing
                row_bytes = chunk.stride(0) * chunk.element_size()
                if row_bytes % 4 or chunk.stride(1) != 1:
                    raise ValueError(
                        f"rows of a chunk are not whole words: strides {chunk.stride()}"
                    )
                aligned &= (address | row_bytes) % (4 * ALIGNED_WORDS) == 0
                operands += (address, row_bytes // 4)
        self._gather(
            table,
            where,
            *self._staging,
            *self._sums,
            *operands,
            FROM_CHUNK=chunks is not None,
            READS_RING=reads_ring,
            ALIGNED=aligned,
            **self._shape,
        )

    def scatter(self, table: torch.Tensor, where: torch.Tensor) -> None:
        """Queue the scatter of the table's blocks for every boundary, one launch on the current stream.
        Arguments as in `gather`."""
        self._scatter(table, where, *self._staging, ALIGNED=self._aligned, **self._shape)
