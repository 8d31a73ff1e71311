"""Seam: SGLang's storage backend behind one that believes nothing it is told.

`StrictStorage` stands where SGLang expects its backend (as SGLang's own failure injector does) and
passes everything on, except that

* a hit query leaves out what was refused before (refused.py) and what no hit may end at;
* records are read straight into their host slot and verified there, with the KV that came with them,
  before anything is reported: so before the ranks take their minimum;
* a backend that raises has not given the page, and nothing else.

A refusal is a miss: one counter, one log line with the key and the reason, and the key is not asked
for again. Which thread calls what: `batch_exists_v2` the prefetch thread, `batch_get_v2` the prefetch
IO thread (and the backup thread, to read a page back), `batch_set_v2` the backup thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.kv_chain import chain_values, first_doubtful
from sglang_bitexact_hicache.layout import POOLS, WINDOW_POOL
from sglang_bitexact_hicache.record import RecordRefused, check
from sglang_bitexact_hicache.storage_kv import HostSpan, host_pages, read_digests, remember_digests

if TYPE_CHECKING:
    from sglang_bitexact_hicache.record import Seal
    from sglang_bitexact_hicache.storage import TruthStorage

logger = logging.getLogger(__name__)

UNREADABLE_SECONDS = 60.0
"""How long what storage announced and did not give is not asked for: it may come back."""

OTHER_KV_SECONDS = 600.0
"""How long the pages behind KV of another computation are not asked for: somebody may replace them."""

_PLACEHOLDER = "__placeholder__"
"""SGLang replaces it by the key of the last page once the hit is known."""


@dataclass
class Fetch:
    """One prefetch, from its submission to its commit.

    Attributes:
        path: the host copies that the prefix has in the tree already, root first.
        hashes: storage keys of the pages that are read, once the IO thread has read them;
            `rows` their host page numbers.
        given_up: whether the scheduler waits for it no more; its host pages may be others' then.
        digests: of every page of the prefix, once verified; `seal` the record's header.
    """

    path: list[HostSpan]
    hashes: Sequence[str] = ()
    rows: Sequence[int] = ()
    given_up: Callable[[], bool] = bool
    digests: Sequence[bytes] = ()
    seal: Seal | None = None

    @property
    def path_hashes(self) -> list[str]:
        """Storage keys of the pages before the ones that are read."""
        return [page_hash for span in self.path for page_hash in span.hashes]


@dataclass
class TruthTransfer(PoolTransfer):
    """A PoolTransfer of a truth pool, with what its IO thread has to know."""

    job: Any = None


def fetch_transfers(pools: Mapping[str, PoolName], job: Fetch) -> list[PoolTransfer]:
    """What a component gives SGLang for a prefetch: the primary pool and the two that share its slot."""
    return [
        TruthTransfer(
            name=pools[pool],
            keys=[_PLACEHOLDER],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
            indices_from_pool=None if pool == WINDOW_POOL else pools[WINDOW_POOL],
            job=job,
        )
        for pool in POOLS
    ]


def job_of(transfers: Sequence[PoolTransfer] | None) -> Any:
    """The job that the transfers of an operation carry, or None."""
    return next((t.job for t in transfers or () if isinstance(t, TruthTransfer)), None)


class Calls:
    """The calls of a backend that have not returned. Any thread."""

    def __init__(self) -> None:
        self._inside = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._inside += 1

    def __exit__(self, *_exc: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def all_returned(self, seconds: float) -> bool:
        """Whether none is left, waiting at most so long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, seconds)


class StrictStorage(HiCacheStorage):
    """See the module's docstring.

    Args:
        backend: SGLang's.
        storage: the scheduler's side; its tables are shared with the IO threads.
    """

    def __init__(self, backend: HiCacheStorage, storage: TruthStorage) -> None:
        self.backend = backend
        self._storage = storage
        self._reasons: dict[str, str] = {}
        """Why KV pages could not be read, until the log line about them. Prefetch IO thread."""

    @classmethod
    def around(cls, backend: HiCacheStorage, storage: TruthStorage) -> StrictStorage:
        """Wrapped so that it keeps the backend's class name, which SGLang shows to users."""
        named = type(type(backend).__name__, (cls,), {})
        return named(backend, storage)

    # ---- what is verified

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The deepest boundary for which KV and all three records are there and none was refused."""
        job = job_of(pool_transfers)
        if self._storage.closed:
            return PoolTransferResult.empty()
        try:
            with self._storage.calls:
                found = self.backend.batch_exists_v2(keys, pool_transfers, extra_info)
        except Exception as error:
            self._storage.counters.add(unreadable=1)
            logger.warning(
                "bit-exact HiCache: storage cannot be asked for %s: %s: %s",
                keys[0],
                type(error).__name__,
                error,
            )
            return PoolTransferResult.empty()
        if job is None or not found.kv_hit_pages:
            return found
        reported = found.restorable_prefix_pages
        # A backend that reports no set vouches for its one answer only.
        candidates = [found.kv_hit_pages] if reported is None else reported
        before = job.path_hashes
        start, unit = len(before), self._storage.unit_pages
        boundaries = [start + pages for pages in candidates if (start + pages) % unit == 0]
        usable = self._storage.refused.usable([*before, *keys], boundaries)
        pages = [boundary - start for boundary in usable]
        return PoolTransferResult(max(pages, default=0), found.extra_pool_hit_pages, pages)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, Any]:
        """Pages of KV as they are; a record only if it is what it should be."""
        job = job_of(transfers)
        if job is None:
            return self._read_kv(transfers, extra_info)
        missing = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        (key,) = transfers[0].keys
        (slot,) = transfers[0].host_indices.tolist()
        try:
            # Copies that still read or write the slot's old bytes.
            for event in self._storage.slot_events(slot):
                event.synchronize()
            with self._storage.landing.into(slot), self._storage.calls:
                found = self.backend.batch_get_v2(transfers, extra_info)
        except Exception as error:
            found, reason = missing, f"{type(error).__name__}: {error}"
        else:
            reason = "not there any more"
        if not all(found.get(t.name) == [True] for t in transfers):
            self._storage.counters.add(unreadable=1)
            self._storage.refused.refuse_record(key, seconds=UNREADABLE_SECONDS)
            self._storage.records.forget(key)
            logger.warning("bit-exact HiCache: record %s in storage is unreadable: %s", key, reason)
            return missing
        nbytes = self._storage.layout.slot_bytes
        self._storage.counters.add(records_read=1, bytes_read=nbytes)
        return found if self._verify(job, slot, key) else missing

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, Any]:
        """As the backend does, which may not raise."""
        try:
            with self._storage.calls:
                return self.backend.batch_set_v2(transfers, extra_info)
        except Exception as error:
            names = [transfer.name for transfer in transfers]
            logger.warning("bit-exact HiCache: storage did not take %s: %s", names, error)
            return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

    def clear(self) -> Any:
        """Everything was removed: what was known of it goes too."""
        result = self.backend.clear()
        self._storage.forget_contents()
        return result

    # ---- what the writer asks

    def holds(self, page_hash: str) -> bool:
        """Whether storage has anything under this page's keys (a crash may have left a part)."""
        if self.backend.batch_exists([page_hash]):
            return True
        inner = self.backend
        if isinstance(inner, HiCacheStorageFailureInjector):
            inner = inner._backend
        if isinstance(inner, HiCacheFile):
            keys = (inner._log_key(pool, page_hash) for pool in self._storage.kv.names)
            return any(map(inner.exists, keys))
        pools = self._storage.kv.names
        return any(inner.pages_exist(pool, [page_hash])[0] for pool in pools)

    def holds_record(self, page_hash: str) -> bool:
        """Whether storage has the page's KV and all three records."""
        transfers = [
            PoolTransfer(name, keys=[page_hash], hit_policy=PoolHitPolicy.TRAILING_PAGES)
            for name in self._storage.names.pools.values()
        ]
        found = self.backend.batch_exists_v2([page_hash], transfers)
        present = found.extra_pool_hit_pages
        return all(present.get(transfer.name) for transfer in transfers)

    def read_back(self, page_hash: str) -> bytes | None:
        """The digest of the KV that storage holds for a page, or None. Backup thread only: it reads
        into the one scratch page."""
        scratch = self._storage.scratch
        if scratch is None or not self.backend.batch_exists([page_hash]):
            return None
        transfers = [
            PoolTransfer(name, host_indices=scratch, keys=[page_hash])
            for name in self._storage.kv.names
        ]
        try:
            found = self.backend.batch_get_v2(transfers)
        except Exception as error:
            # Every write behind the page comes here: said once, and no reader is sent there meanwhile.
            if not self._storage.refused.refuses_page(page_hash):
                self._storage.refused.refuse_page(page_hash, seconds=UNREADABLE_SECONDS)
                logger.warning(
                    "bit-exact HiCache: KV page %s cannot be read back: %s", page_hash, error
                )
            return None
        self._storage.counters.add(pages_read_back=1)
        if not all(found.get(transfer.name) == [True] for transfer in transfers):
            return None
        return self._storage.kv.digest(int(scratch[0]) // PAGE_SIZE)

    # ---- internals

    def _read_kv(self, transfers: list[PoolTransfer], extra_info: Any) -> dict[str, Any]:
        try:
            with self._storage.calls:
                results = self.backend.batch_get_v2(transfers, extra_info)
        except Exception:
            # A page that is too short raises, and with it goes what the batch had read: which page it
            # is decides what must not be asked for again.
            results = {t.name: self._kv_pages(t, extra_info) for t in transfers}
        kv = self._storage.kv
        if kv is not None:
            nbytes = sum(
                sum(map(bool, results.get(t.name, ()))) * kv.nbytes(t.name) for t in transfers
            )
            self._storage.counters.add(bytes_read=nbytes)
        return results

    def _kv_pages(self, transfer: PoolTransfer, extra_info: Any) -> list[bool]:
        def read(i: int) -> Any:
            page = PoolTransfer(
                transfer.name,
                host_indices=transfer.host_indices[i * PAGE_SIZE : (i + 1) * PAGE_SIZE],
                keys=[transfer.keys[i]],
            )
            return self.backend.batch_get_v2([page], extra_info)[transfer.name][0] or None

        return [ok is not None for ok in self._one_by_one(transfer.keys or (), read)]

    def _one_by_one(self, keys: Sequence[str], read: Callable[[int], Any]) -> Iterator[Any]:
        """What `read` gives for each key; None from the first on that it does not give, or raises for.
        The reason is kept for the log."""
        for i, key in enumerate(keys):
            try:
                got = read(i)
            except Exception as error:
                self._reasons[key] = f"{type(error).__name__}: {error}"
                got = None
            if got is None:
                yield from [None] * (len(keys) - i)
                return
            yield got

    def why_unreadable(self, page_hash: str) -> str:
        """Why a KV page could not be read. Asked for once a prefetch."""
        reason = self._reasons.get(page_hash, "not there any more")
        self._reasons.clear()
        return reason

    def _verify(self, job: Fetch, slot: int, key: str) -> bool:
        """Whether the record in the slot is whole, is for this boundary, and is true of the KV in host
        memory: the path that the tree has, and the pages that were read."""
        storage = self._storage
        before = job.path_hashes
        pages = len(before) + len(job.hashes)
        records = {p: storage.pools.record(p, slot).numpy() for p in POOLS}
        try:
            seal = check(
                records,
                storage.layout,
                identity=storage.names.identity,
                boundary=pages * PAGE_SIZE,
                page_hash=key,
            )
        except RecordRefused as refusal:
            storage.counters.add(refused_record=1)
            storage.refused.refuse_record(key)
            storage.records.forget(key)
            logger.warning("bit-exact HiCache: record %s in storage is refused: %s", key, refusal)
            return False
        of_path = read_digests(job.path, storage.kv)
        digests = [*of_path, *map(storage.kv.digest, job.rows)]
        if job.given_up():
            return False
        remember_digests(job.path, of_path)
        good = first_doubtful(seal.marks, chain_values(digests), pages)
        if good is not None:
            storage.counters.add(refused_kv=1)
            doubtful = [*before, *job.hashes][good]
            storage.refused.refuse_page(doubtful, seconds=OTHER_KV_SECONDS)
            logger.warning(
                "bit-exact HiCache: record %s in storage is refused: the KV from page %d (%s) on is "
                "of another computation",
                key,
                good,
                doubtful,
            )
            return False
        for page_hash, digest in zip(job.hashes, digests[len(before) :], strict=True):
            storage.stored.learn(page_hash, digest)
        storage.records.learn(key, seal.kv_chain)
        job.digests, job.seal = digests, seal
        return True

    # ---- passed on

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.backend.register_mem_pool_host(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.backend.register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        self.backend.on_host_pools_registered()

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> Any:
        """KV of a backend that reads all of a page at once."""
        try:
            with self._storage.calls:
                return self.backend.batch_get_v1(keys, host_indices, extra_info)
        except Exception:

            def read(i: int) -> Any:
                rows = host_indices[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
                return self.backend.batch_get_v1([keys[i]], rows, extra_info)[0] or None

            return [got is not None for got in self._one_by_one(keys, read)]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> Any:
        with self._storage.calls:
            return self.backend.batch_set_v1(keys, host_indices, extra_info)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.backend.get(key, target_location, target_sizes)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        """The markers of KV pages, where the bytes are in other pools."""
        try:
            with self._storage.calls:
                return self.backend.batch_get(keys, target_locations, target_sizes)
        except Exception:

            def read(i: int) -> Any:
                return self.backend.batch_get([keys[i]], [target_locations[i]])[0]

            return list(self._one_by_one(keys, read))

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.backend.set(key, value, target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        with self._storage.calls:
            return self.backend.batch_set(keys, values, target_locations, target_sizes)

    def exists(self, key: str) -> bool:
        return self.backend.exists(key)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.backend.batch_exists(keys, extra_info)

    def get_stats(self) -> Any:
        return self.backend.get_stats()

    def close(self) -> None:
        """Some backends have none."""
        close = getattr(self.backend, "close", None)
        if close is not None:
            close()


def before_page_transfer_sidecar(controller: Any, operation: Any, kv_completed_pages: int) -> None:
    """BEFORE HybridCacheController._page_transfer_sidecar, on the prefetch IO thread: the KV of a
    prefetch was read, its record is next.

    The record can then be verified with the pages that came. Where a page did not come, nothing behind
    it is asked for again for a while.
    """
    job = job_of(operation.pool_transfers)
    if job is None or operation.is_terminated():
        return
    if kv_completed_pages == len(operation.hash_value):
        job.hashes = list(operation.hash_value)
        job.rows = host_pages(operation.host_indices)
        job.given_up = operation.is_terminated
        return
    guard = controller.storage_backend
    storage = guard._storage
    missing = operation.hash_value[kv_completed_pages]
    storage.counters.add(unreadable=1)
    storage.refused.refuse_page(missing, seconds=UNREADABLE_SECONDS)
    logger.warning(
        "bit-exact HiCache: KV page %s in storage is unreadable: %s; %d pages read for nothing",
        missing,
        guard.why_unreadable(missing),
        kv_completed_pages,
    )


def around_allocate_storage_hit(
    original: Any, controller: Any, operation: Any, hit_tokens: int, **options: Any
) -> Any:
    """AROUND HybridCacheController.allocate_storage_hit, scheduler thread: host memory for all of a hit,
    or for nothing. SGLang would take what fits; its last page has no record, so all of it would be
    read to be thrown away."""
    if job_of(operation.pool_transfers) is not None:
        options["allow_partial"] = False
    return original(controller, operation, hit_tokens, **options)
