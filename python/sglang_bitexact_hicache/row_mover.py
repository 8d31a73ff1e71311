"""Rows between the device's rings and staging records: what capture and restore queue on the forward
stream.

`RowMover` is plain torch, section by section, on any device: the reference, and what a CPU uses.
`KernelMover` (kernel_mover.py) does the same in one launch: a layer's sections of every boundary that
the running forward captures, every section of the boundaries that a decode step completed, every
section of a batch of restores. Both leave the same bytes and the same checksums.

Current (forward) stream, scheduler thread. Whoever overwrites from another stream what is read here
waits on an event recorded afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_bitexact_hicache.constants import STATE_ROWS, WINDOW
from sglang_bitexact_hicache.device_view import DeviceView, Ring
from sglang_bitexact_hicache.gather import Source, SpanGather, SpanScatter
from sglang_bitexact_hicache.staging import DeviceStaging


@dataclass(frozen=True)
class Part:
    """One section of the layer that a forward is at: its ring, still the old one, and what the forward
    computed for it, ``[tokens, row]``, which is moved as bytes.

    Raises ValueError where the layer's own store would cast it.
    """

    ring: Ring
    chunk: torch.Tensor

    def __post_init__(self) -> None:
        if self.chunk.dtype.itemsize != self.ring.buffer.dtype.itemsize:
            raise ValueError(f"rows of {self.chunk.dtype}, not of {self.ring.buffer.dtype}")


def open_mover(view: DeviceView, staging: DeviceStaging, *, pin: bool) -> RowMover:
    """The fastest RowMover that the device has."""
    if view.device.type == "cpu":
        return RowMover(view, staging, pin=pin)
    from sglang_bitexact_hicache.kernel_mover import KernelMover

    return KernelMover(view, staging, pin=pin)


class RowMover:
    """See the module's docstring. `pin`: whether index tensors are pinned on their way to the device."""

    def __init__(self, view: DeviceView, staging: DeviceStaging, *, pin: bool) -> None:
        self._view = view
        self._staging = staging
        self._pin = pin

    def capture_index(self, sources: Sequence[Source], slots: Sequence[int]) -> Any:
        """Put on the device, once a forward, where the rows of each boundary are and which staging
        slot they go to."""
        return {
            rows: SpanGather(sources, rows, ring, slots, self._view.device, pin=self._pin)
            for rows, ring in self._spans
        }

    def gather_layer(self, index: Any, parts: Sequence[Part]) -> None:
        """Queue some sections of one layer, for every boundary of the index, with their checksums."""
        for part in parts:
            self._gather(index, part.ring, part.chunk)

    def gather_rings(self, index: Any) -> None:
        """Queue every section, as the rings hold it now, with its checksum; for sources that read
        nothing from a chunk (after a forward: all have `chunk_start` at their boundary)."""
        for rings in self._view.rings.values():
            for ring in rings:
                self._gather(index, ring, None)

    def scatter_index(
        self, rows: Sequence[int], boundaries: Sequence[int], slots: Sequence[int]
    ) -> Any:
        """Put on the device which staging slot goes to which request row, whose next token is at the
        boundary. It reads nothing of the staging, so it need not come after the copies into it."""
        return {
            count: SpanScatter(
                rows, boundaries, count, ring, slots, self._view.device, pin=self._pin
            )
            for count, ring in self._spans
        }

    def scatter(self, index: Any) -> None:
        """Queue every section of the index's staging slots into the rings of its request rows."""
        for rings in self._view.rings.values():
            for ring in rings:
                staged = self._staging.rows(ring.section, ring.buffer.dtype)
                index[ring.section.rows].run(staged, ring.buffer)

    def _gather(self, index: Any, ring: Ring, chunk: torch.Tensor | None) -> None:
        section = ring.section
        sums = self._staging.checksums[:, section.index]
        staged = self._staging.rows(section, ring.buffer.dtype)
        index[section.rows].run(chunk, ring.buffer, staged, sums)

    @property
    def _spans(self) -> tuple[tuple[int, int], ...]:
        return (WINDOW, self._view.ring_size), (STATE_ROWS, self._view.state_ring_size)
