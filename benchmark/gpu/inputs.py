"""Rows that stand for the projections of a layer: deterministic in (request, layer, position).

One random table for each kind of row; a request's rows at a layer are a slice of it, shifted by the
request's seed and by the layer. What a layer adds to them is stack.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu.config import HEAD_DIM, INDEX_DIM, Shape

SEEDS = 96
"""Requests that have rows of their own."""

_SEED_STEP = 97
_LAYER_STEP = 37


@dataclass(frozen=True)
class Span:
    """Positions [start, start + count) of the request with this seed."""

    seed: int
    start: int
    count: int


class Rows:
    """Which rows of the tables the tokens of one forward have: a slice, or one index a token."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.count = sum(span.count for span in spans)
        firsts = [span.seed * _SEED_STEP + span.start for span in spans]
        self._first = firsts[0] if len(spans) == 1 else None
        self._index = None
        if self._first is None:
            runs = [torch.arange(f, f + s.count) for f, s in zip(firsts, spans, strict=True)]
            self._index = torch.cat(runs).to(device)

    def of(self, table: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer's rows of one table; a view of it where the tokens are one run."""
        shift = layer * _LAYER_STEP
        if self._index is None:
            return table[self._first + shift : self._first + shift + self.count]
        return table[self._index + shift]


class Inputs:
    """The tables.

    Attributes:
        k: bf16 ``[n, 512]``; q: bf16 ``[n, heads, 512]``; c4, c4_indexer, c128: the compressors' kv and
            scores, fp32 ``[n, 2048]``, ``[n, 512]`` and ``[n, 1024]``; index_q: fp32 ``[n, 128]``.
    """

    def __init__(self, shape: Shape, positions: int, device: torch.device) -> None:
        n = positions + SEEDS * _SEED_STEP + len(shape.ratios) * _LAYER_STEP
        random = torch.Generator(device=device).manual_seed(20260101)

        def table(*row: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(n, *row, device=device, dtype=dtype, generator=random)

        self.k = table(HEAD_DIM, dtype=torch.bfloat16)
        self.q = table(shape.heads, HEAD_DIM, dtype=torch.bfloat16)
        self.c4 = table(4 * HEAD_DIM)
        self.c4_indexer = table(4 * INDEX_DIM)
        self.c128 = table(2 * HEAD_DIM)
        self.index_q = table(INDEX_DIM)
