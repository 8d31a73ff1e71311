"""Drives a BxCache as one scheduler does, with byte-compared hits. Used by the tree tests.

Real: Req, match (`Req.init_next_round_input`), `checkpoint_kv_cache`, `release_kv_cache`, row and page
allocation, the cache, its controller and pools. Written here: the admission of `PrefillAdder`
(lock, load-back, lock), the "forward", which stamps each page it touches with a number that nobody
else ever writes, and the truth record, which is a digest of the KV bytes of the whole row at the
moment the forward ran. A hit is right exactly when it is the state of a request that was (claim 2):
the bytes that the hitting row holds at its final prefix are the bytes that the truth's writer read
when it went on from there. For a boundary inside the writer's forward that is the row at that forward.
For a forward's last boundary it is also the row after a checkpoint that came before the writer's next
forward, because from that row the writer went on. Every other pairing of KV and truth is a Violation.
"""

from __future__ import annotations

import atexit
import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from bitexact_fixtures import PAGE, CpuStack

from sglang_bitexact_hicache.chunking import chunk_end
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.planner import CapturePlanner, Wanted
from sglang_bitexact_hicache.policy import DEFAULT_KINDS, Keep, Kind
from sglang_bitexact_hicache.slots import SlotState

DIGEST = 16


class Violation(AssertionError):
    """A hit whose bytes do not belong together, or bookkeeping that leaks."""


def tokens(pages: int, tail: int = 0, *, branch_at: int | None = None, branch: int = 0) -> array:
    """A prompt of `pages` whole pages and `tail` more tokens, equal for equal arguments.

    Pages from `branch_at` on belong to the branch, so prompts share exactly `branch_at` pages.
    """
    ids = array("q")
    for page in range(pages + (tail > 0)):
        own = branch if branch_at is not None and page >= branch_at else 0
        ids.extend(range(1 + page * PAGE + own * 10**6, 1 + (page + 1) * PAGE + own * 10**6))
    return ids[: pages * PAGE + tail]


class TreeDriver:
    """See the module's docstring.

    Args:
        stack: from `make_cache`.
        keep: which boundaries (in pages) of a row get truth; all by default.
        seed: of the driver's own random choices (none in the directed tests).
        cuts: whether chunks end at junctions, as the scheduler's do where its one place for an
            unfinished request is free.
    """

    def __init__(
        self,
        stack: CpuStack,
        keep: Callable[[int], bool] = lambda _pages: True,
        seed: int = 0,
        cuts: bool = False,
    ) -> None:
        self.cuts = cuts
        self.stack = stack
        self.cache = stack.cache
        self.keep = keep
        self.random = random.Random(seed)
        self.running: list[Any] = []
        self.stats: Counter[str] = Counter()
        self.truth_bytes = torch.zeros(self.cache.store.capacity, DIGEST, dtype=torch.uint8)
        self.computed: dict[Any, int] = {}
        # Per slot the digests of the rows that its record is true of.
        self.true_of: dict[int, set[bytes]] = {}
        # Per request the record at the end of its last forward: (boundary, slot, its true_of).
        self._at_end: dict[Any, tuple[int, int, set[bytes]]] = {}
        self._unchecked: list[Any] = []
        self._loads_queued = False
        self._next_stamp = 0
        self._next_rid = 0

    # ---- a request's life

    def request(self, prompt: array, **fields: Any) -> Any:
        """A Req that has not been matched yet."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._next_rid += 1
        return Req(f"r{self._next_rid}", "", array("q", prompt), SamplingParams(), **fields)

    def admit(
        self,
        prompt: array,
        *,
        between: Callable[[], Any] = lambda: None,
        decline: bool = False,
        flush: bool = True,
        req: Any = None,
        extend_end: Callable[[Any], int] | None = None,
    ) -> Any:
        """Match, load back and give a row, as one pass of PrefillAdder.add_one_req does.

        Args:
            between: runs after the match, with the device anchor locked, before the load-back.
            decline: make the load-back fail for want of quota.
            flush: start the load-back's copies and check the hit at once; False: with later ones.
            req: a Req from `request`, or a retracted one, to admit (again).
            extend_end: where its first chunk will end, asked once its prefix is final; the whole
                prompt by default.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        cache = self.cache
        if req is None:
            req = self.request(prompt)
        req.init_next_round_input(cache)
        self.stats["matches"] += 1
        anchor = cache.lock(req.last_node)
        between()
        if req.host_hit_length > 0:
            promised = req.host_hit_length
            pinned = cache.inc_host_lock_ref(req.best_match_node).to_dec_params()
            loaded, req.last_node = cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=req.best_match_node,
                    host_hit_length=promised,
                    mem_quota=0 if decline else None,
                    req=req,
                )
            )
            cache.dec_host_lock_ref(req.best_match_node, pinned)
            if 0 < loaded < promised:
                raise Violation(f"stock would refuse a partial load-back: {loaded} of {promised}")
            self.stats["loaded" if loaded else "declined"] += 1
            self._loads_queued |= loaded > 0
            req.prefix_len += loaded
            req.kv.cache_protected_len = req.prefix_len
        req.lock = cache.lock(req.last_node)
        cache.unlock(anchor)
        if self.stack.req_to_token.alloc([req]) is None:
            raise RuntimeError("the test ran out of request rows")
        row = self._row(req)
        if req.prefix_len:
            row[: req.prefix_len] = cache.path_device_indices(req.last_node).to(row.dtype)
        req.kv.kv_allocated_len = req.prefix_len
        if not self._grow(req, req.prefix_len + 1):
            raise RuntimeError("the test ran out of device pages")
        # Stock gives a row pages for its whole extend; one token is what the least extend has.
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.prefix_len + 1
        self.computed[req] = req.prefix_len
        whole = len(req.full_untruncated_fill_ids)
        req.extend_end = whole if extend_end is None else extend_end(req)
        cache.row_taken(req)
        self.running.append(req)
        self._unchecked.append(req)
        if flush:
            self.flush_loads()
        return req

    def flush_loads(self) -> None:
        """Start the queued load-backs (one merged copy) and check what every new request reads."""
        if self.loads_queued:
            self.cache.ready_to_load_host_cache()
            self._loads_queued = False
        for req in self._unchecked:
            self._check_hit(req)
        self._unchecked.clear()

    @property
    def loads_queued(self) -> bool:
        """Whether loaded rows do not hold their bytes yet. A checkpoint may have queued some too."""
        return self._loads_queued or bool(self.cache.cache_controller.load_queue)

    def forward(self, req: Any, end: int) -> None:
        """Compute tokens [computed, end): stamp their pages, mint their ids, capture truth."""
        if self.loads_queued:
            self.flush_loads()
        start = self.computed[req]
        self._compute(req, end)
        self.cache.row_launched(req, end // PAGE)
        for boundary in range(start // PAGE + 1, end // PAGE + 1):
            if self.keep(boundary):
                self.capture(req, boundary)

    def capture(self, req: Any, boundary: int) -> bool:
        """Store the truth of a boundary that the row holds; whether the gate can see it now."""
        store = self.cache.store
        slot = store.reserve()
        if slot is None:
            return False
        self._record(req, boundary, slot)
        published = store.publish(self.cache.row_lineage(req, boundary), slot)
        self.stats["published"] += published
        return published

    def prefill(self, req: Any, chunk_pages: int | None = None) -> None:
        """Compute the whole prompt, in chunks, with the checkpoint after each."""
        total = len(req.origin_input_ids)
        while self.computed[req] < total:
            self.prefill_chunk(req, chunk_pages)
            self.checkpoint(req)

    def prefill_chunk(self, req: Any, chunk_pages: int | None = None) -> None:
        """Compute one chunk of the prompt."""
        start, total = self.computed[req], len(req.origin_input_ids)
        step = total if chunk_pages is None else (start // PAGE + chunk_pages) * PAGE
        self.forward(req, self.chunk_end(req, start, min(step, total)))

    def chunk_end(self, req: Any, start: int, end: int) -> int:
        """Where a chunk [start, end) ends."""
        return chunk_end(self.cache, req, start, end) if self.cuts else end

    def checkpoint(self, req: Any, end: int | None = None) -> None:
        """Publish what is computed, as the scheduler does for an unfinished request.

        `end`: of the chunk whose result it is, where a decode step is in flight behind it.
        """
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        req.refresh_fill_ids()
        req.extend_end = self.computed[req] if end is None else end
        checkpoint_kv_cache(req, self.cache)
        self._goes_on_from_here(req)

    def decode(self, req: Any, ids: Iterable[int]) -> None:
        """Append output tokens and compute their KV, one forward each as decode does."""
        for token in ids:
            req.output_ids.append(token)
            req.refresh_fill_ids()
            self.forward(req, self.computed[req] + 1)

    def finish(self, req: Any, *, through: int | None = None) -> None:
        """The request is done: its last pages go to the tree and the row is given back.

        `through`: output tokens that the answer has, where steps beyond its stop were computed.
        """
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        req.finished_len = through
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        self._release(req, checkpoint=True)
        self.stats["finished"] += 1

    def drop(self, req: Any) -> None:
        """Abort or retract: the row is given back and nothing of it is inserted."""
        self._release(req, checkpoint=False)
        self.stats["dropped"] += 1

    def run(self, prompt: array, chunk_pages: int | None = None) -> Any:
        """Admit, prefill, finish and settle one request; it stays readable as a record."""
        req = self.admit(prompt)
        self.prefill(req, chunk_pages)
        self.finish(req)
        self.settle()
        return req

    def hit(self, prompt: array) -> int:
        """Pages a request with this prompt hits now, byte-compared; leaves no KV behind."""
        req = self.admit(prompt)
        hit = self.prefix_pages(req)
        self.drop(req)
        self.settle()
        return hit

    @staticmethod
    def prefix_pages(req: Any) -> int:
        """Pages of the request's final prefix, at admission."""
        return req.prefix_len // PAGE

    # ---- the world around it

    def blind(self, prompt: array) -> Any:
        """Admit a request that finds nothing, as one does that was matched before the others ran."""
        cache = self.cache
        with _hidden_truth(cache.store):
            return self.admit(prompt)

    def evict_device(self, pages: int = 10**4) -> None:
        """Push unlocked nodes off the device, least recently used first."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=pages * PAGE))

    def evict_host(self, pages: int) -> None:
        """Drop host-only leaves."""
        self.cache.evict_host(pages * PAGE)

    def settle(self) -> None:
        """Start what is queued and let it be acknowledged."""
        self.flush_loads()
        self.stack.settle()

    def forget_truth(self, keep: Callable[[int], bool]) -> None:
        """Drop the truths of page lineages for which `keep(lineage)` is false, as eviction would."""
        store = self.cache.store
        for lineage in list(store._slot_of):
            if not keep(lineage):
                store.slots.retire(store._slot_of.pop(lineage))

    def insert_from_storage(self, prompt: array, first: int, stamps: list[int]) -> Any:
        """Insert host pages [first, first + n) of the prompt below its deepest node that ends at
        `first`, as a storage prefetch does. Returns stock's InsertResult."""
        cache = self.cache
        anchor = cache.tree_core.root_node
        position = 0
        while position < first:
            key = self.key(prompt, position, first)
            anchor = anchor.children[key.child_key(PAGE)]
            position += len(anchor.key) // PAGE
        assert position == first, "no node ends there"
        host = self.stack.host_pool.alloc(len(stamps) * PAGE)
        self.stack.pages.stamp_host((host[::PAGE] // PAGE).tolist(), stamps)
        end = first + len(stamps)
        result = cache.tree_core.insert_host(
            anchor.id,
            self.key(prompt, first, end),
            host,
            [f"hash{page}" for page in range(first, end)],
        )
        cache._apply_cache_actions(result.cache_actions)
        unused = host if result.host_insert_dropped else host[: result.prefix_len]
        if len(unused):
            self.stack.host_pool.free(unused)
        return result

    def key_pages(self, prompt: array) -> int:
        """Pages that a prompt's key has."""
        return (len(prompt) + 1 - self.cache.key_tokens) // PAGE

    def key(self, prompt: array, first: int, end: int) -> Any:
        """The key of a prompt's pages [first, end)."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        more = self.cache.key_tokens - 1
        ids = prompt[first * PAGE : end * PAGE + more]
        return RadixKey(ids, is_bigram=self.cache.tree_core.is_eagle).page_aligned(PAGE)

    def walk(self, prompt: array) -> Iterator[tuple[Any, int]]:
        """(node, pages up to its end) for the whole nodes along a prompt, root first."""
        key = self.key(prompt, 0, self.key_pages(prompt))
        node, position = self.cache.tree_core.root_node, 0
        while position < len(key):
            node = node.children.get(key.child_key_at(position, PAGE))
            if node is None or node.key.match_at(key, position, page_size=PAGE) < len(node.key):
                return
            position += len(node.key)
            yield node, position // PAGE

    # ---- bytes

    def stamp(self) -> int:
        """A page content that nobody else ever writes."""
        return self._stamp()

    def row_pages(self, req: Any, pages: int) -> list[int]:
        """Device pages of the row's first `pages` pages."""
        return (self._row(req)[: pages * PAGE : PAGE] // PAGE).tolist()

    def row_stamps(self, req: Any, pages: int) -> list[int]:
        """KV bytes of the row's first `pages` pages."""
        return self.stack.pages.read_device(self.row_pages(req, pages))

    def row_digest(self, req: Any, pages: int) -> torch.Tensor:
        """Digest of `row_stamps`."""
        return digest(self.row_stamps(req, pages))

    def node_stamps(self, node: Any, *, host: bool) -> list[int]:
        """KV bytes of a node's pages on one tier."""
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        data = node.component_data[ComponentType.FULL]
        rows = data.host_value if host else data.value
        pages = (rows[::PAGE] // PAGE).tolist()
        read = self.stack.pages.read_host if host else self.stack.pages.read_device
        return read(pages)

    # ---- checks

    def check(self) -> None:
        """Stock's sanity check, ours, and that no device page is owned twice."""
        if not self.cache.ongoing_load_back:
            # Stock counts a loaded node as a duplicate only from the load's acknowledgement on.
            self.cache.sanity_check()
        self.cache.check_integrity()
        owners: Counter[int] = Counter()
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        for node in self.cache.tree_core._collect_all_nodes():
            rows = node.component_data[ComponentType.FULL].value
            if node.parent is not None and rows is not None:
                owners.update((rows[::PAGE] // PAGE).tolist())
        for req in self.running:
            shared = req.kv.cache_protected_len // PAGE
            owners.update(self.row_pages(req, -(-req.kv.kv_allocated_len // PAGE))[shared:])
        owners.update(self.stack.allocator.full_attn_allocator.free_pages.tolist())
        twice = [page for page, times in owners.items() if times > 1]
        if twice:
            raise Violation(f"device pages owned twice: {twice}")

    def check_no_leak(self) -> None:
        """End of a test: finish everything, empty the device; every page and id must be back."""
        self.flush_loads()
        for req in list(self.running):
            self.drop(req)
        self.settle()
        self.check()
        if len(self.cache.rows):
            raise Violation("rows of requests that are gone")
        self.evict_device()
        self.evict_host(10**4)
        self.check()
        if self.stack.device_pages_free() * PAGE != self.stack.allocator.size_full:
            raise Violation("device pages leaked")
        if self.cache.store.in_use() or self.cache.store.lineages.references():
            raise Violation("truth slots or lineages leaked")

    def close(self) -> None:
        """Let the cache go: SGLang's hook for the end of the process would keep its pools till then."""
        atexit.unregister(self.cache.shutdown)

    # ---- internals

    def _compute(self, req: Any, end: int) -> None:
        """The KV of tokens [computed, end): every page that it touches gets a new content."""
        if not self._grow(req, end):
            raise RuntimeError("the test ran out of device pages")
        self._at_end.pop(req, None)
        pages = self.row_pages(req, -(-end // PAGE))
        touched = range(self.computed[req] // PAGE, -(-end // PAGE))
        own = [p for p in touched if p * PAGE >= req.kv.cache_protected_len]
        self.stack.pages.stamp_device([pages[p] for p in own], [self._stamp() for _ in own])
        self.computed[req] = end
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def _record(self, req: Any, boundary: int, slot: int) -> None:
        """The slot now holds the truth of a boundary (in pages) of the row as it is."""
        self.truth_bytes[slot] = self.row_digest(req, boundary)
        self.true_of[slot] = {self.truth_bytes[slot].numpy().tobytes()}
        if boundary * PAGE == self.computed[req]:
            self._at_end[req] = (boundary, slot, self.true_of[slot])

    def _goes_on_from_here(self, req: Any) -> None:
        """After a checkpoint with no forward launched since the last boundary: the writer reads the
        row as it is now when it goes on, so the record of that boundary is true of this row."""
        boundary, _, true_of = self._at_end.get(req, (0, 0, set()))
        if boundary * PAGE == req.kv.cache_protected_len == self.computed[req]:
            if self.loads_queued:
                self.flush_loads()
            true_of.add(self.row_digest(req, boundary).numpy().tobytes())

    def _check_hit(self, req: Any) -> None:
        pages = self.prefix_pages(req)
        if pages == 0:
            return
        truth = self.cache.final_truth(req)
        if truth is None:
            raise Violation(f"{req.rid}: no truth at its final prefix of {pages} pages")
        lineage, slot = truth
        self.cache.store.lock(slot)
        self.cache.store.touch(lineage)
        if self.row_digest(req, pages).numpy().tobytes() not in self.true_of[slot]:
            raise Violation(f"{req.rid}: row {self.row_stamps(req, pages)} is not what truth saw")
        self.cache.store.unlock(slot)
        self.stats["hits"] += 1
        self.stats["hit_pages"] += pages

    def _release(self, req: Any, *, checkpoint: bool) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        self.flush_loads()
        self.running.remove(req)
        self.computed.pop(req)
        release_kv_cache(req, self.cache, checkpoint=checkpoint)

    def _grow(self, req: Any, end: int) -> bool:
        """Give the row device pages up to `end` tokens."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        have = -(-req.kv.kv_allocated_len // PAGE)
        need = -(-end // PAGE) - have
        if need <= 0:
            return True
        allocator = self.stack.allocator.full_attn_allocator
        for attempt in range(2):
            short = need * PAGE - allocator.available_size()
            if short > 0 and attempt:
                self.settle()  # pages that copies hold locked, which a scheduler settles each step
            if short > 0:
                self.cache.evict_for_alloc(EvictParams(num_tokens=short))
        fresh = allocator.alloc(need * PAGE)
        if fresh is None:
            return False
        row = self._row(req)
        row[have * PAGE : have * PAGE + need * PAGE] = fresh.to(row.dtype)
        return True

    def _row(self, req: Any) -> torch.Tensor:
        return self.stack.req_to_token.req_to_token[req.kv.req_pool_idx]

    def _stamp(self) -> int:
        self._next_stamp += 1
        return self._next_stamp


class PlannedDriver(TreeDriver):
    """A TreeDriver whose captures the real CapturePlanner decides, and whose restores wait.

    It stands where runtime.TruthRuntime stands, without its bytes: it locks a hit's truth when the
    row is taken, checks the hit when the request's first forward reads it, plans a forward's captures
    in the runtime's order, and is told by the cache when a request goes and when all is flushed.

    Args:
        stack: from `make_cache`.
        stride, kinds, row_limit: the planner's.
    """

    def __init__(
        self,
        stack: CpuStack,
        *,
        stride: int = 1,
        kinds: Container[Kind] = DEFAULT_KINDS,
        row_limit: int | None = None,
    ) -> None:
        super().__init__(stack, cuts=True)
        self.counters = Counters()
        self.planner = NotingPlanner(
            self.cache, stride=stride, kinds=kinds, row_limit=row_limit, counters=self.counters
        )
        self.restores: dict[Any, int] = {}
        """Requests that have not read their hit yet: the slot that they hold locked."""
        self.prompt_len: dict[Any, int] = {}
        """Of each running request the tokens that it prefills (its earlier output included)."""
        self.cache.truth_runtime = self

    def admit(self, prompt: array = (), *, flush: bool = True, **options: Any) -> Any:
        """As TreeDriver; the truth of the hit is locked from here to the first forward."""
        req = super().admit(prompt, flush=False, **options)
        self.prompt_len[req] = len(req.full_untruncated_fill_ids)
        if req.prefix_len:
            truth = self.cache.final_truth(req)
            if truth is None:
                raise Violation(f"{req.rid}: no truth at its prefix of {req.prefix_len} tokens")
            lineage, slot = truth
            self.cache.store.lock(slot)
            self.planner.hit(req, lineage)
            self.restores[req] = slot
        if flush:
            self.flush_loads()
        return req

    def check_no_leak(self) -> None:
        """As TreeDriver; nor may the planner or a waiting restore know a request that is gone."""
        super().check_no_leak()
        if self.planner._trails or self.restores:
            raise Violation("marks of requests that are gone")

    def forward(self, req: Any, end: int) -> None:
        """One forward with this request alone: a chunk of its prompt, or a decode step."""
        row = [(req, end)]
        if self.computed[req] < self.prompt_len[req]:
            self.launch(row)
        else:
            self.launch([], row)

    def launch(
        self,
        extends: Sequence[tuple[Any, int]],
        decodes: Sequence[tuple[Any, int]] = (),
        room: int | None = None,
    ) -> list[Wanted]:
        """One forward: chunks up to the given ends, and steps of rows that decode, mixed if both.

        A step that ends more than one token on stands for the steps in between, which end no page.
        Returns what was captured. `room`: boundaries that fit into the device staging.
        """
        self.flush_loads()
        rows = [*extends, *decodes]
        for req, _ in rows:
            self._read_hit(req)
        # Rows of an extend forward are planned before it runs, of a decode forward after it.
        planned = self._plan(extends, decodes, room) if extends else []
        for req, end in rows:
            self._compute(req, end)
        if not extends:
            planned = self._plan((), decodes, room)
        for req, wanted in planned:
            self._record(req, wanted.boundary // PAGE, wanted.slot)
            self.planner.publish(wanted)
        return [wanted for _, wanted in planned]

    def decode_to(self, req: Any, end: int, token: int = 5000) -> None:
        """Decode until `end` tokens have KV, one forward for each page that is completed."""
        self.answer_up_to(req, end, token)
        while self.computed[req] < end:
            self.forward(req, min(end, (self.computed[req] // PAGE + 1) * PAGE))

    def answer_up_to(self, req: Any, end: int, token: int) -> None:
        """Give the request the output tokens whose KV a step up to `end` computes."""
        missing = end - len(req.origin_input_ids) - len(req.output_ids)
        req.output_ids.extend([token] * missing)
        req.refresh_fill_ids()

    def kept(self, req: Any) -> dict[int, Keep]:
        """Boundaries (in pages) of the request's own pages that have truth, with their class."""
        row, store = self.cache.rows.get(req), self.cache.store
        slots = {row.base + i: store.lookup(own) for i, own in enumerate(row.ids, 1)}
        return {page: store.slots.keep(slot) for page, slot in slots.items() if slot is not None}

    def live_slots(self) -> list[int]:
        """Slots of class LIVE."""
        slots = self.cache.store.slots
        return [s for s in slots.least_recent_first() if slots.keep(s) is Keep.LIVE]

    # ---- what the cache calls

    def forget(self, req: Any) -> None:
        """The request gave its row back."""
        self.planner.forget(req)
        slot = self.restores.pop(req, None)
        if slot is not None:
            self.cache.store.unlock(slot)
            self.counters.restore_dropped += 1

    def flush(self) -> None:
        """The tree is being reset."""
        for req in list(self.restores):
            self.forget(req)
        self.planner.flush()

    # ---- checks

    def check(self) -> None:
        """As TreeDriver; and every mark, lock, row and reservation belongs to a running request."""
        super().check()
        store, running = self.cache.store, self.running
        trails = self.planner._trails
        newest = {own: req for req, trail in trails.items() for _, own in trail.newest}
        for slot in self.live_slots():
            if newest.get(store.slots.owner(slot)) not in running:
                raise Violation(f"slot {slot} is LIVE and its request is not running")
        for req, trail in trails.items():
            own = trail.newest[-1][1] if trail.newest else None
            if own in store and store.slots.keep(store.lookup(own)) is not Keep.LIVE:
                raise Violation(f"{req.rid} runs and its newest decode page is not LIVE")
        for what, reqs in (
            ("trails", trails),
            ("restores", self.restores),
            ("healers", self.cache._healers.values()),
        ):
            if any(req not in running for req in reqs):
                raise Violation(f"{what} of requests that are gone")
        if len(self.cache.rows) != len(running) or None in map(self.cache.rows.get, running):
            raise Violation("rows and running requests differ")
        locked = {s for s in range(store.capacity) if store.slots.is_locked(s)}
        if locked != set(self.restores.values()):
            raise Violation(f"slots {locked} are locked for restores {self.restores}")
        if store.slots.count(SlotState.RESERVED):
            raise Violation("a slot is reserved by no forward")

    # ---- internals

    def _plan(
        self,
        extends: Sequence[tuple[Any, int]],
        decodes: Sequence[tuple[Any, int]],
        room: int | None,
    ) -> list[tuple[Any, Wanted]]:
        planned: list[tuple[Any, Wanted]] = []
        for req, end in extends:
            left = None if room is None else room - len(planned)
            start, total = self.computed[req], self.prompt_len[req]
            planned += [(req, w) for w in self.planner.prefill(req, start, end, total, left)]
        for req, end in decodes:
            left = None if room is None else room - len(planned)
            wanted = self.planner.decode(req, end, left) if end % PAGE == 0 else None
            if wanted is not None:
                planned.append((req, wanted))
        return planned

    def _check_hit(self, req: Any) -> None:
        """Not at admission: the hit is read by the first forward."""

    def _read_hit(self, req: Any) -> None:
        slot = self.restores.pop(req, None)
        if slot is None:
            return
        pages = self.prefix_pages(req)
        if self.row_digest(req, pages).numpy().tobytes() not in self.true_of[slot]:
            raise Violation(f"{req.rid}: row {self.row_stamps(req, pages)} is not what truth saw")
        self.cache.store.unlock(slot)
        self.stats["hits"] += 1
        self.stats["hit_pages"] += pages

    def _release(self, req: Any, *, checkpoint: bool) -> None:
        self.prompt_len.pop(req)
        super()._release(req, checkpoint=checkpoint)


class NotingPlanner(CapturePlanner):
    """The shipped planner; only the count is new."""

    spares_released = 0
    """Decode pages of running requests that were let go for want of slots."""

    def _release_spares(self) -> None:
        before = self._live()
        super()._release_spares()
        self.spares_released += before - self._live()

    def _live(self) -> int:
        slots = self.store.slots
        return sum(slots.keep(slot) is Keep.LIVE for slot in slots.least_recent_first())


class FakeClock:
    """Context: SGLang's tree takes the time of its accesses from here, from the same start each
    time, and nodes are numbered from the same start; runs with the same steps are equal."""

    def __enter__(self) -> FakeClock:
        from sglang.srt.mem_cache.unified_cache import unified_tree_core
        from sglang.srt.mem_cache.unified_cache.components import base

        self._now = 0.0
        node = unified_tree_core.UnifiedTreeNode
        clock = "get_and_increase_time_counter"
        patches = [(unified_tree_core, clock, self.tick), (base, clock, self.tick)]
        patches.append((node, "counter", 0))
        self._undo = [(target, name, getattr(target, name)) for target, name, _ in patches]
        for target, name, value in patches:
            setattr(target, name, value)
        return self

    def __exit__(self, *_exc: object) -> None:
        for target, name, value in self._undo:
            setattr(target, name, value)

    def tick(self) -> float:
        """The time, which never stands still."""
        self._now += 1.0
        return self._now

    def pass_time(self, ticks: float) -> None:
        """Let time go by between two accesses."""
        self._now += ticks


@contextmanager
def checked(build: Callable[..., TreeDriver]) -> Iterator[Callable[..., TreeDriver]]:
    """A factory of drivers by `build`; each is checked for leaks at the end, unless it is made with
    `check_leaks=False` (controls, which stop half way)."""
    made: list[TreeDriver] = []

    def make(*args: Any, check_leaks: bool = True, **options: Any) -> TreeDriver:
        driver = build(*args, **options)
        if check_leaks:
            made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.check_no_leak()


def digest(stamps: list[int]) -> torch.Tensor:
    """The bytes that stand for a truth computed over these pages."""
    raw = hashlib.blake2b(array("q", stamps).tobytes(), digest_size=DIGEST).digest()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class _hidden_truth:
    """Context: the store has no truth, but keeps its slots."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._kept, self._store._slot_of = self._store._slot_of, {}

    def __exit__(self, *_exc: object) -> None:
        self._store._slot_of = self._kept
