"""TruthRuntime: what one scheduler does with truth, in the order in which a request meets it.

    admit      (AFTER ScheduleBatch.prepare_for_extend)    lock the truth of each hit, start its copy in
    forward    (AROUND TpModelWorker.forward_batch_generation; with EAGLE, of the worker of both models)
               before: scatter the restores; plan what this forward captures (planner.py)
               during: of an extend, gather once a layer (forward_hooks.py)
               after:  of a decode step that completes a page, gather from the rings; copy out,
                       publish the truth with the lineage of its page. Of a round that may complete a
                       page (rounds.py) the same, but nothing is published
    settle     (AROUND SchedulerBatchResultProcessor._resolve_spec_v2_tokens)
               a round's result is there: publish what it completed, give back the other slots
    forget     (BxCache.on_release)                        a request gave its row back
    flush      (BxCache._reset_full)                       everything is forgotten

Every decision is taken here, on the scheduler thread, from host integers that are equal on all
ranks. Whether bytes have landed decides nothing: their readers wait on events (transfer.py).
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_bitexact_hicache import pinned
from sglang_bitexact_hicache.abort import discard_output
from sglang_bitexact_hicache.capture import CapturePipeline, CapturePlan
from sglang_bitexact_hicache.checks import DebugChecks
from sglang_bitexact_hicache.constants import PAGE_SIZE, STATE_ROWS, WINDOW
from sglang_bitexact_hicache.device_view import DeviceView, plain_rows
from sglang_bitexact_hicache.gather import Source
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.options import Options
from sglang_bitexact_hicache.planner import CapturePlanner, Wanted
from sglang_bitexact_hicache.policy import DEFAULT_KINDS, Keep, Kind
from sglang_bitexact_hicache.ranks import Ranks
from sglang_bitexact_hicache.restore import Restore, RestorePipeline
from sglang_bitexact_hicache.rounds import Rounds
from sglang_bitexact_hicache.transfer import Event, open_lane
from sglang_bitexact_hicache.truth import TruthStore

if TYPE_CHECKING:
    from sglang_bitexact_hicache.tree import BxCache

RESTORE_STAGING = 8
"""Records of device staging for restores: a batch with more hits is restored in waves."""


class _Capture(NamedTuple):
    """One boundary that a forward captures: where its rows are, and what the planner gave it."""

    source: Source
    wanted: Wanted


@dataclass
class ActiveForward:
    """The extend forward that is running: what its hooks need."""

    capture: CapturePlan


class TruthRuntime:
    """See the module's docstring. One per scheduler; scheduler thread only.

    Args:
        cache: the tree; owns lineages, rows and the truth store.
        view: the device rings.
        pools: host records; as many slots as the store has.
        stride: grid stride in pages.
        kinds: the kinds of reuse point that are switched on.
        row_limit: the most slots that one request may hold before a tree node owns them.
        chunk_tokens: the most tokens that one extend forward computes.
        round_tokens: that a round of speculative decoding verifies; 0 where there is none.
        debug: verify every restore on the device (SGLANG_SWA_DBG_CHECKSUM).
        pin: whether host memory is pinned on this platform.
        ranks: the others that hold the same KV, None where there are none.
    """

    def __init__(
        self,
        cache: BxCache,
        view: DeviceView,
        pools: TruthHostPools,
        *,
        stride: int,
        kinds: Container[Kind] = DEFAULT_KINDS,
        row_limit: int | None = None,
        chunk_tokens: int,
        round_tokens: int = 0,
        debug: bool,
        pin: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.cache = cache
        self.store = cache.store
        self.view = view
        self.pools = pools
        self.counters = Counters()
        self.planner = CapturePlanner(
            cache, stride=stride, kinds=kinds, row_limit=row_limit, counters=self.counters
        )
        chunk_pages = max(1, -(-chunk_tokens // PAGE_SIZE))
        self._out_lane = open_lane(view.device, "capture")
        self._in_lane = open_lane(view.device, "restore")
        self._capture = CapturePipeline(
            view,
            pools,
            # One forward's worst case, plus what the previous one on the grid may still copy out.
            chunk_pages + -(-chunk_pages // stride),
            self._out_lane,
            self.counters,
            pin=pin,
        )
        self._restore = RestorePipeline(
            view, pools, RESTORE_STAGING, self._in_lane, self.counters, pin=pin
        )
        self._rounds = Rounds[Wanted](round_tokens) if round_tokens else None
        self._ranks = Ranks() if ranks is None else ranks
        self._checks = DebugChecks(view, pools, self.counters) if debug else None
        self._pending: dict[Any, Restore] = {}
        # Per host slot, the last copy that wrote it and the last that read it.
        self._written: dict[int, Event] = {}
        self._read: dict[int, Event] = {}
        # Per request row, the last gather that read its rings.
        self._row_read: dict[int, Event] = {}

    @classmethod
    def build(cls, cache: BxCache, server_args: Any, options: Options) -> TruthRuntime:
        """Allocate the pools that `options.sizing` planned and attach a store of that size.

        After the cache and the device pools exist, before the scheduler takes a request.

        Raises:
            ValueError: host or device memory cannot be had, or another rank was started with other
                options (on another host, say); the message names the flag or the option.
        """
        from sglang.srt.utils.common import is_pin_memory_available

        view = DeviceView(cache.token_to_kv_pool_allocator.get_kvcache(), cache.draft_pools)
        round_tokens = tokens_of_a_round(server_args)
        check_rings(view, round_tokens)
        pin = is_pin_memory_available(view.device)
        slots = options.planned.slots
        ranks = Ranks.of(cache)
        ranks.require_same(
            {
                "host slots": slots,
                "stride": options.stride,
                "kinds of reuse points": sum(
                    1 << i for i, k in enumerate(Kind) if k in options.kinds
                ),
                "row limit": options.planned.row_limit,
                "largest extend": largest_extend(server_args),
                "draft tokens": round_tokens,
                "aligned prefill": options.aligned_prefill,
                "checks": options.checksum,
            }
        )
        cache.attach_truth(TruthStore(slots))
        allocate = partial(pinned.allocate, device=view.device) if pin else None
        pools = TruthHostPools(view.layout, slots, allocate=allocate, release=pinned.release)
        runtime = cls(
            cache,
            view,
            pools,
            stride=options.stride,
            kinds=options.kinds,
            row_limit=options.planned.row_limit,
            chunk_tokens=largest_extend(server_args),
            round_tokens=round_tokens,
            debug=options.checksum,
            pin=pin,
            ranks=ranks,
        )
        return runtime

    @property
    def staging_bytes(self) -> int:
        """Device bytes of the staging records of both directions."""
        return self._capture.staging.nbytes + self._restore.staging.nbytes

    # ---- admission

    def admit(self, fresh: Sequence[Any]) -> None:
        """Requests that were just given a row: bind the row, lock and start their restores.

        `fresh` are Reqs in batch order, after `alloc_for_extend`. A request whose admitted prefix
        has no truth is a bug of ours: its output is discarded and nothing of it is inserted.
        """
        truths = self._agreed_truths([req for req in fresh if req.prefix_len])
        for req in fresh:
            # The copy first: it runs while the host goes on.
            truth = truths.get(id(req))
            resumed = None if truth is None else self._begin_restore(req, *truth)
            self.cache.row_taken(req)
            junction = self.cache.junction(req)
            if junction is not None:
                self.counters.recomputed_tokens += junction.tokens - req.prefix_len
            if resumed is not None:
                self.planner.hit(req, resumed)

    def _agreed_truths(self, hits: Sequence[Any]) -> dict[int, tuple[int, int]]:
        """By identity of the request, (lineage, slot) of the truth at its admitted prefix. A request for
        which a rank has none is discarded on all of them."""
        found = [self.cache.final_truth(req) for req in hits]
        agreed = self._ranks.all_of([truth is not None for truth in found])
        truths = {}
        for req, truth, everywhere in zip(hits, found, agreed, strict=True):
            if truth is not None and everywhere:
                truths[id(req)] = truth
                continue
            self.counters.restore_impossible += 1
            where = "" if truth is None else " on another rank"
            discard_output(
                req, f"no truth for the admitted prefix of {req.prefix_len} tokens{where}"
            )
        return truths

    def _begin_restore(self, req: Any, lineage: int, slot: int) -> int:
        """Lock the truth of an admitted prefix and start its copy in; returns its lineage."""
        self._ranks.note("restore %s P=%d slot=%d", req.rid, req.prefix_len, slot)
        self.store.lock(slot)
        restore = Restore(
            row=req.kv.req_pool_idx,
            boundary=req.prefix_len,
            host_slot=slot,
            written=self._written.get(slot),
        )
        self._pending[req] = restore
        self._restore.stage(restore)
        return lineage

    def forget(self, req: Any) -> None:
        """The request gave its row back (finish, abort, retract): drop a restore not yet consumed, and
        what its rounds in flight may have completed.

        A step that captures its rings may still be queued on the forward stream, and the row's next
        owner clears its state rows on the schedule stream, which is the current one here: it waits.
        """
        self.planner.forget(req)
        restore = self._pending.pop(req, None)
        if restore is not None:
            self._restore.drop(restore)
            self._unlock(restore)
            self.counters.restore_dropped += 1
        if self._rounds is not None:
            for wanted in self._rounds.drop(req):
                self._not_completed(wanted)
        reading = self._row_read.pop(req.kv.req_pool_idx, None)
        if reading is not None:
            reading.wait()

    # ---- forward

    @contextmanager
    def forward(self, batch: Any) -> Iterator[ActiveForward | None]:
        """The scope of one forward of a ScheduleBatch, on the forward stream.

        Yields what the forward's hooks need, or None where there is nothing to capture.
        """
        self._apply_restores(batch)
        if not batch.forward_mode.is_extend():
            # Before it runs: the mode of a batch changes in the course of a round.
            decode = batch.forward_mode.is_decode()
            yield None
            if decode and self._rounds is not None:
                self._capture_round(batch, self._rounds)
            elif decode:
                self._capture_decoded(batch)
            return
        captures = self._plan_extend(batch)
        if not captures:
            yield None
            return
        plan = self._capture.begin([c.source for c in captures])
        try:
            yield ActiveForward(plan)
        except BaseException:
            self._capture.abandon(plan)
            for capture in captures:
                self.planner.discard(capture.wanted)
            raise
        self._finish_capture(plan, captures)
        self._publish(captures)

    def gather_window(
        self,
        active: ActiveForward,
        layer: int,
        k: torch.Tensor,
        rope: torch.Tensor | None,
        metadata: Any,
    ) -> None:
        """One layer's K of the running forward, before the layer's own store; `rope` with fp8 rows."""
        chunks = [plain_rows(k)] if rope is None else [plain_rows(k), rope]
        self._capture.gather_window(active.capture, layer, chunks)
        if self._checks is not None:
            for ring, chunk in zip(self.view.window_rings(layer), chunks, strict=True):
                self._checks.note_source(active.capture, ring, chunk, metadata)

    def gather_state(
        self, active: ActiveForward, buffer: torch.Tensor, chunk: torch.Tensor, metadata: Any
    ) -> None:
        """One compressor's input of the running forward, before it writes its state ring."""
        ring = self.view.state_ring(buffer)
        if ring is None:
            return
        self._capture.gather_state(active.capture, ring, chunk)
        if self._checks is not None:
            self._checks.note_source(active.capture, ring, chunk, metadata)

    def _apply_restores(self, batch: Any) -> None:
        if not self._pending:
            return
        due = [(req, r) for req in batch.reqs if (r := self._pending.pop(req, None)) is not None]
        if not due:
            return
        restores = [restore for _, restore in due]
        self._restore.apply(restores)
        now = time.perf_counter()
        for restore in restores:
            self.counters.restore_seconds.add(now - restore.admitted)
        for restore in restores:
            self._unlock(restore)
        if self._checks is not None:
            self._verify(self._checks, due)

    def _verify(self, checks: DebugChecks, due: Sequence[tuple[Any, Restore]]) -> None:
        """What is wrong on one rank is discarded on all: the batch is the same everywhere."""
        right = [checks.verify(req, restore) for req, restore in due]
        agreed = self._ranks.all_of(right)
        for (req, _), here, everywhere in zip(due, right, agreed, strict=True):
            if not everywhere:
                where = " on another rank" if here else ""
                discard_output(req, f"restored bytes differ from the captured ones{where}")

    def _unlock(self, restore: Restore) -> None:
        # The slot may be handed to a capture right away: that copy waits for this one.
        if restore.copied is not None:
            self._read[restore.host_slot] = restore.copied
        self.store.unlock(restore.host_slot)

    def _plan_extend(self, batch: Any) -> list[_Capture]:
        """What an extend forward captures, before it runs."""
        # Rows of a mixed batch that decode: their lengths on the Req are stale, so lengths come
        # from the batch; their window begins before the chunk, in the ring.
        decoding = {id(req) for req in batch.decoding_reqs or ()}
        room = self._capture.staging.free
        captures: list[_Capture] = []
        flat = 0
        for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            if id(req) in decoding:
                wanted = self._plan_decoded(req, start + count, room - len(captures))
            else:
                prompt_len = len(req.full_untruncated_fill_ids)
                room_left = room - len(captures)
                wanted = self.planner.prefill(req, start, start + count, prompt_len, room_left)
            row = req.kv.req_pool_idx
            captures += (_Capture(Source(row, start, flat, w.boundary), w) for w in wanted)
            flat += count
        return captures

    def _plan_decoded(self, req: Any, end: int, room: int) -> list[Wanted]:
        if end % PAGE_SIZE:
            return []
        wanted = self.planner.decode(req, end, room)
        return [] if wanted is None else [wanted]

    def _capture_decoded(self, batch: Any) -> None:
        """Capture the pages that a decode step completed, from the rings, after its forward.

        On every other step this is one comparison of host integers.
        """
        # NumPy over the same memory: a third of what torch takes for so few integers.
        lengths = batch.seq_lens_cpu.numpy()
        (full,) = (lengths % PAGE_SIZE == 0).nonzero()
        captures = []
        for i in full.tolist():
            req, end = batch.reqs[i], int(lengths[i])
            wanted = self.planner.decode(req, end)
            if wanted is not None:
                captures.append(_Capture(Source(req.kv.req_pool_idx, end, 0, end), wanted))
        for wave in self._capture_rings(captures):
            self._publish(wave)

    def _capture_round(self, batch: Any, rounds: Rounds[Wanted]) -> None:
        """Capture the pages that a round may have completed, from the rings, after its draft extend: the
        next round overwrites them, and the host does not know yet how many tokens this one accepted.

        What is not there yet is captured in vain, and `settle` lets go of it. The last row of a draft's
        window depends on the token behind the page, which is there when the page is complete.
        """
        captures = []
        for req in batch.reqs:
            end = rounds.launch(req, batch.forward_iter, req.kv.kv_committed_len)
            if end is None:
                continue
            wanted = self.planner.candidate(req, end)
            if wanted is not None:
                rounds.hold(req, wanted)
                captures.append(_Capture(Source(req.kv.req_pool_idx, end, 0, end), wanted))
        for wave in self._capture_rings(captures):
            self.counters.round_captured += len(wave)

    def settle(self, req: Any, number: int, before: int, after: int) -> None:
        """The result of the round `number` (`ScheduleBatch.forward_iter`) moved the request's committed
        length from `before` to `after`. Raises RuntimeError without speculative decoding."""
        if self._rounds is None:
            raise RuntimeError("a round's result where no rounds are launched")
        wanted, completed = self._rounds.settle(req, number, before, after)
        if wanted is None:
            return
        if not completed:
            self._not_completed(wanted)
        elif self.planner.commit(req, wanted) and wanted.keep is Keep.LIVE:
            self.counters.decode_captured += 1

    def _not_completed(self, wanted: Wanted) -> None:
        self.planner.discard(wanted)
        self.counters.round_discarded += 1

    def _capture_rings(self, captures: Sequence[_Capture]) -> Iterator[Sequence[_Capture]]:
        """Queue the gather from the rings and the copies out, and yield what is on its way.

        More boundaries than staging go in waves, of which the later ones wait, on the forward stream, for
        the copies of the earlier.
        """
        remaining = iter(captures)
        while wave := list(islice(remaining, self._capture.staging.slots)):
            plan = self._capture.gather_after([c.source for c in wave])
            if self._checks is not None:
                self._checks.note_rings(plan)
            self._finish_capture(plan, wave)
            yield wave

    def _finish_capture(self, plan: CapturePlan, captures: Sequence[_Capture]) -> None:
        slots = [c.wanted.slot for c in captures]
        readers = dict.fromkeys(
            event for slot in slots if (event := self._read.pop(slot, None)) is not None
        )
        gathered = self._out_lane.mark()
        event = self._capture.finish(plan, slots, [gathered, *readers])
        if self._checks is not None:
            self._checks.bind_sources(plan, slots)
        for source, wanted in captures:
            self._written[wanted.slot] = event
            if source.reads_ring:
                self._row_read[source.slot] = gathered
            self._ranks.note(
                "capture row=%d P=%d slot=%d %s",
                source.slot,
                wanted.boundary,
                wanted.slot,
                wanted.keep.name,
            )

    def _publish(self, captures: Sequence[_Capture]) -> None:
        for _, wanted in captures:
            if self.planner.publish(wanted) and wanted.keep is Keep.LIVE:
                self.counters.decode_captured += 1

    # ---- storage

    def slot_events(self, slot: int) -> tuple[Event, ...]:
        """The copies that may still write or read a host slot's bytes: whoever touches them on another
        thread waits for these first."""
        events = (self._written.get(slot), self._read.get(slot))
        return tuple(event for event in events if event is not None)

    def slot_landed(self, slot: int) -> None:
        """A record came into the slot from storage, after everything in `slot_events`."""
        self._written.pop(slot, None)
        self._read.pop(slot, None)
        if self._checks is not None:
            self._checks.forget_source(slot)

    # ---- lifetime

    def drain(self) -> None:
        """Wait until no copy is in flight. Flush, shutdown and tests; never in a scheduling round."""
        self._out_lane.drain()
        self._in_lane.drain()

    def flush(self) -> None:
        """The tree was reset: forget everything. The caller resets the store."""
        for req in list(self._pending):
            self.forget(req)
        self.drain()
        self._written.clear()
        self._read.clear()
        self._row_read.clear()
        if self._rounds is not None:
            self._rounds.clear()
        self.planner.flush()
        if self._checks is not None:
            self._checks.clear()

    def close(self) -> None:
        """Shutdown: no copy in flight, threads ended, host memory let go."""
        self.flush()
        self._out_lane.close()
        self._in_lane.close()
        self.pools.close()


def tokens_of_a_round(server_args: Any) -> int:
    """Tokens that a round of speculative decoding verifies under these arguments; 0 without it."""
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    return 0 if cfg.speculative_algorithm is None else cfg.speculative_num_draft_tokens


def check_rings(view: DeviceView, round_tokens: int) -> None:
    """Refuses rings that cannot hold a boundary until the round that completes it is over.

    The last round that starts below a boundary P reaches P + `round_tokens` - 2.

    Raises:
        ValueError: one of them is too small.
    """
    beyond = max(round_tokens - 1, 0)
    for size, rows in ((view.ring_size, WINDOW), (view.state_ring_size, STATE_ROWS)):
        if size < rows + beyond:
            raise ValueError(
                f"--speculative-num-draft-tokens: a ring of {size} rows does not hold the {rows} before "
                f"a page's end and the {beyond} that a round of {round_tokens} may write behind it"
            )


def largest_extend(server_args: Any) -> int:
    """The most tokens that one extend forward computes under these arguments."""
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    chunk = cfg.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else cfg.max_prefill_tokens
