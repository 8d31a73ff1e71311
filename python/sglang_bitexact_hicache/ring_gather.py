"""Gather of whole spans from the rings into device staging, after a forward: the decode step's capture.

A decode step that completes a page leaves the page's window and state in the rings. All sections of a
pool are taken in one kernel launch, through a table of the rings' addresses, with their checksums; on a
device without Triton, section by section in plain torch (gather.py), which is also the reference that
the kernel is tested against (bit for bit, under Triton's interpreter and on a GPU).

Current (forward) stream, scheduler thread. Whoever overwrites those ring rows from another stream waits
on an event recorded afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_bitexact_hicache.checksum import section_weights
from sglang_bitexact_hicache.constants import STATE_ROWS, WINDOW
from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.gather import Source, SpanGather, to_device
from sglang_bitexact_hicache.layout import POOLS, WINDOW_POOL
from sglang_bitexact_hicache.staging import DeviceStaging


def open_ring_gather(view: DeviceView, staging: DeviceStaging, *, pin: bool) -> RingGather:
    """The fastest RingGather that the device has."""
    if view.device.type == "cpu":
        return RingGather(view, staging, pin=pin)
    return KernelRingGather(view, staging, pin=pin)


class RingGather:
    """Plain torch: one gather and one checksum a section."""

    def __init__(self, view: DeviceView, staging: DeviceStaging, *, pin: bool) -> None:
        self._view = view
        self._staging = staging
        self._pin = pin

    def run(self, sources: Sequence[Source], slots: Sequence[int]) -> None:
        """Queue the gather of each source's boundary into its staging slot (in order)."""
        view, staging = self._view, self._staging
        for rows, size, pools in (
            (WINDOW, view.ring_size, (WINDOW_POOL,)),
            (STATE_ROWS, view.state_ring_size, POOLS[1:]),
        ):
            span = SpanGather(sources, rows, size, slots, view.device, pin=self._pin)
            for pool in pools:
                for i, ring in enumerate(view.rings[pool]):
                    sums = staging.checksums[:, ring.section.index]
                    span.run(None, ring.buffer, staging.rows(pool, i), sums)


class KernelRingGather(RingGather):
    """One Triton launch a pool (kernels.py)."""

    def __init__(self, view: DeviceView, staging: DeviceStaging, *, pin: bool) -> None:
        super().__init__(view, staging, pin=pin)
        # The rings are allocated once and never move.
        self._rings = {
            pool: torch.tensor([ring.buffer.data_ptr() for ring in rings], dtype=torch.int64).to(
                view.device
            )
            for pool, rings in view.rings.items()
        }

    def run(self, sources: Sequence[Source], slots: Sequence[int]) -> None:
        """As RingGather: three launches, one small copy of indices."""
        from sglang_bitexact_hicache import kernels

        view, staging = self._view, self._staging
        columns = [list(slots), [s.slot for s in sources], [s.boundary for s in sources]]
        where = to_device(torch.tensor(columns, dtype=torch.int64), view.device, self._pin)
        # The kernel adds each block's part of a checksum.
        staging.checksums.index_fill_(0, where[0], 0)
        for pool, rings in view.rings.items():
            section = rings[0].section
            kernels.gather_rings(
                self._rings[pool],
                where,
                into=staging.words(pool),
                sums=staging.checksums[:, section.index :],
                weights=section_weights(section.nbytes, view.device),
                ring=rings[0].size,
                rows=section.rows,
            )
