"""The seam to SGLang's prefix cache: the match that lands on the gate's boundary, the rows of requests.

`BxCache` is UnifiedRadixCache with the components and the tree core of components.py. It owns the tables
that they keep up to date: node copies by node id (`copies`), rows by request object (`rows`), truths
(`store`). Nothing is added to nodes or requests, and no tensor is read.

Scheduler thread only, like everything in SGLang's tree.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_bitexact_hicache.aligned import AlignedPrefill
from sglang_bitexact_hicache.components import (
    FULL,
    SWA,
    TREE_CORE_NAME,
    BxFull,
    BxSWA,
    register_tree_core,
)
from sglang_bitexact_hicache.gate import GateCounters, Walk, chain_end
from sglang_bitexact_hicache.healing import rehang
from sglang_bitexact_hicache.lineage import (
    ROOT,
    UNKNOWN,
    Copy,
    CopyTable,
    LineageError,
    Row,
    RowTable,
)
from sglang_bitexact_hicache.refusals import storage_problem
from sglang_bitexact_hicache.truth import TruthStore

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )
    from sglang.srt.mem_cache.base_prefix_cache import (
        InitLoadBackParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_bitexact_hicache.runtime import TruthRuntime
    from sglang_bitexact_hicache.storage import TruthStorage


class Junction(NamedTuple):
    """Where a prompt stops following a cached path, with no truth there (policy.py)."""

    tokens: int
    """The deepest whole page of the path, as a length in tokens."""
    node: int
    """The deepest tree node of the path."""
    parts: bool
    """Whether the path goes on without this prompt: others come this way."""


class BxCache(UnifiedRadixCache):
    """UnifiedRadixCache whose hits end only where they are exact.

    Built like the stock class (`create_unified_radix_cache(..., cache_class=BxCache)`); it brings
    its own components and tree core. `attach_truth` gives it the store once its size is known;
    until then an empty store refuses every hit.
    """

    def __init__(self, params: CacheInitParams) -> None:
        if tuple(params.tree_components or ()) != (FULL, SWA):
            raise ValueError(
                "strict bit-exact HiCache needs a tree of exactly FULL and SWA, in this order, "
                f"got {params.tree_components}"
            )
        self.truth_runtime: TruthRuntime | None = None
        """The byte side (runtime.TruthRuntime), set by the factory. Its `forget(req)` is called when
        a request gives its row back, its `flush()` on a flush, before the store is reset."""
        self.truth_storage: TruthStorage | None = None
        """What goes to storage and comes from there (storage.TruthStorage). Set by the factory."""
        self.aligned: AlignedPrefill | None = None
        """The rules of aligned prefill where it is on. Set by the factory, before any request."""
        self.key_tokens = 2 if params.is_eagle else 1
        """Tokens that an element of a key spans. With EAGLE keys are pairs of neighbouring tokens: a page
        ends at the same token as without, but is there, and found, only by whoever knows one more."""
        self.draft_pools = tuple(params.mtp_draft_device_pools)
        """The KV pools of the draft's layers, one each, where the server has a draft (EAGLE)."""
        self.gate_counters = GateCounters()
        self.track_junctions = True
        """Whether chunks are cut at junctions (policy.Kind.JUNCTION)."""
        # Before the base constructor, which ends with a reset.
        self._page_size = params.page_size
        self._walks: dict[bool, Walk] = {}
        self._insert_of: tuple[InsertParams, Row] | None = None
        # Only reported, never decided on, so it may end with the request object.
        self._loaded_tokens: WeakKeyDictionary[Req, int] = WeakKeyDictionary()
        # Every match of a request that waits writes its entry anew; the entry is read while the
        # request lives, so when a dead one's goes decides nothing.
        self._junctions: WeakKeyDictionary[Req, Junction] = WeakKeyDictionary()
        self._healers: dict[int, Req] = {}
        self._use_store(TruthStore(0))
        register_tree_core()
        super().__init__(
            dataclasses.replace(
                params,
                tree_core_backend=TREE_CORE_NAME,
                component_registry_override={
                    **(params.component_registry_override or {}),
                    FULL: BxFull,
                    SWA: BxSWA,
                },
            )
        )

    # ---- truth and rows: what the byte side calls

    def attach_truth(self, store: TruthStore) -> None:
        """Use this store from now on. Raises ValueError once the tree holds anything."""
        if len(self.copies) or len(self.rows):
            raise ValueError("truth can only be attached to an empty cache")
        self._use_store(store)

    def row_taken(self, req: Req) -> None:
        """A request that held no KV before has its row: from `last_node` and `prefix_len`.

        Call AFTER ScheduleBatch.prepare_for_extend. A row left from before a retraction is closed.
        """
        base = req.prefix_len // self._page_size
        self.rows.open(req, self._tail(req.last_node, base), base)
        junction = self.junction(req)
        if junction is not None and req.extend_end <= junction.tokens:
            self._healers.setdefault(junction.node, req)

    def junction(self, req: Req) -> Junction | None:
        """Where the request follows cached pages that it has to compute again, and will leave them.

        From its last match; None once its row has passed the junction, or where all that the cache
        holds of the prompt could be reused. With aligned prefill the last whole chunk of the path.
        """
        found = self._junctions.get(req)
        if found is not None and self.aligned is not None:
            found = found._replace(tokens=self.aligned.whole(found.tokens))
        return found if found is not None and found.tokens > self._reached(req) else None

    def healer(self, junction: Junction) -> Req | None:
        """The running request that is on its way to this junction with a chunk that will end there,
        so that whoever waits for its checkpoint need not compute the same pages."""
        return self._healers.get(junction.node)

    def row_launched(self, req: Req, pages: int) -> None:
        """The forward that completes the row's first `pages` pages is launched. Idempotent."""
        row = self.rows.get(req)
        if row is not None:
            row.upto(pages)

    def row_lineage(self, req: Req, pages: int) -> int:
        """Lineage of the row's own page that ends at boundary `pages`.

        UNKNOWN (which no truth can be published for) where the page is the tree's, is not launched
        yet, or the request has no row.
        """
        row = self.rows.get(req)
        return UNKNOWN if row is None else row.id_of(pages)

    def row_truths(self, req: Req) -> int:
        """Slots held for pages of the request that no tree node has yet."""
        row = self.rows.get(req)
        return 0 if row is None else sum(lineage in self.store for lineage in row.ids)

    def row_dropped(self, req: Req) -> None:
        """The request lost its row (finish, abort, retraction). Idempotent.

        Every release of a KV row comes here by itself, through `on_release`.
        """
        self.rows.drop(req)

    def final_truth(self, req: Req) -> tuple[int, int] | None:
        """(lineage, slot) of the truth at the request's final `prefix_len`, which must be > 0.

        Re-checked over the device copies as they are now: None when they do not hang together, do
        not end at `prefix_len`, or have no truth there. The gate admitted the prefix, so None is a
        bug of ours.
        """
        if req.prefix_len <= 0:
            raise ValueError(f"request {req.rid} has no prefix to restore")
        path = self._path(req.last_node)
        if sum(len(node.key) for node in path) != req.prefix_len:
            return None
        lineage = chain_end(self.copies.of(node.id).dev for node in path)
        if lineage is None:
            return None
        slot = self.store.lookup(lineage)
        return None if slot is None else (lineage, slot)

    def pop_loaded_tokens(self, req: Req) -> int:
        """Tokens that the request's load-back copied from host memory; 0 when asked again.

        Stock reports everything between the two anchors as loaded; with the gate, part of that may
        have been on the device all along.
        """
        return self._loaded_tokens.pop(req, 0)

    def check_integrity(self) -> None:
        """Raise LineageError or SlotError where tables, tree and store disagree.

        O(tree); for tests and debugging, beside stock's `sanity_check`.
        """
        nodes = [n for n in self.tree_core._collect_all_nodes() if n.parent is not None]
        for node in nodes:
            known, data = self.copies.of(node.id), node.component_data[FULL]
            for tier, copy, rows in (
                ("device", known.dev, data.value),
                ("host", known.host, data.host_value),
            ):
                if (copy is None) != (rows is None):
                    raise LineageError(f"node {node.id}: {tier} rows and identity disagree")
                if copy is not None and len(copy) != self.pages_of(node):
                    raise LineageError(f"node {node.id}: {tier} identity of another length")
        strays = {node_id for node_id, _ in self.copies.items()} - {node.id for node in nodes}
        if strays:
            raise LineageError(f"copies of nodes that left the tree: {sorted(strays)}")
        expected = self.copies.count_references() + self.rows.count_references()
        held = self.store.lineages.references()
        if held != dict(expected):
            wrong = sorted(set(held.items()) ^ set(expected.items()))
            raise LineageError(f"reference counts differ: {wrong}")
        self.store.check_integrity()

    # ---- overrides

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **options: Any) -> None:
        """Before a checkpoint on the way to a junction: what the path has in host memory only is
        loaded back, so that the request joins it.

        Otherwise stock gives those nodes the request's rows over host copies of another computation,
        and whatever hangs on the one is lost when the other is used. The request's next forward is a
        prefill chunk (a junction lies before the prompt's end), and SGLang starts queued loads when it
        forms that batch, which waits for them.

        With aligned prefill a chunk may end beyond the path that it follows. It joins what there is.

        With bigram keys stock leaves out the last page of a chunk that ends where a page does, whose last
        bigram needs the token behind it. A chunk with others to come knows that token: it is counted, so
        that the request joins the tree exactly where its chunk ends, as it does without EAGLE. No KV of
        that token is looked at, because a key of whole pages has a value for each bigram and no more. A
        request that goes away after such a checkpoint must not step back behind it.
        """
        path = self._junctions.get(req)
        chunks_to_come = up_to < len(req.full_untruncated_fill_ids)
        if (
            path is not None
            and path.tokens > self._reached(req)
            and not req.finished()
            and (up_to <= path.tokens or (self.aligned is not None and chunks_to_come))
        ):
            self._load_path_back(path, up_to)
        joined_here = up_to == req.kv.cache_protected_len
        if chunks_to_come and (joined_here or not req.finished()):
            up_to += self.key_tokens - 1
        super().checkpoint_into_tree(req, up_to=up_to, **options)

    def swa_reprefill_tail_tokens(self, req: Req | None = None) -> int:
        """0: the window is restored, so no tail of a hit has to be computed again."""
        return 0

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, int] | None:
        """Declines where the path no longer is what was matched.

        Nothing locks the resident pages below the device anchor between match and load-back. If
        they were demoted meanwhile, the hit would use their host copies: another lineage.
        """
        path = self._path(params.best_match_node)
        lineage = chain_end(self._copy_to_use(node) for node in path)
        if lineage is None or lineage not in self.store:
            self.gate_counters.load_backs_declined += 1
            return 0, params.req.last_node
        off_device = sum(len(node.key) for node in path if node.evicted)
        outcome = super().init_load_back(params)
        if outcome is not None and outcome[0] > 0:
            self._loaded_tokens[params.req] = off_device
        return outcome

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """Every release of a KV row ends the request's row here, whatever came before."""
        super().on_release(req, checkpointed=checkpointed)
        self.row_dropped(req)
        self._loaded_tokens.pop(req, None)
        self._junctions.pop(req, None)
        self._no_longer_healing(req)
        if self.truth_runtime is not None:
            self.truth_runtime.forget(req)

    def attach_storage_backend(self, storage_backend: str, **options: Any) -> tuple[bool, str]:
        """At run time as at startup: what startup would refuse is refused, and nothing changes."""
        problem = storage_problem(
            storage_backend,
            options.get("hicache_write_policy"),
            options.get("served_model_name"),
            ranks=self.tp_world_size,
        )
        storage = self.truth_storage
        if storage is None:
            problem = problem or "this cache was built without storage"
        elif storage.closed:
            problem = problem or "the model's weights changed since this server started; restart it"
        if problem is not None or storage is None:
            return False, f"bit-exact HiCache: {problem}"
        attached = super().attach_storage_backend(storage_backend, **options)
        storage.attached()
        return attached

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Stock, and what the IO threads had in hand is given back."""
        detached = super().detach_storage_backend()
        if self.truth_storage is not None and detached[0]:
            self.truth_storage.detached()
        return detached

    def write_backup_storage(self, node_id: int) -> None:
        """A node's KV goes to storage: its truths go with it (components.BxSWA, storage_writer.py)."""
        before = len(self.ongoing_backup)
        super().write_backup_storage(node_id)
        if self.truth_storage is not None:
            submitted = len(self.ongoing_backup) > before
            self.truth_storage.submitted(next(reversed(self.ongoing_backup)) if submitted else None)

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: int,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        **options: Any,
    ) -> bool | None:
        """Only behind a prefix that can be proved, and no KV that host memory holds (but for a page). And
        storage is always asked: what it said for another request does not say where a record is."""
        storage = self.truth_storage
        if not self.enable_storage or storage is None or not storage.provable(last_host_node_id):
            return None
        options.pop("storage_hit_end", None)
        key = RadixKey(
            new_input_tokens,
            extra_key=options.get("extra_key"),
            is_bigram=self.tree_core.is_eagle,
            cache_salt=options.get("cache_salt"),
        ).page_aligned(self._page_size)
        anchor, tokens = storage.anchor_of(last_host_node_id, key)
        if tokens:
            last_host_node_id, last_hash = anchor, self.get_last_hash_value(anchor)
            prefix_keys = prefix_keys and self.get_prefix_hash_values(anchor)
            matched = options.get("matched_prefix_tokens") or new_input_tokens[:0]
            options["matched_prefix_tokens"] = matched + new_input_tokens[:tokens]
            new_input_tokens = new_input_tokens[tokens:]
        return super().prefetch_from_storage(
            request, last_host_node_id, new_input_tokens, last_hash, prefix_keys, **options
        )

    def release_host_resources(self) -> None:
        """Graceful shutdown: the byte side ends its threads and lets its host memory go. Idempotent.

        Storage first: its threads read and write that memory, and SGLang detaches only at exit.
        """
        self.shutdown()
        super().release_host_resources()
        runtime, self.truth_runtime = self.truth_runtime, None
        if runtime is not None:
            runtime.close()

    def _drain_storage_control_queues_impl(self, **options: Any) -> None:
        """SGLang takes acknowledgements of its IO threads, as many on every rank: then, and not when
        a thread happens to be done, the slots of those operations are unlocked."""
        super()._drain_storage_control_queues_impl(**options)
        if self.truth_storage is not None:
            self.truth_storage.settle()

    def _prefetch_deadline_expired(self, operation: Any) -> bool:
        """The policy `timeout` bounds the read of a record too: stock waits for as long as it takes once
        the KV is there, and a record may hang like any other read."""
        wait = self._storage_prefetch_wait.get(operation.handle)
        return wait is not None and (
            wait.expired or (wait.timer.running and wait.timer.elapsed() > wait.timeout_s)
        )

    def _match_tree(self, params: MatchPrefixParams) -> MatchResult:
        """Ends the match at the deepest page that the gate accepts, cutting a node if need be.

        The validators judge node ends. Where a page inside a node is deeper, the match is repeated
        with a shorter key, which makes the tree split there; the split stays, so this happens once
        per boundary. The device set is cut too: a declined load-back must find its boundary.
        """
        self._walks.clear()
        result = super()._match_tree(params)
        self.gate_counters.matches += 1
        if result.last_visited_node_id is None:
            if params.req is not None:
                self._junctions.pop(params.req, None)
            return result
        device = self._walks[True]
        # Without HiCache stock builds the device set only.
        host = self._walks.get(False, device)
        device_best, host_best = device.best, host.best
        device_goal, host_goal = device.deepest(), host.deepest()
        if params.req is not None:
            self._note_junction(params.req, result, max(device_goal, host_goal))
        cut_for_device = device_best < device_goal < host_goal
        if cut_for_device:
            self.gate_counters.device_walks += 1
            super()._match_tree(self._limited(params, device_goal))
        if cut_for_device or host_goal > host_best:
            self.gate_counters.second_walks += 1
            gated = super()._match_tree(self._limited(params, host_goal))
            # How far the KV itself reaches is a fact of the whole key.
            result = gated._replace(full_kv_hit_length=result.full_kv_hit_length)
        return result

    def _reset_full(self) -> None:
        """Flush: tree, identities, rows and truths go together. The base constructor runs it too."""
        if self.truth_runtime is not None:
            self.truth_runtime.flush()
        super()._reset_full()
        self._insert_of = None
        self._walks.clear()
        self.copies.clear()
        self.rows.clear()
        self._loaded_tokens.clear()
        self._junctions.clear()
        self._healers.clear()
        self.store.reset()
        if self.truth_storage is not None:
            self.truth_storage.flush()

    # ---- called by the components

    def pages_of(self, node: UnifiedTreeNode) -> int:
        """Pages of a node; keys in the tree are always whole pages."""
        return len(node.key) // self._page_size

    def start_walk(self, match_device_only: bool) -> Walk:
        """The gate's state for one validator set of the match that begins."""
        walk = self._walks[match_device_only] = Walk(self.store)
        return walk

    def insert_announced(self, req: Req, insert_params: InsertParams, tokens: int) -> None:
        """The next insert with these params brings the pages of this request's row."""
        row = self.rows.get(req)
        if row is not None:
            row.upto((tokens - self.key_tokens + 1) // self._page_size)
            self._insert_of = (insert_params, row)

    def insert_settled(self, req: Req, *, inserted: bool, finished: bool) -> None:
        """The insert is over; stock has moved the request's row and lock onto the tree's pages.

        Mends the path that the request's row reads now, and gives the truth of its last page to the
        page that the tree kept (healing.py has the argument).
        """
        self._insert_of = None
        row = self.rows.get(req)
        if row is None:
            return
        if inserted:
            whole = self._rehang(req.last_node)
            end = req.kv.cache_protected_len
            base = end // self._page_size
            tail = self._tail(req.last_node, base)
            own = row.id_of(base)
            # Allocated is what a launched step may have computed: beyond `end` it read own pages.
            went_on_from_here = not finished and req.kv.kv_allocated_len == end
            if whole and own != tail and went_on_from_here and self.store.move(own, tail):
                self.gate_counters.healed += 1
                if self.truth_storage is not None:
                    self.truth_storage.write_late(self.tree_core.node_by_id(req.last_node))
            row.rebase(tail, base)
            if self.junction(req) is None:
                self._no_longer_healing(req)
        if finished:
            self.rows.drop(req)

    def device_rows_from_insert(
        self, node: UnifiedTreeNode, params: InsertParams, start: int
    ) -> None:
        """The node, which begins at token `start`, took the inserting request's device rows."""
        pages = self.pages_of(node)
        # By identity of the params: an insert that nobody announced brings unknown pages.
        if self._insert_of is not None and self._insert_of[0] is params:
            copy = self._insert_of[1].take(start // self._page_size, pages)
        else:
            copy = Copy.unknown(pages)
        self.gate_counters.unknown_pages += copy.ids.count(UNKNOWN)
        self.gate_counters.bound += sum(lineage in self.store for lineage in copy.ids)
        self.copies.set_device(node.id, copy)

    # ---- internals

    def _rehang(self, node_id: int) -> bool:
        """Mend the device chain of a path; whether it hangs together now."""
        path = self._path(node_id)
        if chain_end(self.copies.of(node.id).dev for node in path) is not None:
            return True
        copies = [self.copies.of(node.id) for node in path]
        for position, mended, pages in rehang(copies, self.store.lineages.mint):
            self.copies.relabel(path[position].id, mended)
            self.gate_counters.rehung_pages += pages
        return chain_end(self.copies.of(node.id).dev for node in path) is not None

    def _load_path_back(self, junction: Junction, up_to: int) -> None:
        try:
            node = self.tree_core.node_by_id(junction.node)
        except KeyError:
            return  # evicted since the match: the request's own pages take its place
        start = sum(len(step.key) for step in self._path(node.id)) - len(node.key)
        while node.parent is not None and start >= up_to:
            node = node.parent
            start -= len(node.key)
        if node.parent is None or not node.evicted:
            return
        path = self._path(node.id)
        if chain_end(self._copy_to_use(step) for step in path) is None:
            return
        pages = sum(self.pages_of(step) for step in path if step.evicted)
        if self.load_back(node.id):
            self.gate_counters.loaded_for_healing += pages

    def _note_junction(self, req: Req, result: MatchResult, best_pages: int) -> None:
        reach = result.full_kv_hit_length
        if self.track_junctions and reach > best_pages * self._page_size:
            node = self.tree_core.node_by_id(result.last_visited_node_id)
            self._junctions[req] = Junction(reach, node.id, bool(node.children))
        else:
            self._junctions.pop(req, None)

    def _reached(self, req: Req) -> int:
        """Tokens of the request's row that are the tree's, or will be once it has a row."""
        row = self.rows.get(req)
        return req.prefix_len if row is None else row.base * self._page_size

    def _no_longer_healing(self, req: Req) -> None:
        for node in [node for node, healer in self._healers.items() if healer is req]:
            del self._healers[node]

    def _use_store(self, store: TruthStore) -> None:
        self.store = store
        self.copies = CopyTable(store.lineages)
        self.rows = RowTable(store.lineages)

    def _limited(self, params: MatchPrefixParams, pages: int) -> MatchPrefixParams:
        key = params.key
        limited = RadixKey(
            key.token_ids,
            key.extra_key,
            is_bigram=key.is_bigram,
            # In tokens, whatever an element spans.
            limit=pages * self._page_size + self.key_tokens - 1,
            cache_salt=key.cache_salt,
        )
        return dataclasses.replace(params, key=limited)

    def _path(self, node_id: int) -> list[UnifiedTreeNode]:
        """The nodes from below the root to the node, root first."""
        path = []
        node = self.tree_core.node_by_id(node_id)
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def _copy_to_use(self, node: UnifiedTreeNode) -> Copy | None:
        """What a hit uses of the node now: device where the node is on the device, else host."""
        known = self.copies.of(node.id)
        return known.host if node.evicted else known.dev

    def _tail(self, node_id: int, base: int) -> int:
        """Lineage of the last of the `base` pages that a row shares with the tree."""
        if base == 0:
            return ROOT
        copy = self.copies.of(node_id).dev
        return UNKNOWN if copy is None else copy.last_id


def runtime_of(owner: ScheduleBatch | SchedulerBatchResultProcessor) -> TruthRuntime | None:
    """The byte side of the cache that a batch, or a processor of results, belongs to; None where it is
    not ours."""
    cache = owner.tree_cache
    return cache.truth_runtime if isinstance(cache, BxCache) else None
