"""Seam: under which names records and KV go to storage (L3), so that nothing is read that does not fit.

A server's *identity* is a digest of everything that makes its bytes interchangeable with another
server's: the layout of the whole model's records (RecordLayout over the layers of all stages), the
model's configuration, name, revision and weight version, the dtypes, the SGLang version, the kind of
device, how sums are split over ranks (the sizes of the groups), with aligned prefill the chunk size, and
with EAGLE the draft, whose windows are in the records. Not the ring size, the number of slots, the stride
or the host layout: those differ freely.

The identity is part of

* the names of the three truth pools, which become members of SGLang's `PoolName`: its collectives over
  pools loop over that enum, so a name outside it would not be reduced across ranks;
* the model name that storage backends put into the keys of the compressed KV, so that servers without
  the feature, or with another identity, never seed pages under this one's records.

Scheduler thread, once, before the host pools are built.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_bitexact_hicache.layout import POOLS, RecordLayout

FORMAT = "bx1"
"""Version of everything that storage holds; a change of record.py or kv_chain.py needs another."""

IDENTITY_BYTES = 16

SHORT_BYTES = 8
"""Of the identity in names."""

HASH_DIGITS = 64
"""Of SGLang's key of a page."""

LONGEST_NAME = 255
"""Bytes of a file's name that every file system takes."""


@dataclass(frozen=True)
class StorageNames:
    """The names of one identity.

    Attributes:
        identity: 16 bytes, also kept in each record's header.
        pools: pool of the layout -> member of SGLang's PoolName.
    """

    identity: bytes
    pools: Mapping[str, Any]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> StorageNames:
        """Names for an identity made of these facts (JSON values)."""
        text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, default=str)
        identity = hashlib.blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()
        short = identity[:SHORT_BYTES].hex()
        members = extend_pool_names([f"{FORMAT}_{pool}_{short}" for pool in POOLS])
        return cls(identity, dict(zip(POOLS, members, strict=True)))

    def tagged(self, model_name: str | None) -> str:
        """The model name under which storage keys the compressed KV."""
        tag = f"{FORMAT}-{self.identity[:SHORT_BYTES].hex()}"
        return f"{model_name}-{tag}" if model_name else tag


def name_excess(model_name: str | None, ranks: int = 1) -> int:
    """By how many bytes the names of stored objects would be too long for a file system (0 or less: they
    fit). SGLang joins the page's hash, the pool's name, the model's name and, where several `ranks` hold
    the same KV, the rank, and would fail to write each page."""
    short = 2 * SHORT_BYTES
    pool = max(len(f"{FORMAT}_{pool}_") for pool in POOLS) + short
    model = len((model_name or "").encode()) + len(f"-{FORMAT}-") + short
    rank = len(f"_{ranks - 1}_{ranks}") if ranks > 1 else 0
    return HASH_DIGITS + pool + model + rank + len("._.bin") - LONGEST_NAME


def facts_of(server_args: Any, kvcache: Any, layout: RecordLayout, unit: int) -> dict[str, Any]:
    """What this server's bytes depend on; see the module's docstring.

    Args:
        server_args: the resolved ServerArgs record.
        kvcache: the device KV pool.
        layout: of this stage; the identity takes the layers of all stages.
        unit: tokens of a chunk with aligned prefill, else 0.
    """
    import sglang
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    cfg = resolving_view(server_args)
    return {
        "layout": whole_model(layout, kvcache.compression_ratios).digest(),
        "kv": str(kvcache.dtype),
        "fp8": bool(kvcache._unified_kv_fp8),
        "model": cfg.served_model_name,
        "revision": cfg.revision,
        "weights": cfg.weight_version,
        "load_format": str(cfg.load_format),
        "config": _config_digest(model_config_of(server_args).hf_config),
        "dtype": str(model_config_of(server_args).dtype),
        "quantization": cfg.quantization,
        "sglang": sglang.__version__,
        "device": device_kind(kvcache.device),
        "tp": cfg.tp_size,
        # How else sums are split over the ranks of the group.
        "attn_dp": cfg.attn_dp_size,
        "experts": [cfg.ep_size, cfg.moe_dp_size, cfg.moe_dense_tp_size],
        "aligned": unit,
        **_draft_facts(cfg),
    }


def _draft_facts(cfg: Any) -> dict[str, Any]:
    """What a draft's rows depend on beside the target; nothing without one."""
    if cfg.speculative_algorithm is None:
        return {}
    names = ("algorithm", "draft_model_path", "draft_model_revision", "draft_model_quantization")
    facts = {name: getattr(cfg, f"speculative_{name}") for name in names}
    # SGLang puts the target's path there where the draft is part of it; where that lies is not the model.
    if facts["draft_model_path"] == cfg.model_path:
        facts["draft_model_path"] = None
    return {"draft": {name: None if v is None else str(v) for name, v in facts.items()}}


def _config_digest(hf_config: Any) -> str:
    # Where the files lie, and which library read them, is not the model.
    facts = {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def whole_model(layout: RecordLayout, ratios: Sequence[int]) -> RecordLayout:
    """A stage's layout with the layers of all stages, which is the same on each of them."""
    layers = len(ratios) + layout.draft_layers
    return RecordLayout(
        layers=tuple(range(layers)),
        ratios=(*ratios, *(0,) * layout.draft_layers),
        draft_layers=layout.draft_layers,
        window_row_bytes=layout.window_row_bytes,
        c4_row_bytes=layout.c4_row_bytes,
        indexer_row_bytes=layout.indexer_row_bytes,
        window_dtype=layout.window_dtype,
        state_dtype=layout.state_dtype,
        rope_row_bytes=layout.rope_row_bytes,
    )


def device_kind(device: Any) -> str:
    """What computes: the accelerator's name, or the device's type where it has none."""
    import torch

    kind = torch.device(device).type
    module = torch.get_device_module(kind)
    return module.get_device_name() if hasattr(module, "get_device_name") else kind


def extend_pool_names(names: Sequence[str]) -> list[Any]:
    """Members of SGLang's `PoolName` with these values, added where they are missing.

    Every rank must do this in the same order, before its first collective over pools.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return [PoolName._value2member_map_.get(name) or _add_member(PoolName, name) for name in names]


def _add_member(enum: Any, value: str) -> Any:
    # Enums are closed by their metaclass; a member is a str with these four attributes.
    name = value.upper()
    member = str.__new__(enum, value)
    member._name_ = name
    member._value_ = value
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    type.__setattr__(enum, name, member)
    return member
