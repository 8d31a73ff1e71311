"""SGLang's real DeepSeek-V4 unified_kv pools, radix cache and HiCache controller on a CPU.

    with cpu_hicache():
        stack = make_cache(make_server_args(), pages=32, slots=64)
        stack.cache.match_prefix(...)

Real: DeepSeekV4TokenToKVPool, SWATokenToKVPoolAllocator, ReqToTokenPool, UnifiedRadixCache (or a
subclass), the stock DeepSeek-V4 host pools, HybridCacheController. Stood in for, inside
`cpu_hicache()` only and undone after it: device streams and events (`FakeDevice`: everything happens
at once), the copy kernel of the `direct` io backend (an indexed copy), pinning of host memory, and
the answer to "is this HIP" of the unified_kv gate alone. Nothing depends on the reference platform,
and nothing here replaces what it may have installed outside.

Use one `cpu_hicache()` per test module (a module-scoped autouse fixture); caches are cheap
(about 10 ms), so make one per test.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

PAGE = 256
WINDOW = 128
DEFAULT_LAYERS = (4, 128, 4, 0)


# ---- stand-ins for a device


class FakeEvent:
    """An event of a device that finishes everything at once."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_args: Any) -> None:
        pass

    def wait(self, *_args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


class FakeStream:
    """A stream of a device that finishes everything at once."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_event(self, *_args: Any) -> None:
        pass

    def wait_stream(self, *_args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeDevice:
    """What `get_device_module()` returns on a device, as far as HiCache uses it."""

    Event = FakeEvent
    Stream = FakeStream

    @staticmethod
    @contextlib.contextmanager
    def stream(_stream: Any) -> Iterator[None]:
        yield

    @staticmethod
    def current_stream() -> FakeStream:
        return FakeStream()

    @staticmethod
    def synchronize() -> None:
        pass


class DeferredEvent(FakeEvent):
    """An event whose work runs when somebody asks whether, or waits until, it is done."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def query(self) -> bool:
        self.synchronize()
        return True

    def wait(self, *_args: Any) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


def defer_device_to_host(cache: Any) -> None:
    """Let the cache's backups copy their bytes only when their completion is polled.

    Until then the host rows hold what was there before: what a real asynchronous copy looks like to
    code that reads too early.
    """
    engine = cache.cache_controller.l2_transfer_engine
    submit = engine.submit_device_to_host

    def deferred(transfers: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.mem_cache.l2_transfer import TransferCompletion

        kept = list(transfers)
        finish = DeferredEvent(lambda: submit(kept, *args, **kwargs))
        return TransferCompletion(FakeEvent(), finish, False)

    engine.submit_device_to_host = deferred


def _copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Stands for `transfer_kv_direct`: rows by index, one source and destination a layer."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


@contextlib.contextmanager
def cpu_hicache() -> Iterator[None]:
    """Everything that lets HiCache of the unified_kv path run on a CPU; undone on exit."""
    import sglang.srt.layers.attention.dsv4.unified_kv_gate as gate
    import sglang.srt.managers.cache_controller as controller
    import sglang.srt.mem_cache.host_memory as host_memory
    import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler
    import sglang.srt.mem_cache.l2_transfer as l2_transfer
    import sglang.srt.mem_cache.memory_pool_host as memory_pool_host
    import sglang.srt.mem_cache.pool_host.base as pool_host_base

    def patch(target: Any, name: str, value: Any) -> Any:
        # Some kernels are not even names on a CPU.
        return mock.patch.object(target, name, value, create=True)

    def budget(*_args: Any, **_kwargs: Any) -> int:
        return 1 << 34

    host_pool = functools.partial(assembler.DeepSeekV4PagedHostPool, pin_memory=False)
    with contextlib.ExitStack() as stack:
        env = {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}
        stack.enter_context(mock.patch.dict(os.environ, env))
        for target, name, value in (
            (gate, "is_hip", lambda: True),
            (controller, "device_module", FakeDevice),
            (l2_transfer, "device_module", FakeDevice),
            (l2_transfer, "_timing_events_supported", lambda: False),
            (memory_pool_host, "transfer_kv_direct", _copy_rows),
            (memory_pool_host, "make_kernel_ptr_table", lambda *_a, **_k: None),
            (memory_pool_host, "host_memory_budget_bytes", budget),
            (pool_host_base, "host_memory_budget_bytes", budget),
            (host_memory, "_cuda_host_register", lambda *_a, **_k: None),
            (host_memory, "_cuda_host_unregister", lambda *_a, **_k: None),
            (assembler, "DeepSeekV4PagedHostPool", host_pool),
        ):
            stack.enter_context(patch(target, name, value))
        for cached in (gate.is_unified_kv_triton, gate.is_unified_kv_fp8):
            stack.callback(cached.cache_clear)
            cached.cache_clear()
        yield


# ---- the stack


def make_server_args(*, publish: bool = True, **overrides: Any) -> Any:
    """ServerArgs for the fixture, published as a scheduler's configuration unless told not to.

    SGLang's pools and caches read the published one, so publish the one that you build with last.
    """
    from sglang.srt.runtime_context import SpawnRanks
    from sglang.srt.runtime_context import publish as publish_config
    from sglang.srt.server_args import ServerArgs

    fields: dict[str, Any] = {
        "model_path": "dummy",
        "device": "cpu",
        "page_size": PAGE,
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_write_policy": "write_through",
        "hicache_ratio": 2.0,
    }
    server_args = ServerArgs(**{**fields, **overrides})
    if publish:
        ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        publish_config(server_args, role="scheduler", ranks=ranks)
    return server_args


def make_kv_pool(
    *,
    pages: int,
    rows: int,
    layers: Sequence[int] = DEFAULT_LAYERS,
    nope: int = 12,
    rope: int = 4,
    fp8: bool = False,
) -> Any:
    """A DeepSeekV4TokenToKVPool with the unified_kv layout on the CPU, bf16 or with fp8 rows.

    Args:
        pages: device pages of compressed KV (256 tokens each).
        rows: request rows besides the padding row 0.
        layers: compression ratio of each layer (0, 4 or 128).
        nope, rope: head dimensions; the model's are 448 and 64.
    """
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    return DeepSeekV4TokenToKVPool(
        max_num_reqs=rows,
        swa_size=0,
        c4_size=0,
        c128_size=pages * 2,
        c4_state_pool_size=0,
        c128_state_pool_size=0,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.bfloat16,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        indexer_head_dim=128,
        layer_num=len(layers),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=list(layers),
        sliding_window=WINDOW,
        start_layer=0,
        end_layer=len(layers),
        num_req_slots=rows + 1,
        unified_fp8=fp8,
    )


@dataclass
class CpuStack:
    """What `make_cache` built. `pages` names the KV bytes of a page on either tier."""

    cache: Any
    kv_pool: Any
    allocator: Any
    req_to_token: Any
    params: Any
    server_args: Any
    pages: PageBytes

    def device_pages_free(self) -> int:
        """Free pages of the device pool."""
        return self.allocator.full_attn_allocator.available_size() // PAGE

    @property
    def host_pool(self) -> Any:
        """The stock host pool that allocates (the logical anchor)."""
        return self.cache.cache_controller.mem_pool_host

    def settle(self) -> None:
        """Let queued backups and loads finish and be acknowledged, as scheduler steps do."""
        self.cache.flush_pending_backups()
        self.cache.writing_check()
        self.cache.loading_check()


class PageBytes:
    """Stamps and reads KV pages in every compressed buffer of both tiers.

    A stamp is one integer per page, written as the first 8 bytes of the page in each layer's C4,
    C4-indexer and C128 buffer, different in each; reading checks that all of them agree.
    """

    def __init__(self, host_pool_group: Any) -> None:
        self._device: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        for entry in host_pool_group.entry_map.values():
            buffers = getattr(entry.host_pool, "device_buffers", None)
            if buffers is None:
                continue  # the logical anchor has no bytes
            for device, host in zip(buffers, entry.host_pool.kv_buffer, strict=True):
                self._device.append(_first_word(device))
                self._host.append(_first_word(host))
        if not self._device:
            raise ValueError("the host pools mirror no device buffer")

    def stamp_device(self, pages: Sequence[int], stamps: Sequence[int]) -> None:
        """Write device pages."""
        self._write(self._device, pages, stamps)

    def stamp_host(self, pages: Sequence[int], stamps: Sequence[int]) -> None:
        """Write host pages."""
        self._write(self._host, pages, stamps)

    def read_device(self, pages: Sequence[int]) -> list[int]:
        """Stamps of device pages; -1 for a page whose buffers hold different ones."""
        return self._read(self._device, pages)

    def read_host(self, pages: Sequence[int]) -> list[int]:
        """Stamps of host pages; -1 for a page whose buffers hold different ones."""
        return self._read(self._host, pages)

    @staticmethod
    def _write(buffers: list[torch.Tensor], pages: Sequence[int], stamps: Sequence[int]) -> None:
        index = torch.tensor(pages, dtype=torch.int64)
        values = torch.tensor(stamps, dtype=torch.int64)
        for number, buffer in enumerate(buffers):
            buffer[index] = values * len(buffers) + number

    @staticmethod
    def _read(buffers: list[torch.Tensor], pages: Sequence[int]) -> list[int]:
        if not len(pages):
            return []
        index = torch.tensor(pages, dtype=torch.int64)
        rows = torch.stack([buffer[index] for buffer in buffers])
        stamps = (rows - torch.arange(len(buffers)).unsqueeze(1)).div(
            len(buffers), rounding_mode="floor"
        )
        agreed = (rows == stamps[0] * len(buffers) + torch.arange(len(buffers)).unsqueeze(1)).all(0)
        return torch.where(agreed, stamps[0], -1).tolist()


def _first_word(buffer: torch.Tensor) -> torch.Tensor:
    """int64 view ``[pages]`` of the first 8 bytes of each page of a ``[pages, ...]`` buffer."""
    return buffer.view(torch.uint8).flatten(1)[:, :8].view(torch.int64).squeeze(1)


def make_cache(
    server_args: Any,
    *,
    pages: int = 32,
    slots: int = 64,
    rows: int = 12,
    context: int = 8192,
    layers: Sequence[int] = DEFAULT_LAYERS,
    nope: int = 12,
    rope: int = 4,
    cls: type | None = None,
    hicache: bool = True,
    is_eagle: bool = False,
) -> CpuStack:
    """Build pools, tree and controller.

    Args:
        server_args: from `make_server_args`; the host pool gets `hicache_ratio` times `pages`.
        pages: device pages of compressed KV.
        slots: truth slots of the attached TruthStore (ignored for a stock `cls`).
        rows: request rows; context: tokens a row can hold.
        layers, nope, rope: model geometry, see `make_kv_pool`.
        cls: cache class, BxCache by default; the stock class gets no store.
        hicache: whether to build the host tier.
        is_eagle: whether keys are bigrams, as with EAGLE.
    """
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from sglang_bitexact_hicache.tree import BxCache
    from sglang_bitexact_hicache.truth import TruthStore

    req_to_token = ReqToTokenPool(
        size=rows, max_context_len=context, device="cpu", enable_memory_saver=False
    )
    kv_pool = make_kv_pool(pages=pages, rows=rows, layers=layers, nope=nope, rope=rope)
    allocator = SWATokenToKVPoolAllocator(
        size=pages * PAGE,
        size_swa=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=kv_pool,
        need_sort=False,
        req_to_token_pool=req_to_token,
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=req_to_token,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
        sliding_window_size=WINDOW,
        swa_gates_prefix_match=False,
        is_eagle=is_eagle,
    )
    cache = (cls or BxCache)(params)
    if isinstance(cache, BxCache):
        cache.attach_truth(TruthStore(slots))
    page_bytes = None
    if hicache:
        cache.init_hicache(server_args, params)
        page_bytes = PageBytes(cache.host_pool_group)
    return CpuStack(
        cache=cache,
        kv_pool=kv_pool,
        allocator=allocator,
        req_to_token=req_to_token,
        params=params,
        server_args=server_args,
        pages=page_bytes,
    )
