"""Gather and scatter of window and state rows: plain torch, any device, current stream.

The index arithmetic of geometry.py, vectorised over the boundaries of a forward. Index tensors are
built once a forward on the host and used by every layer; per section there is one gather and one
checksum for all boundaries together, nothing per token. The reference for the kernels (kernels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_bitexact_hicache.checksum import section_checksums
from sglang_bitexact_hicache.constants import WINDOW
from sglang_bitexact_hicache.geometry import ring_row, span


@dataclass(frozen=True)
class Source:
    """Where the rows of one boundary come from, in one forward.

    Attributes:
        slot: the request's row (`req_pool_idx`).
        chunk_start: absolute position of the first token that this forward computes for it.
        chunk_row: row of that token in the forward's flat ``[tokens, ...]`` tensors.
        boundary: the page boundary P.
    """

    slot: int
    chunk_start: int
    chunk_row: int
    boundary: int

    def reads_ring_for(self, rows: int) -> bool:
        """Whether some of the last `rows` positions before the boundary come from the ring."""
        return self.chunk_start > span(self.boundary, rows)[0]

    @property
    def reads_ring(self) -> bool:
        """Whether part of the window, or all of it, comes from the ring."""
        return self.reads_ring_for(WINDOW)


def to_device(index: np.ndarray, device: torch.device, pin: bool) -> torch.Tensor:
    """Copy indices, int64, to the device without blocking the host."""
    host = torch.from_numpy(index)
    return host.pin_memory().to(device, non_blocking=True) if pin else host.to(device)


class SpanGather:
    """Gathers the last `rows` positions before each boundary from a chunk, or from the ring where
    the span begins before the chunk (it must run before the layer overwrites the ring).

    The ring is read as it was before this forward; positions of the chunk come from the chunk
    tensor, which holds every position, not only the trailing window that reaches the ring.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        rows: int,
        ring: int,
        staging: Sequence[int],
        device: torch.device,
        *,
        pin: bool,
    ) -> None:
        start, first, flat, slot = (
            np.array(column)[:, None]
            for column in zip(
                *((span(s.boundary, rows)[0], s.chunk_start, s.chunk_row, s.slot) for s in sources),
                strict=True,
            )
        )
        position = start + np.arange(rows)
        in_ring = position < first
        self._count = len(sources)
        self._rows = rows
        self._staging = to_device(np.array(staging), device, pin)
        self._chunk: torch.Tensor | None = None
        self._ring_rows: torch.Tensor | None = None
        self._ring_into: torch.Tensor | None = None
        ring_rows = ring_row(slot, ring, position)
        if in_ring.all():
            self._ring_rows = to_device(ring_rows.ravel(), device, pin)
            return
        self._chunk = to_device((flat + position - first).clip(min=0).ravel(), device, pin)
        if in_ring.any():
            self._ring_into = to_device(np.flatnonzero(in_ring), device, pin)
            self._ring_rows = to_device(ring_rows[in_ring], device, pin)

    def run(
        self,
        chunk: torch.Tensor | None,
        ring: torch.Tensor,
        into: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        """Queue one section's gather.

        Args:
            chunk: ``[tokens, row]``, the forward's rows, elements as wide as the ring's. Not looked
                at where the ring holds every position (after a forward: all sources have `chunk_start`
                at their boundary).
            ring: ``[ring rows, row]``, read only where a span begins before the chunk.
            into: ``[staging slots, rows, row]``, a section of device staging.
            sums: int64 ``[staging slots]``, the section's checksums.
        """
        if self._chunk is None:
            flat = ring.index_select(0, self._ring_rows)
        else:
            assert chunk is not None, "some source has rows in the chunk"
            flat = chunk.index_select(0, self._chunk).view(into.dtype)
            if self._ring_rows is not None:
                flat.index_copy_(0, self._ring_into, ring.index_select(0, self._ring_rows))
        rows = flat.view(self._count, self._rows, -1)
        into.index_copy_(0, self._staging, rows)
        sums.index_copy_(0, self._staging, section_checksums(rows))


class SpanScatter:
    """Writes staged rows of the last `rows` positions before each boundary into ring rows."""

    def __init__(
        self,
        slots: Sequence[int],
        boundaries: Sequence[int],
        rows: int,
        ring: int,
        staging: Sequence[int],
        device: torch.device,
        *,
        pin: bool,
    ) -> None:
        slot = np.array(slots)[:, None]
        start = np.array([span(b, rows)[0] for b in boundaries])[:, None]
        self._into = to_device(ring_row(slot, ring, start + np.arange(rows)).ravel(), device, pin)
        self._staging = to_device(np.array(staging), device, pin)

    def run(self, staged: torch.Tensor, ring: torch.Tensor) -> None:
        """Queue one section's scatter: `staged` is ``[staging slots, rows, row]``, `ring` is
        ``[ring rows, row]``."""
        rows = staged.index_select(0, self._staging)
        ring.index_copy_(0, self._into, rows.flatten(0, 1))
