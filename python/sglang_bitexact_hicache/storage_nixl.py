"""Seam: SGLang's NIXL storage backend, made to agree with its file backend about what storage holds.

`HiCacheNixl` serves DeepSeek-V4 with this feature only after four changes, all of them here:

* a hit query answers with every prefix that can be restored. Stock takes the least of what each pool
  could do by itself, which need not be a boundary of any pool;
* a page is there when all of its objects are. In the `layer_first` layout NIXL writes one object a
  layer, and stock looks for one object a page, under a name that nobody writes;
* an object is there when it has its full size. NIXL writes in place, so a full disk, a failed open or
  a crash leave objects that are empty or short; stock finds them, and every read of them fails;
* the first writer wins, as with the file backend. Stock writes again over what is there, so that a
  reader could get a page with one half of each, and records would lose the KV that they belong to.

And O_DIRECT, which stock asks for by default, is never used: it wants pages that are multiples of the
disk's blocks, and neither DeepSeek-V4's indexer pages (8,448 bytes a layer) nor records are. With
buffered I/O all pools are read and written where they lie, without bounce buffers.

Importing this module needs the nixl package; storage_backends.py imports it when the backend is
created. Threads: `batch_exists_v2` the prefetch thread; `batch_get_v2` the prefetch IO thread, and at
the same time the backup thread; `batch_set_v2` the backup thread. They share no host buffer, and
NIXL's agent takes its own locks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

logger = logging.getLogger(__name__)


def prefixes_served(transfer: PoolTransfer, present: Sequence[bool]) -> list[int]:
    """For which numbers of pages a pool has what its policy asks for, ascending.

    Args:
        transfer: its policy, and with TRAILING_PAGES as many keys as pages are needed (at least one).
        present: for each page whether the pool has it.

    Raises:
        ValueError: a policy other than ALL_PAGES and TRAILING_PAGES, as HiCacheFile does.
    """
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        whole = next((i for i, there in enumerate(present) if not there), len(present))
        return list(range(1, whole + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        needed = max(1, len(transfer.keys or ()))
        counts = range(1, len(present) + 1)
        return [pages for pages in counts if all(present[max(0, pages - needed) : pages])]
    raise ValueError(f"Unsupported pool hit policy: {transfer.hit_policy}")


class BxHiCacheNixl(HiCacheNixl):
    """See the module's docstring. Made by StorageBackendFactory, with SGLang's own configuration.

    Raises:
        RuntimeError: NIXL has no such plugin (stock).
    """

    def __init__(self, storage_config: HiCacheStorageConfig, *args: Any) -> None:
        asked = dict(storage_config.extra_config or {})
        direct = envs.SGLANG_HICACHE_NIXL_USE_DIRECT_IO
        if asked.get("use_direct_io", direct.is_set() and direct.get()):
            logger.warning(
                "bit-exact HiCache: NIXL storage uses buffered I/O; O_DIRECT was asked for, but pages "
                "of DeepSeek-V4 are not multiples of disk blocks"
            )
        self._object_bytes: dict[PoolName, list[int]] = {}
        buffered = dataclasses.replace(
            storage_config, extra_config={**asked, "use_direct_io": False}
        )
        super().__init__(buffered, *args)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """As stock, and keeps the sizes of the objects that a page of this pool consists of."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        ctx = self._hybrid_pool_ctx.get(host_pool_name)
        if ctx is None:
            return  # the anchor, whose markers are stock's
        if ctx.is_zero_copy:
            _, sizes = host_pool.get_page_buffer_meta(torch.arange(host_pool.page_size))
        else:
            sizes = [ctx.bounce_page_bytes]
        self._object_bytes[host_pool_name] = sizes

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """The prefixes that storage can restore, and the longest; answers to HiCacheFile.batch_exists_v2.

        A prefix of p pages can be restored if the KV markers of all p pages exist and every pool has
        what its policy asks for at p. A pool that was never registered has nothing.
        """
        kv_pages = self.batch_exists(keys, extra_info)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            served = prefixes_served(transfer, self.pages_exist(transfer.name, keys[:kv_pages]))
            if served:
                hits[transfer.name] = served[-1]
            restorable = sorted(set(restorable).intersection(served))
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def pages_exist(self, pool_name: PoolName, keys: list[str]) -> list[bool]:
        """Whether storage has all objects of each page, whole: batch_set_v2 leaves such a page alone."""
        sizes = self._object_bytes.get(pool_name)
        if sizes is None:
            return [False] * len(keys)
        objects = self._get_hybrid_component_keys(keys, pool_name, len(sizes))
        return self._page_results(self._query_keys_exist(objects, sizes * len(keys)), len(sizes))

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """Write the pages that are not there yet; True for each page that is there afterwards."""
        results = {}
        for transfer in transfers:
            present = self.pages_exist(transfer.name, transfer.keys or [])
            missing = [i for i, there in enumerate(present) if not there]
            if missing:
                written = super().batch_set_v2([_only(transfer, missing)], extra_info)
                for i, ok in zip(missing, written[transfer.name], strict=True):
                    present[i] = ok
            results[transfer.name] = present
        return results

    def _query_keys_exist(self, keys: list[str], sizes: list[int] | None = None) -> list[bool]:
        """Whether each object is there with so many bytes; stock, which calls this for the markers,
        gets to know whether they have any."""
        if not keys:
            return []
        found = self.agent.query_memory(
            [self._create_query_tuple(key) for key in keys],
            self.backend_selector.backend_name,
            mem_type=self.backend_selector.mem_type,
        )
        # Only files tell their size; what an object store has, it has whole.
        return [
            info is not None and int(info.get("size", size)) >= size
            for info, size in zip(found, sizes or [1] * len(keys), strict=True)
        ]


def _only(transfer: PoolTransfer, pages: list[int]) -> PoolTransfer:
    """The transfer for some of its pages; without indices, which stock refuses, where they do not fit."""
    keys, indices = transfer.keys or [], transfer.host_indices
    if indices is not None:
        fits = len(indices) % len(keys) == 0
        indices = indices.view(len(keys), -1)[pages].flatten() if fits else None
    return dataclasses.replace(transfer, keys=[keys[i] for i in pages], host_indices=indices)
