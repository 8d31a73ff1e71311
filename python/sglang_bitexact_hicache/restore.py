"""Restore: a record's rows back into the rings of the request that was just given a row.

`stage` (when the request is admitted and its row known) starts the copy from host memory into
device staging on the restore lane; `apply` (on the forward stream, immediately before the forward
that consumes the rows) waits for it and scatters all layers of the batch in one launch. On the
forward stream neither the clear of a fresh row nor a late write of the row's previous owner can come
after it. A batch with more restores than staging is applied in waves of half the staging, so that
copies fill one half while the other is scattered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from sglang_bitexact_hicache.pipeline import RecordPipeline
from sglang_bitexact_hicache.transfer import Event


@dataclass
class Restore:
    """One request's pending restore.

    Attributes:
        row: the request's row (`req_pool_idx`).
        boundary: the page boundary P that its prefix ends at.
        host_slot: the locked host slot with the truth of P.
        written: event of the host bytes (the capture may still be in flight).
        admitted: when it was made, by the host's clock in seconds.
        staging: its staging slot once staged, with `copied`, the event of the staged bytes.
    """

    row: int
    boundary: int
    host_slot: int
    written: Event | None
    admitted: float = field(default_factory=time.perf_counter)
    staging: int | None = None
    copied: Event | None = None


class RestorePipeline(RecordPipeline):
    """Device side of restore; see the module's docstring."""

    def stage(self, restore: Restore) -> bool:
        """Start a restore's copy if staging has room; otherwise `apply` will, in a later wave."""
        if not self.staging.free:
            return False
        (slot,), busy = self.staging.take(1)
        after = busy if restore.written is None else [*busy, restore.written]
        source = self._pools.device_part(restore.host_slot)
        restore.copied = self._lane.submit([(self.staging.memory[slot], source)], after)
        self._counters.bytes_restored += source.nbytes
        restore.staging = slot
        return True

    def drop(self, restore: Restore) -> None:
        """The request went away before its first forward: give its staging back."""
        if restore.staging is not None:
            self.staging.give_back([restore.staging], restore.copied)

    def apply(self, restores: Sequence[Restore]) -> None:
        """Scatter the restores into the rings, on the current (forward) stream."""
        pending = list(restores)
        while pending:
            staged = [r for r in pending if r.staging is not None or self.stage(r)]
            wave = staged
            if len(staged) < len(pending):
                wave = staged[: max(1, self.staging.slots // 2)]
                self._counters.restore_waves += 1
            self._scatter(wave)
            applied = {id(r) for r in wave}
            pending = [r for r in pending if id(r) not in applied]

    def _scatter(self, wave: Sequence[Restore]) -> None:
        staging = [cast(int, r.staging) for r in wave]
        rows, boundaries = [r.row for r in wave], [r.boundary for r in wave]
        # Its own copy travels while those of the records still do.
        index = self._mover.scatter_index(rows, boundaries, staging)
        for restore in wave:
            cast(Event, restore.copied).wait()
        self._mover.scatter(index)
        self.staging.give_back(staging, self._lane.mark())
        self._counters.restored += len(wave)
