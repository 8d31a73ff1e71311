"""The C4 / C128 compressor: its plan, the compression itself, and the store of its rows.

The plan tensors keep the stock byte layout (``CompressPlan`` 16 bytes, ``WritePlan`` 8, and
``DecodePlan`` 16), so that everything that reads a plan reads it as in production. State rows
live in a ring per request: row ``slot * ring_size + position % ring_size``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4_reference_platform.kernels import two_pool
from dsv4_reference_platform.kernels.indexer import hadamard_rows, quantize_fp8_rows
from dsv4_reference_platform.kernels.norm_rope import rms_norm_rows, rotate_pairs

if TYPE_CHECKING:
    from sglang.kernels.ops.attention.dsv4.compress import (
        CompressorDecodePlan,
        CompressorPrefillPlan,
    )

_INVALID_SEQ_LEN = -1  # 0xFFFFFFFF read as int32
_MASKED_SCORE = -torch.finfo(torch.float32).max


def _state_locations(
    rid: torch.Tensor,
    position: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    compress_ratio: int,
    swa_page_size: int,
    ring_size: int,
    use_req_ring: bool,
) -> torch.Tensor:
    """State row of ``position`` for each request row; per-request ring or per-page ring."""
    if compress_ratio == 128 or use_req_ring:
        return rid * ring_size + position % ring_size
    swa_loc = full_to_state[req_to_token[rid, position].long()].long()
    return swa_loc // swa_page_size * ring_size + swa_loc % ring_size


def plan_compress_prefill(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    pin_buffer: torch.Tensor | None,
    num_q_tokens: int,
    compress_ratio: int,
    swa_page_size: int,
    ring_size: int,
    use_req_ring: bool = False,
    use_cuda_graph: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for ``plan_compress_prefill`` of ``deepseek_v4/c_plan.cuh``.

    Args:
        req_pool_indices: ``[requests]`` int64 request rows.
        req_to_token, full_to_state: only read without a per-request ring.
        seq_lens: ``[requests]`` length after this chunk; extend_lens: ``[requests]`` chunk length.
        num_q_tokens: ``sum(extend_lens)``, or the padded count with ``use_cuda_graph``.
        ring_size: state rows per request (or per SWA page).

    Returns:
        ``(plan_c [events, 16], plan_w [writes, 8])`` uint8, in token order; with
        ``use_cuda_graph`` both padded to ``num_q_tokens`` rows with invalid plans.

    Raises:
        ValueError: if the lengths do not add up to ``num_q_tokens``.
    """
    overlap = compress_ratio == 4
    window = compress_ratio * (2 if overlap else 1)
    write_pad = ring_size - window + 2 if ring_size > window else 0
    seq_lens, extend_lens = seq_lens.long(), extend_lens.long()
    total = int(extend_lens.sum())
    if total > num_q_tokens or (total != num_q_tokens and not use_cuda_graph):
        raise ValueError(f"{total} tokens in the chunk, {num_q_tokens} announced")
    request = torch.repeat_interleave(torch.arange(len(seq_lens)), extend_lens)
    ragged = torch.arange(total)
    in_chunk = ragged - (torch.cumsum(extend_lens, 0) - extend_lens)[request]
    position = (seq_lens - extend_lens)[request] + in_chunk
    rid = req_pool_indices.long()[request]

    def locate(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return _state_locations(
            rows,
            at,
            req_to_token,
            full_to_state,
            compress_ratio,
            swa_page_size,
            ring_size,
            use_req_ring,
        )

    event = ((position + 1) % compress_ratio == 0).nonzero().squeeze(1)
    buffer_len = window - (in_chunk[event] + 1).clamp(max=window)
    last, prev = position[event], (position[event] - compress_ratio).clamp(min=0)
    from_ring = buffer_len > 0
    page_0 = torch.where(from_ring, locate(rid[event], prev) // compress_ratio, -1)
    # Stock leaves the request's index here when the ring is not read.
    page_1 = torch.where(from_ring, locate(rid[event], last) // compress_ratio, request[event])
    plan_c = torch.stack((last + 1, (buffer_len << 16) | (event & 0xFFFF), page_0, page_1), 1)

    boundary = seq_lens // compress_ratio * compress_ratio
    first = torch.minimum(boundary - (compress_ratio if overlap else 0), seq_lens - write_pad)
    write = position >= first[request]
    if overlap and not use_req_ring:
        write |= position % swa_page_size >= swa_page_size - compress_ratio
    write = write.nonzero().squeeze(1)
    plan_w = torch.stack((write, locate(rid[write], position[write])), 1)

    if use_cuda_graph:
        invalid = torch.tensor([[_INVALID_SEQ_LEN, 0, -1, -1]])
        plan_c = torch.cat((plan_c, invalid.expand(num_q_tokens - len(plan_c), 4)))
        plan_w = torch.cat((plan_w, torch.full((num_q_tokens - len(plan_w), 2), -1)))
    return (
        plan_c.to(torch.int32).contiguous().view(torch.uint8).view(-1, 16),
        plan_w.to(torch.int32).contiguous().view(torch.uint8).view(-1, 8),
    )


def plan_compress_decode(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    compress_ratio: int,
    swa_page_size: int,
    ring_size: int,
    use_req_ring: bool = False,
) -> torch.Tensor:
    """Stands for ``plan_compress_decode`` of ``deepseek_v4/c_plan.cuh``.

    Returns:
        ``[requests, 16]`` uint8: ``seq_len, write_loc, read_page_0, read_page_1`` (int32 each).
    """
    rid, seq_lens = req_pool_indices.long(), seq_lens.long()
    last = (seq_lens - 1).clamp(min=0)
    prev = (last - compress_ratio).clamp(min=0)
    rest = (
        req_to_token,
        full_to_state,
        compress_ratio,
        swa_page_size,
        ring_size,
        use_req_ring,
    )
    write = _state_locations(rid, last, *rest)
    page_0 = _state_locations(rid, prev, *rest) // compress_ratio
    plan = torch.stack((seq_lens, write, page_0, write // compress_ratio), 1).to(torch.int32)
    return plan.contiguous().view(torch.uint8).view(-1, 16)


def generate_prefill_plan(
    compress_ratio: int,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    swa_page_size: int,
    ring_size: int,
    num_q_tokens: int,
    use_cuda_graph: bool = False,
    use_req_ring: bool = False,
) -> CompressorPrefillPlan:
    """Stands for ``CompressorPrefillPlan.generate`` (a static method; it asks for pinned memory
    and a compiled module, neither of which a CPU has)."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorPrefillPlan

    plan_c, plan_w = plan_compress_prefill(
        req_pool_indices,
        req_to_token,
        full_to_state,
        seq_lens,
        extend_lens,
        None,
        int(num_q_tokens),
        int(compress_ratio),
        int(swa_page_size),
        int(ring_size),
        bool(use_req_ring),
        bool(use_cuda_graph),
    )
    return CompressorPrefillPlan(compress_ratio, plan_c, plan_w)


def generate_decode_plan(
    compress_ratio: int,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_state: torch.Tensor,
    seq_lens: torch.Tensor,
    swa_page_size: int,
    ring_size: int,
    use_req_ring: bool = False,
) -> CompressorDecodePlan:
    """Stands for ``CompressorDecodePlan.generate`` (a static method)."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorDecodePlan

    plan_d = plan_compress_decode(
        req_pool_indices,
        req_to_token,
        full_to_state,
        seq_lens,
        int(compress_ratio),
        int(swa_page_size),
        int(ring_size),
        bool(use_req_ring),
    )
    return CompressorDecodePlan(compress_ratio, plan_d)


def _weighted_rows(kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """Softmax over axis 1 of ``score + ape`` applied to ``kv``; rows added one after the other.

    ``kv`` and ``score`` are ``[events, rows, head_dim]``, ``ape`` is ``[rows, head_dim]``.
    """
    score = score.float() + ape.float()
    weight = torch.exp(score - score.amax(1, keepdim=True))
    weighted = kv.float() * weight
    product, total = weighted[:, 0].clone(), weight[:, 0].clone()
    for row in range(1, weight.shape[1]):
        product += weighted[:, row]
        total += weight[:, row]
    return product / total


def _compress_c4(
    state: torch.Tensor,
    source: torch.Tensor,
    ape: torch.Tensor,
    head_dim: int,
    seq_len: torch.Tensor,
    ragged: torch.Tensor,
    buffer_len: torch.Tensor,
    page_0: torch.Tensor,
    page_1: torch.Tensor,
) -> torch.Tensor:
    """One compressed row per event: the overlap halves of 4 rows, the normal halves of 4 more.

    Of the 8 rows that end at an event, the first ``buffer_len`` come from the state ring, the
    rest from this chunk.
    """
    row = torch.arange(8)
    chunk_row = (ragged.unsqueeze(1) - 7 + row).clamp(min=0)
    ring_row = torch.where(
        row < 4, page_0.unsqueeze(1) * 4 + row, page_1.unsqueeze(1) * 4 + row - 4
    )
    from_ring = row < buffer_len.unsqueeze(1)
    halves = []
    for part, columns in ((slice(0, 4), 0), (slice(4, 8), head_dim)):
        score_columns = columns + 2 * head_dim
        mask = from_ring[:, part]
        ring = ring_row[:, part][mask]
        for first in (columns, score_columns):
            picked = source[:, first : first + head_dim][chunk_row[:, part]]
            picked[mask] = state[ring, first : first + head_dim].to(source.dtype)
            halves.append(picked)
    kv = torch.cat((halves[0], halves[2]), 1)
    score = torch.cat((halves[1], halves[3]), 1)
    alone = seq_len <= 4  # nothing before the first four tokens
    kv[alone, :4] = 0
    score[alone, :4] = _MASKED_SCORE
    return _weighted_rows(kv, score, ape)


def _compress_c128(
    state: torch.Tensor,
    source: torch.Tensor,
    ape: torch.Tensor,
    head_dim: int,
    ragged: torch.Tensor,
    buffer_len: torch.Tensor,
    page_1: torch.Tensor,
) -> torch.Tensor:
    """One compressed row per event out of the 128 rows that end there."""
    row = torch.arange(128)
    mask = row < buffer_len.unsqueeze(1)
    picked = source[(ragged.unsqueeze(1) - 127 + row).clamp(min=0)]
    picked[mask] = state[(page_1.unsqueeze(1) * 128 + row)[mask]].to(source.dtype)
    return _weighted_rows(picked[..., :head_dim], picked[..., head_dim:], ape)


def compress_forward(
    kv_score_buffer: torch.Tensor,
    kv_score_input: torch.Tensor,
    ape: torch.Tensor,
    plan: CompressorDecodePlan | CompressorPrefillPlan,
    *,
    head_dim: int,
    compress_ratio: int,
    out: torch.Tensor | None = None,
    is_online: bool = False,
) -> torch.Tensor:
    """Stands for ``sglang.kernels.ops.attention.dsv4.compress.compress_forward``.

    Prefill: the compression reads the ring as it was before this chunk, then the chunk's last
    rows are written to it. Decode: the token's row is written first, then read.

    Args:
        kv_score_buffer: state rows, any view of ``[rows, width]``, written. ``width`` is
            ``4 * head_dim`` for ratio 4 (kv overlap, kv, score overlap, score) and
            ``2 * head_dim`` for ratio 128 (kv, score).
        kv_score_input: ``[tokens, width]`` of this chunk (or one row per request in decode).
        ape: ``[8 or 128, head_dim]``, added to the scores when they are read.
        plan: the stock plan tuple.
        out: ``[events, head_dim]``, allocated in ``kv_score_input``'s dtype if None.

    Returns:
        ``out``. In decode, rows of requests that complete no block are left as they were (zero in
        a fresh ``out``).
    """
    if is_online:
        raise NotImplementedError("online compression")
    if plan.compress_ratio != compress_ratio:
        raise ValueError(f"a plan for ratio {plan.compress_ratio}, asked for {compress_ratio}")
    state = kv_score_buffer.view(-1, kv_score_buffer.shape[-1])
    info = plan[1].view(torch.int32).long()
    if out is None:
        out = kv_score_input.new_zeros(info.shape[0], head_dim)
    # As stock: ape in the input's dtype at the kernel boundary.
    ape = ape.to(kv_score_input.dtype)
    if plan.is_decode:
        seq_len, write_loc, page_0, page_1 = info.unbind(1)
        state[write_loc] = kv_score_input.to(state.dtype)
        event = ((seq_len % compress_ratio == 0) & (seq_len > 0)).nonzero().squeeze(1)
        window = 8 if compress_ratio == 4 else 128
        seq_len, page_0, page_1 = seq_len[event], page_0[event], page_1[event]
        ragged, buffer_len = event, torch.full_like(event, window)
    else:
        event = (info[:, 0] != _INVALID_SEQ_LEN).nonzero().squeeze(1)
        seq_len, packed, page_0, page_1 = info[event].unbind(1)
        ragged, buffer_len = packed & 0xFFFF, (packed >> 16) & 0xFFFF
    if event.numel():
        if compress_ratio == 4:
            rows = _compress_c4(
                state,
                kv_score_input,
                ape,
                head_dim,
                seq_len,
                ragged,
                buffer_len,
                page_0,
                page_1,
            )
        else:
            rows = _compress_c128(state, kv_score_input, ape, head_dim, ragged, buffer_len, page_1)
        out[event] = rows.to(out.dtype)
    if not plan.is_decode:
        ragged, write_loc = plan[2].view(torch.int32).long().unbind(1)
        valid = ragged >= 0
        state[write_loc[valid]] = kv_score_input[ragged[valid]].to(state.dtype)
    return out


def compress_norm_rope_store(
    kv: torch.Tensor,
    plan: CompressorDecodePlan | CompressorPrefillPlan,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    freq_cis: torch.Tensor,
    out_loc: torch.Tensor,
    kvcache: torch.Tensor,
    page_size: int,
    use_fp4: bool = False,
    bf16_store: bool = False,
    kvcache_scale: torch.Tensor | None = None,
    rope_cache: tuple[torch.Tensor, torch.Tensor] | None = None,
    fp4_k_write_metadata: object | None = None,
    layout: object = None,
    fp8_2buff: bool = False,
    kvcache_rope: torch.Tensor | None = None,
) -> None:
    """Stands for ``sglang.kernels.ops.attention.dsv4.compress.compress_norm_rope_store``.

    Norm with weight, rotation at the block's FIRST position (``seq_len - ratio``), then one of
    three stores: bf16 rows of the unified KV pool; its fp8 rows, quantised from bf16 as stock does; or
    (head_dim 128) the indexer's key: Hadamard transform and fp8 with one fp32 scale per row.

    Args:
        kv: ``[events, head_dim]`` from ``compress_forward``.
        norm_weight: ``[head_dim]``; freq_cis: ``[max_position, rope_dim // 2]`` complex64.
        out_loc: int; per token of the chunk in prefill (indexed by the plan's ragged id), per
            request in decode. A row of the pool, or an index slot.
        kvcache: uint8 view: ``[rows, 2 * head_dim]`` bytes (bf16), ``[rows, 512]`` (fp8), or
            ``[pages, page_size * 132]`` (indexer).
        kvcache_rope: with ``fp8_2buff`` the second pool, uint8 view ``[rows, 128]``.

    Raises:
        NotImplementedError: for the fp4 and the paged fp8 latent layouts.
    """
    is_indexer = kv.shape[-1] == 128
    if use_fp4 or not (bf16_store or fp8_2buff or is_indexer):
        raise NotImplementedError("the fp4 and the paged fp8 layouts")
    info = plan[1].view(torch.int32).long()
    if plan.is_decode:
        keep = ((info[:, 0] % plan.compress_ratio == 0) & (info[:, 0] > 0)).nonzero().squeeze(1)
        loc = out_loc[keep].long()
    else:
        keep = (info[:, 0] != _INVALID_SEQ_LEN).nonzero().squeeze(1)
        loc = out_loc[info[keep, 1] & 0xFFFF].long()
    if keep.numel() == 0:
        return
    angles = freq_cis[info[keep, 0] - plan.compress_ratio]
    rope = 2 * freq_cis.shape[-1]
    # The weight goes through kv's dtype, as at the stock kernel's boundary.
    rows = rms_norm_rows(kv[keep], norm_weight.to(kv.dtype), norm_eps)
    rows[:, -rope:] = rotate_pairs(rows[:, -rope:], angles.real.float(), angles.imag.float())
    if bf16_store:
        kvcache.view(torch.bfloat16)[loc] = rows.to(torch.bfloat16)
        return
    if fp8_2buff:
        half = rows.to(torch.bfloat16)
        two_pool.store(kvcache, loc, two_pool.pack_nope(half[:, :-rope].float(), floor=1e-4))
        kvcache_rope.view(torch.bfloat16)[loc] = half[:, -rope:]
        return
    values, scale = quantize_fp8_rows(hadamard_rows(rows))
    pages = kvcache.view(-1, page_size * 132)
    page, slot = loc // page_size, loc % page_size
    column = (slot * 128).unsqueeze(1) + torch.arange(128)
    pages[page.unsqueeze(1), column] = values.view(torch.uint8)
    column = (page_size * 128 + slot * 4).unsqueeze(1) + torch.arange(4)
    # A one-row tensor may carry an odd stride, which a dtype view refuses: make it plain first.
    pages[page.unsqueeze(1), column] = scale.reshape(-1).clone().view(torch.uint8).view(-1, 4)
