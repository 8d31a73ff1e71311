"""Device staging: a small, fixed number of records on the device that copies start from or land in.

`memory` is uint8 ``[slots, device_bytes]``: a slot without the header bytes that only the host writes
(layout.py), so that one contiguous copy moves a boundary between staging and a host slot. Slots are
handed out in the order in which they came back; each remembers the event of the last copy that used
it, and its next user waits on that event, on its own stream. Scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from sglang_bitexact_hicache.layout import CHECKSUM_BYTES, RecordLayout, Section
from sglang_bitexact_hicache.transfer import Event


class DeviceStaging:
    """`slots` records on `device`; see the module's docstring."""

    def __init__(self, layout: RecordLayout, slots: int, device: torch.device) -> None:
        if slots < 1:
            raise ValueError(f"device staging needs at least one record, got {slots}")
        self.slots = slots
        self._layout = layout
        try:
            shape = (slots, layout.device_bytes)
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no device memory for {slots} staging records of {layout.device_bytes} bytes: "
                "lower --mem-fraction-static or --chunked-prefill-size"
            ) from error
        self.checksums = self.memory[:, : CHECKSUM_BYTES * layout.num_sections].view(torch.int64)
        """int64 ``[slots, sections]``: where the capture leaves each section's checksum."""
        self._free: deque[tuple[int, Event | None]] = deque((slot, None) for slot in range(slots))

    @property
    def free(self) -> int:
        """Staging slots that can be taken now (their last copy may still be in flight)."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Device bytes of all records."""
        return self.memory.nbytes

    def rows(self, section: Section, dtype: torch.dtype) -> torch.Tensor:
        """A section's rows of every staging slot: ``[slots, rows, row]`` of that dtype, a view."""
        records = self.memory.narrow(1, self._layout.device_offset(section), section.nbytes)
        return records.view(dtype).unflatten(1, (section.rows, -1))

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
