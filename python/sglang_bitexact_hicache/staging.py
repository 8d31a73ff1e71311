"""Device staging: a small, fixed number of records on the device that copies start from or land in.

`buffers[pool]` is uint8 ``[slots, device part of a record]``: the record without the header bytes
that only the host writes (layout.py), so that one contiguous copy a pool moves a boundary between
staging and a host slot. Slots are handed out in the order in which they came back; each remembers
the event of the last copy that used it, and its next user waits on that event, on its own stream.
Scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from sglang_bitexact_hicache.layout import CHECKSUM_BYTES, POOLS, WINDOW_POOL, RecordLayout
from sglang_bitexact_hicache.transfer import Event


class DeviceStaging:
    """`slots` records on `device`; see the module's docstring."""

    def __init__(self, layout: RecordLayout, slots: int, device: torch.device) -> None:
        if slots < 1:
            raise ValueError(f"device staging needs at least one record, got {slots}")
        self.slots = slots
        self.buffers: dict[str, torch.Tensor] = {}
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._words: dict[str, torch.Tensor] = {}
        for pool in POOLS:
            skip = layout.host_header_bytes if pool == WINDOW_POOL else 0
            nbytes = layout.record_bytes(pool) - skip
            try:
                buffer = torch.zeros((slots, nbytes), dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"no device memory for {slots} staging records of {layout.slot_bytes} bytes: "
                    "lower --mem-fraction-static or --chunked-prefill-size"
                ) from error
            self.buffers[pool] = buffer
            name = layout.window_dtype if pool == WINDOW_POOL else layout.state_dtype
            dtype = getattr(torch, name)
            sections = layout.sections(pool)
            start, end = sections[0].offset, sections[-1].offset + sections[-1].nbytes
            self._words[pool] = buffer[:, start - skip : end - skip].view(torch.int32)
            self._rows[pool] = [
                buffer[:, s.offset - skip : s.offset - skip + s.nbytes]
                .view(dtype)
                .unflatten(1, (s.rows, -1))
                for s in sections
            ]
        self.checksums = self.buffers[WINDOW_POOL][:, : CHECKSUM_BYTES * layout.num_sections].view(
            torch.int64
        )
        """int64 ``[slots, sections]``: where the capture leaves each section's checksum."""
        self._free: deque[tuple[int, Event | None]] = deque((slot, None) for slot in range(slots))

    @property
    def free(self) -> int:
        """Staging slots that can be taken now (their last copy may still be in flight)."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Device bytes of all records."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def rows(self, pool: str, section: int) -> torch.Tensor:
        """One section's rows of every staging slot: ``[slots, rows, row]`` of the rings' dtype, a
        view. `section` counts within the pool."""
        return self._rows[pool][section]

    def words(self, pool: str) -> torch.Tensor:
        """All sections' rows of a pool as int32 ``[staging slots, words]``, a view."""
        return self._words[pool]

    def take(self, count: int) -> tuple[list[int], list[Event]]:
        """`count` staging slots, longest unused first, and the events of copies that still use them.

        Raises ValueError when `count` exceeds `free`: the caller bounds it.
        """
        if count > self.free:
            raise ValueError(f"{count} records do not fit the {self.free} free staging slots")
        taken = [self._free.popleft() for _ in range(count)]
        events = dict.fromkeys(event for _, event in taken if event is not None)
        return [slot for slot, _ in taken], list(events)

    def give_back(self, slots: Sequence[int], event: Event | None) -> None:
        """The slots are free once `event` happened; whoever takes them next waits for it."""
        self._free.extend((slot, event) for slot in slots)
