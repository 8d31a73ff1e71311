"""Triton kernels over rings and records. Imported only where a device can run them.

Everything is moved and summed as 32-bit words, so one kernel serves every dtype. They use nothing that
is not portable to ROCm, and run under Triton's interpreter on a CPU (tests).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 2048


@triton.jit
def _gather_rings(
    rings,
    where,
    into,
    weights,
    sums,
    boundaries,
    into_stride,
    sums_stride,
    ring,
    section_words: tl.constexpr,
    row_words: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of words of one boundary's section: ring rows to staging, and their checksum."""
    section = tl.program_id(0)
    boundary = tl.program_id(1)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = word < section_words
    source = tl.load(rings + section).to(tl.pointer_type(tl.int32))
    slot = tl.load(where + boundary)
    first_row = tl.load(where + boundaries + boundary) * ring
    end = tl.load(where + 2 * boundaries + boundary)
    position = end - section_words // row_words + word // row_words
    row = first_row + position % ring
    value = tl.load(source + row * row_words + word % row_words, mask=inside, other=0)
    tl.store(into + slot * into_stride + section * section_words + word, value, mask=inside)
    weight = tl.load(weights + word, mask=inside, other=0)
    part = tl.sum(value.to(tl.int64) * weight, axis=0)
    tl.atomic_add(sums + slot * sums_stride + section, part)


def gather_rings(
    rings: torch.Tensor,
    where: torch.Tensor,
    *,
    into: torch.Tensor,
    sums: torch.Tensor,
    weights: torch.Tensor,
    ring: int,
    rows: int,
) -> None:
    """Queue the gather of every section of one pool for every boundary, on the current stream.

    Args:
        rings: int64 ``[sections]``, addresses of the pool's ring buffers.
        where: int64 ``[3, boundaries]``: staging slot, request row, boundary (tokens).
        into: int32 ``[staging slots, sections * section words]``, the pool's rows in staging.
        sums: int64 ``[staging slots, >= sections]``, zero where it is added to; the pool's sections
            are its first columns.
        weights: int64 ``[section words]`` (checksum.py).
        ring: rows of a ring a request row.
        rows: rows of a section.
    """
    sections, boundaries = rings.shape[0], where.shape[1]
    section_words = weights.shape[0]
    block = min(BLOCK_WORDS, triton.next_power_of_2(section_words))
    _gather_rings[(sections, boundaries, triton.cdiv(section_words, block))](
        rings,
        where,
        into,
        weights,
        sums,
        boundaries,
        into.stride(0),
        sums.stride(0),
        ring,
        section_words=section_words,
        row_words=section_words // rows,
        BLOCK=block,
    )
