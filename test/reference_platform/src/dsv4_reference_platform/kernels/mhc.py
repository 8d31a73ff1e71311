"""Manifold-constrained hyper-connections (mHC): how the residual streams are mixed."""

from __future__ import annotations

import torch

from dsv4_reference_platform.kernels.elementwise import row_sums, sigmoid
from dsv4_reference_platform.kernels.matmul import row_tiled_mm


def _column_sums(c: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis but one, top down, keeping it."""
    total = c[..., 0:1, :].clone()
    for j in range(1, c.shape[-2]):
        total += c[..., j : j + 1, :]
    return total


def hc_split_sinkhorn(
    mixes: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_mult: int = 4,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands for ``sglang.kernels.ops.layernorm.mhc.hc_split_sinkhorn``.

    Args:
        mixes: ``[b, s, (2 + hc) * hc]``: pre, post, comb (row-major ``hc x hc``).
        hc_scale: ``[3]``; hc_base: ``[(2 + hc) * hc]``.
        sinkhorn_iters: row and column normalisations, the first row pass being a softmax.

    Returns:
        ``(pre [b, s, hc], post [b, s, hc], comb [b, s, hc, hc])`` of ``mixes``' dtype.
    """
    b, s, _ = mixes.shape
    hc = hc_mult
    flat = mixes.reshape(b * s, -1).float()
    scale, base = hc_scale.float(), hc_base.float()
    pre = sigmoid(flat[:, :hc] * scale[0] + base[:hc]) + eps
    post = 2.0 * sigmoid(flat[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (flat[:, 2 * hc :] * scale[2] + base[2 * hc :]).view(-1, hc, hc)
    comb = torch.exp(comb - comb.amax(-1, keepdim=True))
    comb = comb / row_sums(comb) + eps
    comb = comb / (_column_sums(comb) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (row_sums(comb) + eps)
        comb = comb / (_column_sums(comb) + eps)
    return (
        pre.view(b, s, hc).to(mixes.dtype),
        post.view(b, s, hc).to(mixes.dtype),
        comb.view(b, s, hc, hc).to(mixes.dtype),
    )


def mhc_combine(
    x_flat: torch.Tensor, pre: torch.Tensor, hc: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Stands for ``sglang.kernels.ops.layernorm.mhc.mhc_combine``.

    Args:
        x_flat: ``[tokens, hc * hidden]``; pre: ``[tokens, hc]``.

    Returns:
        ``[tokens, hidden]``: ``sum_k pre[:, k] * stream k``, added in the order of ``k``.
    """
    streams = x_flat.view(x_flat.shape[0], hc, -1)
    total = torch.zeros(streams.shape[0], streams.shape[2], dtype=torch.float32)
    for k in range(hc):
        total += pre[:, k : k + 1].float() * streams[:, k].float()
    return total.to(out_dtype)


def hc_pre_mixes(x: torch.Tensor, hc_fn: torch.Tensor, rms_eps: float) -> torch.Tensor:
    """RMS-normed streams times ``hc_fn``: the ``mixes`` of ``DeepseekV4DecoderLayer.hc_pre``.

    Args:
        x: ``[tokens, hc, hidden]``; hc_fn: ``[mixes, hc * hidden]`` fp32.

    Returns:
        ``[tokens, mixes]`` fp32.
    """
    flat = x.flatten(1).float()
    return row_tiled_mm(flat, hc_fn.t()) * torch.rsqrt(
        (flat * flat).mean(-1, keepdim=True) + rms_eps
    )


def hc_post(
    x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """``R'[i] = post[i] * x + sum_j comb[j][i] * R[j]``: the torch branch of
    ``sglang.srt.models.deepseek_v4_mhc.post``.

    Args:
        x: ``[tokens, hidden]``; residual: ``[tokens, hc, hidden]``; post_mix: ``[tokens, hc]``;
        comb: ``[tokens, hc, hc]``.

    Returns:
        ``[tokens, hc, hidden]`` of ``x``'s dtype.
    """
    out = torch.zeros(residual.shape, dtype=torch.float32)
    for j in range(residual.shape[1]):
        out += comb[:, j].float().unsqueeze(-1) * residual[:, j : j + 1].float()
    out += post_mix.float().unsqueeze(-1) * x.float().unsqueeze(1)
    return out.to(x.dtype)


def fused_hc_head(
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Stands for ``sglang.kernels.ops.layernorm.mhc_head.fused_hc_head``.

    Args:
        x: ``[tokens, hc, hidden]``; hc_fn: ``[hc, hc * hidden]`` fp32; hc_scale: ``[1]``;
        hc_base: ``[hc]``.

    Returns:
        ``[tokens, hidden]`` of ``x``'s dtype: the streams weighted by
        ``sigmoid(mix * scale + base) + hc_eps``.
    """
    mixes = hc_pre_mixes(x, hc_fn, norm_eps)
    pre = sigmoid(mixes * hc_scale.float() + hc_base.float()) + hc_eps
    return mhc_combine(x.flatten(1), pre, x.shape[1], x.dtype)
