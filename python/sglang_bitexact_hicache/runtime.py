"""TruthRuntime: what one scheduler does with truth, in the order in which a request meets it.

    admit      (AFTER ScheduleBatch.prepare_for_extend)    lock the truth of each hit, start its copy in
    forward    (AROUND TpModelWorker.forward_batch_generation)
               before: scatter the restores; plan what this forward captures
               during: gather, once a layer (forward_hooks.py)
               after:  copy out, publish the truth with the lineage of its page
    forget     (BxCache.on_release)                        a request gave its row back
    flush      (BxCache._reset_full)                       everything is forgotten

Every decision is taken here, on the scheduler thread, from host integers that are equal on all
ranks. Whether bytes have landed decides nothing: their readers wait on events (transfer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_bitexact_hicache.abort import discard_output
from sglang_bitexact_hicache.capture import CapturePipeline, CapturePlan
from sglang_bitexact_hicache.checks import DebugChecks
from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.gather import Source
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.options import Options
from sglang_bitexact_hicache.policy import prefill_boundaries
from sglang_bitexact_hicache.restore import Restore, RestorePipeline
from sglang_bitexact_hicache.transfer import Event, open_lane
from sglang_bitexact_hicache.truth import TruthStore

if TYPE_CHECKING:
    from sglang_bitexact_hicache.tree import BxCache

logger = logging.getLogger(__name__)

RESTORE_STAGING = 8
"""Records of device staging for restores: a batch with more hits is restored in waves."""


@dataclass(frozen=True)
class _Wanted:
    """One boundary that a forward captures: its source rows, its page's lineage, its host slot."""

    source: Source
    lineage: int
    slot: int


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
        chunk_tokens: the most tokens that one extend forward computes.
        debug: verify every restore on the device (SGLANG_SWA_DBG_CHECKSUM).
        pin: whether host memory is pinned on this platform.
    """

    def __init__(
        self,
        cache: BxCache,
        view: DeviceView,
        pools: TruthHostPools,
        *,
        stride: int,
        chunk_tokens: int,
        debug: bool,
        pin: bool,
    ) -> None:
        self.cache = cache
        self.store = cache.store
        self.view = view
        self.pools = pools
        self.counters = Counters()
        self._stride = stride
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
        self._checks = DebugChecks(view, pools, self.counters) if debug else None
        self._pending: dict[Any, Restore] = {}
        # Per host slot, the last copy that wrote it and the last that read it.
        self._written: dict[int, Event] = {}
        self._read: dict[int, Event] = {}

    @classmethod
    def build(cls, cache: BxCache, server_args: Any, options: Options) -> TruthRuntime:
        """Allocate the pools that `options.sizing` planned and attach a store of that size.

        After the cache and the device pools exist, before the scheduler takes a request.

        Raises:
            ValueError: host or device memory cannot be had; the message names the flag to change.
        """
        from sglang.srt.utils.common import is_pin_memory_available

        view = DeviceView(cache.token_to_kv_pool_allocator.get_kvcache())
        pin = is_pin_memory_available(view.device)
        slots = options.sizing.slots
        cache.attach_truth(TruthStore(slots))
        runtime = cls(
            cache,
            view,
            TruthHostPools(view.layout, slots, pin=pin),
            stride=options.stride,
            chunk_tokens=largest_extend(server_args),
            debug=options.checksum,
            pin=pin,
        )
        logger.info(
            "bit-exact HiCache: %d boundaries in host memory (%.2f GB, %d bytes each), stride %d, "
            "layout %s, checks %s",
            slots,
            runtime.pools.nbytes / 1e9,
            view.layout.slot_bytes,
            options.stride,
            view.layout.digest(),
            "on" if options.checksum else "off",
        )
        return runtime

    # ---- admission

    def admit(self, fresh: Sequence[Any]) -> None:
        """Requests that were just given a row: bind the row, lock and start their restores.

        `fresh` are Reqs in batch order, after `alloc_for_extend`. A request whose admitted prefix
        has no truth is a bug of ours: its output is discarded and nothing of it is inserted.
        """
        started: list[Restore] = []
        for req in fresh:
            self.cache.row_taken(req)
            if req.prefix_len == 0:
                continue
            truth = self.cache.final_truth(req)
            if truth is None:
                self.counters.restore_impossible += 1
                discard_output(req, f"no truth for the admitted prefix of {req.prefix_len} tokens")
                continue
            lineage, slot = truth
            self.store.lock(slot)
            self.store.touch(lineage)
            restore = Restore(
                row=req.kv.req_pool_idx,
                boundary=req.prefix_len,
                host_slot=slot,
                written=self._written.get(slot),
            )
            self._pending[req] = restore
            started.append(restore)
        for restore in started:
            self._restore.stage(restore)

    def forget(self, req: Any) -> None:
        """The request gave its row back (finish, abort, retract): drop a restore not yet consumed."""
        restore = self._pending.pop(req, None)
        if restore is not None:
            self._restore.drop(restore)
            self._unlock(restore)
            self.counters.restore_dropped += 1

    # ---- forward

    @contextmanager
    def forward(self, batch: Any) -> Iterator[ActiveForward | None]:
        """The scope of one forward of a ScheduleBatch, on the forward stream.

        Yields what the forward's hooks need, or None where there is nothing to capture.
        """
        self._apply_restores(batch)
        if not batch.forward_mode.is_extend():
            self._mint_decode(batch)
            yield None
            return
        wanted = self._plan_capture(batch)
        if not wanted:
            yield None
            return
        plan = self._capture.begin([w.source for w in wanted])
        try:
            yield ActiveForward(plan)
        except BaseException:
            self._capture.abandon(plan)
            for w in wanted:
                self.store.discard(w.slot)
            raise
        self._finish_capture(plan, wanted)

    def gather_window(
        self, active: ActiveForward, layer: int, chunk: torch.Tensor, metadata: Any
    ) -> None:
        """One layer's K of the running forward, before the layer's own store."""
        self._capture.gather_window(active.capture, layer, chunk)
        if self._checks is not None:
            self._checks.note_source(active.capture, self.view.window_ring(layer), chunk, metadata)

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
        due = [(req, r) for req in batch.reqs if (r := self._pending.pop(req, None)) is not None]
        if not due:
            return
        restores = [restore for _, restore in due]
        self._restore.apply(restores)
        for restore in restores:
            self._unlock(restore)
        if self._checks is not None:
            for req, restore in due:
                if not self._checks.verify(req, restore):
                    discard_output(req, "restored bytes differ from the captured ones")

    def _unlock(self, restore: Restore) -> None:
        # The slot may be handed to a capture right away: that copy waits for this one.
        if restore.copied is not None:
            self._read[restore.host_slot] = restore.copied
        self.store.unlock(restore.host_slot)

    def _mint_decode(self, batch: Any) -> None:
        """Pages that a decode step completes get their identity when it is launched."""
        if not batch.forward_mode.is_decode():
            return
        for i in (batch.seq_lens_cpu % PAGE_SIZE == 0).nonzero().flatten().tolist():
            self.cache.row_launched(batch.reqs[i], int(batch.seq_lens_cpu[i]) // PAGE_SIZE)

    def _plan_capture(self, batch: Any) -> list[_Wanted]:
        """Mint the pages that this forward completes and choose what to capture of them."""
        # Rows of a mixed batch that decode: their lengths on the Req are stale, so lengths come
        # from the batch; their window begins before the chunk and is the next part's.
        decoding = {id(req) for req in batch.decoding_reqs or ()}
        room = self._capture.staging.free
        wanted: list[_Wanted] = []
        row = 0
        for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            self.cache.row_launched(req, (start + count) // PAGE_SIZE)
            if id(req) not in decoding and not req.skip_radix_cache_insert:
                prompt_len = len(req.full_untruncated_fill_ids)
                for boundary in prefill_boundaries(start, start + count, prompt_len, self._stride):
                    if len(wanted) == room:
                        self.counters.capture_over_staging += 1
                        continue
                    slot = self.store.reserve()
                    if slot is None:
                        self.counters.capture_no_slot += 1
                        self._warn_of_full_pool()
                        continue
                    source = Source(req.kv.req_pool_idx, start, row, boundary)
                    lineage = self.cache.row_lineage(req, boundary // PAGE_SIZE)
                    wanted.append(_Wanted(source, lineage, slot))
            row += count
        return wanted

    def _warn_of_full_pool(self) -> None:
        """One line at the first, second, fourth, ... boundary that found no slot."""
        count = self.counters.capture_no_slot
        if count & (count - 1) == 0:
            logger.warning(
                "bit-exact HiCache: %d boundaries not captured, all %d host slots were locked or "
                "reserved; these prefixes will be computed again. Raise "
                "--hicache-swa-offload-tail-slots or --hicache-ratio.",
                count,
                self.store.capacity,
            )

    def _finish_capture(self, plan: CapturePlan, wanted: Sequence[_Wanted]) -> None:
        readers = dict.fromkeys(
            event for w in wanted if (event := self._read.pop(w.slot, None)) is not None
        )
        event = self._capture.finish(plan, [w.slot for w in wanted], list(readers))
        if self._checks is not None:
            self._checks.bind_sources(plan, [w.slot for w in wanted])
        for w in wanted:
            self._written[w.slot] = event
            if self.store.publish(w.lineage, w.slot):
                self.counters.captured += 1
            else:
                self.counters.capture_unpublished += 1

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
        if self._checks is not None:
            self._checks.clear()

    def close(self) -> None:
        """Shutdown: no copy in flight, threads ended, host memory let go."""
        self.flush()
        self._out_lane.close()
        self._in_lane.close()
        self.pools.close()


def largest_extend(server_args: Any) -> int:
    """The most tokens that one extend forward computes under these arguments."""
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    chunk = cfg.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else cfg.max_prefill_tokens
