"""Per-forward metadata that stock builds with Triton kernels (once per forward, all layers)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.kernels.ops.attention.dsv4.attn_metadata_kernels import ExpandPrefillCausallyResult


def expand_prefill_causally(
    *,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor | None,
    seq_lens_cpu: list[int] | None,
    extend_seq_lens_cpu: list[int] | None,
    num_tokens: int,
    padded_num_tokens: int | None,
) -> ExpandPrefillCausallyResult:
    """Stands for ``expand_prefill_causally_triton`` of
    ``sglang.kernels.ops.attention.dsv4.attn_metadata_kernels``, at the place of the torch function
    that stock has for a CPU: that one needs lengths on the host, which a verification under the
    overlap schedule does not have.

    Args:
        req_pool_indices, seq_lens, extend_seq_lens: ``[requests]``, lengths after the chunk and of it.
        extend_start_loc, seq_lens_cpu, extend_seq_lens_cpu: unused.
        num_tokens: ``sum(extend_seq_lens)``; padded_num_tokens: rows of the result, if more.

    Returns:
        Per token its causal length (int32, 1 for padding) and its request's row (for padding, the
        last request's).
    """
    from sglang.kernels.ops.attention.dsv4.attn_metadata_kernels import ExpandPrefillCausallyResult

    extend = extend_seq_lens.long()
    request = torch.repeat_interleave(torch.arange(len(extend)), extend)
    if request.shape[0] != num_tokens:
        raise ValueError(f"{request.shape[0]} tokens in the chunk, {num_tokens} announced")
    in_chunk = torch.arange(num_tokens) - (torch.cumsum(extend, 0) - extend)[request]
    causal = (seq_lens.long() - extend + 1)[request] + in_chunk
    padding = max(padded_num_tokens or 0, num_tokens) - num_tokens
    rows = torch.nn.functional.pad(request, (0, padding), value=len(extend) - 1)
    return ExpandPrefillCausallyResult(
        seq_lens_casual=torch.nn.functional.pad(causal, (0, padding), value=1).to(torch.int32),
        req_pool_indices_repeated=req_pool_indices[rows],
    )


def init_compression_metadata(
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    raw_out_loc: torch.Tensor,
    page_table: torch.Tensor | None = None,
    page_size: int = 0,
    compute_page_indices: bool = True,
) -> tuple[torch.Tensor | None, ...]:
    """Stands for ``sglang.kernels.ops.attention.dsv4.metadata_kernel.init_compression_metadata``.

    Args:
        seq_lens: ``[rows]`` int32, causal length of each query row; positions: ``[rows]``.
        raw_out_loc: ``[writes]``, ``writes <= rows``: the token slots written.
        page_table: ``[rows, pages]`` int32, needed for the C128 page indices.

    Returns:
        For ratio 4, then for ratio 128: out_loc (int64 ``[writes]``, 0 where no block ends),
        block start positions, lengths, lengths clamped to 1 (int32 ``[rows]``); at the end the
        C128 page indices (int32 ``[rows, pages * page_size // 128]``, -1 past the length) or None.
    """
    writes = raw_out_loc.shape[0]
    results: list[torch.Tensor | None] = []
    lengths = seq_lens
    for ratio in (4, 128):
        lengths = seq_lens // ratio
        ends_block = seq_lens[:writes] % ratio == 0
        results += [
            torch.where(ends_block, raw_out_loc.long() // ratio, 0),
            (positions // ratio * ratio).to(torch.int32),
            lengths.to(torch.int32),
            lengths.clamp(min=1).to(torch.int32),
        ]
    if not compute_page_indices:
        return (*results, None)
    if page_table is None or page_size < 128 or page_size % 128:
        raise ValueError("C128 page indices need a page table and a page size that 128 divides")
    per_page = page_size // 128
    slots = page_table.long().unsqueeze(-1) * per_page + torch.arange(per_page)
    slots = slots.view(page_table.shape[0], -1)
    beyond = torch.arange(slots.shape[1]) >= lengths.unsqueeze(1)
    return (*results, slots.masked_fill_(beyond, -1).to(torch.int32))


def low_ratio_compression_metadata(
    seq_lens_casual: torch.Tensor,
    raw_out_loc: torch.Tensor,
    low_ratios: tuple[int, ...],
) -> dict[str, torch.Tensor]:
    """Stands for ``sglang.kernels.ops.attention.dsv4.attn_glue_hip`` of the same name.

    Returns:
        Empty for DeepSeek-V4 (ratios 1 and 2 belong to V4.1).
    """
    out = {}
    for ratio in low_ratios:
        ends_block = seq_lens_casual[: raw_out_loc.shape[0]] % ratio == 0
        out[f"c{ratio}_out_loc"] = torch.where(ends_block, raw_out_loc.long() // ratio, -1)
        out[f"c{ratio}_topk_lengths_clamp1"] = (seq_lens_casual // ratio).clamp(min=1)
    return out


def sparse_buffers(
    *,
    c4_topk_lengths_clamp1: torch.Tensor,
    c4_topk_lengths_raw: torch.Tensor,
    c1_topk_lengths_clamp1: torch.Tensor | None,
    c2_topk_lengths_clamp1: torch.Tensor | None,
    index_topk: int,
    page_index_align: int,
) -> dict[str, torch.Tensor]:
    """Stands for ``sglang.kernels.ops.attention.dsv4.attn_glue_hip.sparse_buffers``.

    Returns:
        Lengths clamped to ``index_topk`` and page-index buffers filled with -1, their width padded
        to a multiple of ``page_index_align``; keyed by attribute name.
    """
    rows = c4_topk_lengths_clamp1.shape[0]
    width = -(-index_topk // page_index_align) * page_index_align
    out = {
        "c4_sparse_topk_lengths": c4_topk_lengths_clamp1.clamp(max=index_topk),
        "c4_sparse_topk_lengths_raw": c4_topk_lengths_raw.clamp(max=index_topk),
        "c4_sparse_page_indices": torch.full((rows, width), -1, dtype=torch.int32),
    }
    for ratio, lengths in ((1, c1_topk_lengths_clamp1), (2, c2_topk_lengths_clamp1)):
        if lengths is not None:
            out[f"c{ratio}_sparse_topk_lengths"] = lengths.clamp(max=index_topk)
            out[f"c{ratio}_sparse_page_indices"] = torch.full((rows, width), -1, dtype=torch.int32)
    return out


def page_table_from_req_to_token(
    req_to_token: torch.Tensor, req_rows: torch.Tensor, max_seq_len: int, page_size: int
) -> torch.Tensor:
    """Stands for ``sglang.kernels.ops.attention.dsv4.attn_glue_hip`` of the same name.

    Returns:
        ``[rows, ceil(max_seq_len / page_size)]`` int32 page numbers.
    """
    stops = req_to_token[req_rows.long(), :max_seq_len:page_size]
    return torch.div(stops, page_size, rounding_mode="floor").to(torch.int32)
