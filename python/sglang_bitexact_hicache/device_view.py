"""Seam: the rings of SGLang's device pool, seen as the sections of a record.

Answers to `DeepSeekV4TokenToKVPool` (mem_cache/deepseek_v4_memory_pool.py): `unified_kv_pool` holds
one buffer a layer (with fp8 rows two, nope and rope) whose first `num_req_slots * ring` rows are the
sliding-window rings, and the C4 state pools hold one ring a slot. A draft (EAGLE) has pools of the same
class, whose layers keep windows only, in rings of the same size by the same rows; here they are layers
behind the target's. Built once, after the pools exist; it keeps references to their tensors and reads no
device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_bitexact_hicache.constants import C4_RATIO
from sglang_bitexact_hicache.layout import (
    C4_POOL,
    INDEXER_POOL,
    WINDOW_POOL,
    RecordLayout,
    Section,
)


@dataclass(frozen=True)
class Ring:
    """One section's device rows: `buffer` is ``[rows, row]``, `size` rows a request slot. fp8 rows, which
    are packed with their scales, are plain bytes here."""

    section: Section
    buffer: torch.Tensor
    size: int


class DeviceView:
    """The rings of one pipeline stage, by section.

    Args:
        pool: the target's `DeepSeekV4TokenToKVPool`.
        drafts: those of the draft's layers (`CacheInitParams.mtp_draft_device_pools`), if there are any.

    Attributes:
        layout: the record geometry that these buffers imply.
        rings: pool name -> rings in section order.
        draft_base: id of the draft's first layer here.

    Raises:
        ValueError: the stage has no ratio-4 layer, or a draft keeps more than windows, or in other rings.
    """

    def __init__(self, pool: Any, drafts: Sequence[Any] = ()) -> None:
        unified = pool.unified_kv_pool
        first, last = pool._stage_start, pool._stage_end
        layers = tuple(range(first, last))
        ratios = tuple(pool.compression_ratios[layer] for layer in layers)
        windows = {layer: _window(pool, layer - first) for layer in layers}
        c4, indexer = (
            {
                layer: (pools[layer].kv_score_buffer.kv_score,)
                for layer, ratio in zip(layers, ratios, strict=True)
                if ratio == C4_RATIO
            }
            for pools in (pool.compress_state_pools, pool.indexer_compress_state_pools)
        )
        self.draft_base = len(pool.compression_ratios)
        draft_windows = [rows for draft in drafts for rows in _draft_windows(pool, draft)]
        windows.update(enumerate(draft_windows, self.draft_base))
        if not c4:
            raise ValueError(
                "this pipeline stage has no ratio-4 layer: its C4 state cannot be captured"
            )
        self._state_pools = {
            C4_POOL: pool.compress_state_pools,
            INDEXER_POOL: pool.indexer_compress_state_pools,
        }
        self.ring_size: int = pool.unified_swa_ring_size
        self.state_ring_size: int = pool.compress_state_pools[min(c4)].ring_size
        window, *rope = windows[first]
        (c4_rows,), (indexer_rows,) = (next(iter(states.values())) for states in (c4, indexer))
        self.device: torch.device = window.device
        self.layout = RecordLayout(
            layers=(*layers, *range(self.draft_base, self.draft_base + len(draft_windows))),
            ratios=ratios + (0,) * len(draft_windows),
            window_row_bytes=_row_bytes(window),
            c4_row_bytes=_row_bytes(c4_rows),
            indexer_row_bytes=_row_bytes(indexer_rows),
            window_dtype=str(unified.get_unified_kv(0).dtype).removeprefix("torch."),
            state_dtype=str(c4_rows.dtype).removeprefix("torch."),
            rope_row_bytes=sum(map(_row_bytes, rope)),
            draft_layers=len(draft_windows),
        )
        self.rings: dict[str, tuple[Ring, ...]] = {
            name: tuple(
                Ring(section, tensors[section.layer][section.plane], size)
                for section in self.layout.sections(name)
            )
            for name, tensors, size in (
                (WINDOW_POOL, windows, self.ring_size),
                (C4_POOL, c4, self.state_ring_size),
                (INDEXER_POOL, indexer, self.state_ring_size),
            )
        }
        self._windows_of_layer: dict[int, tuple[Ring, ...]] = {}
        for ring in self.rings[WINDOW_POOL]:
            planes = self._windows_of_layer.get(ring.section.layer, ())
            self._windows_of_layer[ring.section.layer] = (*planes, ring)
        # The compressor's hook is handed the state buffer, not the layer: its address tells which.
        self._state_of_pointer = {
            ring.buffer.data_ptr(): ring
            for name in (C4_POOL, INDEXER_POOL)
            for ring in self.rings[name]
        }

    def window_rings(self, layer: int) -> tuple[Ring, ...]:
        """The sliding-window ring of an absolute layer id, in each of its planes."""
        return self._windows_of_layer[layer]

    def state_ring(self, buffer: torch.Tensor) -> Ring | None:
        """The state ring that `buffer` is, or None (a C128 state, another pool's buffer)."""
        return self._state_of_pointer.get(buffer.data_ptr())

    def state_rows(
        self, section: Section, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Stock's own address of state rows (CompressStatePool), for checks: int64 ``[n]``."""
        pool = self._state_pools[section.pool][section.layer]
        return pool.translate_from_req_position_to_state_loc(slots, positions)


def _draft_windows(pool: Any, draft: Any) -> list[tuple[torch.Tensor, ...]]:
    """The window of each of a draft's layers, in its planes; its rows and rings are like the target's."""
    if getattr(draft, "unified_kv_pool", None) is None or any(draft.compression_ratios):
        raise ValueError(
            "--speculative-draft-model-path: the draft's layers must keep windows and nothing else"
        )
    windows = [_window(draft, layer) for layer in range(len(draft.compression_ratios))]
    target = _ring_shape(pool, _window(pool, 0))
    shapes = [_ring_shape(draft, window) for window in windows]
    if any(shape != target for shape in shapes):
        raise ValueError(
            "--speculative-draft-model-path: the draft's rings (rows, widths and dtypes of a row) "
            f"differ: {shapes}, the target's are {target}"
        )
    return windows


def _window(pool: Any, layer: int) -> tuple[torch.Tensor, ...]:
    """The planes of a layer's window; `layer` counts from the first of the pool's stage."""
    unified = pool.unified_kv_pool
    planes = (plain_rows(unified.get_unified_kv(layer)),)
    return (*planes, unified.get_unified_kv_rope(layer)) if pool._unified_kv_fp8 else planes


def _ring_shape(pool: Any, window: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return (pool.unified_swa_ring_size, *((plane.shape[1], plane.dtype) for plane in window))


def plain_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows of fp8 as bytes: they hold scales too, and torch cannot index fp8 everywhere."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


def _row_bytes(buffer: torch.Tensor) -> int:
    return buffer.shape[1] * buffer.element_size()
