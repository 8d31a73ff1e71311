"""The seam to SGLang's tree components: identity rides the tree's commits, the gate its validators.

Three subclasses of stock classes:

* `BxFull`: where a node's device and host copies are born, split, moved and lost.
* `BxSWA`: the gate, and the two insert hooks that stock offers to no other component.
* `BxTreeCore`: the storage insert, which no component hook sees.

They keep nothing: what they see they tell the cache that they belong to (tree.BxCache). The SWA component
keeps no host pool: truth is neither in `host_value` nor moved with nodes. No tensor is read here, only
whether it is None, so nothing synchronises with the device.

`tree_writers.py` checks at startup that stock writes FULL's `value` and `host_value` nowhere else
than where these hooks look.

Scheduler thread only, like everything in SGLang's tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InsertResult, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import (
    CacheTransferPhase,
    ComponentType,
    FullComponent,
    SWAComponent,
)
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer, PreparePrefetchResult
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_bitexact_hicache.lineage import Copy

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_bitexact_hicache.tree import BxCache

FULL = ComponentType.FULL
SWA = ComponentType.SWA
TREE_CORE_NAME = "bitexact_hicache"
"""Name of `BxTreeCore` in SGLang's tree core registry."""


class BxFull(FullComponent):
    """Follows the copies of every node: the one component that owns `value` and `host_value`."""

    cache: BxCache

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Tells the insert that follows whose pages it brings, and with aligned prefill how many of
        them may enter the tree (FullComponent: no-op, all of them). The others stay the request's.
        """
        self.cache.insert_announced(req, insert_params, token_ids_len)
        limit = super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        if self.cache.aligned is None:
            return limit
        # `extend_end` is where its prefill ends or has got to: what lies beyond was decoded.
        return self.cache.aligned.whole(min(token_ids_len, req.extend_end))

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        """Moves the row onto the tree's pages that stock gave it (FullComponent: no-op)."""
        super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)
        self.cache.insert_settled(req, inserted=insert_result is not None, finished=is_finished)

    def commit_insert_component_data(
        self,
        node: UnifiedTreeNode,
        is_new_leaf: bool,
        params: InsertParams,
        result: InsertResult,
        cache_actions: list[Any],
    ) -> None:
        """New leaf (UnifiedTreeCore._add_new_node): its pages are the inserting row's.

        FULL runs before SWA, which may split the leaf; BxCache checks the order.
        """
        super().commit_insert_component_data(
            node=node,
            is_new_leaf=is_new_leaf,
            params=params,
            result=result,
            cache_actions=cache_actions,
        )
        if is_new_leaf:
            self.cache.device_rows_from_insert(node, params, result.prefix_len)

    def redistribute_on_node_split(
        self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode
    ) -> None:
        """Split (UnifiedTreeCore._split_node): cut the identities where the rows are cut."""
        super().redistribute_on_node_split(new_parent, child)
        self.cache.copies.split(new_parent.id, child.id, self.cache.pages_of(new_parent))

    def commit_hicache_transfer(
        self,
        node: UnifiedTreeNode,
        phase: CacheTransferPhase,
        transfers: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        """Backup and load-back: the copied rows have the identity of the rows they come from.

        Stock commits when the copy is queued and locks the node until it is done, so the queued
        copy moves the bytes that are labelled here.
        """
        super().commit_hicache_transfer(node, phase, transfers, **kwargs)
        if not transfers:
            return
        copies, pages_of = self.cache.copies, self.cache.pages_of
        transfer = transfers[0]
        if phase == CacheTransferPhase.BACKUP_HOST and transfer.host_indices is not None:
            copies.backed_up(node.id, pages_of(node))
        elif phase == CacheTransferPhase.LOAD_BACK and transfer.device_indices is not None:
            for node_id in transfer.nodes_to_load or ():
                copies.loaded_back(node_id, pages_of(self.tree_core.node_by_id(node_id)))

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: dict[Any, Any],
        host_frees: dict[Any, Any],
        cache_actions: list[Any],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        """Eviction, demotion and deletion of either layer: the copy is gone."""
        freed = super().evict_component(node, device_frees, host_frees, cache_actions, target)
        if EvictLayer.DEVICE in target:
            self.cache.copies.set_device(node.id, None)
        if EvictLayer.HOST in target:
            self.cache.copies.set_host(node.id, None)
        return freed


class BxSWA(SWAComponent):
    """The gate. SWA rows of a ring mean nothing to another request, so nothing of them is kept."""

    cache: BxCache

    def create_match_validator(
        self, match_device_only: bool = False
    ) -> Callable[[UnifiedTreeNode], bool]:
        """Both validator sets demand truth at the end of an unbroken chain.

        Device-only too: a request whose load-back is declined continues at the device anchor.
        """
        cache = self.cache
        walk = cache.start_walk(match_device_only)
        copies, pages_of = cache.copies, cache.pages_of

        def accepts(node: UnifiedTreeNode) -> bool:
            known = copies.of(node.id)
            data = node.component_data[FULL]
            if data.value is not None:
                copy = known.dev
            elif match_device_only or data.host_value is None:
                copy = None
            else:
                copy = known.host
            return walk.step(copy, pages_of(node))

        return accepts

    def finalize_match_result_in_tree_core(
        self,
        result: MatchResult,
        params: MatchPrefixParams,
        value_chunks: list[Any],
        best_value_len: int,
    ) -> MatchResult:
        """No SWA host hit to load and no branch point: stock derives both from SWA rows."""
        return result

    def recover_after_unevict(
        self,
        node: UnifiedTreeNode,
        prefix_len: int,
        total_prefix_len: int,
        params: InsertParams,
        result: InsertResult,
        cache_actions: list[Any],
    ) -> None:
        """UnifiedTreeCore._unevict_node_on_insert gave the node the inserting row's pages.

        Before super(), which may split the node. Stock calls this hook on SWA only.
        """
        self.cache.device_rows_from_insert(node, params, total_prefix_len)
        super().recover_after_unevict(
            node=node,
            prefix_len=prefix_len,
            total_prefix_len=total_prefix_len,
            params=params,
            result=result,
            cache_actions=cache_actions,
        )

    def prepare_prefetch(self, node_id: int, *, prefetch_tokens: int = 0) -> PreparePrefetchResult:
        """A prefetch of whole pages brings one record, into one slot."""
        wanted = self.cache.truth_storage is not None and prefetch_tokens >= self.cache.page_size
        return PreparePrefetchResult(staging_tokens=int(wanted))

    def alloc_prefetch_staging(self, num_tokens: int) -> torch.Tensor | None:
        """The slot; SGLang releases it by its host index unless the commit takes it."""
        storage = self.cache.truth_storage
        return None if storage is None else storage.alloc(num_tokens)

    def build_hicache_transfers(
        self, node: UnifiedTreeNode, phase: CacheTransferPhase, **kwargs: Any
    ) -> list[Any] | None:
        """Truth goes to storage and comes from there with KV. Between device and host it does not ride
        with nodes: it is captured and restored for a request."""
        storage = self.cache.truth_storage
        if storage is None:
            return None
        if phase == CacheTransferPhase.BACKUP_STORAGE:
            return storage.write_transfers(node)
        if phase == CacheTransferPhase.PREFETCH and kwargs.get("staging_tokens"):
            return storage.fetch_transfers(node)
        return None

    def commit_hicache_transfer(
        self,
        node: UnifiedTreeNode,
        phase: CacheTransferPhase,
        transfers: Sequence[Any] = (),
        *,
        cache_actions: list[Any],
        insert_result: InsertResult | None = None,
        pool_storage_result: Any = None,
    ) -> None:
        """A prefetch is in the tree: its truth is published, or its slot given back."""
        storage = self.cache.truth_storage
        if phase == CacheTransferPhase.PREFETCH and transfers and storage is not None:
            storage.commit(transfers, insert_result, pool_storage_result)

    def update_component_on_insert_overlap(
        self,
        node: UnifiedTreeNode,
        prefix_len: int,
        total_prefix_len: int,
        value_slice: Any,
        params: InsertParams,
        result: InsertResult,
        cache_actions: list[Any],
    ) -> int:
        """Overlap keeps the tree's rows: stock would re-point nodes to revive their SWA rows."""
        return prefix_len


class BxTreeCore(UnifiedTreeCore):
    """The Python tree core with the one writer of host rows that no component hook sees."""

    def insert_host(
        self, node_id: int, key: RadixKey, host_value: Any, hash_value: list[str]
    ) -> InsertResult:
        """Storage insert: the pages it brings have no identity until their record proves one, which is
        the next thing that happens (BxSWA.commit_hicache_transfer).

        Dropped whole below a node without a host copy: stock guards only the new-node case, and
        refilling a resident child there would leave it backed up under a parent that is not.
        """
        cache: BxCache = self.components_by_type[FULL].cache
        anchor = self.node_by_id(node_id)
        if anchor is not self.root_node and not anchor.backuped:
            cache.gate_counters.host_inserts_dropped += 1
            return InsertResult(prefix_len=0, total_len=len(key), host_insert_dropped=True)
        result = super().insert_host(node_id, key, host_value, hash_value)
        node, position = anchor, 0
        while position < len(key):
            node = node.children.get(key.child_key_at(position, self.page_size))
            if node is None:
                break
            if node.backuped and cache.copies.of(node.id).host is None:
                cache.copies.set_host(node.id, Copy.unknown(cache.pages_of(node)))
            position += len(node.key)
        return result


def register_tree_core() -> None:
    """Make `BxTreeCore` known to SGLang under TREE_CORE_NAME. Idempotent."""
    if get_tree_core_factory(TREE_CORE_NAME) is None:
        register_tree_core_backend(TREE_CORE_NAME, BxTreeCore)
