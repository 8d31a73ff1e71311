"""RMS norm and interleaved rotary embedding, fused as the stock kernels fuse them.

Where a stock kernel rounds between the norm and the rotation (it keeps the normed row in the
input's dtype), so does its stand-in; where it stays in fp32, so does the stand-in.
"""

from __future__ import annotations

import torch

from dsv4_reference_platform.kernels import two_pool

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
    """Stands for ``sglang.kernels.ops.attention.fused_qk_norm_rope_store`` of the same name; with
    ``fp8_2buff`` for aiter's ``fused_qk_norm_rope_group_quant``, which stock calls there.

    Norm and rotate q and kv, and store kv's row in the SWA ring at ``swa_loc``. With bf16 rows this is
    the decode (and verify) path; with fp8 rows the prefill too, which gets its rows of K in
    ``k_nope_out`` and ``k_rope_out`` and writes them to the ring later. It stays in fp32 from norm to
    rotation and takes its angles from ``cos_cache`` / ``sin_cache`` (stock: bf16 tables), which the
    kernels that prefill bf16 rows do not. So a decoded bf16 row of K differs from a prefilled one in the
    last bit, here as in stock, and a decoded fp8 row does not.

    Args:
        q: ``[tokens, heads * head_dim]`` or ``[splits, tokens, heads * head_dim]`` (summed).
        kv: ``[tokens, head_dim]``, mutated; with ``fp8_2buff`` only read.
        cos_cache, sin_cache: ``[max_position, ..., rope_head_dim // 2]``.
        swa_cache: ``[rows, head_dim]`` bf16; with ``swa_loc`` ``[tokens]`` the ring rows to write.
            With ``fp8_2buff`` ``[rows, 512]`` float8_e4m3fn, and ``swa_rope_cache`` ``[rows, 64]`` bf16.
        q_out: ``[tokens, heads, head_dim]``, allocated as ``dtype`` if None.
        q_rope_out: ``[tokens, heads, 64]`` bf16, with a ``q_out`` of float8_e4m3fn: q packed like K.
        k_nope_out, k_rope_out: ``[tokens, 512]`` float8_e4m3fn and ``[tokens, 64]`` bf16, or None.

    Returns:
        ``q_out``.

    Raises:
        NotImplementedError: for the paged fp8 store.
        ValueError: ``q_out`` and ``q_rope_out`` do not fit each other.
    """
    if swa_cache is not None and not (bf16_store or fp8_2buff):
        raise NotImplementedError("the paged fp8 store")
    head_dim = kv.shape[1]
    q = q.float().sum(0) if q.dim() == 3 else q
    q = q.reshape(q.shape[0], -1, head_dim)
    if q_out is None:
        q_out = torch.empty(q.shape, dtype=dtype)
    if (q_rope_out is not None) != (q_out.element_size() == 1):
        raise ValueError(f"q_out is {q_out.dtype}, and q_rope_out is {q_rope_out}")
    half = rope_head_dim // 2
    rows = positions.long()
    cos = cos_cache.reshape(cos_cache.shape[0], half)[rows].float()
    sin = sin_cache.reshape(sin_cache.shape[0], half)[rows].float()

    for start in range(0, q.shape[0], TOKEN_BLOCK):
        block = slice(start, start + TOKEN_BLOCK)
        turned = _norm_and_rotate(
            q[block], q_norm_weight, q_rms_eps, cos[block].unsqueeze(1), sin[block].unsqueeze(1)
        )
        if q_rope_out is None:
            q_out[block] = turned.to(q_out.dtype)
        else:
            two_pool.store(q_out, block, _packed(turned))
            q_rope_out[block] = turned[..., two_pool.NOPE_DIM :].to(q_rope_out.dtype)

    turned = _norm_and_rotate(kv, kv_norm_weight, kv_rms_eps, cos, sin)
    if fp8_2buff:
        nope, rope = _packed(turned), turned[:, two_pool.NOPE_DIM :].to(torch.bfloat16)
        if k_nope_out is not None:
            two_pool.store(k_nope_out, slice(None), nope)
            k_rope_out.copy_(rope)
        if swa_cache is not None:
            two_pool.store(swa_cache, swa_loc.long(), nope)
            swa_rope_cache[swa_loc.long()] = rope
        return q_out
    kv.copy_(turned)
    if swa_cache is not None and swa_loc is not None:
        swa_cache[swa_loc.long()] = kv.to(swa_cache.dtype)
    return q_out


def _norm_and_rotate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Normed rows of ``x`` whose last ``2 * cos.shape[-1]`` elements are rotated; fp32 throughout."""
    normed = rms_norm_rows(x, weight, eps)
    rope = 2 * cos.shape[-1]
    normed[..., -rope:] = rotate_pairs(normed[..., -rope:], cos, sin)
    return normed


def _packed(rows: torch.Tensor) -> torch.Tensor:
    """The elements without rope, as aiter packs them: from fp32."""
    return two_pool.pack_nope(rows[..., : two_pool.NOPE_DIM], floor=1e-12)
