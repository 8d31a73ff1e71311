"""Matrix products in tiles of a fixed number of rows.

A BLAS picks its blocking from the shape of the product, so a row's bits follow the number of rows
that it is multiplied with. In a product of a FIXED number of rows (at least 8) they depend on the
row alone: every product here is cut into tiles of ``ROW_TILE`` rows, the last one padded with
zero rows.

All kernels of this package call the ``out=`` overloads of torch's products, because the platform
overrides the others (``invariant.py``) for the layers of the model.
"""

from __future__ import annotations

import torch

ROW_TILE = 32
"""Rows per tile. A single decode row costs a whole tile; 32 keeps that cheap and BLAS busy."""


def row_tiled_mm(a: torch.Tensor, b: torch.Tensor, *, tile: int = ROW_TILE) -> torch.Tensor:
    """``a @ b`` whose rows depend on the same row of ``a`` (and on ``b``) only.

    Args:
        a: ``[rows, k]``, any float dtype, any strides.
        b: ``[k, n]``, any float dtype; pass a transposed view of a weight, it is not copied when
            it is fp32 already.
        tile: rows per product, at least 8 (fewer take another BLAS path).

    Returns:
        ``[rows, n]`` fp32. Products and sums are fp32, whatever the inputs are.
    """
    if tile < 8:
        raise ValueError(f"tile must be at least 8 rows, got {tile}")
    rows, inner = a.shape
    a, b = a.float(), b.float()
    out = torch.empty(rows, b.shape[1], dtype=torch.float32)
    whole = rows - rows % tile
    for start in range(0, whole, tile):
        torch.mm(a[start : start + tile], b, out=out[start : start + tile])
    if whole < rows:
        padded = torch.zeros(tile, inner, dtype=torch.float32)
        padded[: rows - whole] = a[whole:]
        product = torch.empty(tile, b.shape[1], dtype=torch.float32)
        out[whole:] = torch.mm(padded, b, out=product)[: rows - whole]
    return out


def row_tiled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: int = ROW_TILE,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` in fixed row tiles with fp32 sums.

    Args:
        x: ``[..., k]``; leading dimensions are flattened into rows first, so a view cannot fold
            back into one large product.
        weight: ``[n, k]``; a bf16 weight is widened on each call (keep an fp32 copy where that
            matters).
        bias: ``[n]`` or None, added in fp32.
        out_dtype: dtype of the result, ``x.dtype`` by default.

    Returns:
        ``[..., n]``.
    """
    out = row_tiled_mm(x.reshape(-1, x.shape[-1]), weight.t(), tile=tile)
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype or x.dtype).reshape(*x.shape[:-1], weight.shape[0])
