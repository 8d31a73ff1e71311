"""Host <-> device copies of HiCache (``sgl_kernel.kvcacheio``), for pools that both lie in RAM.

``transfer_kv_direct``, the one of the io backend ``direct`` with the layout layer_first, also copies
between pinned RAM and a GPU.

Layouts of the host side: layer_first (one buffer per layer, like the device), page_first (all
layers of a token together) and page_first_direct (all layers of a page together). Sizes named
``*_size`` and ``*_layout_dim`` are bytes. A ``*_layers`` argument of the kernel family is a tensor
of raw addresses, one per layer.
"""

from __future__ import annotations

import ctypes

import torch


def _rows_of(tensor: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """``tensor`` as ``[rows, row_bytes]`` bytes, sharing memory; it must be contiguous."""
    return tensor.view(-1).view(torch.uint8).view(-1, row_bytes)


def _rows_at(address: int, rows: int, row_bytes: int) -> torch.Tensor:
    """``[rows, row_bytes]`` bytes at a raw address, sharing memory."""
    raw = (ctypes.c_uint8 * (rows * row_bytes)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(rows, row_bytes)


def _page_starts(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices.long()[::page_size]


def transfer_kv_per_layer_mla(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """One layer, layer_first on both sides: row ``src_indices[i]`` to row ``dst_indices[i]``."""
    _rows_of(dst, item_size)[dst_indices.long()] = _rows_of(src, item_size)[src_indices.long()]


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """One layer, page_first host (``src_layout_dim`` bytes a token) to layer_first device."""
    column = slice(layer_id * item_size, (layer_id + 1) * item_size)
    rows = _rows_of(src, src_layout_dim)[:, column][src_indices.long()]
    _rows_of(dst, item_size)[dst_indices.long()] = rows


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """All layers, layer_first on both sides, given by address."""
    if src_indices.numel() == 0:
        return
    src_rows, dst_rows = int(src_indices.max()) + 1, int(dst_indices.max()) + 1
    layers = zip(src_layers.tolist()[:num_layers], dst_layers.tolist()[:num_layers], strict=True)
    for src, dst in layers:
        rows = _rows_at(src, src_rows, item_size)[src_indices.long()]
        _rows_at(dst, dst_rows, item_size)[dst_indices.long()] = rows


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """All layers, layer_first device (by address) to page_first host."""
    if src_indices.numel() == 0:
        return
    src_rows = int(src_indices.max()) + 1
    target = _rows_of(dst, dst_layout_dim)
    for layer, src in enumerate(src_layers.tolist()[:num_layers]):
        column = slice(layer * item_size, (layer + 1) * item_size)
        target[dst_indices.long(), column] = _rows_at(src, src_rows, item_size)[src_indices.long()]


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """``transfer_kv_per_layer_mla`` for separate K and V."""
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices, item_size)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """``transfer_kv_per_layer_mla_pf_lf`` for separate K and V."""
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """``transfer_kv_all_layer_mla`` for separate K and V."""
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """``transfer_kv_all_layer_mla_lf_pf`` for separate K and V."""
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Whole pages, layer_first on both sides; of each page only the first index is read.

    The indices lie on the CPU. On a GPU each page is one asynchronous copy on the current stream.
    """
    src_pages = _page_starts(src_indices, page_size).tolist()
    dst_pages = _page_starts(dst_indices, page_size).tolist()
    for src, dst in zip(src_layers, dst_layers, strict=True):
        for src_row, dst_row in zip(src_pages, dst_pages, strict=True):
            page = src[src_row : src_row + page_size]
            dst[dst_row : dst_row + page_size].copy_(page, non_blocking=True)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Whole pages of all layers into a page_first_direct host pool ``[pages, layers, ...]``.

    With two destinations (K and V) the sources are all K layers, then all V layers.
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    src_rows = _page_starts(src_indices, page_size).unsqueeze(1) + torch.arange(page_size)
    pages = _page_starts(dst_indices, page_size) // page_size
    for group, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[group * layers + layer][src_rows]
            dst[pages, layer] = rows.reshape(len(pages), *dst.shape[2:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Whole pages of one layer out of a page_first_direct host pool ``[pages, layers, ...]``."""
    pages = _page_starts(src_indices, page_size) // page_size
    dst_rows = _page_starts(dst_indices, page_size).unsqueeze(1) + torch.arange(page_size)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        rows = src[pages, layer_id]
        dst[dst_rows] = rows.reshape(*dst_rows.shape, *dst.shape[1:])
