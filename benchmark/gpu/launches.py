"""The launches that move most, each against the floor of its bytes: the gather of a decode step that
completes many pages, and the scatter of a batch of restores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gpu.config import PAGE
from gpu.feature import Server
from gpu.timing import device_ms, medians, whole
from sglang_bitexact_hicache.gather import Source
from sglang_bitexact_hicache.row_mover import open_mover
from sglang_bitexact_hicache.staging import DeviceStaging

COUNTS = (8, 32)
"""Boundaries in one launch: 70 and 282 MiB of rows for the model."""


@dataclass(frozen=True)
class Launch:
    """One launch: what it does, bytes that it reads and writes, device time in ms."""

    what: str
    nbytes: int
    ms: float

    def vs_floor(self, rate: float) -> float:
        """Its time over that of its bytes at `rate` bytes a second."""
        return self.ms / (1e3 * self.nbytes / rate)


def measure(server: Server, repeats: int) -> list[Launch]:
    """Both kinds, for each count; other staging than the runtime's, the same movers."""
    view = server.view
    staging = DeviceStaging(view.layout, max(COUNTS), view.device)
    mover = open_mover(view, staging, pin=True)
    rows = sum(ring.section.nbytes for rings in view.rings.values() for ring in rings)
    found = []
    for count in COUNTS:
        slots = list(range(count))
        sources = [Source(1 + i, PAGE * (1 + i), 0, PAGE * (1 + i)) for i in slots]
        gathered = mover.capture_index(sources, slots)
        scattered = mover.scatter_index(
            [s.slot for s in sources], [s.boundary for s in sources], slots
        )
        arms = {
            f"gather of {count} boundaries": partial(mover.gather_rings, gathered),
            f"scatter of {count} boundaries": partial(mover.scatter, scattered),
        }
        ms = medians(
            {
                what: lambda work=work: device_ms(whole(work), ahead_ms=5)
                for what, work in arms.items()
            },
            2 * repeats,
        )
        found += [Launch(what, 2 * count * rows, time) for what, time in ms.items()]
    return found
