"""How many host slots the truth pools get, what they cost, when that is refused, and how many of them
one request may hold.

Pure Python. The numbers come from the caller; nothing is read from the machine here, and nothing is
clamped: a pool that is silently smaller than asked for would look like a cache that forgets.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.settings import STRIDE_ARGUMENT, TAIL_ARGUMENT

logger = logging.getLogger(__name__)

TAIL_SLOTS_PER_ROW = 2
"""Slots off the grid for each request row: the two points of a prompt where a repeat resumes."""

TAIL_PAGES_PER_SLOT = 6
"""One more slot off the grid for this many host pages that are off it (measured: docs/reuse.md)."""

WARN_BYTES = 16 * 10**9
"""Above this the pools' size is reported as a warning."""

DRAM_FRACTION = 0.9
"""The part of the free host memory that the pools of all ranks on a host may take together."""

LONGEST_PROMPT = 200_000
"""Tokens of the longest prompt whose whole grid one request may hold by default."""

LEAST_ROW_LIMIT = 2
"""A running request keeps its newest two decode boundaries."""


@dataclass(frozen=True)
class Sizing:
    """The truth pools of one rank.

    Attributes:
        grid_slots: slots for every `stride`-th page of the host cache.
        tail_slots: slots for boundaries off the grid.
        slot_bytes: host bytes of one slot over the three pools.
        row_limit: slots that one request may hold before a tree node owns them.
    """

    grid_slots: int
    tail_slots: int
    slot_bytes: int
    row_limit: int

    @property
    def slots(self) -> int:
        """Slots of each of the three pools, which share one slot space."""
        return self.grid_slots + self.tail_slots

    @property
    def nbytes(self) -> int:
        """Host bytes of the three pools."""
        return self.slots * self.slot_bytes


def size(
    *,
    full_host_pages: int,
    stride: int,
    request_rows: int,
    slot_bytes: int,
    context_length: int,
    tail_slots: int | None = None,
    row_limit_override: int | None = None,
) -> Sizing:
    """The pools' size.

    Args:
        full_host_pages: pages (256 tokens) of the host cache of the compressed KV.
        stride: pages between two boundaries of the grid, at least 1.
        request_rows: requests that can run at once (rows of the ReqToTokenPool).
        slot_bytes: host bytes of one slot (`RecordLayout.slot_bytes`).
        context_length: tokens that a request can have.
        tail_slots: slots off the grid, None for 2 a row and 1 for every 6 pages
            off the grid.
        row_limit_override: slots that one request may hold, None for the default (`row_limit`).
    """
    grid_slots = -(-full_host_pages // stride)
    if tail_slots is None:
        off_grid = full_host_pages - grid_slots
        tail_slots = TAIL_SLOTS_PER_ROW * request_rows + off_grid // TAIL_PAGES_PER_SLOT
    limit = row_limit(context_length, stride, grid_slots + tail_slots, row_limit_override)
    return Sizing(grid_slots, tail_slots, slot_bytes, limit)


def row_limit(context_length: int, stride: int, slots: int, override: int | None = None) -> int:
    """The most slots that one request may hold before a tree node owns them: the grid of its longest
    prompt and one boundary more, but no more than 1.5 times the pool.

    Args:
        context_length: tokens that a request can have; what is above LONGEST_PROMPT does not count.
        stride: pages between two boundaries of the grid, at least 1.
        slots: slots of the pool.
        override: what the user asked for; taken as it is.
    """
    if override is not None:
        return override
    grid = -(-min(LONGEST_PROMPT, context_length) // (PAGE_SIZE * stride))
    return max(LEAST_ROW_LIMIT, min(grid + 1, slots * 3 // 2))


def check(sizing: Sizing, *, stride: int, available_dram: int, ranks: int) -> None:
    """Warns of a large size and refuses one that host memory cannot hold. Silent otherwise.

    Args:
        sizing: the pools of one rank.
        stride: the stride they were sized with, for the message.
        available_dram: free bytes of host memory, one reading for the host.
        ranks: ranks on this host, each with pools of its own (TP, PP and DP counted).

    Raises:
        ValueError: the host cache has no page, or the pools take more than 0.9 of each rank's share
            of the memory.
    """
    numbers = (
        f"{sizing.grid_slots} slots on the grid (stride {stride}) and {sizing.tail_slots} off it, "
        f"{sizing.slot_bytes} bytes each, {sizing.nbytes / 1e9:.2f} GB of pinned host memory a rank"
    )
    if sizing.grid_slots <= 0:
        raise ValueError(
            f"the host cache has no page, so there is nothing to come back to: {numbers}. Raise "
            "--hicache-ratio."
        )
    allowed = DRAM_FRACTION * available_dram / ranks
    if sizing.nbytes > allowed:
        tail_is_larger = sizing.tail_slots > sizing.grid_slots
        first = f"Lower {TAIL_ARGUMENT}" if tail_is_larger else f"Raise {STRIDE_ARGUMENT}"
        second = f"raise {STRIDE_ARGUMENT}" if tail_is_larger else f"lower {TAIL_ARGUMENT}"
        raise ValueError(
            f"the bit-exact SWA pools do not fit in host memory: {numbers}, but {ranks} rank(s) on "
            f"this host may take {allowed / 1e9:.2f} GB each (0.9 of {available_dram / 1e9:.2f} GB "
            f"free). {first}, or {second}, or lower --hicache-ratio."
        )
    if sizing.nbytes > WARN_BYTES:
        logger.warning("bit-exact SWA pools: %s; %s makes them smaller", numbers, STRIDE_ARGUMENT)


def startup_line(
    sizing: Sizing, *, stride: int, ranks: int, staging_bytes: int, layout: str, checked: bool
) -> str:
    """The one line that a rank logs about itself when it starts.

    Args:
        sizing: the pools of one rank.
        stride: the stride they were sized with.
        ranks: ranks on this host, each with as much.
        staging_bytes: device bytes of the staging records of one rank, both directions.
        layout: digest of the record layout.
        checked: whether every restore is verified.
    """
    return (
        f"bit-exact HiCache: {sizing.slots} windows of {sizing.slot_bytes} bytes in host memory "
        f"({sizing.grid_slots} on the grid of stride {stride}, {sizing.tail_slots} off it; a request "
        f"holds at most {sizing.row_limit} that no node owns), {_gigabytes(sizing.nbytes)} a rank; "
        f"device staging {_gigabytes(staging_bytes)} a rank; on this host {ranks} rank(s), "
        f"{_gigabytes(ranks * sizing.nbytes)} of host memory and {_gigabytes(ranks * staging_bytes)} "
        f"of device staging; layout {layout}, checks {'on' if checked else 'off'}"
    )


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB"
