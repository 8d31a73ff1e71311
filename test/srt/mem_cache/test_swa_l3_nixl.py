"""NIXL storage (L3), with the real nixl package: its POSIX plugin, SGLang's host pools and ours.

Nothing is skipped where the package is missing: `make env` installs it, so the tests fail without it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bitexact_fixtures import PAGE, cpu_hicache, make_cache, make_server_args
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.layout import C4_POOL, INDEXER_POOL, POOLS, WINDOW_POOL
from sglang_bitexact_hicache.storage_backends import register_backends
from sglang_bitexact_hicache.storage_names import StorageNames
from sglang_bitexact_hicache.storage_pool import Landing, TruthPagePool
from sglang_bitexact_hicache.truth import TruthStore

LAYOUTS = ("layer_first", "page_first_direct")
SLOTS = 8
NAMES = StorageNames.of({"test": "nixl"}).pools
WINDOW, C4_STATE, INDEXER_STATE = NAMES[WINDOW_POOL], NAMES[C4_POOL], NAMES[INDEXER_POOL]
KV_POOLS = (
    PoolName.DEEPSEEK_V4_C4,
    PoolName.DEEPSEEK_V4_C4_INDEXER,
    PoolName.DEEPSEEK_V4_C128,
)
CONFIG = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=True,
    enable_storage_metrics=False,
    is_page_first_layout=False,
    model_name="org/model",
    # The cleaner would look at how full this machine's disk is.
    extra_config={"l3_cleaner_enabled": False},
)


@dataclass
class Pools:
    """The host pools of one server."""

    anchor: Any
    by_name: dict[Any, Any]

    def rows(self, name: PoolName, pages: Sequence[int]) -> torch.Tensor:
        """Host indices of pages (slots, of a truth pool)."""
        size = self.by_name[name].page_size
        return (torch.tensor(pages).view(-1, 1) * size + torch.arange(size)).flatten()

    def bytes_of(self, name: PoolName, page: int) -> bytes:
        """What the pool holds of a page, in the order of layers."""
        pool = self.by_name[name]
        return pool.get_data_page(page * pool.page_size, flat=True).numpy().tobytes()

    def fill(self) -> None:
        """Random bytes everywhere."""
        for pool in self.by_name.values():
            for buffer in pool.get_hybrid_pool_buffer():
                buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))


@pytest.fixture(scope="module", params=LAYOUTS)
def pools(request) -> Iterator[Pools]:
    with cpu_hicache():
        server_args = make_server_args(hicache_mem_layout=request.param)
        stack = make_cache(server_args, pages=SLOTS, cls=UnifiedRadixCache, hicache=False)
        stack.cache.init_hicache(server_args, stack.params)
        group = stack.cache.host_pool_group
        kv = {name: entry.host_pool for name, entry in group.entry_map.items()}
        anchor = kv.pop(PoolName.KV)
        assert set(kv) == set(KV_POOLS)
        records = TruthHostPools(DeviceView(stack.kv_pool).layout, SLOTS, pin=False)
        store, landing = TruthStore(SLOTS), Landing()
        truth = {NAMES[pool]: TruthPagePool(pool, records, store, landing) for pool in POOLS}
        result = Pools(anchor, {**kv, **truth})
        result.fill()
        yield result


def stock_class() -> type:
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    return HiCacheNixl


def our_class() -> type:
    from sglang_bitexact_hicache.storage_nixl import BxHiCacheNixl

    return BxHiCacheNixl


def attach(cls: type, pools: Pools, path: Path, **extra: Any) -> Any:
    """A backend with every pool registered as HybridCacheController.attach_storage_backend does."""
    config = dataclasses.replace(CONFIG, extra_config={**CONFIG.extra_config, **extra})
    backend = cls(config, str(path))
    backend.register_mem_pool_host(pools.anchor)
    backend.register_mem_host_pool_v2(pools.anchor, PoolName.KV)
    for name, pool in pools.by_name.items():
        backend.register_mem_host_pool_v2(pool, name)
    return backend


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SGLANG_HICACHE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", "POSIX")


@pytest.fixture
def nixl(pools, tmp_path) -> Any:
    backend = attach(our_class(), pools, tmp_path)
    yield backend
    backend.close()


def put(
    backend: Any, pools: Pools, name: PoolName, keys: Sequence[str], pages: Sequence[int]
) -> list[bool]:
    """Write pages of a pool under keys; which of them storage took."""
    transfer = PoolTransfer(name, host_indices=pools.rows(name, pages), keys=list(keys))
    return backend.batch_set_v2([transfer])[name]


def get(
    backend: Any, pools: Pools, name: PoolName, keys: Sequence[str], pages: Sequence[int]
) -> list[bool]:
    """Read keys into pages of a pool; which of them came."""
    transfer = PoolTransfer(name, host_indices=pools.rows(name, pages), keys=list(keys))
    return backend.batch_get_v2([transfer])[name]


def put_markers(backend: Any, keys: Sequence[str]) -> None:
    """What SGLang's backup writes for the KV anchor, which has no bytes."""
    if isinstance(backend, HiCacheFile):
        assert backend.batch_set(keys, [torch.empty(0, dtype=torch.uint8)] * len(keys))
    else:
        indices = torch.arange(len(keys) * PAGE)
        assert backend.batch_set_v1(list(keys), indices) == [True] * len(keys)


def query(name: PoolName, trailing: int = 0) -> PoolTransfer:
    """A pool of a hit query; with `trailing`, that many of the last pages are needed."""
    if not trailing:
        return PoolTransfer(name)
    return PoolTransfer(
        name, keys=["__placeholder__"] * trailing, hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


QUERY = (*(query(name) for name in KV_POOLS), *(query(name, 1) for name in NAMES.values()))


def file_of(backend: Any, name: PoolName, key: str) -> str:
    """Path of the first object of a page."""
    count = len(backend._object_bytes[name])
    return backend.file_manager.get_file_path(
        backend._get_hybrid_component_keys([key], name, count)[0]
    )


# ---- bytes


def test_the_package_is_real(nixl):
    assert nixl.backend_selector.backend_name == "POSIX"
    assert nixl.registry.path_mode
    assert type(nixl.agent).__module__.startswith("nixl")


def test_kv_and_truth_come_back_as_they_went(nixl, pools):
    keys = ["k0", "k1", "k2"]
    put_markers(nixl, keys)
    for name in pools.by_name:
        assert put(nixl, pools, name, keys, [0, 1, 2]) == [True] * 3
        wanted = [pools.bytes_of(name, page) for page in range(3)]
        for page in (4, 5, 6):
            assert pools.bytes_of(name, page) not in wanted
        assert get(nixl, pools, name, ["k2", "k0", "k1"], [4, 5, 6]) == [True] * 3
        assert [pools.bytes_of(name, page) for page in (5, 6, 4)] == wanted
    assert nixl.batch_get_v1(keys, torch.arange(3 * PAGE)) == [True] * 3
    found = nixl.batch_exists_v2([*keys, "k3"], list(QUERY))
    assert found.kv_hit_pages == 3 and found.restorable_prefix_pages == [1, 2, 3]
    pools.fill()


def test_another_server_finds_them(nixl, pools, tmp_path):
    put_markers(nixl, ["k0"])
    for name in pools.by_name:
        assert put(nixl, pools, name, ["k0"], [0]) == [True]
    other = attach(our_class(), pools, tmp_path)
    assert other.batch_exists_v2(["k0"], list(QUERY)).kv_hit_pages == 1
    for name in pools.by_name:
        assert get(other, pools, name, ["k0"], [7]) == [True]
        assert pools.bytes_of(name, 7) == pools.bytes_of(name, 0)
    other.close()
    pools.fill()


# ---- which prefixes can be restored

KEY_NUMBERS = itertools.count()


@dataclass
class Presence:
    """What storage holds of a few pages: the KV markers, and each pool's pages."""

    markers: list[bool]
    pages: dict[PoolName, list[bool]]
    query: list[PoolTransfer]

    def store(self, backend: Any, pools: Pools, keys: Sequence[str]) -> None:
        put_markers(backend, [key for key, there in zip(keys, self.markers, strict=True) if there])
        for name, present in self.pages.items():
            pages = [i for i, there in enumerate(present) if there]
            if pages:
                taken = put(backend, pools, name, [keys[i] for i in pages], pages)
                assert taken == [True] * len(pages)

    def restorable(self) -> list[int]:
        """By the definition."""
        result = []
        for end in range(1, len(self.markers) + 1):
            needed = [self.markers[:end]]
            for transfer in self.query:
                whole = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
                first = 0 if whole else max(0, end - len(transfer.keys))
                needed.append(self.pages[transfer.name][first:end])
            if all(map(all, needed)):
                result.append(end)
        return result


MOSTLY = st.sampled_from([True] * 5 + [False])


@st.composite
def presences(draw: st.DrawFn) -> Presence:
    count = draw(st.integers(1, 6))
    pages, asked = {}, []
    for name in (*KV_POOLS, *NAMES.values()):
        truth = name in NAMES.values()
        there = st.booleans() if truth else MOSTLY
        pages[name] = draw(st.lists(there, min_size=count, max_size=count))
        asked.append(query(name, draw(st.sampled_from([1, 1, 1, 2])) if truth else 0))
    markers = draw(st.lists(MOSTLY, min_size=count, max_size=count))
    return Presence(markers, pages, draw(st.permutations(asked)))


@given(presence=presences())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_restorable_prefixes_are_those_of_the_definition_and_of_the_file_backend(
    nixl, pools, tmp_path, presence
):
    keys = [f"{next(KEY_NUMBERS)}-{i}" for i in range(len(presence.markers))]
    files = attach(HiCacheFile, pools, tmp_path / "files")
    for backend in (nixl, files):
        presence.store(backend, pools, keys)
    found = nixl.batch_exists_v2(keys, presence.query)
    assert found.restorable_prefix_pages == presence.restorable()
    assert found.kv_hit_pages == max(presence.restorable(), default=0)
    assert found == files.batch_exists_v2(keys, presence.query)


def test_without_extra_pools_the_markers_decide(nixl):
    put_markers(nixl, ["k0", "k1", "k3"])
    found = nixl.batch_exists_v2(["k0", "k1", "k2", "k3"])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    assert nixl.batch_exists_v2([]).restorable_prefix_pages == []


def test_a_pool_that_was_not_registered_has_nothing(nixl):
    put_markers(nixl, ["k0"])
    found = nixl.batch_exists_v2(["k0"], [query(PoolName.SWA, 1)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])


def test_an_unknown_policy_is_refused(nixl):
    put_markers(nixl, ["k0"])
    with pytest.raises(ValueError, match="Unsupported pool hit policy"):
        nixl.batch_exists_v2(["k0"], [PoolTransfer(WINDOW, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])


FOUR_PAGES = Presence(
    markers=[True] * 4,
    pages={
        **{name: [True] * 4 for name in KV_POOLS},
        WINDOW: [False, True, False, True],
        C4_STATE: [False, True, True, False],
        INDEXER_STATE: [True] * 4,
    },
    query=list(QUERY),
)


@pytest.mark.parametrize("pools", ["page_first_direct"], indirect=True)
def test_stock_answers_with_a_boundary_that_no_pool_agreed_to(nixl, pools, tmp_path):
    FOUR_PAGES.store(nixl, pools, keys := ["k0", "k1", "k2", "k3"])
    assert nixl.batch_exists_v2(keys, FOUR_PAGES.query).restorable_prefix_pages == [2]
    stock = attach(stock_class(), pools, tmp_path, use_direct_io=False)
    # The window ends at 2 and 4, the C4 state at 2 and 3: 3 is the minimum of their maxima.
    assert stock.batch_exists_v2(keys, FOUR_PAGES.query).kv_hit_pages == 3
    assert get(stock, pools, WINDOW, ["k2"], [7]) == [False]
    stock.close()


@pytest.mark.parametrize("pools", ["layer_first"], indirect=True)
def test_stock_does_not_find_its_own_layer_first_pages(pools, tmp_path):
    stock = attach(stock_class(), pools, tmp_path, use_direct_io=False)
    FOUR_PAGES.store(stock, pools, keys := ["k0", "k1", "k2", "k3"])
    assert stock.batch_exists_v2(keys, [query(name) for name in KV_POOLS]).kv_hit_pages == 0
    ours = attach(our_class(), pools, tmp_path)
    assert ours.batch_exists_v2(keys, FOUR_PAGES.query).restorable_prefix_pages == [2]
    stock.close()
    ours.close()


# ---- objects that are there, whole or not


def test_the_first_writer_wins(nixl, pools):
    for name in pools.by_name:
        assert put(nixl, pools, name, ["k0"], [0]) == [True]
        # One page is there, one is not, in one transfer.
        assert put(nixl, pools, name, ["k0", "k1"], [1, 2]) == [True, True]
        assert get(nixl, pools, name, ["k0", "k1"], [6, 7]) == [True, True]
        assert pools.bytes_of(name, 6) == pools.bytes_of(name, 0)
        assert pools.bytes_of(name, 7) == pools.bytes_of(name, 2)
    pools.fill()


def test_stock_writes_over_what_is_there(pools, tmp_path):
    stock = attach(stock_class(), pools, tmp_path, use_direct_io=False)
    put(stock, pools, WINDOW, ["k0"], [0])
    put(stock, pools, WINDOW, ["k0"], [1])
    assert get(stock, pools, WINDOW, ["k0"], [6]) == [True]
    assert pools.bytes_of(WINDOW, 6) == pools.bytes_of(WINDOW, 1)
    stock.close()
    pools.fill()


@pytest.mark.parametrize("left", ["nothing", "half", "all but a byte"])
def test_a_short_object_is_no_hit_no_read_and_is_written_again(nixl, pools, left):
    for name in pools.by_name:
        keys = [f"{name}-{i}" for i in range(2)]
        put_markers(nixl, keys)
        assert put(nixl, pools, name, keys, [0, 1]) == [True, True]
        path = file_of(nixl, name, keys[1])
        size = os.path.getsize(path)
        os.truncate(path, {"nothing": 0, "half": size // 2, "all but a byte": size - 1}[left])
        assert nixl.batch_exists_v2(keys, [query(name)]).restorable_prefix_pages == [1]
        assert get(nixl, pools, name, keys[1:], [7]) == [False]
        assert put(nixl, pools, name, keys, [2, 3]) == [True, True]
        assert get(nixl, pools, name, keys, [6, 7]) == [True, True]
        assert pools.bytes_of(name, 6) == pools.bytes_of(name, 0)
        assert pools.bytes_of(name, 7) == pools.bytes_of(name, 3)
    pools.fill()


def test_a_marker_without_bytes_is_no_hit(nixl):
    put_markers(nixl, ["k0", "k1"])
    os.truncate(nixl.file_manager.get_file_path(nixl._get_suffixed_key("k1")), 0)
    assert nixl.batch_exists_v2(["k0", "k1"]).kv_hit_pages == 1
    assert nixl.exists("k0") and not nixl.exists("k1")


def test_an_object_that_vanished_is_not_read_nor_is_its_neighbour(nixl, pools):
    assert put(nixl, pools, C4_STATE, ["k0", "k1"], [0, 1]) == [True, True]
    before = pools.bytes_of(C4_STATE, 6)
    os.remove(file_of(nixl, C4_STATE, "k1"))
    assert get(nixl, pools, C4_STATE, ["k0", "k1"], [6, 7]) == [False, False]
    assert pools.bytes_of(C4_STATE, 6) == before
    assert get(nixl, pools, C4_STATE, ["k0"], [6]) == [True]
    pools.fill()


def test_a_failed_write_leaves_nothing_that_is_found(nixl, pools):
    keys = ["k0", "k1"]
    put_markers(nixl, keys)
    blocked = file_of(nixl, WINDOW, "k1")
    os.mkdir(blocked)
    assert put(nixl, pools, WINDOW, keys, [0, 1]) == [False, False]
    # NIXL opens the files in turn: the first one is there, empty.
    assert os.path.getsize(file_of(nixl, WINDOW, "k0")) == 0
    assert nixl.batch_exists_v2(keys, [query(WINDOW, 1)]).restorable_prefix_pages == []
    os.rmdir(blocked)
    assert put(nixl, pools, WINDOW, keys, [0, 1]) == [True, True]
    assert nixl.batch_exists_v2(keys, [query(WINDOW, 1)]).restorable_prefix_pages == [1, 2]


def test_indices_that_do_not_fit_the_keys_are_not_written(nixl, pools):
    put(nixl, pools, WINDOW, ["k1"], [1])
    for indices in (None, torch.arange(5), torch.arange(6)):
        transfer = PoolTransfer(WINDOW, host_indices=indices, keys=["k0", "k1", "k2"])
        assert nixl.batch_set_v2([transfer]) == {WINDOW: [False, True, False]}
    assert nixl.pages_exist(WINDOW, ["k0", "k1", "k2"]) == [False, True, False]


def test_the_cleaner_takes_a_page_with_its_records(nixl, pools):
    """SGLang deletes whole groups of objects; their names must tell it that these are one."""
    from sglang.srt.mem_cache.storage.nixl.nixl_cleaner import _parse_group_key

    put_markers(nixl, ["k0"])
    for name in pools.by_name:
        put(nixl, pools, name, ["k0"], [0])
    names = [f for _, _, files in os.walk(nixl.file_manager.base_dirs[0]) for f in files]
    assert len(names) == 1 + sum(map(len, nixl._object_bytes.values()))
    assert {_parse_group_key(name) for name in names} == {nixl._get_suffixed_key("k0")}


# ---- threads


def test_backup_and_prefetch_at_once(nixl, pools):
    """Writing and reading back on one thread, reading on another: each gets its own bytes."""
    for name in pools.by_name:
        put(nixl, pools, name, ["a", "b"], [0, 1])
    failures: list[BaseException] = []

    def backup() -> None:
        try:
            for i in range(40):
                for name in pools.by_name:
                    assert put(nixl, pools, name, [f"w{i}"], [2]) == [True]
                    assert get(nixl, pools, name, [f"w{i}"], [3]) == [True]
                    assert pools.bytes_of(name, 3) == pools.bytes_of(name, 2)
                    # The other thread's transfers do not see this one's failures.
                    assert get(nixl, pools, name, ["missing"], [3]) == [False]
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=backup)
    thread.start()
    rounds = 0
    while thread.is_alive() or not rounds:
        for name in pools.by_name:
            assert get(nixl, pools, name, ["a", "b"], [5, 4]) == [True, True]
            assert pools.bytes_of(name, 5) == pools.bytes_of(name, 0)
            assert pools.bytes_of(name, 4) == pools.bytes_of(name, 1)
        assert nixl.pages_exist(WINDOW, ["a", "missing"]) == [True, False]
        rounds += 1
    thread.join()
    assert not failures
    pools.fill()


# ---- how it is made


@pytest.mark.parametrize("asked", ["default", "config", "environment"])
def test_io_is_buffered_and_nothing_is_copied(pools, tmp_path, monkeypatch, caplog, asked):
    if asked == "environment":
        monkeypatch.setenv("SGLANG_HICACHE_NIXL_USE_DIRECT_IO", "1")
    extra = {"use_direct_io": True} if asked == "config" else {}
    with caplog.at_level(logging.WARNING):
        backend = attach(our_class(), pools, tmp_path, **extra)
    assert ("O_DIRECT was asked for" in caplog.text) == (asked != "default")
    assert not backend.file_manager.use_direct_io
    assert all(ctx.is_zero_copy for ctx in backend._hybrid_pool_ctx.values())
    backend.close()


@pytest.mark.parametrize("pools", ["page_first_direct"], indirect=True)
def test_pages_that_no_disk_block_fits(pools):
    """Why it is buffered: what O_DIRECT moves must be a multiple of the disk's blocks, and where it is
    not, stock leaves empty objects that it finds later."""
    indexer = pools.by_name[PoolName.DEEPSEEK_V4_C4_INDEXER]
    assert indexer.item_bytes == 8448 and indexer.item_bytes % 512 != 0
    assert not indexer.is_stride_page_aligned(4096)


def test_the_factory_makes_ours(pools, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(StorageBackendFactory, "_registry", {**StorageBackendFactory._registry})
    with caplog.at_level(logging.WARNING):
        register_backends()
        register_backends()
    assert "overwriting" not in caplog.text
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path))
    backend = StorageBackendFactory.create_backend("nixl", CONFIG, pools.anchor)
    assert type(backend) is our_class()
    backend.close()
    with caplog.at_level(logging.WARNING):
        StorageBackendFactory.register_backend("nixl", "elsewhere", "Other")
    assert "overwriting" in caplog.text


def test_registering_does_not_import_nixl_and_stocks_message_gets_through(monkeypatch):
    monkeypatch.setattr(StorageBackendFactory, "_registry", {**StorageBackendFactory._registry})
    for module in (our_class().__module__, stock_class().__module__):
        monkeypatch.delitem(sys.modules, module)
    for module in [name for name in sys.modules if name.split(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "nixl", None)
    register_backends()
    with pytest.raises(ImportError, match="Please install NIXL"):
        StorageBackendFactory.create_backend("nixl", CONFIG, None)
