"""Seeded parameters for ``--load-format dummy``.

SGLang's dummy initialisation draws U(-1e-3, 1e-3) with one seed for every parameter and leaves
integer tables and buffers of ``torch.empty`` alone: logits are flat, two servers differ by
whatever was in memory, and every equality test passes for the wrong reason. Here each entry of
the state dict gets values of its own from a generator seeded by its name, at a scale at which
attention, compressor, indexer, router and mHC all matter to the logits.

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
    with torch.no_grad():
        for name, value in model.state_dict().items():
            seed = _draft_seed(name) if draft else name
            generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
            if draft and name in _DRAFT_PROJECTIONS:
                value.copy_(torch.eye(value.shape[0]) * _DRAFT_PROJECTIONS[name])
            elif torch.is_floating_point(value):
                _fill_float(name, value, generator)
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


def _fill_float(name: str, value: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(value.shape, generator=generator)
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in name and leaf == "weight":
        noise = 1 + 0.1 * noise
    elif leaf == "ape":
        # Additive bias on the compressor's softmax scores.
        noise = 0.5 * noise
    elif "embed_tokens" in name:
        pass
    elif value.dim() >= 2:
        gain = next((g for key, g in _GAIN.items() if key in name), 1.0)
        noise = noise * (gain / math.sqrt(value.shape[-1]))
    else:
        # attn_sink, router bias, mHC base and scale vectors.
        noise = 0.3 * noise
    value.copy_(noise.to(value.dtype))


def _fill_expert_table(table: torch.Tensor, experts: int, generator: torch.Generator) -> None:
    """Hash routing table [vocab, top_k]: for each token ``top_k`` different routed experts."""
    order = torch.rand(table.shape[0], experts, generator=generator).argsort(dim=1)
    table.copy_(order[:, : table.shape[1]].to(table.dtype))


def _routed_experts(model: torch.nn.Module) -> int:
    return model.config.n_routed_experts
