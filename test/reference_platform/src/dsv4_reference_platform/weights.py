"""Seeded parameters for ``--load-format dummy``.

SGLang's dummy initialisation draws U(-1e-3, 1e-3) with one seed for every parameter and leaves
integer tables and buffers of ``torch.empty`` alone: logits are flat, two servers differ by
whatever was in memory, and every equality test passes for the wrong reason. Here each entry of
the state dict gets values of its own from a generator seeded by its name, at a scale at which
attention, compressor, indexer, router and mHC all matter to the logits.

With tensor parallelism a rank gets its part of what the one rank would have: the ranks together are
that model, but for the rounding of the partial sums that they add.

A model whose config has a NextN layer (``num_nextn_predict_layers``) is seeded so that the layer's
drafts are right now and then. What a sublayer adds to the residual streams is scaled down, so that the
next token depends mostly on the current one; and the draft gets the target's first layer and output
norm, behind projections that hand the token's embedding on and mix in a little of the target's hidden
state. ``DSV4_REFERENCE_DRAFT_SEED`` gives the draft a layer of its own instead.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

# How much sharper than unit variance a projection is. Queries and keys are normed per head, so
# attention scores have the scale of head_dim**-0.5 * |q| * |k| ~ sqrt(head_dim): no gain needed
# there. Everything not named here is drawn at 1/sqrt(fan_in).
_GAIN = {"lm_head": 4.0}

# Of a model with a NextN layer: what its sublayers' last projections are scaled by.
_NEXTN_SUBLAYER_GAIN = 0.15
_SUBLAYER_OUTPUTS = ("wo_b.weight", "experts.w2_weight", "down_proj.weight")

# Of the draft: which of the target's parameters each gets, by name; and, of its two square
# projections, what multiple of the identity.
_DRAFT_FROM_TARGET = {
    "model.decoder.": "model.layers.0.",
    "model.shared_head.norm.": "model.norm.",
}
_DRAFT_PROJECTIONS = {"model.e_proj.weight": 1.0, "model.h_proj.weight": 0.2}

DRAFT_SEED_VARIABLE = "DSV4_REFERENCE_DRAFT_SEED"


def initialize_weights(model: torch.nn.Module, *_args, **_kwargs) -> None:
    """Fills every parameter and table of ``model`` in place; the stock name is
    ``sglang.srt.model_loader.weight_utils.initialize_dummy_weights``.

    Raises:
        ValueError: an integer table that this module does not know how to fill. An unknown
            table left as it is would be whatever the allocator returned.
    """
    draft = type(model).__name__.endswith("NextN")
    nextn = draft or bool(getattr(model.config, "num_nextn_predict_layers", 0))
    shards = dict(_shards(model))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            seed = _draft_seed(name) if draft else name
            generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
            if draft and name in _DRAFT_PROJECTIONS:
                value.copy_(torch.eye(value.shape[0]) * _DRAFT_PROJECTIONS[name])
            elif torch.is_floating_point(value):
                shard = shards.get(name, REPLICATED)
                whole = _floats(name, shard.whole(value.shape), generator)
                value.copy_(shard.of(whole).to(value.dtype))
            elif name.endswith("tid2eid"):
                _fill_expert_table(value, _routed_experts(model), generator)
            else:
                raise ValueError(f"no rule to fill the integer parameter {name} {value.dtype}")
            if nextn and name.endswith(_SUBLAYER_OUTPUTS):
                value.mul_(_NEXTN_SUBLAYER_GAIN)


def _draft_seed(name: str) -> str:
    """What seeds parameter ``name`` of a draft: the target's name for it, unless another layer is
    asked for."""
    for prefix, target in _DRAFT_FROM_TARGET.items():
        if name.startswith(prefix):
            return os.environ.get(DRAFT_SEED_VARIABLE, "") + target + name.removeprefix(prefix)
    return name


class Shard(NamedTuple):
    """One rank's part of a parameter: of each of `blocks` equal blocks along `dim`, the `rank`-th of
    `ranks` slices."""

    dim: int = 0
    blocks: int = 1
    rank: int = 0
    ranks: int = 1

    def whole(self, shape: Sequence[int]) -> list[int]:
        """The shape of the whole parameter, of which one of `shape` is the part."""
        return [n * self.ranks if d == self.dim else n for d, n in enumerate(shape)]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of the whole parameter."""
        if self.ranks == 1:
            return whole
        slices = whole.unflatten(self.dim, (self.blocks, self.ranks, -1))
        return slices.select(self.dim + 1, self.rank).flatten(self.dim, self.dim + 1)


REPLICATED = Shard()


def _shards(model: torch.nn.Module) -> Iterator[tuple[str, Shard]]:
    """Parameters of which a rank has a part, by name in the state dict."""
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers import linear
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.runtime_context import get_parallel

    for name, module in model.named_modules():
        if isinstance(module, linear.RowParallelLinear):
            where = get_group_rank_size(module.tp_group)
            yield f"{name}.weight", Shard(1, 1, *where)
        elif isinstance(module, linear.ColumnParallelLinear):
            merged = isinstance(module, linear.MergedColumnParallelLinear)
            where = get_group_rank_size(module.tp_group)
            yield f"{name}.weight", Shard(0, len(module.output_sizes) if merged else 1, *where)
        elif isinstance(module, VocabParallelEmbedding):
            first = module.shard_indices.padded_org_vocab_start_index
            rank = first // module.num_embeddings_per_partition
            yield f"{name}.weight", Shard(0, 1, rank, module.tp_size)
        elif isinstance(module, FusedMoE):
            where = get_parallel().moe_tp_rank, get_parallel().moe_tp_size
            yield f"{name}.w13_weight", Shard(1, 2, *where)
            yield f"{name}.w2_weight", Shard(2, 1, *where)


def _floats(name: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """The whole parameter of this name, fp32."""
    noise = torch.randn(shape, generator=generator)
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in name and leaf == "weight":
        return 1 + 0.1 * noise
    if leaf == "ape":
        # Additive bias on the compressor's softmax scores.
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise
    if len(shape) >= 2:
        gain = next((g for key, g in _GAIN.items() if key in name), 1.0)
        return noise * (gain / math.sqrt(shape[-1]))
    # attn_sink, router bias, mHC base and scale vectors.
    return 0.3 * noise


def _fill_expert_table(table: torch.Tensor, experts: int, generator: torch.Generator) -> None:
    """Hash routing table [vocab, top_k]: for each token ``top_k`` different routed experts."""
    order = torch.rand(table.shape[0], experts, generator=generator).argsort(dim=1)
    table.copy_(order[:, : table.shape[1]].to(table.dtype))


def _routed_experts(model: torch.nn.Module) -> int:
    return model.config.n_routed_experts
