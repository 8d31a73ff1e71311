"""EAGLE with a chain of drafts: cache locations, the draft tree, greedy verification, clean-up.

All of it moves integers, except ``clear_unaccepted_c128_draft_states``. Every function handles the
requests of a batch one by one or element by element, so nothing depends on who shares the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode


def get_last_loc_triton(
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """Stands for ``sglang.kernels.ops.memory.common.get_last_loc_triton`` (on HIP:
    ``get_last_loc_triton_safe``).

    Returns:
        ``[requests]`` of ``prefix_lens_tensor``'s dtype: token slot of each request's last token, or
        -1 where it has none.
    """
    last = (prefix_lens_tensor.long() - 1).clamp(min=0)
    slots = req_to_token[req_pool_indices_tensor.long(), last].to(prefix_lens_tensor.dtype)
    return slots.masked_fill(prefix_lens_tensor == 0, -1)


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Stands for ``sglang.srt.mem_cache.allocation`` of the same name (a Triton kernel beside its
    launcher).

    Args:
        req_to_token: ``[rows, context]`` int32, written at the positions ``start_offset[i]`` to
            ``end_offset[i] - 1`` of row ``req_pool_indices[i]``.
        out_cache_loc: the new token slots, request after request.
    """
    first = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        req_to_token[row, start:end] = out_cache_loc[first : first + end - start].to(
            req_to_token.dtype
        )
        first += end - start


def gather_spec_extras(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Stands for ``sglang.kernels.ops.speculative.gather_spec_extras`` of the same name.

    Args:
        indices: ``[requests]`` int64 request rows; the rest: buffers with a row per request row.

    Returns:
        The rows ``indices`` of each buffer (None for None): what the last forward left for the next.
    """
    topk_p, topk_index, tokens = (
        buffer[indices] for buffer in (topk_p_buf, topk_index_buf, output_tokens_buf)
    )
    hidden = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p, topk_index, tokens, hidden


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Stands for ``sglang.kernels.ops.speculative.cache_locs`` of the same name.

    Args:
        req_pool_indices, seq_lens: ``[requests]`` int: request rows, committed lengths.
        req_to_token: ``[rows, context]`` int32 token slots.
        out_cache_loc: ``[requests * topk * num_cols]`` int64, written: each request's slots of the
            positions ``seq_len, seq_len + 1, ...``.
        positions: ``[requests * topk]`` int64, written with the committed length; or None.

    Raises:
        NotImplementedError: with ``mrope``.
    """
    if mrope is not None:
        raise NotImplementedError("DeepSeek-V4 has no mrope positions")
    column = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_cols)
    rows = req_to_token[req_pool_indices.long().unsqueeze(1), column]
    out_cache_loc.copy_(rows.flatten())
    if positions is not None:
        positions.copy_(seq_lens.repeat_interleave(topk))


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Stands for the Triton kernel ``assign_extend_cache_locs`` of
    ``sglang.kernels.ops.speculative.cache_locs``, through the platform's own seam for it
    (``get_speculative_cache_locs_fn``).

    Args:
        req_pool_indices: ``[requests]`` request rows; req_to_token: ``[rows, context]`` int32.
        start_offset, end_offset: ``[requests]`` int, first position and the one after the last;
            together ``batch_size * draft_token_num`` positions.

    Returns:
        ``[batch_size * draft_token_num]`` int64 token slots, request after request.
    """
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, start:end] for row, start, end in spans])
    if slots.shape[0] != batch_size * draft_token_num:
        raise ValueError(f"{slots.shape[0]} positions, {batch_size} x {draft_token_num} announced")
    return slots.to(device=device, dtype=torch.int64)


def build_tree_kernel_efficient_func(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: TreeMaskMode,
) -> None:
    """Stands for ``sglang.kernels.ops.speculative.spec_tree`` of the same name, which calls the
    JIT-compiled ``build_tree_kernel_efficient``.

    With one candidate a step the tree is a chain: node ``j`` of a request follows node ``j - 1``.

    Args:
        parent_list, top_scores_index: which candidates make up the tree; of a chain, all.
        seq_lens: ``[requests]`` committed lengths.
        tree_mask: flat bool, written: row ``j`` of a request's square says which nodes node ``j``
            sees; in mode FULL_MASK each row has ``seq_len`` columns for the prefix in front of it,
            which stay as they are.
        positions: ``[requests * nodes]`` int64, written: ``seq_len + j``.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: ``[requests, nodes]`` int64,
            written: flat index of each node, its child in the request or -1, its sibling or -1.
        spec_steps: unused: the depth of a chain is its length.

    Raises:
        NotImplementedError: for ``topk > 1`` (DeepSeek-V4's backend asserts it) or a packed mask.
    """
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    if topk != 1 or tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        raise NotImplementedError("chains of drafts with a bool mask only")
    requests, nodes = seq_lens.shape[0], num_verify_tokens
    node = torch.arange(nodes)
    positions.copy_((seq_lens.long().unsqueeze(1) + node).flatten())
    retrieve_index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    retrieve_next_token.copy_(torch.where(node + 1 < nodes, node + 1, -1).expand(requests, nodes))
    retrieve_next_sibling.fill_(-1)
    seen = torch.ones(nodes, nodes, dtype=torch.bool).tril()
    start = 0
    for length in seq_lens.tolist():
        prefix = length if tree_mask_mode == TreeMaskMode.FULL_MASK else 0
        size = nodes * (prefix + nodes)
        tree_mask[start : start + size].view(nodes, prefix + nodes)[:, prefix:] = seen
        start += size


def verify_tree_greedy_func(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands for ``sglang.kernels.ops.speculative.spec_tree`` of the same name, which calls the
    JIT-compiled ``verify_tree_greedy``.

    From each request's root, walks to the child that holds what the target predicts, as long as
    there is one.

    Args:
        predicts: ``[requests * nodes]`` int32, written: the target's token at every node on the
            path (other entries stay).
        accept_index: ``[requests, depth]`` int32, written: flat indices of the path's nodes, the
            root included (entries beyond it stay).
        accept_token_num: ``[requests]`` int32, written: accepted drafts, the root not counted.
        candidates, target_predict: ``[requests, nodes]`` int: token of each node, and the target's
            greedy token after it.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: as the builder wrote them.

    Returns:
        ``(predicts, accept_index, accept_token_num)``.
    """
    depth = accept_index.shape[1]
    target = target_predict.flatten().tolist()
    for request in range(candidates.shape[0]):
        token, flat, child, sibling = (
            table[request].tolist()
            for table in (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
        )
        path = [0]
        while len(path) < depth:
            node = child[path[-1]]
            while node != -1 and token[node] != target[flat[path[-1]]]:
                node = sibling[node]
            if node == -1:
                break
            path.append(node)
        for place, node in enumerate(path):
            accept_index[request, place] = flat[node]
            predicts[flat[node]] = target[flat[node]]
        accept_token_num[request] = len(path) - 1
    return predicts, accept_index, accept_token_num


def fill_bonus_tokens_func(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Stands for ``sglang.kernels.ops.speculative.eagle`` of the same name.

    ``bonus_tokens[i] = accept_tokens[i][accept_lens[i] - 1]``.

    Args:
        accept_tokens: ``[batch_size, accept_stride]`` int (or flat), tokens of the accepted path.
        accept_lens: ``[batch_size]``, the bonus token included.
        bonus_tokens: ``[batch_size]`` int32, written.
    """
    paths = accept_tokens.reshape(batch_size, accept_stride)
    bonus_tokens.copy_(paths.gather(1, accept_lens.long().unsqueeze(1) - 1).squeeze(1))


def clear_unaccepted_c128_draft_states(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    """Stands for ``sglang.kernels.ops.kvcache.dsv4_c128_cleanup`` of the same name.

    The state rows of the positions ``seq_len + accept_len`` to ``seq_len + num_draft_tokens - 1``
    get kv 0 and score -inf.

    Args:
        state: ``[rows, 2 * head_dim]`` (kv, score), written; row ``slot * ring_size + position %
            ring_size``.
        req_pool_indices, seq_lens, accept_lens: ``[requests]`` int: slots, lengths before this
            verification, accepted tokens.
    """
    offset = torch.arange(num_draft_tokens)
    slots = (seq_lens.long().unsqueeze(1) + offset) % ring_size
    rows = (req_pool_indices.long().unsqueeze(1) * ring_size + slots)[
        offset >= accept_lens.long().unsqueeze(1)
    ]
    half = state.shape[1] // 2
    state[rows, :half] = 0
    state[rows, half:] = float("-inf")
