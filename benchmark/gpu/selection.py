"""Which compressed rows the ratio-4 layers attend to: stands in for the indexer's query side.

The indexer's K is real: its compressor, norm, rope and rotation, and the fp8 rows of its cache. What is
stood in for is the query (one head of random rows), the kernel that computes logits and the one that
takes the largest, because they are aiter's or DeepGEMM's. The result has stock's form: per token the rows
of the compressed cache, front-packed, the rest -1.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu.config import INDEX_DIM, INDEX_PAGE


def select_recent(core: Any, selected: int) -> None:
    """The newest `selected` rows of each token, for all layers at once: for timings.

    Where no more than that exist it is what any indexer selects. `core` is stock's DSV4AttnMetadata.
    """
    table = core.c4_sparse_page_indices
    rows = core.c4_topk_lengths_raw.unsqueeze(1).to(torch.int64)
    column = torch.arange(table.shape[1], device=table.device)
    row = column + (rows - selected).clamp(min=0)
    page = (row // INDEX_PAGE).clamp(max=core.page_table.shape[1] - 1)
    found = core.page_table.gather(1, page) * INDEX_PAGE + row % INDEX_PAGE
    valid = column < rows.clamp(max=selected)
    table.copy_(torch.where(valid, found, -1))


def select_scored(
    core: Any, tokens: slice, query: torch.Tensor, cache: torch.Tensor, selected: int
) -> None:
    """The `selected` rows of largest logits for the tokens of one request, for one layer.

    A pure function of the request's own rows: the same, whatever else is in the batch.

    Args:
        core: stock's DSV4AttnMetadata; its table is written.
        tokens: the request's tokens of the forward.
        query: fp32 ``[tokens, 128]``.
        cache: the layer's indexer K, uint8 ``[pages, 64 * 132]``: fp8 values, then one fp32 scale a row.
    """
    lengths = core.c4_topk_lengths_raw[tokens]
    table = core.c4_sparse_page_indices[tokens]
    table.fill_(-1)
    longest = int(lengths.max())
    if not longest:
        return
    pages = core.page_table[tokens.start, : -(-longest // INDEX_PAGE)].to(torch.int64)
    keys = _dequantized(cache[pages])
    logits = query @ keys.T
    row = torch.arange(keys.shape[0], device=query.device)
    logits.masked_fill_(row >= lengths.unsqueeze(1), -torch.inf)
    values, best = logits.topk(min(selected, keys.shape[0]), dim=1)
    # In the order of the rows, so that equal sets are equal tables; what is no row goes last.
    best = best.masked_fill(values == -torch.inf, keys.shape[0]).sort(dim=1).values
    valid = best < keys.shape[0]
    at = pages[(best // INDEX_PAGE).clamp(max=len(pages) - 1)] * INDEX_PAGE + best % INDEX_PAGE
    table[:, : best.shape[1]] = torch.where(valid, at, -1).to(table.dtype)


def _dequantized(pages: torch.Tensor) -> torch.Tensor:
    """fp32 ``[pages * 64, 128]`` of indexer K pages."""
    split = INDEX_PAGE * INDEX_DIM
    values = pages[:, :split].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scales = pages[:, split:].contiguous().view(torch.float32)
    return values.view(-1, INDEX_DIM) * scales.reshape(-1, 1)
