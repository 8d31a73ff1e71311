"""Gather and scatter of window and state rows: plain torch, any device, current stream.

The index arithmetic of geometry.py, vectorised over the boundaries of a forward. Index tensors are
built once a forward on the host and used by every layer; per layer there is one gather and one
checksum for all boundaries together, nothing per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_bitexact_hicache.checksum import section_checksums
from sglang_bitexact_hicache.geometry import ring_row, span, window_span


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

    @property
    def reads_ring(self) -> bool:
        """Whether part of the window, or all of it, comes from the ring."""
        return self.chunk_start > window_span(self.boundary)[0]


def to_device(index: torch.Tensor, device: torch.device, pin: bool) -> torch.Tensor:
    """Copy a host index tensor to the device without blocking the host."""
    return index.pin_memory().to(device, non_blocking=True) if pin else index.to(device)


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
            torch.tensor(column, dtype=torch.int64).unsqueeze(1)
            for column in zip(
                *((span(s.boundary, rows)[0], s.chunk_start, s.chunk_row, s.slot) for s in sources),
                strict=True,
            )
        )
        position = start + torch.arange(rows)
        chunk = flat + position - first
        in_ring = position < first
        self._count = len(sources)
        self._rows = rows
        self._staging = to_device(torch.tensor(list(staging), dtype=torch.int64), device, pin)
        self._chunk = self._ring_rows = self._ring_into = None
        ring_rows = ring_row(slot, ring, position).flatten()
        if bool(in_ring.all()):
            self._ring_rows = to_device(ring_rows, device, pin)
            return
        self._chunk = to_device(chunk.clamp(min=0).flatten(), device, pin)
        if bool(in_ring.any()):
            which = in_ring.flatten().nonzero().flatten()
            self._ring_into = to_device(which, device, pin)
            self._ring_rows = to_device(ring_rows[which], device, pin)

    def run(
        self,
        chunk: torch.Tensor | None,
        ring: torch.Tensor,
        into: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        """Queue one section's gather.

        Args:
            chunk: ``[tokens, row]``, the forward's rows; cast to the ring's dtype as the layer's own
                store casts it (round to nearest). Not looked at where the ring holds every position
                (after a forward: all sources have `chunk_start` at their boundary).
            ring: ``[ring rows, row]``, read only where a span begins before the chunk.
            into: ``[staging slots, rows, row]``, a section of device staging.
            sums: int64 ``[staging slots]``, the section's checksums.
        """
        if self._chunk is None:
            flat = ring.index_select(0, self._ring_rows)
        else:
            flat = chunk.index_select(0, self._chunk).to(into.dtype)
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
        slot = torch.tensor(list(slots), dtype=torch.int64).unsqueeze(1)
        start = torch.tensor([span(b, rows)[0] for b in boundaries]).unsqueeze(1)
        index = ring_row(slot, ring, start + torch.arange(rows))
        self._into = to_device(index.flatten(), device, pin)
        self._staging = to_device(torch.tensor(list(staging), dtype=torch.int64), device, pin)

    def run(self, staged: torch.Tensor, ring: torch.Tensor) -> None:
        """Queue one section's scatter: `staged` is ``[staging slots, rows, row]``, `ring` is
        ``[ring rows, row]``."""
        rows = staged.index_select(0, self._staging)
        ring.index_copy_(0, self._into, rows.flatten(0, 1))
