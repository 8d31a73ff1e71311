"""Capture: the true window and state of every wanted boundary of a forward, into host slots.

Life of a capture, all on the scheduler thread: `begin` before the forward takes device staging and
puts the index on the device; the forward's hooks (forward_hooks.py) hand in each layer's rows before
the layer touches its rings, `gather_state` once a compressor and then `gather_window`, which queues
one gather for the layer; `finish` right after the forward was launched queues one copy a boundary to
its host slot, on the capture lane, and returns the event that every reader of those host bytes waits
on.

A decode step is captured after its forward, when the rings hold the boundary's positions:
`gather_after` takes the place of `begin` and the hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_bitexact_hicache.constants import STATE_ROWS
from sglang_bitexact_hicache.device_view import Ring
from sglang_bitexact_hicache.gather import Source
from sglang_bitexact_hicache.pipeline import RecordPipeline
from sglang_bitexact_hicache.row_mover import Part
from sglang_bitexact_hicache.transfer import Event


@dataclass
class CapturePlan:
    """The boundaries that one forward captures, and how far that has come.

    Attributes:
        index: where the rows are, for the mover.
        states_at_once: some state begins before its chunk, so it is gathered before the compressor
            overwrites its ring, not with the layer's window.
        gathered: indices of the sections gathered so far; `finish` refuses a record with a hole.
        held: states of the running layer, gathered with its window: one launch instead of three.
    """

    sources: list[Source]
    staging: list[int]
    index: Any
    states_at_once: bool
    gathered: set[int] = field(default_factory=set)
    held: list[Part] = field(default_factory=list)


class CapturePipeline(RecordPipeline):
    """Device side of capture; see the module's docstring."""

    def begin(self, sources: Sequence[Source]) -> CapturePlan:
        """Take staging for the boundaries of a forward (at most `staging.slots`), before it runs.

        The current (forward) stream waits for older captures that still leave that staging.
        """
        staging, busy = self.staging.take(len(sources))
        for event in busy:
            self._counters.staging_waits += not event.done()
            event.wait()
        return CapturePlan(
            list(sources),
            staging,
            self._mover.capture_index(sources, staging),
            any(s.reads_ring_for(STATE_ROWS) for s in sources),
        )

    def gather_after(self, sources: Sequence[Source]) -> CapturePlan:
        """Take staging and queue every section's rows as the rings hold them now, after the forward.

        Streams as `begin`. Whoever overwrites those ring rows from another stream waits on an event
        recorded after this.
        """
        plan = self.begin(sources)
        self._mover.gather_rings(plan.index)
        plan.gathered.update(range(self._view.layout.num_sections))
        return plan

    def gather_window(self, plan: CapturePlan, layer: int, chunks: Sequence[torch.Tensor]) -> None:
        """Queue one layer's rows; `chunks` are the layer's K, ``[tokens, row]`` for each plane of its
        window: bf16 of all of the head, or the bytes of the packed nope rows and the bf16 rope."""
        rings = self._view.window_rings(layer)
        parts = [Part(ring, chunk) for ring, chunk in zip(rings, chunks, strict=True)]
        self._gather(plan, [*parts, *plan.held])
        plan.held.clear()

    def gather_state(self, plan: CapturePlan, ring: Ring, chunk: torch.Tensor) -> None:
        """One layer's C4 or indexer state rows, before the same layer's `gather_window`; `chunk` is
        fp32 ``[tokens, 4 * head_dim]`` and is not written before that."""
        part = Part(ring, chunk)
        if plan.states_at_once:
            self._gather(plan, [part])
        else:
            plan.held.append(part)

    def _gather(self, plan: CapturePlan, parts: Sequence[Part]) -> None:
        self._mover.gather_layer(plan.index, parts)
        plan.gathered.update(part.ring.section.index for part in parts)

    def finish(self, plan: CapturePlan, host_slots: Sequence[int], after: Sequence[Event]) -> Event:
        """Queue the copies to the host slots (one for each source, in order).

        `after`: an event recorded behind the last gather, and those of copies that still read the host
        slots. Returns the event of the host bytes. Raises RuntimeError if the forward did not pass
        every layer of the stage.
        """
        missing = self._view.layout.num_sections - len(plan.gathered)
        if missing:
            self.abandon(plan)
            raise RuntimeError(f"the forward skipped {missing} of the layers to capture")
        copies = [
            (self._pools.device_part(host), self.staging.memory[slot])
            for slot, host in zip(plan.staging, host_slots, strict=True)
        ]
        event = self._lane.submit(copies, after)
        self._counters.bytes_captured += sum(source.nbytes for _, source in copies)
        self.staging.give_back(plan.staging, event)
        return event

    def abandon(self, plan: CapturePlan) -> None:
        """The forward failed: give its staging back, once what it queued has run."""
        self.staging.give_back(plan.staging, self._lane.mark())
