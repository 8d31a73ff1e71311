"""Rows of unified_kv's fp8 layout: packing and unpacking.

A latent row of 448 elements without and 64 with rotary embedding lies in two pools under one row
number. The first pool's row is 512 bytes:

* ``[0, 448)``: the elements without rope, float8_e4m3fn, in 7 tiles of 64;
* ``[448, 462)``: the tiles' scales, E8M0 (byte ``b`` is ``2 ** (b - 127)``), each written twice: the
  readers take one for every 32 elements;
* ``[462, 512)``: nothing. No kernel writes these bytes, and none reads them: they are whatever was in
  the memory, here as on a GPU.

The second pool's row is the 64 elements with rope, bf16. A value times its scale has four significant
bits, so an unpacked row is exact in bf16 and fp32.
"""

from __future__ import annotations

import torch

NOPE_DIM = 448
ROPE_DIM = 64
ROW_BYTES = 512
PAYLOAD_BYTES = 462
"""Bytes of a row that are written: values and scales."""

_TILE = 64
_SCALED_TOGETHER = 32
"""Elements for which a reader takes one of the scale bytes."""
_FP8_MAX = 448.0


def pack_nope(rows: torch.Tensor, floor: float) -> torch.Tensor:
    """Quantise the elements without rope, a scale for every 64: the least power of two with which the
    tile's largest magnitude fits.

    Args:
        rows: ``[..., 448]`` fp32.
        floor: the least magnitude that a scale is chosen for.

    Returns:
        ``[..., 462]`` uint8: the values, then each scale twice.
    """
    tiles = rows.unflatten(-1, (-1, _TILE))
    bits = (tiles.abs().amax(-1).clamp(min=floor) / _FP8_MAX).view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).int()
    scale = (exponent << 23).view(torch.float32)
    values = (tiles / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    scales = exponent.to(torch.uint8).repeat_interleave(_TILE // _SCALED_TOGETHER, -1)
    return torch.cat((values.view(torch.uint8), scales), -1)


def unpack(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Whole rows.

    Args:
        nope: ``[..., 512]`` float8_e4m3fn or uint8; rope: ``[..., 64]`` bf16.

    Returns:
        ``[..., 512]`` fp32: 448 elements without rope, then 64 with it.
    """
    raw = nope.view(torch.uint8)
    values = raw[..., :NOPE_DIM].view(torch.float8_e4m3fn).float()
    scale = (raw[..., NOPE_DIM:PAYLOAD_BYTES].int() << 23).view(torch.float32)
    groups = values.unflatten(-1, (-1, _SCALED_TOGETHER)) * scale.unsqueeze(-1)
    return torch.cat((groups.flatten(-2), rope.float()), -1)


def store(pool: torch.Tensor, rows: torch.Tensor | slice, packed: torch.Tensor) -> None:
    """Write packed rows (``pack_nope``) to rows of a first pool ``[..., 512]``, leaving the rest of
    their bytes alone."""
    pool.view(torch.uint8)[rows, ..., :PAYLOAD_BYTES] = packed
