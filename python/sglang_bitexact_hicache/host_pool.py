"""The pinned host pools (L2): bytes only, one slot space.

Ownership of slots is truth.py's; this module knows only where a slot's bytes are. Allocated once at
startup, after the sizing guards (sizing.py) and before the server takes requests; if the memory
cannot be had or registered, startup fails here and not at the first capture.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_bitexact_hicache.layout import CHECKSUM_BYTES, POOLS, RecordLayout

Allocate = Callable[[tuple[int, int]], torch.Tensor]
"""Gives host memory: uint8 of that shape, contiguous."""


class TruthHostPools:
    """Host records of all slots.

    The three records of a slot lie one behind the other in `memory`, uint8 ``[slots, slot_bytes]``, so
    that a slot moves with one copy. `buffers[pool]` is uint8 ``[slots, record_bytes]``, a view of it,
    of which each slot is contiguous.

    Args:
        pin: whether the memory comes from torch's pinned allocator (which rounds it up to a power of
            two: fit for tools and tests).
        allocate, release: where else it comes from and goes to (pinned.py), in place of that.
    """

    def __init__(
        self,
        layout: RecordLayout,
        slots: int,
        *,
        pin: bool = False,
        allocate: Allocate | None = None,
        release: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.layout = layout
        self.slots = slots
        self._release = release
        shape = (slots, layout.slot_bytes)
        try:
            if allocate is None:
                self.memory = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
            else:
                self.memory = allocate(shape)
        except RuntimeError as error:
            raise ValueError(
                f"cannot have {slots * layout.slot_bytes / 1e9:.2f} GB of host memory for the truth of "
                f"{slots} boundaries: {error}. "
                "Raise --hicache-swa-offload-page-stride or lower --hicache-ratio."
            ) from error
        self._moving = self.memory[:, layout.host_header_bytes :]
        self.buffers: dict[str, torch.Tensor] = {
            pool: self.memory.narrow(1, layout.record_offset(pool), layout.record_bytes(pool))
            for pool in POOLS
        }

    @property
    def nbytes(self) -> int:
        """Host bytes of all three pools."""
        return self.memory.nbytes

    def record(self, pool: str, slot: int) -> torch.Tensor:
        """A slot's whole record: uint8 ``[record_bytes]``."""
        return self.buffers[pool][slot]

    def device_part(self, slot: int) -> torch.Tensor:
        """What moves between host and device: uint8 ``[device_bytes]``, the slot less the header that
        the host owns."""
        return self._moving[slot]

    def checksums(self, slot: int) -> torch.Tensor:
        """The device checksums that a slot's record carries: int64 ``[sections]``, a view. Wait on the
        capture's event first."""
        nbytes = CHECKSUM_BYTES * self.layout.num_sections
        return self.device_part(slot)[:nbytes].view(torch.int64)

    def close(self) -> None:
        """Let go of the memory."""
        self.buffers.clear()
        memory, self.memory = self.memory, self.memory.new_empty(0)
        self._moving = self.memory
        if self._release is not None and memory.numel():
            self._release(memory)
