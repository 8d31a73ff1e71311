"""TruthStorage: what the scheduler decides about storage (L3), and what it shares with the IO threads.

    write     a node's KV goes to storage (BxCache.write_backup_storage): the truths of its pages go along
              (storage_writer.py); slots are locked until SGLang acknowledges the operation
    fetch     a prefetch is submitted: the prefix that is in the tree already goes along, so that the
              record can be verified with all of [0, P) (storage_guard.py)
    commit    the pages are in the tree: the ones that survived there are compared with the ones that
              were verified; then they are one chain, and the truth is published

Identity in this process is lineage; across processes it is digests of the pages' bytes. `KvPage` joins
them: one object a lineage, with the digest once somebody has computed it.

With several ranks each writes and reads its own bytes, under names of its own, and proves them by
itself. Every decision that changes the tree, the slots or what is asked of the threads is taken alike:
from host integers that are equal everywhere or, where it takes what IO threads found out (`anchor_of`,
`commit`, a flush), after the ranks have asked each other.

Scheduler thread only, but for the tables that say otherwise (refused, stored, counters, landing).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.layout import POOLS, WINDOW_POOL, RecordLayout
from sglang_bitexact_hicache.lineage import ROOT, UNKNOWN, Copy
from sglang_bitexact_hicache.metrics import StorageCounters
from sglang_bitexact_hicache.policy import Keep
from sglang_bitexact_hicache.ranks import Ranks
from sglang_bitexact_hicache.refused import RefusedKeys
from sglang_bitexact_hicache.storage_guard import (
    OTHER_KV_SECONDS,
    Calls,
    Fetch,
    StrictStorage,
    TruthTransfer,
    fetch_transfers,
)
from sglang_bitexact_hicache.storage_kv import HostKv, HostSpan, KvPage, host_pages
from sglang_bitexact_hicache.storage_names import StorageNames
from sglang_bitexact_hicache.storage_pool import Landing, TruthPagePool
from sglang_bitexact_hicache.storage_writer import Boundary, Write
from sglang_bitexact_hicache.stored_pages import StoredPages

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang_bitexact_hicache.runtime import TruthRuntime
    from sglang_bitexact_hicache.tree import BxCache

logger = logging.getLogger(__name__)

KNOWN_PAGES = 1 << 18
"""Pages in storage whose digests are remembered: 70 MB of host memory, 67 million tokens."""

HANGS_SECONDS = 5.0
"""A call of a storage backend that has not returned for so long may not return at all."""

STEP_SECONDS = 0.01
"""Between two looks at what the threads have done, while a flush waits for them."""

SPARE_SPANS = 64
"""Spans of nodes that are gone, beyond as many as there are nodes, before they are swept out."""


class TruthStorage:
    """See the module's docstring.

    Made before the cache, because SGLang attaches its backend while it builds the host pools; `bind`
    gives it the cache, before the server takes a request.

    Args:
        names: under which records are stored.
        layout: of this stage's records.
        unit: tokens of which every boundary is a multiple (a page, or a chunk with aligned prefill).
    """

    def __init__(self, names: StorageNames, layout: RecordLayout, unit: int = PAGE_SIZE) -> None:
        self.names = names
        self.layout = layout
        self.unit_pages = unit // PAGE_SIZE
        self.counters = StorageCounters()
        self.refused = RefusedKeys()
        """What storage holds and must not be asked for again. Any thread."""
        self.stored = StoredPages(KNOWN_PAGES)
        """The bytes that storage is known to hold. Any thread."""
        self.records = StoredPages(KNOWN_PAGES)
        """The boundaries whose record storage is known to hold, with its KV chain. Any thread."""
        self.calls = Calls()
        """What its IO threads have asked of the backend and not been answered. Any thread."""
        self.landing = Landing()
        self.closed = False
        """Storage is neither read nor written any more: its names do not fit this server's weights."""
        self.scratch: torch.Tensor | None = None
        """Host indices of one page of SGLang's KV pools, for the backup thread to read into."""
        self._pages: dict[int, KvPage] = {}
        self._spans: dict[int, HostSpan] = {}
        self._prepared: Write | None = None
        self._writes: dict[int, Write] = {}
        self._refused_for_the_tree: set[str] = set()

    def guard(self, backend: Any) -> StrictStorage:
        """SGLang's backend, made strict."""
        return StrictStorage.around(backend, self)

    def bind(self, cache: BxCache) -> None:
        """Join the cache that was built, its truth store and its host pools."""
        runtime = cast("TruthRuntime", cache.truth_runtime)
        self.cache = cache
        self.ranks = Ranks.of(cache)
        self.store = cache.store
        self.pools = runtime.pools
        self.slot_events = runtime.slot_events
        group = cache.host_pool_group
        self.kv = HostKv(group, [spec.pool_name for spec in cache.sidecar_pool_specs])
        self.store.on_death = self._lineage_died
        self._slots = TruthPagePool(WINDOW_POOL, self.pools, self.store, self.landing)
        for pool in POOLS:
            self._register(pool)
        self.attached()

    def _register(self, pool: str) -> None:
        from sglang.srt.mem_cache.pool_host.group import PoolEntry

        host_pool = (
            self._slots
            if pool == WINDOW_POOL
            else TruthPagePool(pool, self.pools, self.store, self.landing)
        )
        entry = PoolEntry(
            name=self.names.pools[pool],
            host_pool=host_pool,
            device_pool=None,
            layer_mapper=lambda _layer: None,
        )
        self.cache.cache_controller.register_host_pool_entry(entry)

    # ---- attach and detach

    def attached(self) -> None:
        """A backend may be there now: keep one host page aside for reading back."""
        if self.cache.enable_storage and self.scratch is None:
            group = self.cache.cache_controller.mem_pool_host
            self.scratch = group.alloc(PAGE_SIZE, reclaim=self.cache.evict_host)

    def detached(self) -> None:
        """The backend is gone; what it held is not known of the next one.

        SGLang's threads have ended. What they said last about prefetches that were given up, it does not
        hear any more, so their slots and host pages are given back here.
        """
        self.settle()
        self._slots.free_lent()
        for operation in self._unheard():
            # It gave back itself what it had heard of.
            rest = operation.host_indices[operation.completed_tokens :]
            self.cache.cache_controller.mem_pool_host.free(rest)
        self.forget_contents()
        if self.scratch is not None:
            self.cache.cache_controller.mem_pool_host.free(self.scratch)
            self.scratch = None

    def forget_contents(self) -> None:
        """What was known of what storage holds is not true any more. Any thread."""
        self.refused.clear()
        self.stored.clear()
        self.records.clear()

    def weights_changed(self) -> None:
        """The weights were replaced: nothing in storage is theirs, and nothing may be added to it."""
        if not self.closed:
            self.closed = True
            logger.warning(
                "bit-exact HiCache: the model's weights changed, so storage (L3) is neither read nor "
                "written any more; restart with another --weight-version to use it again"
            )

    # ---- write

    def write_transfers(self, node: Any) -> list[TruthTransfer] | None:
        """For the storage write of a node that begins: its truths, and its prefix. None where the
        prefix in host memory is not one computation, or bytes of it are on their way."""
        self.attached()  # where there was no page to be had, there may be one now
        path = self._path(node.id)
        if path is None:
            return None
        start = sum(len(span.hashes) for span in path[:-1])
        boundaries = []
        for pages, lineage in enumerate(path[-1].copy.ids, start + 1):
            slot = self.store.lookup(lineage)
            if slot is None or self.store.slots.keep(slot) is Keep.FILL:
                continue
            self.store.lock(slot)
            boundaries.append(Boundary(pages, slot, self.slot_events(slot)))
        self._prepared = Write(path, boundaries)
        return [self._carrier(self._prepared)]

    def submitted(self, operation_id: int | None) -> None:
        """The write that was prepared last has this id; None: nothing was submitted."""
        job, self._prepared = self._prepared, None
        if job is None:
            return
        if operation_id is None:
            self._unlock(job)
        else:
            self._writes[operation_id] = job

    def settle(self) -> None:
        """Unlock what belongs to operations that SGLang has acknowledged or forgotten. On every rank
        after the same acknowledgement."""
        for operation_id in [i for i in self._writes if i not in self.cache.ongoing_backup]:
            self._unlock(self._writes.pop(operation_id))

    def write_late(self, node: Any) -> None:
        """A page of a node that is in storage got its truth after its KV was written: write it alone."""
        cache = self.cache
        if not (cache.enable_storage and node.backuped and node.hash_value):
            return
        if node.write_through_pending_id is not None:
            return  # its write is still to come
        if self.write_transfers(node) is not None:
            job, self._prepared = self._prepared, None
            if job is not None:
                self._submit_alone(node, job)

    # ---- fetch

    def provable(self, node_id: int) -> bool:
        """Whether what storage has behind this node could be proved to follow it."""
        if self.closed:
            return False
        path = self._path(node_id)
        if path is None:
            self.counters.add(not_asked=1)
            logger.info(
                "bit-exact HiCache: storage is not asked, the prefix in host memory is no proof"
            )
        return path is not None

    def anchor_of(self, node_id: int, key: RadixKey) -> tuple[int, int]:
        """Behind which node to prefetch, and how many tokens of the key lie before that.

        Where the tree holds pages behind the node in host memory, and one of them only lacks a record
        that storage is known to have, their KV need not be read to get it: the last node before that page
        is as good an anchor. (The page itself is read: SGLang fetches nothing without KV.) Of what the
        ranks know, the least: each has every page before its own answer at hand.
        """
        tree, page = self.cache.tree_core, self.cache.page_size
        node = tree.node_by_id(node_id)
        resident: list[tuple[int, Any, HostSpan]] = []
        start = 0
        while start < len(key):
            node = node.children.get(key.child_key_at(start, page))
            if node is None or node.key.match_at(key, start, page_size=page) < len(node.key):
                break
            span = self._resident(node)
            if span is None:
                break
            resident.append((start, node, span))
            start += len(node.key)
        record = next((end for end in map(self._last_record, reversed(resident)) if end), 0)
        (record,) = self.ranks.least([record])
        # The last node that ends before the record's page.
        for start, node, _ in reversed(resident):
            end = start + len(node.key)
            if end <= record - page and self._path(node.id) is not None:
                return node.id, end
        return node_id, 0

    def _last_record(self, resident: tuple[int, Any, HostSpan]) -> int:
        """The deepest boundary of a node, in tokens of the key, that storage is known to have a record
        of; 0 for none."""
        start, _, span = resident
        known = [i for i, h in enumerate(span.hashes, 1) if self.records.digest(h) is not None]
        usable = self.refused.usable(span.hashes, known)
        return start + self.cache.page_size * usable[-1] if usable else 0

    def fetch_transfers(self, anchor: Any) -> list[TruthTransfer] | None:
        """For a prefetch behind this node: the record's pools, and the prefix."""
        path = self._path(anchor.id)
        return None if path is None else fetch_transfers(self.names.pools, Fetch(path))

    def alloc(self, count: int) -> torch.Tensor | None:
        """A slot for a record to land in, as SGLang's host index."""
        return self._slots.alloc(count)

    def commit(self, transfers: Sequence[TruthTransfer], insert_result: Any, result: Any) -> None:
        """A prefetch is in the tree: publish its truth, or give the slot back.

        All ranks come here with the same counts (SGLang reduces them), and where these are whole every
        one has verified its own bytes.
        """
        primary = transfers[0]
        job: Fetch = primary.job
        slot = int(primary.host_indices[0])
        self._slots.landed(slot)
        hits = result.extra_pool_hit_pages
        whole = all(hits.get(name) == 1 for name in self.names.pools.values())
        target = insert_result.inserted_host_node
        if not whole or job.seal is None or target is None or self.closed:
            self.store.discard(slot)
            return
        lineage = self._prove(job, target)
        if lineage is None:
            self.counters.add(unproved=1)
            self.store.discard(slot)
            hosts = (self.cache.copies.of(node.id).host for node in self.cache._path(target))
            unknown = sum(copy.ids.count(UNKNOWN) for copy in hosts if copy is not None)
            self.cache.gate_counters.unknown_pages += unknown
            return
        cast("TruthRuntime", self.cache.truth_runtime).slot_landed(slot)
        pages = len(job.hashes)
        self.ranks.note("from storage P=%d slot=%d", len(job.digests) * PAGE_SIZE, slot)
        if self.store.publish(lineage, slot, Keep.POINT, pages):
            used = pages * self.kv.nbytes() + self.layout.slot_bytes
            self.counters.add(records_loaded=1, bytes_used=used)

    def may_flush(self) -> bool:
        """Whether SGLang's threads can be stopped on every rank; waits for what is under way.

        No call of the backend hangs, and no thread has something to reduce over the ranks: a prefetch
        that was given up is read to its end, and a thread that is stopped before that leaves those of the
        other ranks waiting for it.
        """
        (returned,) = self.ranks.all_of([self.calls.all_returned(HANGS_SECONDS)])
        # A prefetch has its slot until then, on all ranks alike. So many steps, whatever the clocks say.
        for _ in range(round(HANGS_SECONDS / STEP_SECONDS) if returned else 0):
            if not self._slots.lent:
                break
            time.sleep(STEP_SECONDS)
            self.cache.check_hicache_events()
        return returned and not self._slots.lent

    def flush(self) -> None:
        """The tree was reset and SGLang's threads have stopped: nothing is in flight any more."""
        for job in self._writes.values():
            self._unlock(job)
        self._writes.clear()
        for page_hash in self._refused_for_the_tree:
            self.refused.forgive(page_hash)
        self._refused_for_the_tree.clear()
        self._pages.clear()
        self._spans.clear()
        self.scratch = None
        self.attached()

    # ---- internals

    def _unheard(self) -> list[Any]:
        """The prefetches that have host pages and whose end SGLang did not hear of: the ones that its IO
        thread had no time for, and the ones that it did not acknowledge to the scheduler."""
        controller = self.cache.cache_controller
        operations: list[Any] = []
        if controller.prefetch_buffer is None:
            return operations  # nothing was ever attached
        for queue in (controller.prefetch_sync_queue, controller.ack_prefetch_queue):
            while not queue.empty():
                ack = queue.get()
                if ack is not None and ack.completed_req:
                    operations.append(ack.operation)
        while not controller.prefetch_buffer.empty():
            operation = controller.prefetch_buffer.get()
            if operation is not None:
                operations.append(operation)
        return operations

    def _carrier(self, job: Write) -> TruthTransfer:
        """What takes a job to the backup thread; it moves nothing itself."""
        nothing = torch.empty(0, dtype=torch.int64)
        return TruthTransfer(self.names.pools[WINDOW_POOL], host_indices=nothing, keys=[], job=job)

    def _submit_alone(self, node: Any, job: Write) -> None:
        """A storage operation of a node that brings no KV. As UnifiedRadixCache.write_backup_storage."""
        cache = self.cache
        operation_id = cache.cache_controller.write_storage(
            torch.empty(0, dtype=torch.int64), [], hash_value=[], extra_pools=[self._carrier(job)]
        )
        lock = cache.inc_host_lock_ref(node.id).to_dec_params()
        cache.ongoing_backup[operation_id] = (node.id, lock)
        self._writes[operation_id] = job

    def _unlock(self, job: Write) -> None:
        for boundary in job.boundaries:
            self.store.unlock(boundary.slot)

    def _lineage_died(self, lineage: int) -> None:
        self._pages.pop(lineage, None)

    def _path(self, node_id: int) -> list[HostSpan] | None:
        """The host copies from the root to a node; None where they are not one chain of known bytes."""
        spans, previous = [], ROOT
        for node in self.cache._path(node_id):
            copy = self.cache.copies.of(node.id).host
            if copy is None or copy.first_parent != previous or not copy.whole:
                return None
            span = self._span(node, copy)
            if not span.landed:
                return None
            spans.append(span)
            previous = copy.last_id
        return spans

    def _resident(self, node: Any) -> HostSpan | None:
        """The node's host copy, if it is there, whole, and every digest of it is known."""
        copy = self.cache.copies.of(node.id).host
        if copy is None or not copy.whole:
            return None
        span = self._span(node, copy)
        return span if span.hashed else None

    def _span(self, node: Any, copy: Copy) -> HostSpan:
        landed = node.write_through_pending_id is None
        span = self._spans.get(node.id)
        if span is None or span.copy is not copy or span.landed != landed:
            pages = [self._pages.setdefault(lineage, KvPage()) for lineage in copy.ids]
            rows = host_pages(node.component_data[0].host_value)
            span = HostSpan(copy, list(node.hash_value), pages, rows, landed)
            self._spans[node.id] = span
            if len(self._spans) > 2 * len(self.cache.copies) + SPARE_SPANS:
                live = {node_id for node_id, copies in self.cache.copies.items() if copies.host}
                self._spans = {i: s for i, s in self._spans.items() if i in live}
        return span

    def _prove(self, job: Fetch, target: int) -> int | None:
        """Give the pages of a verified prefix the identities of one chain; its last, or None.

        `job.digests` is what the record was found true of. A page of the tree is that page if it lies
        in the host row that was read, or if its digest, known by its lineage, is the same.
        """
        path = self.cache._path(target)
        found = [self.cache.copies.of(node.id).host for node in path]
        copies = [copy for copy in found if copy is not None]
        pages = sum(self.cache.pages_of(node) for node in path)
        if pages != len(job.digests) or len(copies) < len(found):
            return None
        if not self._survivors_are_verified(job, path, copies):
            return None
        renamed, previous = [], ROOT
        for node, copy in zip(path, copies, strict=True):
            ids, parents = [], []
            for lineage, parent in zip(copy.ids, copy.parents, strict=True):
                if lineage == UNKNOWN or parent != previous:
                    lineage = self.store.lineages.mint()
                ids.append(lineage)
                parents.append(previous)
                previous = lineage
            renamed.append((node.id, Copy(tuple(ids), tuple(parents)), copy))
        for node_id, copy, old in renamed:
            if copy.ids != old.ids:
                self.cache.copies.set_host(node_id, copy)
        for lineage, digest in zip(
            (i for _, c, _ in renamed for i in c.ids), job.digests, strict=True
        ):
            self._pages.setdefault(lineage, KvPage()).digest = digest
        return previous

    def _survivors_are_verified(
        self, job: Fetch, path: Sequence[Any], copies: Sequence[Copy]
    ) -> bool:
        """Whether, on every rank, the pages of the tree are the ones that the record is true of.

        Where one is of another computation, storage is not asked for what is behind it. Where nobody has
        hashed it yet, that is done now, for the next request: by all ranks, or their backup threads would
        not do as many operations.
        """
        pages = len(job.digests)
        rows = [None] * (pages - len(job.rows)) + list(job.rows)
        hashes = [*job.path_hashes, *job.hashes]
        held = [
            (row, lineage)
            for node, copy in zip(path, copies, strict=True)
            for row, lineage in zip(
                host_pages(node.component_data[0].host_value), copy.ids, strict=True
            )
        ]
        other, unhashed = pages, pages
        for position, (row, lineage) in enumerate(held):
            known = self._pages.get(lineage)
            digest = None if known is None else known.digest
            read_now = row == rows[position]
            if not read_now and digest != job.digests[position]:
                if digest is None:
                    unhashed = position
                else:
                    other = position
                    # As long as the tree has this page, what storage has behind it is of no use.
                    self.refused.refuse_page(hashes[position], seconds=OTHER_KV_SECONDS)
                    self._refused_for_the_tree.add(hashes[position])
                break
        other, unhashed = self.ranks.least([other, unhashed])
        position = min(other, unhashed)
        if position == pages:
            return True
        if position == unhashed:
            node = self._node_of_page(path, position)
            before = self._path(node.id)
            if before is not None:
                self._submit_alone(node, Write(before, ()))
        logger.info(
            "bit-exact HiCache: a record from storage is not used, page %d of its prefix (%s) in host "
            "memory is %s",
            position,
            hashes[position],
            "not hashed yet" if position == unhashed else "of another computation",
        )
        return False

    def _node_of_page(self, path: Sequence[Any], position: int) -> Any:
        """The node of a path, root first, that has its page of this number."""
        for node in path:
            position -= self.cache.pages_of(node)
            if position < 0:
                return node
        raise IndexError(position)
