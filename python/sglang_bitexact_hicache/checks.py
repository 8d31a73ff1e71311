"""SGLANG_SWA_DBG_CHECKSUM: verify every restore on the device, and say so.

Three statements a restore, one log line each, or one line with the word MISMATCH:

* ``[SWA-DBG] restore verified``: the window re-read from the rings after the restore has the
  checksums that the source rows had at capture;
* ``[LB-DEV] device landing byte-exact``: the window's host bytes equal the device rows they landed in;
* ``[C4-STATE-DBG] state ride bit-exact``: both, for the C4 and the indexer state.

Neither side goes through the index arithmetic of capture or restore, or one wrong index would satisfy
both: source rows are found through the per-token metadata that stock built for its own attention,
landing rows through stock's own index builders. All of this synchronises the device; it runs only
when the flag is set.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sglang_bitexact_hicache.capture import CapturePlan
from sglang_bitexact_hicache.checksum import section_checksums
from sglang_bitexact_hicache.constants import STATE_ROWS, WINDOW
from sglang_bitexact_hicache.device_view import DeviceView, Ring
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.layout import (
    C4_POOL,
    INDEXER_POOL,
    WINDOW_POOL,
)
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.restore import Restore

logger = logging.getLogger(__name__)


class DebugChecks:
    """Source checksums by host slot, and the comparison after a restore. Scheduler thread."""

    def __init__(self, view: DeviceView, pools: TruthHostPools, counters: Counters) -> None:
        self._view = view
        self._pools = pools
        self._counters = counters
        self._noted: dict[tuple[int, int], int] = {}
        self._sources: dict[int, dict[int, int]] = {}

    def note_source(
        self, plan: CapturePlan, ring: Ring, chunk: torch.Tensor, metadata: Any
    ) -> None:
        """Checksum one section's source rows of every boundary of a plan.

        `metadata` is stock's UnifiedKvMetadata of the forward: per token its request row, its
        chunk's start and its chunk's first row, from which each token's position follows.
        """
        tokens = metadata.pf_state_slot.shape[0]
        rows = torch.arange(tokens, device=chunk.device)
        position = metadata.pf_chunk_start + rows - metadata.pf_cu_q
        for i, source in enumerate(plan.sources):
            first = source.boundary - ring.section.rows
            mine = metadata.pf_state_slot == source.slot
            inside = mine & (position >= first) & (position < source.boundary)
            found = chunk[:tokens][inside].to(ring.buffer.dtype)
            missing = ring.section.rows - found.shape[0]
            if missing:
                base = source.slot * ring.size
                old = [base + p % ring.size for p in range(first, first + missing)]
                found = torch.cat([ring.buffer[old], found])
            value = int(section_checksums(found.unsqueeze(0)))
            self._noted[i, ring.section.index] = value

    def note_rings(self, plan: CapturePlan) -> None:
        """Checksum every section's source rows of a plan that is captured after its forward, through
        stock's own index builders."""
        for rings in self._view.rings.values():
            for ring in rings:
                for i, source in enumerate(plan.sources):
                    rows = ring.buffer[self._stock_rows(ring, source.slot, source.boundary)]
                    self._noted[i, ring.section.index] = int(section_checksums(rows.unsqueeze(0)))

    def bind_sources(self, plan: CapturePlan, slots: Sequence[int]) -> None:
        """The plan's captures went to these host slots."""
        sections = self._view.layout.num_sections
        for i, slot in enumerate(slots):
            self._sources[slot] = {s: self._noted[i, s] for s in range(sections)}
        self._noted.clear()

    def forget_source(self, slot: int) -> None:
        """The slot's record comes from storage: its checksums are the ones that it carries."""
        self._sources.pop(slot, None)

    def verify(self, req: Any, restore: Restore) -> bool:
        """Compare a restore that was just applied; logs three lines, or one with MISMATCH."""
        window = self._compare(WINDOW_POOL, restore)
        states = [self._compare(pool, restore) for pool in (C4_POOL, INDEXER_POOL)]
        where = f"rid={req.rid} P={restore.boundary} row={restore.row} tier={_tier(req)}"
        failed = [
            f"{tag} {what}"
            for tag, what, ok in (
                ("SWA-DBG", "window checksum", window[0]),
                ("LB-DEV", "window bytes", window[1]),
                ("C4-STATE-DBG", "state checksum", all(s[0] for s in states)),
                ("C4-STATE-DBG", "state bytes", all(s[1] for s in states)),
            )
            if not ok
        ]
        if failed:
            self._counters.checks_failed += 1
            logger.error("[%s] MISMATCH %s: %s", failed[0].split()[0], where, ", ".join(failed))
            return False
        self._counters.checks_verified += 1
        state_bytes = sum(s[2] for s in states)
        logger.info("[SWA-DBG] restore verified %s bytes=%d", where, window[2])
        logger.info("[LB-DEV] device landing byte-exact %s bytes=%d", where, window[2])
        logger.info("[C4-STATE-DBG] state ride bit-exact %s bytes=%d", where, state_bytes)
        return True

    def clear(self) -> None:
        """Flush."""
        self._noted.clear()
        self._sources.clear()

    def _compare(self, pool: str, restore: Restore) -> tuple[bool, bool, int]:
        """(checksums equal, host bytes equal, bytes compared) of one pool's sections."""
        if restore.copied is not None:
            restore.copied.synchronize()
        record = self._pools.record(pool, restore.host_slot)
        carried = self._pools.checksums(restore.host_slot)
        noted = self._sources.get(restore.host_slot, {})
        sums_equal = bytes_equal = True
        nbytes = 0
        for ring in self._view.rings[pool]:
            section = ring.section
            landed = ring.buffer[self._stock_rows(ring, restore.row, restore.boundary)]
            sum_now = int(section_checksums(landed.unsqueeze(0)))
            # A record from another process carries its checksum only in its header.
            sum_then = noted.get(section.index, int(carried[section.index]))
            sums_equal &= sum_now == sum_then == int(carried[section.index])
            host = record[section.offset : section.offset + section.nbytes]
            bytes_equal &= torch.equal(landed.contiguous().view(torch.uint8).cpu().flatten(), host)
            nbytes += section.nbytes
        return sums_equal, bytes_equal, nbytes

    def _stock_rows(self, ring: Ring, row: int, boundary: int) -> torch.Tensor:
        """Ring rows of a boundary's section, in position order, by stock's own arithmetic."""
        device = ring.buffer.device
        if ring.section.pool == WINDOW_POOL:
            return _rows_that_attention_reads(row, boundary, ring.size, device)
        positions = torch.arange(boundary - STATE_ROWS, boundary, device=device)
        return self._view.state_rows(ring.section, torch.full_like(positions, row), positions)


def _tier(req: Any) -> str:
    """The farthest tier that the request's prefix came from."""
    if req.cached_tokens_storage:
        return "storage"
    return "host" if req.cached_tokens_host else "device"


def _rows_that_attention_reads(
    row: int, boundary: int, ring_size: int, device: torch.device
) -> torch.Tensor:
    """Ring rows of [P - 128, P), asked from the index builder of stock's prefill attention.

    The first query after P reads the 127 rows before it; a query at P - 1 reads the row before those
    as well. Their union, in position order, is the window.
    """
    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import runtime

    positions = torch.tensor([boundary - 1, boundary], dtype=torch.int64, device=device)
    rows, spans, _, _ = runtime.build_prefill_indices(
        compress_ratio=0,
        state_slot=torch.full_like(positions, row),
        positions=positions,
        chunk_start=positions.clone(),
        cu_q=torch.zeros_like(positions),
        win=WINDOW,
        ring_stride=ring_size,
        swa_pages=0,
        c128_page_indices=None,
        c4_sparse_page_indices=None,
    )
    _, end, stop = spans.tolist()
    before, after = rows[:end], rows[end:stop]
    return torch.cat([before[:1], after]).to(torch.int64)
