"""Where the bytes of a boundary are: one pure definition for the writer and for the reader.

A boundary P is a multiple of the page size. Its window is the positions [P - 128, P) of every
layer; its state is the positions [P - 4, P) of every ratio-4 layer. On the device both live in rings
addressed by the request's row (`req_pool_idx`): position p of a request in row `slot` is at
`slot * ring + p % ring`. The ring size is not a power of two under speculation, so host bytes are
always in position order.

Pure Python: knows nothing of SGLang, torch or a device. Any thread.
"""

from __future__ import annotations

from typing import Any

from sglang_bitexact_hicache.constants import PAGE_SIZE, STATE_ROWS, WINDOW


def boundaries(start: int, end: int) -> range:
    """Page boundaries that the tokens [start, end) complete: multiples of the page in (start, end]."""
    if start < 0 or end < start:
        raise ValueError(f"not a span of tokens: [{start}, {end})")
    return range((start // PAGE_SIZE + 1) * PAGE_SIZE, end + 1, PAGE_SIZE)


def span(boundary: int, rows: int) -> tuple[int, int]:
    """Positions [lo, hi) of the last `rows` positions before a boundary (ValueError if it is none)."""
    if boundary <= 0 or boundary % PAGE_SIZE:
        raise ValueError(f"{boundary} is not a page boundary (multiple of {PAGE_SIZE})")
    return boundary - rows, boundary


def window_span(boundary: int) -> tuple[int, int]:
    """Positions [lo, hi) of the window at a boundary; `lo` is the request's `buf_lo`."""
    return span(boundary, WINDOW)


def state_span(boundary: int) -> tuple[int, int]:
    """Positions [lo, hi) of the C4 and C4-indexer state at a boundary."""
    return span(boundary, STATE_ROWS)


def ring_row(slot: Any, ring: int, position: Any) -> Any:
    """Row of a position in a per-request ring buffer of `ring` rows per slot.

    Integers, or integer arrays that broadcast against each other.
    """
    return slot * ring + position % ring
