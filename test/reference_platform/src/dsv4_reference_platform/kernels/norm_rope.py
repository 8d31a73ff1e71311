"""RMS norm and interleaved rotary embedding, fused as the stock kernels fuse them.

Where a stock kernel rounds between the norm and the rotation (it keeps the normed row in the
input's dtype), so does its stand-in; where it stays in fp32, so does the stand-in.
"""

from __future__ import annotations

import torch

TOKEN_BLOCK = 64
"""Tokens handled at a time where a token has many heads: what fits into the processor's cache."""


def rms_norm_rows(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS-normalised rows of ``x`` (last dimension), times ``weight`` if given; fp32."""
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.float()


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs ``(x[2i], x[2i+1])`` by the angles given as ``cos[i], sin[i]``.

    Args:
        x: ``[..., rope_dim]`` fp32.
        cos, sin: broadcastable to ``[..., rope_dim // 2]``, fp32.

    Returns:
        fp32 tensor of ``x``'s shape. Four products and two sums per pair, no fused multiply-add.
    """
    real, imag = x[..., 0::2], x[..., 1::2]
    return torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1).flatten(-2)


def _angles(
    freqs_cis: torch.Tensor, positions: torch.Tensor, ndim: int, inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin at ``positions``, shaped to broadcast over the heads of an ``ndim`` tensor."""
    table = freqs_cis[positions.long()]
    shape = (table.shape[0], *([1] * (ndim - 2)), table.shape[-1])
    sin = table.imag.float()
    return table.real.float().view(shape), (-sin if inverse else sin).view(shape)


def fused_q_norm_rope(
    q_input: torch.Tensor,
    q_output: torch.Tensor,
    eps: float | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Stands for ``sglang.kernels.ops.attention.dsv4.norm_rope.fused_q_norm_rope``.

    RMS norm without weight per (token, head), rotation of the trailing ``rope_dim`` elements.

    Args:
        q_input: ``[tokens, heads, head_dim]``.
        q_output: same shape, written.
        eps: epsilon of the norm; None skips the norm.
        freqs_cis: ``[max_position, rope_dim // 2]`` complex64.
        positions: ``[tokens]`` int.
    """
    rope = freqs_cis.shape[-1] * 2
    for start in range(0, q_input.shape[0], TOKEN_BLOCK):
        block = slice(start, start + TOKEN_BLOCK)
        rows, out = q_input[block], q_output[block]
        normed = rows if eps is None else rms_norm_rows(rows, None, eps).to(rows.dtype)
        cos, sin = _angles(freqs_cis, positions[block], rows.dim())
        out[..., :-rope] = normed[..., :-rope]
        # bf16 first, as stock does when the output is fp8.
        out[..., -rope:] = rotate_pairs(normed[..., -rope:].float(), cos, sin).to(rows.dtype)


def fused_norm_rope_inplace(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    freq_cis: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Stands for ``sglang.kernels.ops.attention.dsv4.norm_rope.fused_norm_rope_inplace``.

    Args:
        kv: ``[tokens, head_dim]``, normed with ``weight`` and rotated in place.
        freq_cis: ``[max_position, rope_dim // 2]`` complex64.
        positions: ``[tokens]`` int.
    """
    rope = freq_cis.shape[-1] * 2
    normed = rms_norm_rows(kv, weight, eps).to(kv.dtype)
    cos, sin = _angles(freq_cis, positions, kv.dim())
    kv[..., :-rope] = normed[..., :-rope]
    kv[..., -rope:] = rotate_pairs(normed[..., -rope:].float(), cos, sin).to(kv.dtype)


def fused_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    inverse: bool = False,
) -> None:
    """Stands for ``sglang.kernels.ops.attention.dsv4.norm_rope.fused_rope_inplace``.

    Args:
        q: ``[tokens, heads, rope_dim]``, rotated in place (a view of larger rows is fine).
        k: like ``q``, or None.
        inverse: rotate by the negative angle.
    """
    for x in (q, k):
        if x is not None:
            cos, sin = _angles(freqs_cis, positions, x.dim(), inverse)
            x.copy_(rotate_pairs(x.float(), cos, sin).to(x.dtype))


def fused_qk_norm_rope_swa_store(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    kv_norm_weight: torch.Tensor | None,
    q_rms_eps: float,
    kv_rms_eps: float,
    rope_head_dim: int,
    cos_cache: torch.Tensor,
    sin_cache: torch.Tensor,
    positions: torch.Tensor,
    swa_cache: torch.Tensor | None = None,
    swa_loc: torch.Tensor | None = None,
    swa_page_size: int = 128,
    q_out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    bf16_store: bool = False,
    fp8_2buff: bool = False,
    swa_rope_cache: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_rope_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stands for ``sglang.kernels.ops.attention.fused_qk_norm_rope_store`` of the same name.

    The decode (and verify) path: norm and rotate q and kv, kv in place, and store kv's row in the
    SWA ring at ``swa_loc``. Unlike the prefill kernels it stays in fp32 from norm to rotation and
    takes its angles from ``cos_cache`` / ``sin_cache`` (stock: bf16 tables), so a decoded K row
    differs from a prefilled one in the last bit, here as in stock.

    Args:
        q: ``[tokens, heads * head_dim]`` or ``[splits, tokens, heads * head_dim]`` (summed).
        kv: ``[tokens, head_dim]``, mutated.
        cos_cache, sin_cache: ``[max_position, ..., rope_head_dim // 2]``.
        swa_cache: ``[rows, head_dim]`` bf16; with ``swa_loc`` ``[tokens]`` the ring rows to write.

    Returns:
        ``q_out`` (``[tokens, heads, head_dim]``, allocated as ``dtype`` if None).

    Raises:
        NotImplementedError: for the fp8 layouts (paged fp8 store, two pools).
    """
    if fp8_2buff or (swa_cache is not None and not bf16_store):
        raise NotImplementedError("the reference platform stores bf16 rows only")
    head_dim = kv.shape[1]
    q = q.float().sum(0) if q.dim() == 3 else q
    q = q.reshape(q.shape[0], -1, head_dim)
    if q_out is None:
        q_out = torch.empty(q.shape, dtype=dtype)
    half = rope_head_dim // 2
    rows = positions.long()
    cos = cos_cache.reshape(cos_cache.shape[0], half)[rows].float()
    sin = sin_cache.reshape(sin_cache.shape[0], half)[rows].float()

    normed_q = rms_norm_rows(q, q_norm_weight, q_rms_eps)
    q_out[..., :-rope_head_dim] = normed_q[..., :-rope_head_dim].to(q_out.dtype)
    q_out[..., -rope_head_dim:] = rotate_pairs(
        normed_q[..., -rope_head_dim:], cos.unsqueeze(1), sin.unsqueeze(1)
    ).to(q_out.dtype)

    normed_kv = rms_norm_rows(kv, kv_norm_weight, kv_rms_eps)
    kv[:, :-rope_head_dim] = normed_kv[:, :-rope_head_dim].to(kv.dtype)
    kv[:, -rope_head_dim:] = rotate_pairs(normed_kv[:, -rope_head_dim:], cos, sin).to(kv.dtype)
    if swa_cache is not None and swa_loc is not None:
        swa_cache[swa_loc.long()] = kv.to(swa_cache.dtype)
    return q_out
