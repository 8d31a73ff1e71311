"""Capture: the true window and state of every wanted boundary of a forward, into host slots.

Life of a capture, all on the scheduler thread: `begin` before the forward takes device staging and
builds the index tensors; the forward's hooks (forward_hooks.py) call `gather_window` and
`gather_state` once a layer, before the layer touches its ring; `finish` right after the forward was
launched queues one copy a pool and boundary to the host slot, on the capture lane, and returns the
event that every reader of those host bytes waits on.

A decode step is captured after its forward, when the rings hold the boundary's positions:
`gather_after` takes the place of `begin` and the hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_bitexact_hicache import checksum
from sglang_bitexact_hicache.constants import STATE_ROWS, WINDOW
from sglang_bitexact_hicache.device_view import DeviceView, Ring
from sglang_bitexact_hicache.gather import Source, SpanGather
from sglang_bitexact_hicache.layout import POOLS
from sglang_bitexact_hicache.pipeline import RecordPipeline
from sglang_bitexact_hicache.ring_gather import open_ring_gather
from sglang_bitexact_hicache.transfer import Event


@dataclass
class CapturePlan:
    """The boundaries that one forward captures, and how far that has come."""

    sources: list[Source]
    staging: list[int]
    gathered: set[int]
    """Indices of the sections gathered so far; `finish` refuses a record with a hole."""
    window: SpanGather | None = None
    state: SpanGather | None = None
    """How the hooks find a layer's rows; None where the forward is over."""


class CapturePipeline(RecordPipeline):
    """Device side of capture; see the module's docstring."""

    def __init__(self, view: DeviceView, *args: Any, **kwargs: Any) -> None:
        super().__init__(view, *args, **kwargs)
        for rings in view.rings.values():
            checksum.prepare(rings[0].section.nbytes, view.device)
        self._ring_gather = open_ring_gather(view, self.staging, pin=self._pin)

    def begin(self, sources: Sequence[Source]) -> CapturePlan:
        """Take staging for the boundaries of a forward (at most `staging.slots`), before it runs.

        The current (forward) stream waits for older captures that still leave that staging.
        """
        plan = self._take_staging(sources)
        plan.window, plan.state = (
            SpanGather(sources, rows, ring, plan.staging, self._view.device, pin=self._pin)
            for rows, ring in (
                (WINDOW, self._view.ring_size),
                (STATE_ROWS, self._view.state_ring_size),
            )
        )
        return plan

    def gather_after(self, sources: Sequence[Source]) -> CapturePlan:
        """Take staging and queue every section's rows as the rings hold them now, after the forward.

        Streams as `begin`. Whoever overwrites those ring rows from another stream waits on an event
        recorded after this.
        """
        plan = self._take_staging(sources)
        self._ring_gather.run(sources, plan.staging)
        plan.gathered.update(range(self._view.layout.num_sections))
        return plan

    def _take_staging(self, sources: Sequence[Source]) -> CapturePlan:
        staging, busy = self.staging.take(len(sources))
        for event in busy:
            self._counters.staging_waits += not event.done()
            event.wait()
        return CapturePlan(list(sources), staging, gathered=set())

    def gather_window(self, plan: CapturePlan, layer: int, chunk: torch.Tensor) -> None:
        """Queue one layer's window rows; `chunk` is the layer's K, bf16 ``[tokens, head_dim]``."""
        self._gather(plan, plan.window, self._view.window_ring(layer), chunk)

    def gather_state(self, plan: CapturePlan, ring: Ring, chunk: torch.Tensor) -> None:
        """Queue one layer's C4 or indexer state rows; `chunk` is fp32 ``[tokens, 4 * head_dim]``."""
        self._gather(plan, plan.state, ring, chunk)

    def _gather(self, plan: CapturePlan, span: SpanGather, ring: Ring, chunk: torch.Tensor) -> None:
        section = ring.section
        first = self._view.rings[section.pool][0].section.index
        span.run(
            chunk,
            ring.buffer,
            self.staging.rows(section.pool, section.index - first),
            self.staging.checksums[:, section.index],
        )
        plan.gathered.add(section.index)

    def finish(self, plan: CapturePlan, host_slots: Sequence[int], after: Sequence[Event]) -> Event:
        """Queue the copies to the host slots (one for each source, in order).

        `after`: events of copies that still read those host slots. Returns the event of the host
        bytes. Raises RuntimeError if the forward did not pass every layer of the stage.
        """
        missing = self._view.layout.num_sections - len(plan.gathered)
        if missing:
            self.abandon(plan)
            raise RuntimeError(f"the forward skipped {missing} of the layers to capture")
        copies = [
            (self._pools.device_part(pool, host), self.staging.buffers[pool][slot])
            for slot, host in zip(plan.staging, host_slots, strict=True)
            for pool in POOLS
        ]
        event = self._lane.submit(copies, [self._lane.mark(), *after])
        self._counters.bytes_captured += sum(source.nbytes for _, source in copies)
        self.staging.give_back(plan.staging, event)
        return event

    def abandon(self, plan: CapturePlan) -> None:
        """The forward failed: give its staging back, once what it queued has run."""
        self.staging.give_back(plan.staging, self._lane.mark())
