"""The kinds of prefix cache that are compared with and without the plugin (regression_trees.py): SGLang's
registry, pools and allocators of other models, on a CPU. Knows nothing of the plugin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

ROWS = 6
"""Request rows of each cache; fewer than the operations would like to have."""


@dataclass(frozen=True)
class Shape:
    """One kind of prefix cache.

    Attributes:
        pools: "mha", "mla", "swa" (full and sliding-window layers), "all-swa", "mamba".
        page: tokens a page.
        core: the tree core, "rust" or "python"; None for a class that has none.
        hicache: the write policy of a host tier; None: no such tier.
        disabled: --disable-radix-cache.
        eagle: keys are bigrams.
        eviction: the eviction policy.
        legacy: RadixCache itself instead of what the registry chooses.
    """

    pools: str
    page: int
    core: str | None = "rust"
    hicache: str | None = None
    disabled: bool = False
    eagle: bool = False
    eviction: str = "lru"
    legacy: bool = False

    @property
    def name(self) -> str:
        """A name that says all of it."""
        words = [self.pools, f"page {self.page}", self.core or "no core"]
        if self.hicache:
            words.append(self.hicache)
        if self.eviction != "lru":
            words.append(self.eviction)
        words += [word for word in ("disabled", "eagle", "legacy") if getattr(self, word)]
        return ", ".join(words)

    @property
    def unit(self) -> int:
        """Tokens that lengths are counted in: a page, where that is more than a few tokens."""
        return max(self.page, 8)

    @property
    def window(self) -> int:
        """Tokens of the sliding window."""
        return 2 * self.unit - self.unit // 4


def _shapes() -> Iterator[Shape]:
    for core in ("rust", "python"):
        for page in (1, 16, 64):
            yield Shape("mha", page, core)
            yield Shape("swa", page, core)
        yield Shape("mla", 16, core)
        yield Shape("mamba", 1, core)
        yield Shape("mha", 16, core, eagle=True)
        yield Shape("mha", 16, core, eviction="lfu")
        yield Shape("mha", 16, core, disabled=True)
        yield Shape("swa", 16, core, disabled=True)
        for policy in ("write_through", "write_through_selective", "write_back"):
            yield Shape("mha", 16, core, hicache=policy)
            yield Shape("swa", 16, core, hicache=policy)
        yield Shape("mha", 64, core, hicache="write_through")
        yield Shape("mla", 16, core, hicache="write_through")
        yield Shape("swa", 64, core, hicache="write_through")
    yield Shape("all-swa", 1, None)
    for page in (1, 16):
        yield Shape("mha", page, None, legacy=True)


SHAPES = {shape.name: shape for shape in _shapes()}
QUICK = tuple(
    shape.name
    for shape in (
        Shape("mha", 1), Shape("swa", 16), Shape("mamba", 1), Shape("all-swa", 1, None),
        Shape("mha", 16, "python", hicache="write_through"), Shape("swa", 64, hicache="write_through"),
        Shape("mha", 16, disabled=True), Shape("mha", 16, None, legacy=True),
    )
)  # fmt: skip
"""Those that `make test` runs."""


@dataclass
class Stack:
    """What `build` made."""

    cache: Any
    allocator: Any
    req_to_token: Any
    pools: list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]]
    """Each KV pool, with how a row of the request is a row of it."""
    evictable: tuple[str, ...]

    def write_kv(self, rows: torch.Tensor, stamp: int, req: Any) -> None:
        """New bytes in the rows of every layer, and in the request's state."""
        for number, (buffer, own) in enumerate(self._buffers(rows)):
            buffer[own] = (
                (torch.arange(len(own)) % 13 + stamp % 97 + number)
                .to(buffer.dtype)
                .view(-1, *(1,) * (buffer.dim() - 1))
            )
        if req.kv.holds_mamba:
            self.req_to_token.mamba_pool.mamba_cache.temporal[:, req.kv.mamba_pool_idx] = stamp

    def kv_digest(self, rows: torch.Tensor) -> str:
        """Of the bytes in these rows of every layer."""
        data = b"".join(
            buffer[own].contiguous().view(torch.uint8).numpy().tobytes()
            for buffer, own in self._buffers(rows)
        )
        return digest(data)

    def _buffers(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for pool, own_rows in self.pools:
            own = own_rows(rows.to(torch.int64))
            buffers = [getattr(pool, name, ()) for name in ("k_buffer", "v_buffer", "kv_buffer")]
            for buffer in (layer for layers in buffers for layer in layers):
                yield buffer, own


def build(shape: Shape) -> Stack:
    """The cache of a shape, built by SGLang's registry as a scheduler builds it."""
    from types import SimpleNamespace

    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache

    server_args = _publish(shape)
    allocator, req_to_token, pools = _pools(shape)
    swa, mamba = shape.pools in ("swa", "all-swa"), shape.pools == "mamba"
    params = CacheInitParams(
        disable=shape.disabled,
        req_to_token_pool=req_to_token,
        token_to_kv_pool_allocator=allocator,
        page_size=shape.page,
        is_eagle=shape.eagle,
        eviction_policy=shape.eviction,
        sliding_window_size=shape.window if swa else None,
        tree_core_backend=shape.core,
        chunked_prefill_size=3 * shape.unit,
    )
    if shape.legacy:
        cache = RadixCache(params)
    else:
        cache = create_tree_cache(
            TreeCacheBuildContext(
                server_args=server_args,
                params=params,
                is_hybrid_swa=swa,
                is_hybrid_ssm=mamba,
                enable_hierarchical_cache=shape.hicache is not None,
                disable_radix_cache=shape.disabled,
                tp_worker=SimpleNamespace(
                    register_hicache_layer_transfer_counter=lambda _counter: None
                ),
                model_config=None,
                tp_size=1,
                tp_rank=0,
                tp_group=None,
                full_tokens_per_layer=0 if shape.pools == "all-swa" else None,
            )
        )
    evictable = ["num_tokens"]
    evictable += ["swa_num_tokens"] if shape.pools == "swa" else []
    evictable += ["mamba_num"] if mamba else []
    evictable += ["host"] if shape.hicache else []
    return Stack(cache, allocator, req_to_token, pools, tuple(evictable))


def _publish(shape: Shape) -> Any:
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path="dummy",
        device="cpu",
        page_size=shape.page,
        enable_hierarchical_cache=shape.hicache is not None,
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        hicache_write_policy=shape.hicache or "write_through",
        hicache_ratio=2.0,
    )
    server_args._mamba_cache_chunk_size = 8
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return server_args


def _pools(shape: Shape) -> tuple[Any, Any, list[Any]]:
    from sglang.srt.mem_cache import memory_pool, swa_memory_pool
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import (
        PureSWATokenToKVPoolAllocator,
        SWATokenToKVPoolAllocator,
    )
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    size, dtype = 24 * shape.unit, torch.bfloat16
    common: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
    pool_of: dict[str, Any] = {**common, "page_size": shape.page, "enable_memory_saver": False}
    heads = {"head_num": 1, "head_dim": 16}
    context = 16 * shape.unit
    req_to_token = None
    if shape.pools == "mamba":
        req_to_token = _mamba_rows(context)
        pool = memory_pool.HybridLinearKVPool(
            size=size,
            **pool_of,
            **heads,
            full_attention_layer_ids=[1],
            mamba_pool=req_to_token.mamba_pool,
        )
        kv_pools = [(pool.full_kv_pool, _same)]
    elif shape.pools in ("swa", "all-swa"):
        pool = swa_memory_pool.SWAKVPool(
            size=size,
            size_swa=size if shape.pools == "all-swa" else size // 2,
            **pool_of,
            **heads,
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1] if shape.pools == "swa" else [],
        )
        kv_pools = [(pool.full_kv_pool, _same)] if shape.pools == "swa" else []
    elif shape.pools == "mla":
        pool = memory_pool.MLATokenToKVPool(
            size, kv_lora_rank=24, qk_rope_head_dim=8, layer_num=2, **pool_of
        )
        kv_pools = [(pool, _same)]
    else:
        pool = memory_pool.MHATokenToKVPool(size, layer_num=2, **heads, **pool_of)
        kv_pools = [(pool, _same)]
    if req_to_token is None:
        req_to_token = memory_pool.ReqToTokenPool(
            size=ROWS, max_context_len=context, device="cpu", enable_memory_saver=False
        )
    made = {**common, "kvcache": pool, "need_sort": False}
    if shape.pools == "all-swa":
        allocator = PureSWATokenToKVPoolAllocator(size_swa=size, page_size=1, **made)
        kv_pools.append((pool.swa_kv_pool, _same))
    elif shape.pools == "swa":
        allocator = SWATokenToKVPoolAllocator(size, size // 2, shape.page, **made)
        kv_pools.append((pool.swa_kv_pool, allocator.translate_loc_from_full_to_swa))
    elif shape.page == 1:
        allocator = TokenToKVPoolAllocator(size, **made)
    else:
        allocator = PagedTokenToKVPoolAllocator(size, shape.page, **made)
    return allocator, req_to_token, kv_pools


def _mamba_rows(context: int) -> Any:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    state = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=16, n_groups=1, num_heads=2, head_dim=8, state_size=4,
        conv_kernel=4,
    )  # fmt: skip
    return HybridReqToTokenPool(
        size=ROWS,
        mamba_size=2 * ROWS + 4,
        mamba_spec_state_size=ROWS,
        max_context_len=context,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=state, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=False,
    )


def _same(rows: torch.Tensor) -> torch.Tensor:
    return rows


def digest(data: bytes | str) -> str:
    """Short enough to be read in a difference."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]
