"""Seam: the truth pools as HiCache host pools, so that storage backends read and write their records.

One object a pool over the same slots: an index is a slot number (`page_size` is 1), a page is a whole
record, contiguous. Only the primary pool allocates, on the scheduler thread, out of the truth store:
a slot that a prefetch will land in is RESERVED until `commit` publishes or discards it, or SGLang's
release queue frees it (tree.py, storage.py).

Answers to the interface that backends expect of `HostKVCache` (pool_host/base.py), by way of
`LogicalHostPool`, whose device transfers do nothing: device copies of records are the pipelines'.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.layout import WINDOW_POOL
from sglang_bitexact_hicache.policy import Keep
from sglang_bitexact_hicache.slots import SlotState
from sglang_bitexact_hicache.truth import TruthStore


class Landing(threading.local):
    """Which slot the calling thread is reading a record into: a backend that asks for a buffer then
    gets the record itself, so that nothing is copied."""

    slot: int | None = None

    @contextmanager
    def into(self, slot: int) -> Iterator[None]:
        """While the context lasts, records are read into this slot."""
        self.slot = slot
        try:
            yield
        finally:
            self.slot = None


class TruthPagePool(LogicalHostPool):
    """One of the three pools; see the module's docstring.

    Args:
        pool: its name in the layout.
        pools: the records.
        store: who owns them.
        landing: shared by the three.
    """

    def __init__(
        self, pool: str, pools: TruthHostPools, store: TruthStore, landing: Landing
    ) -> None:
        self.pool = pool
        self._pools = pools
        self._store = store
        self._landing = landing
        super().__init__(store.capacity, page_size=1)
        self.size_per_token = pools.layout.record_bytes(pool)

    # ---- slots: scheduler thread

    def clear(self) -> None:
        """A flush clears the store (BxCache._reset_full); nothing is lent then."""
        self._lent: set[int] = set()

    def available_size(self) -> int:
        """Slots that could be had now."""
        return self._store.slots.count(SlotState.FREE)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """A RESERVED slot as an int64 tensor, or None. One at a time, of the primary pool only."""
        if self.pool != WINDOW_POOL or need_size != 1:
            raise ValueError(f"{self.pool} does not give {need_size} slots")
        slot = self._store.reserve(Keep.POINT)
        if slot is None:
            return None
        self._lent.add(slot)
        return torch.tensor([slot], dtype=torch.int64)

    @property
    def lent(self) -> int:
        """Slots that were given and not come back yet."""
        return len(self._lent)

    def landed(self, slot: int) -> None:
        """The slot is the caller's from now on, to publish or to discard."""
        self._lent.remove(slot)

    def free(self, indices: torch.Tensor) -> int:
        """Give RESERVED slots back unused."""
        for slot in indices.tolist():
            self.landed(slot)
            self._store.discard(slot)
        return len(indices)

    def free_lent(self) -> None:
        """Give back every slot that was not: once nothing can land in one any more."""
        self.free(torch.tensor(sorted(self._lent), dtype=torch.int64))

    # ---- bytes: the thread that the slot was handed to

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """A slot's record, a view."""
        return self._pools.record(self.pool, int(index))

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Where to read a record: into the slot that the thread is landing in, or a scratch buffer."""
        if self._landing.slot is not None:
            return self._pools.record(self.pool, self._landing.slot)
        return torch.empty(self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """A record was read; copied only where the backend brought its own buffer."""
        record = self._pools.record(self.pool, int(index))
        if data_page.data_ptr() != record.data_ptr():
            record.copy_(data_page)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """(addresses, bytes) of the slots' records, one each."""
        records = self._pools.buffers[self.pool]
        addresses = [records.data_ptr() + slot * records.stride(0) for slot in indices.tolist()]
        return addresses, [self.size_per_token] * len(addresses)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The memory that a backend may register: of all three pools, whose records alternate."""
        return [self._pools.memory]

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Whether every record begins at a multiple of this many bytes (for O_DIRECT)."""
        records = self._pools.buffers[self.pool]
        return not (records.data_ptr() % page_size_bytes or records.stride(0) % page_size_bytes)
