"""Router and experts of the DeepSeek-V4 MoE."""

from __future__ import annotations

import torch

from dsv4_reference_platform.kernels.elementwise import row_sums, sigmoid, silu, softplus
from dsv4_reference_platform.kernels.matmul import row_tiled_mm

_RENORMALIZE_SUM_EPSILON = 1e-20


def hash_topk(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    scoring_func: str = "sqrtsoftplus",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for ``sglang.kernels.ops.moe.dsv4.hash_topk`` (and ``hash_topk_triton``).

    The experts of a token are looked up by its id; the logits only weigh them.

    Args:
        router_logits: ``[tokens, experts]``.
        input_ids: ``[tokens]`` int.
        tid2eid: ``[vocab, topk]`` int, expert ids per token id.
        num_fused_shared_experts: columns appended with ids ``experts, experts + 1, ...`` and the
            weight ``1 / routed_scaling_factor``.

    Returns:
        ``(weights [tokens, topk + shared] fp32, ids [tokens, topk + shared] int32)``; the routed
        weights of a token sum to 1.
    """
    if scoring_func != "sqrtsoftplus":
        raise ValueError(f"hash_topk knows sqrtsoftplus only, got {scoring_func!r}")
    tokens, experts = router_logits.shape
    routed = tid2eid[input_ids.long()].long()
    scores = torch.sqrt(softplus(router_logits.float().gather(1, routed)))
    weights = scores / (row_sums(scores) + _RENORMALIZE_SUM_EPSILON)
    if num_fused_shared_experts:
        shared = torch.arange(experts, experts + num_fused_shared_experts).expand(tokens, -1)
        routed = torch.cat((routed, shared), 1)
        weights = torch.cat(
            (weights, weights.new_full(shared.shape, 1.0 / routed_scaling_factor)), 1
        )
    return weights, routed.to(torch.int32)


def mask_topk_ids(topk_ids: torch.Tensor, num_token_non_padded: torch.Tensor | int) -> None:
    """Stands for ``sglang.kernels.ops.moe.dsv4.mask_topk_ids``: -1 in the padding rows."""
    topk_ids[int(num_token_non_padded) :] = -1


def moe_fused_gate(
    input_tensor: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    scoring_func: str = "sigmoid",
    num_fused_shared_experts: int = 0,
    renormalize: bool = True,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k router with a correction bias; what ``moe_fused_gate`` computes for DeepSeek-V4.

    The bias takes part in choosing, not in weighing. Ties go to the lower expert id.

    Args:
        input_tensor: ``[tokens, experts]`` router logits.
        bias: ``[experts]``.

    Returns:
        ``(weights [tokens, topk] fp32, ids [tokens, topk] int32)``, best first.

    Raises:
        NotImplementedError: with fused shared experts (the reference model has none).
    """
    if num_fused_shared_experts:
        raise NotImplementedError("fused shared experts")
    logits = input_tensor.float()
    if scoring_func == "sigmoid":
        scores = sigmoid(logits)
    elif scoring_func == "sqrtsoftplus":
        scores = torch.sqrt(softplus(logits))
    else:
        raise ValueError(f"unknown scoring function {scoring_func!r}")
    order = torch.sort(scores + bias.float(), dim=-1, descending=True, stable=True).indices
    ids = order[:, :topk]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (row_sums(weights) + _RENORMALIZE_SUM_EPSILON)
    if apply_routed_scaling_factor_on_output:
        weights = weights * routed_scaling_factor
    return weights, ids.to(torch.int32)


def biased_topk_impl(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "sigmoid",
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    num_token_non_padded: torch.Tensor | None = None,
    expert_location_dispatch_info: object | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
    **_unused: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for ``sglang.srt.layers.moe.topk.biased_topk_impl`` and ``..._jit_kernel_impl``."""
    return moe_fused_gate(
        gating_output,
        correction_bias,
        topk,
        scoring_func,
        num_fused_shared_experts,
        renormalize,
        routed_scaling_factor,
        bool(apply_routed_scaling_factor_on_output),
    )


def silu_and_mul_clamp(input: torch.Tensor, output: torch.Tensor, swiglu_limit: float) -> None:
    """Stands for ``sglang.kernels.ops.activation.silu_and_mul_clamp.silu_and_mul_clamp``.

    Args:
        input: ``[..., 2 * n]``, gate then up.
        output: ``[..., n]``, written: ``silu(min(gate, limit)) * clamp(up, -limit, limit)``.
    """
    gate, up = input.float().chunk(2, -1)
    gate = gate.clamp(max=swiglu_limit)
    up = up.clamp(-swiglu_limit, swiglu_limit)
    output.copy_((silu(gate) * up).to(output.dtype))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[..., 2 * n]``: ``sglang.srt.layers.activation.SiluAndMul``."""
    gate, up = x.float().chunk(2, -1)
    return (silu(gate) * up).to(x.dtype)


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """SwiGLU experts, summed with the router's weights.

    Args:
        x: ``[tokens, hidden]``.
        w13: ``[experts, 2 * inner, hidden]``, gate then up.
        w2: ``[experts, hidden, inner]``.
        topk_weights: ``[tokens, topk]`` fp32.
        topk_ids: ``[tokens, topk]`` int; -1 contributes nothing.
        swiglu_limit: clamp of gate and up, None for none.

    Returns:
        ``[tokens, hidden]`` of ``x``'s dtype: the weighted sum in fp32, in the order of the
        columns of ``topk_ids``, rounded once. Expert outputs are rounded to ``x.dtype`` as the
        stock layers' are.
    """
    tokens, hidden = x.shape
    slots = torch.zeros(topk_ids.numel(), hidden, dtype=torch.float32)
    flat = topk_ids.reshape(-1).long()
    for expert in range(w13.shape[0]):
        picked = (flat == expert).nonzero().squeeze(1)
        if picked.numel() == 0:
            continue
        rows = x[picked // topk_ids.shape[1]]
        gate_up = row_tiled_mm(rows, w13[expert].t()).to(x.dtype)
        inner = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        silu_and_mul_clamp(gate_up, inner, float("inf") if swiglu_limit is None else swiglu_limit)
        slots[picked] = row_tiled_mm(inner, w2[expert].t()).to(x.dtype).float()
    slots = slots.view(tokens, topk_ids.shape[1], hidden)
    total = torch.zeros(tokens, hidden, dtype=torch.float32)
    for column in range(topk_ids.shape[1]):
        total += slots[:, column] * topk_weights[:, column : column + 1].float()
    return total.to(x.dtype)


def moe_forward_native(
    layer: torch.nn.Module,
    x: torch.Tensor,
    topk_output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    moe_runner_config: object,
) -> torch.Tensor:
    """Stands for ``sglang.srt.layers.moe.fused_moe_native.moe_forward_native``.

    Stock's native version ignores ``swiglu_limit``; the GPU kernels apply it, and so does this.

    Args:
        layer: carries ``w13_weight`` and ``w2_weight``.
        topk_output: ``(topk_weights, topk_ids, router_logits)``.
        moe_runner_config: ``MoeRunnerConfig``; silu only, weights applied on the output.
    """
    config = moe_runner_config
    if config.activation != "silu" or config.apply_router_weight_on_input:
        raise NotImplementedError(f"experts of this kind: {config}")
    if config.gemm1_alpha is not None:
        raise NotImplementedError("gpt-oss style swiglu")
    weights, ids, _ = topk_output
    return experts(x, layer.w13_weight, layer.w2_weight, weights, ids, config.swiglu_limit)
