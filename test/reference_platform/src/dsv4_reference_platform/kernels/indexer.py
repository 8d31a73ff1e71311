"""The C4 indexer: query quantisation, logits over the paged fp8 keys, top-k selection."""

from __future__ import annotations

import functools
import math

import torch

from dsv4_reference_platform.kernels.matmul import row_tiled_mm
from dsv4_reference_platform.kernels.norm_rope import TOKEN_BLOCK, rotate_pairs

FP8_MAX = 448.0
QUERY_BLOCK = 8
"""Queries per matrix product; fixed, the last block padded."""

_HADAMARD_TILE = 512


@functools.cache
def _hadamard_matrix(n: int) -> torch.Tensor:
    """``[n, n]`` orthonormal Hadamard matrix in natural order; ``n`` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        top, bottom = torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)
        matrix = torch.cat((top, bottom))
    return matrix / math.sqrt(n)


def hadamard_rows(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Hadamard transform of the last dimension (a power of two), fp32."""
    n = x.shape[-1]
    flat = row_tiled_mm(x.reshape(-1, n), _hadamard_matrix(n), tile=_HADAMARD_TILE)
    return flat.view(x.shape)


def quantize_fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One fp32 scale per row: ``max(1e-4, amax) / 448``.

    Returns:
        ``(values, same shape, float8_e4m3fn; scale [..., 1] fp32)``.
    """
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX
    values = (x * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX)
    return values.to(torch.float8_e4m3fn), scale


def fused_q_indexer_rope_hadamard_quant(
    q_input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for ``sglang.kernels.ops.attention.dsv4.norm_rope`` of the same name.

    Args:
        q_input: ``[tokens, heads, 128]``; weight: ``[tokens, heads]``.
        weight_scale: factor of the head weights.
        freqs_cis: ``[max_position, 32]`` complex64; positions: ``[tokens]`` int.

    Returns:
        ``(q_fp8 [tokens, heads, 128] float8_e4m3fn, weights [tokens, heads, 1] fp32)``; the
        query's scale is folded into the weights.
    """
    rope = 2 * freqs_cis.shape[-1]
    values = torch.empty(q_input.shape, dtype=torch.float8_e4m3fn)
    weights = torch.empty(*q_input.shape[:-1], 1, dtype=torch.float32)
    for start in range(0, q_input.shape[0], TOKEN_BLOCK):
        rows = slice(start, start + TOKEN_BLOCK)
        q = q_input[rows].to(torch.float32, copy=True)
        angles = freqs_cis[positions[rows].long()].unsqueeze(1)
        q[..., -rope:] = rotate_pairs(q[..., -rope:], angles.real.float(), angles.imag.float())
        values[rows], scale = quantize_fp8_rows(hadamard_rows(q))
        weights[rows] = weight[rows].float().unsqueeze(-1) * weight_scale * scale
    return values, weights


def _runs_of_equal_rows(table: torch.Tensor) -> list[tuple[int, int]]:
    """``[start, end)`` of maximal runs of equal consecutive rows."""
    if table.shape[0] == 0:
        return []
    cuts = ((table[1:] != table[:-1]).any(1).nonzero().squeeze(1) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, table.shape[0]], strict=True))


def fp8_paged_mqa_logits(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    deep_gemm_metadata: object,
    max_seq_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:
    """Stands for ``fp8_paged_mqa_logits`` (``fp8_paged_mqa_logits_torch`` in the same module as
    ``C4Indexer``): ``logit[t, j] = scale[j] * sum_h weight[t, h] * relu(q[t, h] . k[j])``.

    A page of 64 keys is one tile of every product, so a logit's bits do not depend on the length
    of the context or on the other queries.

    Args:
        q_fp8: ``[tokens, 1, heads, 128]`` float8_e4m3fn.
        kvcache_fp8: ``[pages, 64, 1, 132]`` uint8: per page 64 x 128 values, then 64 fp32 scales.
        weight: ``[tokens, heads]`` fp32.
        seq_lens: ``[tokens]`` keys visible to each query.
        page_table: ``[tokens, max_pages]`` int.
        max_seq_len: width of the result.

    Returns:
        ``[tokens, max_seq_len]`` fp32; 0 where ``j >= seq_lens[t]``.
    """
    tokens, _, heads, dim = q_fp8.shape
    page_size = kvcache_fp8.shape[1]
    pool = kvcache_fp8.reshape(kvcache_fp8.shape[0], -1)
    out = torch.zeros(tokens, max_seq_len, dtype=torch.float32)
    seq_lens = seq_lens.reshape(-1)
    lengths = seq_lens.tolist()
    q_block = torch.zeros(QUERY_BLOCK * heads, dim, dtype=torch.float32)
    w_block = torch.zeros(QUERY_BLOCK, 1, heads, dtype=torch.float32)
    scores = torch.empty(QUERY_BLOCK, 1, page_size, dtype=torch.float32)
    product = torch.empty(QUERY_BLOCK * heads, page_size, dtype=torch.float32)
    for start, end in _runs_of_equal_rows(page_table):
        longest = max(lengths[start:end])
        if longest == 0:
            continue
        n_pages = -(-longest // page_size)
        raw = pool[page_table[start, :n_pages].clamp(min=0).long()]
        keys = raw[:, : page_size * dim].contiguous().view(torch.float8_e4m3fn).float()
        keys = keys.view(n_pages, page_size, dim)
        scales = raw[:, page_size * dim :].contiguous().view(torch.float32)
        for first in range(start, end, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, end)
            reach = max(lengths[first:last])
            count = last - first
            q_block.zero_()
            w_block.zero_()
            q_block[: count * heads] = q_fp8[first:last, 0].reshape(-1, dim).float()
            w_block[:count, 0] = weight[first:last].float()
            for page in range(-(-reach // page_size)):
                torch.mm(q_block, keys[page].t(), out=product)
                hits = product.relu_().view(QUERY_BLOCK, heads, page_size)
                torch.bmm(w_block, hits, out=scores)
                width = min(page_size, max_seq_len - page * page_size)
                lo = page * page_size
                out[first:last, lo : lo + width] = (scores[:count, 0] * scales[page])[:, :width]
    column = torch.arange(max_seq_len)
    return out.masked_fill_(column >= seq_lens.unsqueeze(1), 0.0)


def topk_transform_paged(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Stands for ``sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged``.

    Stock leaves the order of the selected rows and the choice among equal scores open. Here ties
    go to the lower index and the rows come in ascending order: the attention adds them in the
    order of the list.

    Args:
        scores: ``[tokens, >= max(seq_lens)]`` fp32; seq_lens: ``[tokens]``.
        page_tables: ``[tokens, pages]`` int; page_size: rows per page.
        out_page_indices: ``[tokens, k]`` int32, written: pool rows, then -1.
        out_raw_indices: like it, positions in the sequence; or None.
    """
    k = out_page_indices.shape[1]
    seq_lens = seq_lens.reshape(-1).long()
    column = torch.arange(k)
    raw = torch.where(column < seq_lens.unsqueeze(1), column, -1)
    choose = (seq_lens > k).nonzero().squeeze(1)
    if choose.numel():
        width = int(seq_lens[choose].max())
        rows = scores[choose, :width].float()
        beyond = torch.arange(width) >= seq_lens[choose].unsqueeze(1)
        rows = rows.masked_fill(beyond, float("-inf"))
        best = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :k]
        raw[choose] = torch.sort(best, dim=1).values
    page = page_tables.long().gather(1, raw.clamp(min=0) // page_size)
    physical = page * page_size + raw % page_size
    out_page_indices.copy_(torch.where(raw >= 0, physical, -1))
    if out_raw_indices is not None:
        out_raw_indices.copy_(raw)
