"""Sparse attention over the unified KV pool: index builders, stores, prefill and decode.

Two kinds of rows make up a query's context: the last ``win`` positions (ring rows of earlier
chunks, rows of this chunk) and compressed rows of everything before. The index lists that stock
passes around say which rows, in an order that depends on the chunking, because stock's online
softmax does not care. Sums in floating point do. So the builders here leave a note on the index
tensor that they return (``RowOrder``: each query's position, and how many ring rows lead its
list), and the attention puts the rows in one canonical order:

* window rows in tiles of ``TILE`` absolute positions, ``[64 k, 64 k + 64)``;
* compressed rows in tiles of ``TILE`` absolute block numbers, when the query sees all of them;
* or, when the indexer selected some, the list as it stands, which is ascending.

Every product has one fixed shape (``QUERY_BLOCK`` queries of one request by one tile, or one query
by its whole selection). A row that a query must not see gets the weight exp(-inf) = 0 exactly, and
a whole tile of those adds exact zeros, so the tiles that other queries of a block need change
nothing. The tiles are added in ascending order. Hence a query's bits depend on its own rows alone:
not on the chunk, the block or the batch; and from equal rows decode computes what prefill would have
(the rows themselves are not equal: see norm_rope.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4_reference_platform.kernels import two_pool

TILE = 64
QUERY_BLOCK = 16


class RowOrder(NamedTuple):
    """What the order of an index list leaves open. All tensors are ``[tokens]`` int64 on CPU."""

    compress_ratio: int
    win: int
    positions: torch.Tensor
    state_slot: torch.Tensor
    ring_rows: torch.Tensor
    """Rows at the head of each token's list that lie in the SWA ring, by ascending position."""


def _note(indices: torch.Tensor, order: RowOrder) -> None:
    """Leave ``order`` on an index tensor for the attention call that gets it."""
    indices.dsv4_row_order = order


def _lengths_to_indptr(lengths: torch.Tensor) -> torch.Tensor:
    """``[n]`` lengths to ``[n + 1]`` int32 offsets."""
    return torch.nn.functional.pad(torch.cumsum(lengths.long(), 0), (1, 0)).to(torch.int32)


# -- stores ----------------------------------------------------------------------------------


def store_swa_into_unified(
    *,
    kv: torch.Tensor,
    state_slot: torch.Tensor,
    positions: torch.Tensor,
    unified_kv: torch.Tensor,
    win: int,
    ring_stride: int,
    final_pos: torch.Tensor | None = None,
    kv_rope: torch.Tensor | None = None,
    unified_kv_rope: torch.Tensor | None = None,
) -> None:
    """Stands for ``sglang.kernels.ops.kvcache.dsv4_unified_kv_store.store_swa_into_unified``.

    Writes row ``t`` of ``kv`` to ring row ``state_slot[t] * ring_stride + positions[t] %
    ring_stride``, but only the last ``win`` positions of each request (``final_pos``).

    Args:
        kv: ``[tokens, width]``; unified_kv: ``[rows, width]`` of the same dtype, written.
        kv_rope, unified_kv_rope: the second pool of the fp8 layout, or both None.
    """
    if (kv_rope is None) != (unified_kv_rope is None):
        raise ValueError("kv_rope and unified_kv_rope come together")
    loc = state_slot.long() * ring_stride + positions.long() % ring_stride
    keep = slice(None) if final_pos is None else positions > final_pos - win
    for rows, pool in ((kv, unified_kv), (kv_rope, unified_kv_rope)):
        if rows is None:
            continue
        if rows.element_size() == 1:  # fp8 rows are moved as bytes
            rows, pool = rows.view(torch.uint8), pool.view(torch.uint8)
        pool[loc[keep]] = rows[keep]


def scatter_bf16_into_unified(
    *, kv: torch.Tensor, loc: torch.Tensor, unified_kv: torch.Tensor
) -> None:
    """Stands for ``...kvcache.dsv4_unified_kv_store.scatter_bf16_into_unified``.

    ``unified_kv[loc[t]] = kv[t]`` where ``loc[t] >= 0``.
    """
    keep = loc >= 0
    unified_kv[loc[keep].long()] = kv[keep]


# -- index builders --------------------------------------------------------------------------


def build_prefill_indices(
    *,
    compress_ratio: int,
    state_slot: torch.Tensor,
    positions: torch.Tensor,
    chunk_start: torch.Tensor,
    cu_q: torch.Tensor,
    win: int,
    ring_stride: int,
    swa_pages: int,
    c128_page_indices: torch.Tensor | None,
    c4_sparse_page_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands for ``...unified_kv_kernels.runtime.build_prefill_indices``.

    Args:
        compress_ratio: 0, 4 or 128; chooses the compressed rows.
        state_slot, positions, chunk_start, cu_q: ``[tokens]`` int: request row, absolute position,
            first position of the request's chunk, row of that position in the chunk's KV. ``positions``
            may be longer: padded rows, of which nothing is built.
        c128_page_indices, c4_sparse_page_indices: ``[>= tokens, width]`` int32, valid entries
            first, then -1.

    Returns:
        ``(prefix_indices, prefix_indptr, extend_indices, extend_indptr)``, int32: rows of the pool
        (ring rows by position, then compressed rows) and rows of the chunk's KV, both packed. The
        tensors have exactly ``indptr[-1]`` entries (stock's are longer, the rest undefined).
    """
    tokens = state_slot.shape[0]
    positions, chunk_start = positions[:tokens].long(), chunk_start.long()
    slot, cu_q = state_slot.long(), cu_q.long()
    if compress_ratio == 0:
        pages = None
    elif compress_ratio == 128:
        pages = c128_page_indices[:tokens]
    elif compress_ratio == 4:
        pages = c4_sparse_page_indices[:tokens]
    else:
        raise ValueError(f"compress_ratio must be 0, 4 or 128, got {compress_ratio}")

    column = torch.arange(win)
    lowest = (positions - win + 1).clamp(min=0)
    in_chunk = positions - chunk_start
    extend_count = (in_chunk + 1).clamp(max=win)
    ring_count = (chunk_start - lowest).clamp(min=0, max=win)

    extend = (cu_q + in_chunk - extend_count + 1).unsqueeze(1) + column
    extend_mask = column < extend_count.unsqueeze(1)
    ring = slot.unsqueeze(1) * ring_stride + (lowest.unsqueeze(1) + column) % ring_stride
    ring_mask = column < ring_count.unsqueeze(1)
    rows, mask, count = ring, ring_mask, ring_count
    if pages is not None:
        rows = torch.cat((ring, pages.long() + swa_pages), 1)
        mask = torch.cat((ring_mask, pages >= 0), 1)
        count = mask.sum(1)
    prefix_indices = rows[mask].to(torch.int32)
    _note(prefix_indices, RowOrder(compress_ratio, win, positions, slot, ring_count))
    return (
        prefix_indices,
        _lengths_to_indptr(count),
        extend[extend_mask].to(torch.int32),
        _lengths_to_indptr(extend_count),
    )


def write_v4_paged_decode_indices(
    *,
    state_slot_per_seq: torch.Tensor,
    batch_id_per_token: torch.Tensor,
    positions: torch.Tensor,
    swa_indptr: torch.Tensor,
    csa_indptr: torch.Tensor,
    hca_indptr: torch.Tensor,
    swa_indices: torch.Tensor,
    csa_indices: torch.Tensor,
    hca_indices: torch.Tensor,
    T: int,
    win: int,
    ring_stride: int,
) -> None:
    """Stands for ``...unified_kv_kernels.paged_decode_indices.write_v4_paged_decode_indices``.

    Writes the window rows of ``T`` tokens (ring rows by ascending position) at the head of each
    token's segment of the three streams. Tokens with ``batch_id_per_token < 0`` are skipped.
    """
    batch = batch_id_per_token[:T].long()
    token = (batch >= 0).nonzero().squeeze(1)
    position = positions[:T].long()[token]
    slot = state_slot_per_seq.long()[batch[token]]
    count = (position + 1).clamp(max=win)
    column = torch.arange(win)
    mask = column < count.unsqueeze(1)
    at = (position - count + 1).unsqueeze(1) + column
    rows = (slot.unsqueeze(1) * ring_stride + at % ring_stride).to(torch.int32)[mask]
    for indptr, indices in (
        (swa_indptr, swa_indices),
        (csa_indptr, csa_indices),
        (hca_indptr, hca_indices),
    ):
        indices[(indptr[:T].long()[token].unsqueeze(1) + column)[mask]] = rows.to(indices.dtype)


def fill_compress_tail(
    *,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    prefix_len: torch.Tensor,
    page_indices: torch.Tensor,
    valid_len: torch.Tensor,
    swa_pages: int,
) -> None:
    """Stands for ``...unified_kv_kernels.runtime.fill_compress_tail``.

    Writes ``page_indices[t, :valid_len[t]] + swa_pages`` (-1 stays -1) behind the first
    ``prefix_len[t]`` entries of token ``t``'s segment.

    Args:
        page_indices: ``[tokens, width]`` int32; prefix_len, valid_len: ``[tokens]``.
    """
    tokens, width = page_indices.shape
    column = torch.arange(width)
    mask = column < valid_len.unsqueeze(1)
    at = (indptr[:tokens].long() + prefix_len.long()).unsqueeze(1) + column
    rows = torch.where(page_indices >= 0, page_indices + swa_pages, -1)
    indices[at[mask]] = rows[mask].to(indices.dtype)


def build_decode_streams(
    *,
    state_slot: torch.Tensor,
    positions: torch.Tensor,
    swa_len: torch.Tensor,
    hca_len: torch.Tensor,
    csa_len: torch.Tensor,
    hca_page_indices: torch.Tensor,
    csa_width: int,
    win: int,
    ring_stride: int,
    swa_pages: int,
) -> tuple[torch.Tensor, ...]:
    """Stands for ``...unified_kv_kernels.runtime.build_decode_streams``.

    Args:
        state_slot, positions: ``[tokens]`` int; swa_len: window rows, ``min(position + 1, win)``;
            hca_len, csa_len: compressed rows of the C128 and the C4 stream.
        hca_page_indices: ``[tokens, width]`` int32.
        csa_width: most compressed rows of a token in the C4 stream.

    Returns:
        ``(swa_indices, swa_indptr, hca_indices, hca_indptr, csa_indices, csa_indptr)`` int32. The
        C4 stream's tail is -1 until ``fill_compress_tail`` writes it, layer by layer.
    """
    tokens = state_slot.shape[0]
    swa_len, hca_len, csa_len = swa_len.long(), hca_len.long(), csa_len.long()
    swa_indptr = _lengths_to_indptr(swa_len)
    hca_indptr = _lengths_to_indptr(swa_len + hca_len)
    csa_indptr = _lengths_to_indptr(swa_len + csa_len)
    capacities = (win, win + hca_page_indices.shape[1], win + csa_width)
    swa_indices, hca_indices, csa_indices = (
        torch.full((tokens * capacity,), -1, dtype=torch.int32) for capacity in capacities
    )
    write_v4_paged_decode_indices(
        state_slot_per_seq=state_slot,
        batch_id_per_token=torch.arange(tokens, dtype=torch.int32),
        positions=positions,
        swa_indptr=swa_indptr,
        csa_indptr=csa_indptr,
        hca_indptr=hca_indptr,
        swa_indices=swa_indices,
        csa_indices=csa_indices,
        hca_indices=hca_indices,
        T=tokens,
        win=win,
        ring_stride=ring_stride,
    )
    fill_compress_tail(
        indices=hca_indices,
        indptr=hca_indptr,
        prefix_len=swa_len,
        page_indices=hca_page_indices[:tokens],
        valid_len=hca_len,
        swa_pages=swa_pages,
    )
    for ratio, indices in ((0, swa_indices), (128, hca_indices), (4, csa_indices)):
        _note(indices, RowOrder(ratio, win, positions.long(), state_slot.long(), swa_len))
    return swa_indices, swa_indptr, hca_indices, hca_indptr, csa_indices, csa_indptr


# -- attention -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plain:
    """Latent rows ``[rows, width]`` as they are."""

    rows: torch.Tensor

    def __len__(self) -> int:
        return self.rows.shape[0]

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows with these numbers."""
        return self.rows.index_select(0, rows)


@dataclass(frozen=True)
class _TwoPool:
    """Latent rows in the fp8 layout: ``[rows, 512]`` float8_e4m3fn and ``[rows, 64]`` bf16."""

    nope: torch.Tensor
    rope: torch.Tensor

    def __len__(self) -> int:
        return self.nope.shape[0]

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows with these numbers, fp32."""
        raw = self.nope.view(torch.uint8).index_select(0, rows)
        return two_pool.unpack(raw, self.rope.index_select(0, rows))


class _Rows:
    """Latent rows addressed through one list: pool rows first, chunk rows after them."""

    def __init__(self, pool: _Plain | _TwoPool, chunk: _Plain | _TwoPool | None):
        self._pool, self._chunk = pool, chunk
        self.offset = len(pool)

    def gather(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """``out[i] = row rows[i]`` in fp32; ``rows`` may hold -1, whose row stays as it is."""
        for source, base in ((self._pool, 0), (self._chunk, self.offset)):
            if source is None:
                continue
            mine = (rows >= base) & (rows < base + len(source))
            if mine.all():
                out.copy_(source.read(rows - base))
            elif mine.any():
                out[mine] = source.read(rows[mine] - base).float()


class _Lists(NamedTuple):
    """Index lists of a call, as int64 rows of ``_Rows``, with Python offsets."""

    head: torch.Tensor
    head_ptr: list[int]
    tail: torch.Tensor | None
    tail_ptr: list[int]

    def window(self, token: int, ring: int) -> torch.Tensor:
        """Window rows of a token by ascending position, ``ring`` of them in the ring."""
        start = self.head_ptr[token]
        rows = self.head[start : start + ring]
        if self.tail is None:
            return rows
        return torch.cat((rows, self.tail[self.tail_ptr[token] : self.tail_ptr[token + 1]]))

    def compressed(self, token: int, ring: int) -> torch.Tensor:
        """Compressed rows of a token in list order."""
        return self.head[self.head_ptr[token] + ring : self.head_ptr[token + 1]]


def _tiles(rows: torch.Tensor, lead: int, source: _Rows, width: int) -> torch.Tensor:
    """Rows in fp32 tiles ``[n, TILE, width]``, the first row at offset ``lead``, zero elsewhere."""
    count = -(-(lead + rows.shape[0]) // TILE)
    out = torch.zeros(count * TILE, width, dtype=torch.float32)
    source.gather(rows, out[lead : lead + rows.shape[0]])
    return out.view(count, TILE, width)


def _attend(
    q: torch.Tensor,
    lists: _Lists,
    source: _Rows,
    order: RowOrder,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Attention of every token over its rows in canonical order (see the module's docstring)."""
    tokens, heads, width = q.shape
    out = torch.zeros(tokens, heads, width, dtype=out_dtype)
    known = min(tokens, order.positions.shape[0])
    if known == 0:
        return out
    positions = order.positions[:known]
    ring = order.ring_rows[:known].tolist()
    pos = positions.tolist()
    head_len = [lists.head_ptr[t + 1] - lists.head_ptr[t] for t in range(known)]
    listed = [head_len[t] - ring[t] for t in range(known)]
    ratio = order.compress_ratio
    # A query that sees every complete block has the blocks 0, 1, 2, ... in its list.
    all_blocks = [ratio == 0 or listed[t] == (pos[t] + 1) // ratio for t in range(known)]

    slot = order.state_slot[:known]
    follows = (slot[1:] == slot[:-1]) & (positions[1:] == positions[:-1] + 1)
    if lists.tail is None:  # decode: each token brings its whole window
        follows = torch.zeros_like(follows)
    cuts = [0, *((~follows).nonzero().squeeze(1) + 1).tolist(), known]
    sink = attn_sink[:heads].float().repeat(QUERY_BLOCK)
    for start, end in itertools.pairwise(cuts):
        window = lists.window(start, ring[start])
        if end - start > 1:
            # Each later token adds its own row: the last of its window.
            last = torch.tensor(lists.tail_ptr[start + 2 : end + 1]) - 1
            window = torch.cat((window, lists.tail[last]))
        first_position = pos[end - 1] - window.shape[0] + 1
        base = first_position // TILE
        window_tiles = _tiles(window, first_position - base * TILE, source, width)
        full = [t for t in range(start, end) if all_blocks[t]]
        block_tiles = (
            _tiles(lists.compressed(full[-1], ring[full[-1]]), 0, source, width)
            if full and listed[full[-1]]
            else None
        )
        first = start
        while first < end:
            stop = first + 1
            while stop < min(first + QUERY_BLOCK, end) and all_blocks[stop] == all_blocks[first]:
                stop += 1
            _attend_block(
                q,
                out,
                first,
                stop,
                pos,
                listed if all_blocks[first] else None,
                window_tiles,
                base,
                block_tiles,
                None
                if all_blocks[first]
                else [lists.compressed(t, ring[t]) for t in range(first, stop)],
                source,
                order.win,
                sink,
                softmax_scale,
            )
            first = stop
    return out


def _attend_block(
    q: torch.Tensor,
    out: torch.Tensor,
    first: int,
    stop: int,
    pos: list[int],
    listed: list[int] | None,
    window_tiles: torch.Tensor,
    base: int,
    block_tiles: torch.Tensor | None,
    selections: list[torch.Tensor] | None,
    source: _Rows,
    win: int,
    sink: torch.Tensor,
    softmax_scale: float,
) -> None:
    """Attention of tokens ``[first, stop)`` of one request, at most ``QUERY_BLOCK`` of them.

    Args:
        listed: compressed rows of each token, all of them ascending; None with ``selections``.
        window_tiles: tile ``k`` holds the positions ``[(base + k) * TILE, ...)``.
        selections: per token the compressed rows it attends to, when the indexer chose.
    """
    _, heads, width = q.shape
    count = stop - first
    block = torch.zeros(QUERY_BLOCK, heads, width, dtype=torch.float32)
    block[:count] = q[first:stop]
    block = block.view(QUERY_BLOCK * heads, width)

    low_tile = max(pos[first] - win + 1, 0) // TILE
    tiles = list(window_tiles[low_tile - base : pos[stop - 1] // TILE - base + 1])
    n_window = len(tiles)
    # Padding queries sit before every row: they see nothing.
    at = torch.tensor([*pos[first:stop], *([-1] * (QUERY_BLOCK - count))]).view(1, -1, 1)
    column = (low_tile * TILE + torch.arange(n_window * TILE)).view(n_window, 1, TILE)
    visible = (column <= at) & (column > at - win)
    if listed is not None and block_tiles is not None and listed[stop - 1]:
        n_blocks = -(-listed[stop - 1] // TILE)
        tiles += list(block_tiles[:n_blocks])
        seen = torch.tensor([*listed[first:stop], *([0] * (QUERY_BLOCK - count))]).view(1, -1, 1)
        block_column = torch.arange(n_blocks * TILE).view(n_blocks, 1, TILE)
        visible = torch.cat((visible, block_column < seen))

    logits = torch.empty(len(tiles), QUERY_BLOCK * heads, TILE, dtype=torch.float32)
    for tile, product in zip(tiles, logits, strict=True):
        torch.mm(block, tile.t(), out=product)
    logits.mul_(softmax_scale)
    logits.view(len(tiles), QUERY_BLOCK, heads, TILE).masked_fill_(
        ~visible.unsqueeze(2), float("-inf")
    )
    peak = torch.maximum(logits.amax((0, 2)), sink)

    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    if selections is not None:
        for query, rows in enumerate(selections):
            latent = torch.zeros(rows.shape[0], width, dtype=torch.float32)
            source.gather(rows, latent)
            scores = torch.empty(heads, rows.shape[0], dtype=torch.float32)
            torch.mm(block[query * heads : (query + 1) * heads], latent.t(), out=scores)
            scores.mul_(softmax_scale).masked_fill_(rows < 0, float("-inf"))
            mine = peak[query * heads : (query + 1) * heads]
            torch.maximum(mine, scores.amax(1), out=mine)
            chosen.append((scores, latent))

    weights = logits.sub_(peak.view(1, -1, 1)).exp_()
    sums = weights.sum(2)
    total = torch.exp(sink - peak)
    acc = torch.zeros(QUERY_BLOCK * heads, width, dtype=torch.float32)
    for tile, weight, tile_sum in zip(tiles, weights, sums, strict=True):
        total += tile_sum
        torch.addmm(acc, weight, tile, out=acc)
    for query, (scores, latent) in enumerate(chosen):
        mine = slice(query * heads, (query + 1) * heads)
        weight = scores.sub_(peak[mine].unsqueeze(1)).exp_()
        total[mine] += weight.sum(1)
        acc[mine] += torch.mm(weight, latent, out=torch.empty(heads, width))
    result = (acc / total.unsqueeze(1)).view(QUERY_BLOCK, heads, width)
    out[first:stop] = result[:count].to(out.dtype)


def _order_of(indices: torch.Tensor) -> RowOrder:
    order = getattr(indices, "dsv4_row_order", None)
    if order is None:
        raise ValueError(
            "these index lists were not built by dsv4_reference_platform.kernels.attention: "
            "their rows cannot be put in canonical order"
        )
    return order


def sparse_attn_v4_paged_prefill(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices_prefix: torch.Tensor,
    kv_indptr_prefix: torch.Tensor,
    kv: torch.Tensor,
    kv_indices_extend: torch.Tensor,
    kv_indptr_extend: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Stands for ``...unified_kv_kernels.paged_prefill.sparse_attn_v4_paged_prefill``.

    Softmax over the rows of the token's two lists and one sink per head; a row is both key and
    value.

    Args:
        q: ``[tokens, heads, head_dim]``; unified_kv: ``[rows, head_dim]``; kv: this chunk's rows.
        kv_indices_*, kv_indptr_*: the tensors that ``build_prefill_indices`` returned (the lists
            of one request must agree with each other, as its lists do).
        attn_sink: ``[>= heads]`` fp32; softmax_scale: factor of the logits.

    Returns:
        ``[tokens, heads, head_dim]`` of ``q``'s dtype; tokens beyond the lists get zeros.
    """
    order = _order_of(kv_indices_prefix)
    source = _Rows(_Plain(unified_kv), _Plain(kv))
    lists = _Lists(
        kv_indices_prefix.long(),
        kv_indptr_prefix.tolist(),
        kv_indices_extend.long() + source.offset,
        kv_indptr_extend.tolist(),
    )
    return _attend(q, lists, source, order, attn_sink, softmax_scale, q.dtype)


def sparse_attn_v4_paged_decode(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    kv_scales: torch.Tensor | None = None,
    kv_splits: int | None = None,
) -> torch.Tensor:
    """Stands for ``...unified_kv_kernels.paged_decode.sparse_attn_v4_paged_decode``.

    Args:
        q: ``[tokens, heads, head_dim]``, one token per request.
        kv_indices, kv_indptr: a stream of ``build_decode_streams``.
        kv_splits: ignored: how a GPU splits the work.

    Returns:
        ``[tokens, heads, head_dim]`` of ``q``'s dtype, the bits that prefill gives for the query.
    """
    if kv_scales is not None:
        raise NotImplementedError("scaled KV rows")
    order = _order_of(kv_indices)
    lists = _Lists(kv_indices.long(), kv_indptr.tolist(), None, [])
    source = _Rows(_Plain(unified_kv), None)
    return _attend(q, lists, source, order, attn_sink, softmax_scale, q.dtype)


def prefill_fp8_2buff(
    *,
    q: torch.Tensor,
    q_rope: torch.Tensor,
    unified_kv: torch.Tensor,
    unified_kv_rope: torch.Tensor,
    kv_indices_prefix: torch.Tensor,
    kv_indptr_prefix: torch.Tensor,
    kv_extend: torch.Tensor,
    kv_extend_rope: torch.Tensor,
    kv_indices_extend: torch.Tensor,
    kv_indptr_extend: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    v_head_dim: int,
) -> torch.Tensor:
    """Stands for ``...unified_kv_kernels.runtime.prefill_fp8_2buff`` (aiter's
    ``pa_sparse_prefill_fp8_opus``): ``sparse_attn_v4_paged_prefill`` over unpacked rows.

    Args:
        q, q_rope: ``[tokens, heads, 512]`` float8_e4m3fn and ``[tokens, heads, 64]`` bf16.
        unified_kv, unified_kv_rope: the two pools; kv_extend, kv_extend_rope: this chunk's rows.
        v_head_dim: 512.

    Returns:
        ``[tokens, heads, 512]`` of ``q_rope``'s dtype; tokens beyond the lists get zeros.
    """
    _check_pair(q, q_rope, unified_kv, unified_kv_rope, v_head_dim)
    order = _order_of(kv_indices_prefix)
    source = _Rows(
        _TwoPool(unified_kv, unified_kv_rope),
        _TwoPool(kv_extend, kv_extend_rope),
    )
    lists = _Lists(
        kv_indices_prefix.long(),
        kv_indptr_prefix.tolist(),
        kv_indices_extend.long() + source.offset,
        kv_indptr_extend.tolist(),
    )
    query = two_pool.unpack(q, q_rope)
    return _attend(query, lists, source, order, attn_sink, softmax_scale, q_rope.dtype)


def decode_fp8_2buff(
    *,
    q: torch.Tensor,
    q_rope: torch.Tensor,
    unified_kv: torch.Tensor,
    unified_kv_rope: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    attn_sink: torch.Tensor,
    v_head_dim: int,
    qo_indptr: torch.Tensor | None = None,
    max_seqlen_q: int = 1,
    num_kv_splits: int | None = None,
    compress_ratio: int | None = None,
    q_kv_bounds: torch.Tensor | None = None,
    kv_len_hint: int | None = None,
) -> torch.Tensor:
    """Stands for ``...unified_kv_kernels.runtime.decode_fp8_2buff`` (aiter's
    ``mla_decode_fwd_v4_nm``): ``sparse_attn_v4_paged_decode`` over unpacked rows.

    The scale of the logits is ``512 ** -0.5``, as in aiter's kernel.

    Args:
        q, q_rope: ``[tokens, heads, 512]`` float8_e4m3fn and ``[tokens, heads, 64]`` bf16, with a list
            for each token: one of each request, or the tokens that it verifies.
        unified_kv, unified_kv_rope: the two pools.
        kv_indices, kv_indptr: a stream of ``build_decode_streams``.
        v_head_dim: 512.
        num_kv_splits, compress_ratio, kv_len_hint: ignored: how a GPU splits the work.

    Returns:
        ``[tokens, heads, 512]`` of ``q_rope``'s dtype, the bits that prefill gives for the query.

    Raises:
        NotImplementedError: several queries of a request share a list (DSpark, and
            SGLANG_DSV4_GROUPED_ASM=1).
    """
    if qo_indptr is not None or max_seqlen_q != 1 or q_kv_bounds is not None:
        raise NotImplementedError("lists that several queries share")
    _check_pair(q, q_rope, unified_kv, unified_kv_rope, v_head_dim)
    order = _order_of(kv_indices)
    lists = _Lists(kv_indices.long(), kv_indptr.tolist(), None, [])
    source = _Rows(_TwoPool(unified_kv, unified_kv_rope), None)
    query = two_pool.unpack(q, q_rope)
    scale = v_head_dim**-0.5
    return _attend(query, lists, source, order, attn_sink, scale, q_rope.dtype)


def _check_pair(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    nope: torch.Tensor,
    rope: torch.Tensor,
    v_head_dim: int,
) -> None:
    """Refuse what aiter's kernels would read as something else.

    Raises:
        ValueError: rows of another layout, or pools that are not a pair.
    """
    sizes = (q.shape[-1], q_rope.shape[-1], nope.shape[-1], rope.shape[-1], v_head_dim)
    row, turned = two_pool.ROW_BYTES, two_pool.ROPE_DIM
    if sizes != (row, turned, row, turned, two_pool.NOPE_DIM + turned):
        raise ValueError(f"row widths {sizes} are not those of the fp8 layout")
    if q.element_size() != 1 or nope.element_size() != 1 or rope.dtype != torch.bfloat16:
        raise ValueError(f"the fp8 layout has no rows of {q.dtype}, {nope.dtype}, {rope.dtype}")
    if len(nope) != len(rope):
        raise ValueError(f"{len(nope)} rows without rope, {len(rope)} with it")
