"""The three pinned host pools (L2): bytes only, one slot space.

Ownership of slots is truth.py's; this module knows only where a slot's bytes are. Allocated once at
startup, after the sizing guards (sizing.py) and before the server takes requests; if the memory
cannot be had or registered, startup fails here and not at the first capture.
"""

from __future__ import annotations

import torch

from sglang_bitexact_hicache.layout import CHECKSUM_BYTES, POOLS, WINDOW_POOL, RecordLayout


class TruthHostPools:
    """Host records of all slots.

    `buffers[pool]` is uint8 ``[slots, record_bytes]``; the slices of one slot are contiguous, so a
    slot moves with one copy a pool. Pinned where `pin` says so.
    """

    def __init__(self, layout: RecordLayout, slots: int, *, pin: bool) -> None:
        self.layout = layout
        self.slots = slots
        self.buffers: dict[str, torch.Tensor] = {}
        for pool in POOLS:
            shape = (slots, layout.record_bytes(pool))
            try:
                self.buffers[pool] = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
            except RuntimeError as error:
                raise ValueError(
                    f"cannot allocate {shape[0] * shape[1] / 1e9:.2f} GB of"
                    f"{' pinned' if pin else ''} host memory for {pool} ({slots} slots): {error}. "
                    "Raise --hicache-swa-offload-page-stride or lower --hicache-ratio."
                ) from error

    @property
    def nbytes(self) -> int:
        """Host bytes of all three pools."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def record(self, pool: str, slot: int) -> torch.Tensor:
        """A slot's whole record: uint8 ``[record_bytes]``."""
        return self.buffers[pool][slot]

    def device_part(self, pool: str, slot: int) -> torch.Tensor:
        """What moves between host and device: the record less the header bytes the host owns."""
        start = self.layout.host_header_bytes if pool == WINDOW_POOL else 0
        return self.buffers[pool][slot, start:]

    def checksums(self, slot: int) -> torch.Tensor:
        """The device checksums that a slot's record carries: int64 ``[sections]``, a view. Wait on the
        capture's event first."""
        nbytes = CHECKSUM_BYTES * self.layout.num_sections
        return self.device_part(WINDOW_POOL, slot)[:nbytes].view(torch.int64)

    def close(self) -> None:
        """Let go of the memory."""
        self.buffers.clear()
