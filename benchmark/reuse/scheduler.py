"""A scheduler without a model: replays a trace on the real tree, controller and pools.

Real: Req, match, lock, load-back, page and row allocation, checkpoint after every chunk, release.
Written here, after SGLang's scheduler: first come, first served admission while rows and device
pages allow it; prefill before decode; forwards of at most `chunk_tokens`, shared by several requests,
of which at most the last is cut; decode of everybody until somebody is done. Only page boundaries of
a decode matter to a cache, so tokens in between are appended in bulk.

An `Arm` says what differs between the strict cache and stock.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from bitexact_fixtures import CpuStack

from reuse.traces import PAGE, Segment, Trace, Turn
from sglang_bitexact_hicache import chunking
from sglang_bitexact_hicache.lineage import ROOT
from sglang_bitexact_hicache.planner import CapturePlanner, Wanted

CHUNK_TOKENS = 8192
"""Tokens of one prefill forward (SGLang's --chunked-prefill-size)."""

_ID_SPACE = 1 << 20
"""Token i of segment s is s * _ID_SPACE + i: no segment is that long, and 2^33 ids fit."""


class Arm(Protocol):
    """What the byte side does with a request, without bytes."""

    def waits(self, req: Any, start: int) -> bool:
        """Whether a matched request waits for another that computes the same pages."""

    def chunk_end(self, req: Any, start: int, end: int) -> int:
        """Where the chunk [start, end) of the request is to end."""

    def admitted(self, req: Any) -> None:
        """The request has a row, its final prefix and its first chunk."""

    def prefilled(self, chunks: list[tuple[Any, int, int]]) -> None:
        """One forward computed these chunks (request, start, end)."""

    def decoded(self, req: Any, boundary: int) -> None:
        """A decode step completed the page that ends at `boundary` tokens."""

    def released(self, req: Any) -> None:
        """The request gave its row back."""

    def loss(self, reach: Reach) -> str:
        """Why a request reuses less than what the KV would give it."""


class StockArm:
    """Flag off: nothing is captured, nothing restored, and chunks end where the budget does."""

    def waits(self, req: Any, start: int) -> bool:
        """Never."""
        return False

    def chunk_end(self, req: Any, start: int, end: int) -> int:
        """`end`."""
        return end

    def admitted(self, req: Any) -> None:
        """Nothing to bind."""

    def prefilled(self, chunks: list[tuple[Any, int, int]]) -> None:
        """Nothing to capture."""

    def decoded(self, req: Any, boundary: int) -> None:
        """Nothing to capture."""

    def released(self, req: Any) -> None:
        """Nothing to forget."""

    def loss(self, reach: Reach) -> str:
        """Stock computes the last window again."""
        return "window"


class StrictArm:
    """The shipped decisions, as the runtime and the seams on the scheduler take them.

    Args:
        cache: the BxCache of the stack, with a NotingStore attached.
        planner: decides what is captured.
        staging: boundaries that the device staging holds.
        cut: whether chunks end at junctions.
    """

    def __init__(self, cache: Any, planner: CapturePlanner, staging: int, cut: bool) -> None:
        self._cache = cache
        self._planner = planner
        self._staging = staging
        self._cut = cut
        self._restoring: list[int] = []
        self.truths_held: list[int] = []
        """Truths in the store, once a request."""

    def waits(self, req: Any, start: int) -> bool:
        """While another request is on its way to the same junction (chunking.py)."""
        if not self._cut:
            return False
        junction = self._cache.junction(req)
        if junction is None or junction.tokens <= start:
            return False
        return self._cache.healer(junction) is not None

    def chunk_end(self, req: Any, start: int, end: int) -> int:
        """The request's junction, where it lies inside."""
        return chunking.chunk_end(self._cache, req, start, end) if self._cut else end

    def admitted(self, req: Any) -> None:
        """Open the request's row and lock the truth of its hit, as TruthRuntime.admit does."""
        self._cache.row_taken(req)
        self.truths_held.append(len(self._cache.store))
        if req.prefix_len == 0:
            return
        truth = self._cache.final_truth(req)
        if truth is None:
            raise RuntimeError(f"request {req.rid}: a hit of {req.prefix_len} tokens without truth")
        lineage, slot = truth
        self._cache.store.lock(slot)
        self._planner.hit(req, lineage)
        self._restoring.append(slot)

    def prefilled(self, chunks: list[tuple[Any, int, int]]) -> None:
        """Restores are over; capture what the policy wants and publish it."""
        for slot in self._restoring:
            self._cache.store.unlock(slot)
        self._restoring.clear()
        wanted: list[Wanted] = []
        for req, start, end in chunks:
            room = self._staging - len(wanted)
            prompt_len = len(req.full_untruncated_fill_ids)
            wanted += self._planner.prefill(req, start, end, prompt_len, room)
        for capture in wanted:
            self._planner.publish(capture)

    def decoded(self, req: Any, boundary: int) -> None:
        """Capture the page that the step completed, where the policy wants it."""
        capture = self._planner.decode(req, boundary)
        if capture is not None:
            self._planner.publish(capture)

    def released(self, req: Any) -> None:
        """What the request kept as its newest is a point like any other."""
        self._planner.forget(req)

    def loss(self, reach: Reach) -> str:
        """What is wrong with the last page of the KV that the request could have used."""
        previous = ROOT
        for node, pages in reach.nodes:
            copies = self._cache.copies.of(node.id)
            copy = copies.host if node.evicted else copies.dev
            if copy is None or copy.first_parent != previous or copy.intact < pages:
                return "chain"
            previous = copy.ids[pages - 1]
        return self._cache.store.fate(previous)


@dataclass
class Served:
    """What one request found.

    Attributes:
        turn: its index in the trace.
        prompt: tokens of its prompt.
        kv: tokens that the KV match alone would reuse, in whole pages and with one token to compute.
        reused: tokens that it reused.
        loss: why that is less, "" where it is not.
    """

    turn: int
    prompt: int
    kv: int
    reused: int
    loss: str


@dataclass
class Launches:
    """What the replay cost in launches: forwards, the chunks in them, and chunks that were cut."""

    forwards: int = 0
    chunks: int = 0
    cuts: int = 0


@dataclass
class _Running:
    """A request with a row: `kv_len` tokens of it are computed."""

    req: Any
    turn: int
    answer: array
    pages: int
    kv_len: int

    @property
    def prompt_len(self) -> int:
        return len(self.req.origin_input_ids)

    @property
    def final_len(self) -> int:
        """Tokens with KV when the request is done: the last token sampled is never computed."""
        return self.prompt_len + len(self.answer) - 1


class _Chunk(NamedTuple):
    """Tokens [start, end) of a request's prompt, computed by one forward."""

    running: _Running
    start: int
    end: int

    @property
    def pages(self) -> int:
        return _pages(self.end - self.start)

    @property
    def is_last(self) -> bool:
        return self.end == self.running.prompt_len


def tokens_of(segments: tuple[Segment, ...]) -> array:
    """The token ids of a text."""
    ids = array("q")
    for segment in segments:
        first = segment.id * _ID_SPACE
        ids.frombytes(np.arange(first, first + segment.length, dtype=np.int64).tobytes())
    return ids


class Reach(NamedTuple):
    """Where the KV of a prompt's beginning is: tokens, and (node, pages used of it) root first."""

    tokens: int
    nodes: tuple[tuple[Any, int], ...]


def kv_reach(cache: Any, ids: array) -> Reach:
    """The beginning of a prompt whose KV the tree holds, wherever truth may be; read-only.

    In whole pages, and less than the prompt, because one token must be computed.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(ids, limit=len(ids) - 1).page_aligned(PAGE)
    node, reached = cache.tree_core.root_node, 0
    nodes = []
    while reached < len(key):
        child = node.children.get(key.child_key_at(reached, PAGE))
        if child is None or (child.evicted and not child.backuped):
            break
        shared = child.key.match_at(key, reached, page_size=PAGE)
        nodes.append((child, shared // PAGE))
        reached += shared
        if shared < len(child.key):
            break
        node = child
    return Reach(reached, tuple(nodes))


def no_reach(_cache: Any, _ids: array) -> Reach:
    """In the place of `kv_reach` for a tree that cannot be walked from Python."""
    return Reach(0, ())


class Replay:
    """One trace on one stack. `run` may be called once.

    Args:
        stack: from `world.build`.
        arm: what differs between the strict cache and stock.
        trace: the requests.
        reach: finds what the KV alone would give a prompt.
    """

    def __init__(
        self,
        stack: CpuStack,
        arm: Arm,
        trace: Trace,
        reach: Callable[[Any, array], Reach] = kv_reach,
    ) -> None:
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.stack = stack
        self.cache = stack.cache
        self.arm = arm
        self.trace = trace
        self.reach = reach
        self.served: list[Served] = []
        self.launches = Launches()
        self._sampling = SamplingParams()
        self._device_pages = stack.allocator.size_full // PAGE
        self._running: list[_Running] = []
        self._unfinished: _Running | None = None

    def run(self) -> list[Served]:
        """Replay the whole trace and settle; what each request found, in order of admission."""
        waiting = _Waiting(self.trace)
        while waiting or self._running:
            if not self._prefill(waiting):
                self._decode(waiting)
            self.stack.settle()
        return self.served

    # ---- prefill

    def _prefill(self, waiting: _Waiting) -> bool:
        """One prefill forward; False when there is nothing to prefill now."""
        budget = CHUNK_TOKENS
        batch: list[_Chunk] = []
        if self._unfinished is not None:
            batch.append(self._next_chunk(self._unfinished, budget))
            budget -= batch[-1].pages * PAGE
            if batch[-1].is_last:
                self._unfinished = None
        while budget >= PAGE:
            turn = waiting.head()
            chunk = None if turn is None else self._admit(turn, budget)
            if chunk is None:
                break
            waiting.pop()
            batch.append(chunk)
            budget -= chunk.pages * PAGE
            if not chunk.is_last:
                self._unfinished = chunk.running
        if not batch:
            return False
        self.cache.ready_to_load_host_cache()
        self.arm.prefilled([(chunk.running.req, chunk.start, chunk.end) for chunk in batch])
        self.launches.forwards += 1
        self.launches.chunks += len(batch)
        for chunk in batch:
            self._checkpoint(chunk)
        return True

    def _next_chunk(self, running: _Running, budget: int) -> _Chunk:
        """The next chunk of the unfinished request."""
        end = running.prompt_len
        if end - running.kv_len > budget:
            end = (running.kv_len + budget) // PAGE * PAGE
        cut = self.arm.chunk_end(running.req, running.kv_len, end)
        self.launches.cuts += cut < end
        running.req.extend_end = cut
        return self._chunk(running, cut)

    def _chunk(self, running: _Running, end: int) -> _Chunk:
        self._grow(running, end)
        return _Chunk(running, running.kv_len, end)

    def _fits(self, turn: Turn) -> bool:
        """Whether a row is free, and pages for everybody to the end whatever they share."""
        if self.stack.req_to_token.available_size() == 0:
            return False
        pages = _pages(turn.prompt_len + turn.answer.length)
        if pages > self._device_pages:
            raise ValueError(f"a request of {pages} pages on a device of {self._device_pages}")
        return pages + sum(running.pages for running in self._running) <= self._device_pages

    def _admit(self, index: int, budget: int) -> _Chunk | None:
        """Match, load back and give a row, as one pass of PrefillAdder.add_one_req does.

        None where the request has to wait. Like SGLang's, this scheduler has one unfinished request
        at a time: beside it another is admitted only if its whole prompt fits, and runs uncut.
        """
        from sglang.srt.managers.schedule_batch import Req

        turn = self.trace.turns[index]
        if not self._fits(turn):
            return None
        cache, ids = self.cache, tokens_of(turn.prompt)
        req = Req(str(index), "", ids, self._sampling)
        req.init_next_round_input(cache)
        reach = self.reach(cache, ids)
        start = req.prefix_len + req.host_hit_length
        end = len(ids)
        if end - start > budget:
            end = (start + budget) // PAGE * PAGE
        cut = self.arm.chunk_end(req, start, end)
        if self.arm.waits(req, start) or (self._unfinished is not None and end < len(ids)):
            return None
        if self._unfinished is None and cut < end:
            end = cut
            self.launches.cuts += 1
        loss = self.arm.loss(reach) if start < reach.tokens else ""
        self._take_prefix(req)
        if req.prefix_len != start:
            raise RuntimeError(f"request {index}: {start} tokens promised, {req.prefix_len} there")
        req.extend_end = end
        pages = _pages(turn.prompt_len + turn.answer.length)
        running = _Running(req, index, tokens_of((turn.answer,)), pages, start)
        self._running.append(running)
        self.arm.admitted(req)
        self.served.append(Served(index, len(ids), reach.tokens, start, loss))
        return self._chunk(running, end)

    def _take_prefix(self, req: Any) -> None:
        """Load the hit back, lock it and write it into a row of the request's own."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        cache = self.cache
        anchor = cache.lock(req.last_node)
        if req.host_hit_length > 0:
            pinned = cache.inc_host_lock_ref(req.best_match_node).to_dec_params()
            loaded, req.last_node = cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=req.best_match_node,
                    host_hit_length=req.host_hit_length,
                    mem_quota=None,
                    req=req,
                )
            )
            cache.dec_host_lock_ref(req.best_match_node, pinned)
            req.prefix_len += loaded
            req.kv.cache_protected_len = req.prefix_len
        req.lock = cache.lock(req.last_node)
        cache.unlock(anchor)
        if self.stack.req_to_token.alloc([req]) is None:
            raise RuntimeError("no request row, though one was free")
        if req.prefix_len:
            row = self._row(req)
            row[: req.prefix_len] = cache.path_device_indices(req.last_node).to(row.dtype)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.prefix_len

    def _checkpoint(self, chunk: _Chunk) -> None:
        """Publish what a chunk computed; the first token is sampled where the prompt ends."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        running = chunk.running
        running.kv_len = chunk.end
        checkpoint_kv_cache(running.req, self.cache)
        if chunk.is_last:
            running.req.output_ids.append(running.answer[0])

    # ---- decode

    def _decode(self, waiting: _Waiting) -> None:
        """Decode everybody until the first is done; who is done gives its row back."""
        steps = min(running.final_len - running.kv_len for running in self._running)
        crossings = sorted(
            (boundary - running.kv_len, number, boundary)
            for number, running in enumerate(self._running)
            for boundary in _boundaries(running.kv_len, running.kv_len + steps)
        )
        targets = [running.kv_len + steps for running in self._running]
        for _, number, boundary in crossings:
            running = self._running[number]
            self._extend(running, boundary)
            self.arm.decoded(running.req, boundary)
        for running, target in zip(self._running, targets, strict=True):
            self._extend(running, target)
        for running in [r for r in self._running if r.kv_len == r.final_len]:
            self._finish(running)
            waiting.answered(running.turn)

    def _extend(self, running: _Running, kv_len: int) -> None:
        """The request decodes until `kv_len` of its tokens have KV."""
        self._grow(running, kv_len)
        running.kv_len = kv_len
        outputs = running.req.output_ids
        outputs.extend(running.answer[len(outputs) : kv_len - running.prompt_len + 1])

    def _finish(self, running: _Running) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req = running.req
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)
        self._running.remove(running)
        self.arm.released(req)

    # ---- pages

    def _grow(self, running: _Running, end: int) -> None:
        """Give the row device pages up to `end` tokens, evicting what is needed."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        kv = running.req.kv
        have = _pages(kv.kv_allocated_len)
        kv.kv_allocated_len = kv.kv_committed_len = max(end, kv.kv_allocated_len)
        need = _pages(end) - have
        if need <= 0:
            return
        allocator = self.stack.allocator.full_attn_allocator
        short = need * PAGE - allocator.available_size()
        if short > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=short))
        fresh = allocator.alloc(need * PAGE)
        if fresh is None:
            raise RuntimeError("no device pages, though admission had counted them")
        row = self._row(running.req)
        row[have * PAGE : (have + need) * PAGE] = fresh.to(row.dtype)

    def _row(self, req: Any) -> Any:
        return self.stack.req_to_token.req_to_token[req.kv.req_pool_idx]


class _Waiting:
    """Turns in the order of the trace, each not before the answer that it builds on."""

    def __init__(self, trace: Trace) -> None:
        self._unsent = deque(enumerate(turn.after for turn in trace.turns))
        self._ready: deque[int] = deque()
        self._blocked: dict[int, list[int]] = {}
        self._answered: set[int] = set()

    def head(self) -> int | None:
        """The turn to send next; None when all that are left wait for an answer."""
        while not self._ready and self._unsent:
            index, after = self._unsent.popleft()
            if after is None or after in self._answered:
                self._ready.append(index)
            else:
                self._blocked.setdefault(after, []).append(index)
        return self._ready[0] if self._ready else None

    def pop(self) -> None:
        """The head was sent."""
        self._ready.popleft()

    def answered(self, index: int) -> None:
        """A turn's answer is complete: what waited for it is overdue, so it goes first."""
        self._answered.add(index)
        self._ready.extendleft(self._blocked.pop(index, ()))

    def __bool__(self) -> bool:
        return bool(self._ready or self._unsent or self._blocked)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def _boundaries(start: int, end: int) -> Iterator[int]:
    """Page boundaries in (start, end]."""
    return iter(range((start // PAGE + 1) * PAGE, end // PAGE * PAGE + 1, PAGE))
