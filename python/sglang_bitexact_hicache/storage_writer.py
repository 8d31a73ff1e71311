"""Writing to storage (L3): a record only over KV that is known to be its own.

SGLang's backup thread writes a node's KV after its copy to host memory was acknowledged. `Write` runs
around that, on the same thread:

1. digests of the host pages of the whole prefix, where they are not known;
2. SGLang's own write of the KV: first writer wins, a page that storage has is never rewritten;
3. which pages of the prefix storage holds with these bytes: the ones that were not there before and were
   written now, the ones that this process has verified or written earlier, and the ones that are read
   back and found equal. A record behind any other page would be refused by every reader for ever;
4. the records of the boundaries that are left: once their capture is complete, the header is filled in
   place, and the three pools are written, the one with the header last.

Nothing is decided here but that; slots are locked until SGLang acknowledges the operation (storage.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.kv_chain import chain_values, mark_pages
from sglang_bitexact_hicache.layout import C4_POOL, INDEXER_POOL, POOLS, WINDOW_POOL
from sglang_bitexact_hicache.record import seal
from sglang_bitexact_hicache.storage_guard import StrictStorage, TruthTransfer, job_of
from sglang_bitexact_hicache.storage_kv import HostSpan, digests_of
from sglang_bitexact_hicache.transfer import Event

if TYPE_CHECKING:
    from sglang_bitexact_hicache.storage import TruthStorage

logger = logging.getLogger(__name__)

WRITE_ORDER = (C4_POOL, INDEXER_POOL, WINDOW_POOL)
"""The pool that carries the header last, so that a crash leaves no header without its sections."""


class Boundary(NamedTuple):
    """A boundary whose record is to be written: its place in the prefix, its locked slot, and the events
    of the copies that wrote the slot."""

    pages: int
    slot: int
    written: tuple[Event, ...]


@dataclass
class Write:
    """One storage write of a tree node; made on the scheduler thread, run on the backup thread.

    Attributes:
        path: host copies of the node's whole prefix, root first; the last one is the node's.
        boundaries: of the node, ascending.
    """

    path: Sequence[HostSpan]
    boundaries: Sequence[Boundary]

    def run(
        self,
        storage: TruthStorage,
        guard: StrictStorage,
        operation: Any,
        write_kv: Callable[[], Any],
    ) -> None:
        """See the module's docstring. `write_kv` is SGLang's own part of the operation."""
        if storage.closed:
            return
        digests = digests_of(self.path, storage.kv)
        hashes = [page_hash for span in self.path for page_hash in span.hashes]
        start = len(hashes) - len(self.path[-1].hashes)
        fresh = [
            i
            for i, page_hash in enumerate(operation.hash_value, start)
            if storage.stored.digest(page_hash) is None and not guard.holds(page_hash)
        ]
        write_kv()
        written = pages_written(operation, storage.kv.names)
        for i in fresh:
            if i < start + written:
                storage.stored.learn(hashes[i], digests[i])
                storage.refused.forgive(hashes[i])
        boundaries = self.boundaries
        if written < len(operation.hash_value):
            boundaries = [b for b in boundaries if b.pages <= start + written]
            storage.counters.add(write_failed=len(self.boundaries) - len(boundaries))
        if boundaries:
            self._write_records(storage, guard, hashes, digests, boundaries)

    def _write_records(
        self,
        storage: TruthStorage,
        guard: StrictStorage,
        hashes: Sequence[str],
        digests: Sequence[bytes],
        boundaries: Sequence[Boundary],
    ) -> None:
        own = own_pages(storage, guard, hashes, digests)
        ours = [b for b in boundaries if b.pages <= own]
        wanted = [b for b in ours if not guard.holds_record(hashes[b.pages - 1])]
        storage.counters.add(
            write_not_own=len(boundaries) - len(ours), records_present=len(ours) - len(wanted)
        )
        values = chain_values(digests)
        for boundary in ours:
            if boundary not in wanted:
                storage.records.learn(hashes[boundary.pages - 1], values[boundary.pages - 1])
        if not wanted:
            return
        for boundary in wanted:
            for event in boundary.written:
                event.synchronize()
            seal(
                {pool: storage.pools.record(pool, boundary.slot).numpy() for pool in POOLS},
                storage.layout,
                identity=storage.names.identity,
                boundary=boundary.pages * PAGE_SIZE,
                page_hash=hashes[boundary.pages - 1],
                marks=[values[pages - 1] for pages in mark_pages(boundary.pages)],
            )
        slots = torch.tensor([boundary.slot for boundary in wanted], dtype=torch.int64)
        keys = [hashes[boundary.pages - 1] for boundary in wanted]
        transfers = [
            PoolTransfer(
                storage.names.pools[pool],
                host_indices=slots,
                keys=keys,
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )
            for pool in WRITE_ORDER
        ]
        results = guard.batch_set_v2(transfers)
        taken = [all(ok) for ok in zip(*(results[t.name] for t in transfers), strict=True)]
        storage.counters.add(
            records_written=sum(taken),
            bytes_written=sum(taken) * storage.layout.slot_bytes,
            write_failed=len(taken) - sum(taken),
        )
        for boundary, key, ok in zip(wanted, keys, taken, strict=True):
            if ok:
                storage.refused.forgive(key)
                storage.records.learn(key, values[boundary.pages - 1])
            else:
                logger.warning("bit-exact HiCache: record %s did not go to storage", key)


def pages_written(operation: Any, pools: Sequence[Any]) -> int:
    """How many leading pages of an operation storage took: its markers, and its bytes in every pool,
    which SGLang writes first and whose failures it does not count."""
    hits = operation.pool_storage_result.extra_pool_hit_pages
    return min([operation.completed_tokens // PAGE_SIZE, *(hits.get(pool, 0) for pool in pools)])


def own_pages(
    storage: TruthStorage, guard: StrictStorage, hashes: Sequence[str], digests: Sequence[bytes]
) -> int:
    """How many leading pages storage holds with these bytes. Backup thread: it may read pages back."""
    for i, (page_hash, digest) in enumerate(zip(hashes, digests, strict=True)):
        known = storage.stored.digest(page_hash)
        if known is None:
            known = guard.read_back(page_hash)
            if known is not None:
                storage.stored.learn(page_hash, known)
        if known != digest:
            return i
    return len(hashes)


def around_page_backup(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """AROUND HybridCacheController._page_backup, on the backup thread: the records of the operation are
    ours to write, its KV SGLang's."""
    job = job_of(operation.pool_transfers)
    if job is None:
        return original(controller, operation)
    others = [t for t in operation.pool_transfers if not isinstance(t, TruthTransfer)]
    operation.pool_transfers = others or None
    if controller.backup_skip:
        return original(controller, operation)
    guard = controller.storage_backend
    return job.run(guard._storage, guard, operation, lambda: original(controller, operation))
