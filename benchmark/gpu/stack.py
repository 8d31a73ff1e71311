"""The layers of the model as far as the cache goes: compressors and attention, one after the other.

Real, called as SGLang calls them: the fused K store of decode, the compress plans, the three
compressors through `_forward_compress_all_in_one` (so that our hook sits on the real function), the
compressed rows in the unified cache, the index lists, the attention kernels, the ring store of prefill.
Stood in for: the projections (inputs.py), the indexer's query side (selection.py). There are no experts.

Each layer adds a function of one head of the attention output before it to its inputs, token by token,
so a wrong row anywhere spreads to every later layer. Everything is computed row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention import fused_qk_norm_rope_store
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from gpu import stock
from gpu.config import HEAD_DIM, INDEX_DIM, ROPE_DIM, Shape
from gpu.inputs import Inputs, Rows, Span
from gpu.selection import select_recent, select_scored

MIX = 64.0
"""A layer adds the sine of this times the output of the one before to its inputs. Attention averages, so
differences fade from layer to layer; this keeps the smallest one that bf16 can hold, and its own size is
bounded."""

EPSILON = 1e-6

WINDOW_ROWS, C4_ROWS, INDEXER_ROWS = "window", "c4", "c4_indexer"
"""What a layer hands to `record`: its K, its compressor's and its indexer compressor's input."""


@dataclass(frozen=True)
class Compressor:
    """Parameters of one compressor: `ape` fp32 ``[rows, head_dim]``, a norm, the rotary table."""

    head_dim: int
    ratio: int
    ape: torch.Tensor
    norm: SimpleNamespace
    rope: torch.Tensor


@dataclass
class Forward:
    """One prepared forward: stock's metadata, and where its tokens' inputs are."""

    mode: ForwardMode
    metadata: Any
    batch: SimpleNamespace
    rows: Rows
    requests: tuple[slice, ...]


class Stack:
    """See the module's docstring.

    Args:
        shape: the layers.
        pool, backend: stock's (stock.py).
        positions: positions that a request can reach.
        scored: whether ratio-4 layers select rows by logits over the real indexer K, layer by layer;
            otherwise the newest rows, once a forward.
    """

    def __init__(
        self, shape: Shape, pool: Any, backend: stock.Backend, positions: int, *, scored: bool
    ) -> None:
        device = backend.device
        self.shape = shape
        self.scored = scored
        self._pool = pool
        self._backend = backend
        self._inputs = Inputs(shape, positions, device)
        rope = stock.rope_table(positions + 256, device)
        # The layout of the model's table where decode reads it: bf16 [positions, 1, 1, 32].
        self._cos, self._sin = (
            part.to(torch.bfloat16)[:, None, None, :].contiguous()
            for part in (rope.real, rope.imag)
        )
        random = torch.Generator(device=device).manual_seed(7)

        def compressor(head_dim: int, ratio: int) -> Compressor:
            rows = 8 if ratio == 4 else ratio
            ape = torch.randn(rows, head_dim, device=device, generator=random)
            weight = 1 + 0.1 * torch.randn(head_dim, device=device, generator=random)
            norm = SimpleNamespace(weight=weight, variance_epsilon=EPSILON)
            return Compressor(head_dim, ratio, ape, norm, rope)

        self._c4 = compressor(HEAD_DIM, 4)
        self._c4_indexer = compressor(INDEX_DIM, 4)
        self._c128 = compressor(HEAD_DIM, 128)
        self._k_norm = 1 + 0.1 * torch.randn(HEAD_DIM, device=device, generator=random)
        self._sink = torch.zeros(shape.heads, device=device)

    # ---- before a forward

    def extend(self, rows: Sequence[int], spans: Sequence[Span]) -> Forward:
        """A prefill of these request rows, each of one span of positions."""
        device = self._backend.device
        ends = [span.start + span.count for span in spans]
        counts = [span.count for span in spans]
        metadata = self._backend.init_forward_metadata_prefill(
            max_seq_len=max(ends),
            req_pool_indices=torch.tensor(rows, device=device),
            seq_lens=torch.tensor(ends, device=device),
            seq_lens_cpu=ends,
            out_cache_loc=torch.cat(
                [self._locations(r, s) for r, s in zip(rows, spans, strict=True)]
            ),
            num_tokens=sum(counts),
            extend_seq_lens=torch.tensor(counts, device=device),
            extend_seq_lens_cpu=counts,
        )
        return self._prepared(ForwardMode.EXTEND, metadata, rows, spans)

    def decode(self, rows: Sequence[int], spans: Sequence[Span]) -> Forward:
        """A decode step of these request rows, each of a span of one position."""
        device = self._backend.device
        raw = SimpleNamespace(
            req_pool_indices=torch.tensor(rows, device=device),
            seq_lens=torch.tensor([span.start + 1 for span in spans], device=device),
            out_cache_loc=torch.cat(
                [self._locations(r, s) for r, s in zip(rows, spans, strict=True)]
            ),
        )
        metadata = self._backend.make_forward_metadata_from_raw_decode(raw)
        return self._prepared(ForwardMode.DECODE, metadata, rows, spans)

    def _locations(self, row: int, span: Span) -> torch.Tensor:
        where = self._backend.req_to_token[row, span.start : span.start + span.count]
        return where.to(torch.int64)

    def _prepared(
        self, mode: ForwardMode, metadata: Any, rows: Sequence[int], spans: Sequence[Span]
    ) -> Forward:
        core = metadata.core_attn_metadata
        batch = SimpleNamespace(
            forward_mode=mode,
            positions=core.positions_casual.to(torch.int64),
            req_pool_indices=torch.tensor(rows, device=self._backend.device),
            attn_cp_metadata=None,
        )
        starts = [sum(span.count for span in spans[:i]) for i in range(len(spans))]
        requests = tuple(slice(s, s + p.count) for s, p in zip(starts, spans, strict=True))
        if not self.scored:
            select_recent(core, self.shape.selected)
        return Forward(mode, metadata, batch, Rows(spans, self._backend.device), requests)

    # ---- the forward

    def run(
        self,
        forward: Forward,
        *,
        keep: bool = False,
        record: Callable[[int, str, torch.Tensor], None] | None = None,
    ) -> list[torch.Tensor]:
        """All layers, on the current stream; with `keep`, each one's output.

        Outputs are bf16 ``[tokens, heads, 512]``.
        `record(layer, kind, rows)` is told what a prefill's layers put into rings and states.
        """
        self._backend.forward_metadata = forward.metadata
        decoding = forward.mode.is_decode()
        outputs: list[torch.Tensor] = []
        before: torch.Tensor | None = None
        for layer, ratio in enumerate(self.shape.ratios):
            k = self._mixed(self._inputs.k, forward, layer, before)
            q = forward.rows.of(self._inputs.q, layer)
            if decoding:
                # The store norms K in place; a first layer's K is a view of the table.
                q = self._store_decoded(layer, forward, q, k.clone() if before is None else k)
            elif record is not None:
                record(layer, WINDOW_ROWS, k)
            if ratio:
                self._compress(layer, ratio, forward, before, record)
            output = self._attend(layer, ratio, forward, q, None if decoding else k)
            before = torch.sin(MIX * output[:, layer % self.shape.heads].to(torch.float32))
            if keep:
                outputs.append(output)
        return outputs

    def hooks_only(
        self, forward: Forward, on_attention: Callable[..., None], on_compress: Callable[..., None]
    ) -> None:
        """Calls what is hooked into a prefill's layers, with their arguments, and nothing of theirs.

        The arguments are views of the input tables: no kernel runs but the hooks' own.
        """
        self._backend.forward_metadata = forward.metadata
        core = forward.metadata.core_attn_metadata
        for layer, ratio in enumerate(self.shape.ratios):
            for indexer in (True, False) if ratio == 4 else (False,) * bool(ratio):
                table, _, states = self._parts(layer, ratio, indexer)
                on_compress(
                    self._backend,
                    kv_score_buffer=states.kv_score_buffer.kv_score,
                    kv_score_input=forward.rows.of(table, layer),
                )
            on_attention(
                self._backend,
                kv=forward.rows.of(self._inputs.k, layer),
                layer=SimpleNamespace(layer_id=layer),
                core_attn_metadata=core,
            )

    def _mixed(
        self, table: torch.Tensor, forward: Forward, layer: int, before: torch.Tensor | None
    ) -> torch.Tensor:
        """A layer's rows of a table, plus what came of the layer before (fp32 ``[tokens, 512]``) as often
        as it fits; in the table's dtype."""
        rows = forward.rows.of(table, layer)
        if before is None:
            return rows
        parts = rows.view(rows.shape[0], -1, HEAD_DIM)
        return torch.add(parts, before.unsqueeze(1)).to(table.dtype).view(rows.shape)

    def _store_decoded(
        self, layer: int, forward: Forward, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return fused_qk_norm_rope_store.fused_qk_norm_rope_swa_store(
            q=q.reshape(q.shape[0], -1),
            kv=k,
            q_norm_weight=None,
            kv_norm_weight=self._k_norm,
            q_rms_eps=EPSILON,
            kv_rms_eps=EPSILON,
            rope_head_dim=ROPE_DIM,
            cos_cache=self._cos,
            sin_cache=self._sin,
            positions=forward.batch.positions,
            swa_cache=self._pool.get_unified_kv(layer),
            swa_loc=forward.metadata.core_attn_metadata.unified.swa_loc,
            swa_page_size=1,
            dtype=torch.bfloat16,
            bf16_store=True,
        )

    def _parts(self, layer: int, ratio: int, indexer: bool) -> tuple[torch.Tensor, Compressor, Any]:
        """Input table, parameters and state pool of one compressor of a layer."""
        if indexer:
            pool = self._pool.indexer_compress_state_pools[layer]
            return self._inputs.c4_indexer, self._c4_indexer, pool
        pool = self._pool.compress_state_pools[layer]
        if ratio == 4:
            return self._inputs.c4, self._c4, pool
        return self._inputs.c128, self._c128, pool

    def _compress(
        self,
        layer: int,
        ratio: int,
        forward: Forward,
        before: torch.Tensor | None,
        record: Callable[[int, str, torch.Tensor], None] | None,
    ) -> None:
        core = forward.metadata.core_attn_metadata
        for indexer in (True, False) if ratio == 4 else (False,):
            table, parameters, states = self._parts(layer, ratio, indexer)
            scores = self._mixed(table, forward, layer, before)
            if record is not None and ratio == 4:
                record(layer, INDEXER_ROWS if indexer else C4_ROWS, scores)
            if indexer:
                where = {
                    "kv_cache": self._pool.get_index_k_with_scale_buffer(layer),
                    "page_size": self._pool.get_index_k_page_size(ratio),
                    "out_loc": core.c4_out_loc,
                }
            else:
                where = {
                    "kv_cache": self._pool.get_unified_kv(layer).view(torch.uint8),
                    "page_size": 1,
                    "out_loc": getattr(core.unified, f"c{ratio}_out_loc"),
                }
            self._backend._forward_compress_all_in_one(
                kv_score_buffer=states.kv_score_buffer.kv_score,
                kv_score_input=scores,
                ape=parameters.ape,
                head_dim=parameters.head_dim,
                norm=parameters.norm,
                freqs_cis_cache=parameters.rope,
                is_indexer=indexer,
                rotate=indexer,
                compress_ratio=ratio,
                bf16_store=not indexer,
                **where,
            )
            if indexer and self.scored:
                self._select(layer, forward, core)

    def _select(self, layer: int, forward: Forward, core: Any) -> None:
        cache = self._pool.get_index_k_with_scale_buffer(layer)
        query = forward.rows.of(self._inputs.index_q, layer)
        for tokens in forward.requests:
            select_scored(core, tokens, query[tokens], cache, self.shape.selected)

    def _attend(
        self, layer: int, ratio: int, forward: Forward, q: torch.Tensor, k: torch.Tensor | None
    ) -> torch.Tensor:
        return self._backend._forward_unified_kv(
            q=q,
            kv=k,
            layer=SimpleNamespace(layer_id=layer, v_head_dim=HEAD_DIM),
            forward_batch=forward.batch,
            compress_ratio=ratio,
            attn_sink=self._sink,
            core_attn_metadata=forward.metadata.core_attn_metadata,
            save_kv_cache=k is not None,
        )
