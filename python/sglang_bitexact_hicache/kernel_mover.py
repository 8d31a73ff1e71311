"""RowMover with Triton kernels: one launch where plain torch needs six a section (kernels.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from sglang_bitexact_hicache import kernels
from sglang_bitexact_hicache.device_view import DeviceView, Ring
from sglang_bitexact_hicache.gather import Source, to_device
from sglang_bitexact_hicache.layout import C4_POOL, INDEXER_POOL, WINDOW_POOL, Section
from sglang_bitexact_hicache.row_mover import Part, RowMover
from sglang_bitexact_hicache.staging import DeviceStaging

_PARTS = {(WINDOW_POOL, 0): 0, (C4_POOL, 0): 1, (INDEXER_POOL, 0): 2, (WINDOW_POOL, 1): 3}


def part_of(section: Section) -> int:
    """Which chunk tensor of a layer a section is gathered from."""
    return _PARTS[section.pool, section.plane]


class CaptureIndex(NamedTuple):
    """Where the boundaries of one forward are: int64 ``[5, boundaries]`` on the device (kernels.py), and
    whether any window begins before its chunk, which the host knows."""

    where: torch.Tensor
    reads_ring: bool


ALIGNMENT = 4 * kernels.ALIGNED_WORDS
"""Of a ring's first byte; its rows follow from it."""


class KernelMover(RowMover):
    """See the module's docstring. The rings are allocated once and never move.

    Raises ValueError where a ring is not the plain rows that the kernels take it for.
    """

    def __init__(self, view: DeviceView, staging: DeviceStaging, *, pin: bool) -> None:
        super().__init__(view, staging, pin=pin)
        # Layer by layer, so that one launch covers a layer's sections.
        by_layer = sorted(
            (ring for rings in view.rings.values() for ring in rings),
            key=lambda ring: (ring.section.layer, ring.section.index),
        )
        for ring in by_layer:
            if not ring.buffer.is_contiguous() or ring.buffer.data_ptr() % ALIGNMENT:
                raise ValueError(
                    f"the ring of {ring.section.pool}, layer {ring.section.layer}, is not contiguous "
                    f"rows from a multiple of {ALIGNMENT} bytes on"
                )
        words = math.gcd(*(ring.section.row_bytes // 4 for ring in by_layer))
        self._segment = min(kernels.MAX_SEGMENT_WORDS, words & -words)
        block = 4 * self._segment * kernels.BLOCK_SEGMENTS
        self._kernels = kernels.Kernels(
            staging.memory.view(torch.int32),
            staging.checksums,
            segment_words=self._segment,
            whole_blocks=all(ring.section.nbytes % block == 0 for ring in by_layer),
        )
        self._layer_of = {ring.section.index: ring.section.layer for ring in by_layer}
        self._blocks: dict[int, range] = {}
        table: list[list[int]] = []
        for ring in by_layer:
            start = len(table)
            table += self._entries(ring)
            self._blocks[ring.section.index] = range(start, len(table))
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._table = torch.tensor(table, dtype=torch.int64).to(view.device)
        self._compile()

    def _compile(self) -> None:
        """Compile what the forwards will launch; the first of each kind would take seconds otherwise."""
        nowhere = self._where(*[[]] * 5)
        layout = self._view.layout
        kinds = dict(zip(layout.ratios, layout.layers, strict=True))
        for reads_ring in (False, True):
            index = CaptureIndex(nowhere, reads_ring)
            for layer in kinds.values():
                parts = [self._empty_part(ring) for ring in self._rings_of(layer)]
                self.gather_layer(index, parts)
                if reads_ring and len(parts) > 1:
                    for part in parts:
                        self.gather_layer(index, [part])
        self.gather_rings(index)
        self.scatter(self.scatter_index([], [], []))

    def _rings_of(self, layer: int) -> list[Ring]:
        rings = (ring for rings in self._view.rings.values() for ring in rings)
        return [ring for ring in rings if ring.section.layer == layer]

    @staticmethod
    def _empty_part(ring: Ring) -> Part:
        """As a forward without tokens would give it."""
        return Part(ring, ring.buffer.new_empty((0, ring.buffer.shape[1])))

    def _entries(self, ring: Ring) -> Iterator[list[int]]:
        section = ring.section
        row_segments = section.row_bytes // 4 // self._segment
        for first in range(0, section.rows * row_segments, kernels.BLOCK_SEGMENTS):
            yield [
                ring.buffer.data_ptr(),
                ring.size,
                section.rows,
                row_segments,
                first,
                self._view.layout.device_offset(section) // 4,
                section.index,
                part_of(section),
            ]

    def capture_index(self, sources: Sequence[Source], slots: Sequence[int]) -> CaptureIndex:
        """As RowMover: one small copy, and the checksums of the slots cleared, which the kernel's
        blocks add to."""
        where = self._where(
            slots,
            [s.slot for s in sources],
            [s.boundary for s in sources],
            [s.chunk_start for s in sources],
            [s.chunk_row for s in sources],
        )
        self._staging.checksums.index_fill_(0, where[0], 0)
        return CaptureIndex(where, any(s.reads_ring for s in sources))

    def gather_layer(self, index: CaptureIndex, parts: Sequence[Part]) -> None:
        """As RowMover, one launch. Raises ValueError unless the parts lie next to each other in the
        table: they are one layer's."""
        self._kernels.gather(
            self._table_of(tuple(part.ring.section.index for part in parts)),
            index.where,
            chunks={part_of(part.ring.section): part.chunk for part in parts},
            reads_ring=index.reads_ring,
        )

    def _table_of(self, sections: tuple[int, ...]) -> torch.Tensor:
        """The blocks of some sections; looked up, since it is asked for once a layer."""
        if sections not in self._tables:
            spans = sorted((self._blocks[i] for i in sections), key=lambda span: span.start)
            layers = {self._layer_of[i] for i in sections}
            if len(layers) > 1 or any(a.stop != b.start for a, b in pairwise(spans)):
                raise ValueError(f"sections {sections} are of more than one layer")
            self._tables[sections] = self._table[spans[0].start : spans[-1].stop]
        return self._tables[sections]

    def gather_rings(self, index: CaptureIndex) -> None:
        """As RowMover, one launch."""
        self._kernels.gather(self._table, index.where)

    def scatter_index(
        self, rows: Sequence[int], boundaries: Sequence[int], slots: Sequence[int]
    ) -> torch.Tensor:
        """As RowMover: one small copy, int64 ``[3, restores]`` (kernels.py)."""
        return self._where(slots, rows, boundaries)

    def scatter(self, index: torch.Tensor) -> None:
        """As RowMover, one launch."""
        self._kernels.scatter(self._table, index)

    def _where(self, *columns: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(columns, dtype=np.int64), self._view.device, self._pin)
