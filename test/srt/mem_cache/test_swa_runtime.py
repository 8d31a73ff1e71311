"""TruthRuntime's life: built from a plan, closed with its cache, refused where memory is missing."""

from __future__ import annotations

import threading
from functools import partial
from unittest import mock

import bitexact_fixtures as fixtures
import pytest
import torch

from sglang_bitexact_hicache import pinned
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.layout import POOLS, WINDOW_POOL, RecordLayout
from sglang_bitexact_hicache.options import Options
from sglang_bitexact_hicache.runtime import TruthRuntime, largest_extend
from sglang_bitexact_hicache.sizing import Sizing
from sglang_bitexact_hicache.staging import DeviceStaging

LAYOUT = RecordLayout((0, 1), (0, 4), 64, 64, 64)


@pytest.fixture(scope="module", autouse=True)
def hicache():
    with fixtures.cpu_hicache():
        yield


def build(slots: int = 5, **overrides):
    server_args = fixtures.make_server_args(**{"chunked_prefill_size": 1024, **overrides})
    stack = fixtures.make_cache(server_args, slots=0)
    sizing = Sizing(grid_slots=slots, tail_slots=0, slot_bytes=1, row_limit=slots)
    options = Options(sizing=sizing, checksum=True)
    runtime = TruthRuntime.build(stack.cache, server_args, options)
    stack.cache.truth_runtime = runtime
    return stack.cache, runtime


def test_built_with_one_slot_space_for_store_and_three_pools():
    cache, runtime = build(slots=5)
    assert cache.store.capacity == 5
    assert [runtime.pools.buffers[pool].shape[0] for pool in POOLS] == [5] * 3
    # A chunk of four pages, and as many that may still leave.
    assert runtime._capture.staging.slots == 8
    cache.release_host_resources()


def test_closing_the_cache_ends_the_threads_and_lets_the_memory_go():
    before = set(threading.enumerate())
    cache, runtime = build()
    runtime._out_lane.submit([]).synchronize()
    runtime._in_lane.submit([]).synchronize()
    assert set(threading.enumerate()) > before
    cache.release_host_resources()
    assert set(threading.enumerate()) <= before
    assert runtime.pools.buffers == {}
    cache.release_host_resources()


@pytest.mark.parametrize(("chunk", "tokens"), [(1024, 1024), (-1, 16384)])
def test_the_largest_forward_is_a_chunk_or_a_whole_prefill(chunk, tokens):
    server_args = fixtures.make_server_args(
        publish=False, chunked_prefill_size=chunk, max_prefill_tokens=16384
    )
    assert largest_extend(server_args) == tokens


def test_host_memory_that_cannot_be_had_names_the_flag():
    with (
        mock.patch.object(torch, "empty", side_effect=RuntimeError("cannot register")),
        pytest.raises(ValueError, match="--hicache-swa-offload-page-stride"),
    ):
        TruthHostPools(LAYOUT, 3, pin=False)


class Registrar:
    """Stands for torch.cuda.cudart(): keeps what is registered, and may refuse."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.held: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:
        if self.refuses:
            return 2
        self.held[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0

    def cudaGetErrorString(self, _rc: int) -> str:
        return "out of memory"


def pinned_pools() -> TruthHostPools:
    allocate = partial(pinned.allocate, device=torch.device("cuda"))
    return TruthHostPools(LAYOUT, 3, allocate=allocate, release=pinned.release)


def test_pinned_memory_is_as_large_as_what_was_asked_for_and_is_let_go():
    registrar = Registrar(refuses=False)
    with mock.patch.object(torch.cuda, "cudart", return_value=registrar):
        pools = pinned_pools()
        # torch's own pinned allocator would have taken the next power of two.
        assert list(registrar.held.values()) == [3 * LAYOUT.slot_bytes] == [pools.nbytes]
        pools.close()
        assert registrar.held == {}
        pools.close()


def test_memory_that_cannot_be_registered_fails_at_startup_and_names_the_flag():
    with (
        mock.patch.object(torch.cuda, "cudart", return_value=Registrar(refuses=True)),
        pytest.raises(ValueError, match=r"out of memory.*--hicache-swa-offload-page-stride"),
    ):
        pinned_pools()


def test_a_slot_moves_in_one_piece_that_holds_every_section():
    pools = TruthHostPools(LAYOUT, 3)
    pools.memory.zero_()
    pools.device_part(1).fill_(7)
    for pool in POOLS:
        record = pools.record(pool, 1)
        for section in LAYOUT.sections(pool):
            assert (record[section.offset : section.offset + section.nbytes] == 7).all()
            start = LAYOUT.device_offset(section)
            part = pools.device_part(1)[start : start + section.nbytes]
            assert part.data_ptr() == record.data_ptr() + section.offset
    # What the host alone writes does not move, nor do its neighbours.
    assert not pools.record(WINDOW_POOL, 1)[: LAYOUT.host_header_bytes].any()
    assert not pools.memory[[0, 2]].any()


def test_device_memory_that_cannot_be_had_names_the_flag():
    with (
        mock.patch.object(torch, "zeros", side_effect=torch.OutOfMemoryError()),
        pytest.raises(ValueError, match="--mem-fraction-static"),
    ):
        DeviceStaging(LAYOUT, 3, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"storage_backend": "mooncake"}, "must be one of file, nixl"),
        ({"storage_backend": "file", "hicache_write_policy": "write_back"}, "stay write_through"),
        ({"storage_backend": "file", "served_model_name": "m" * 200}, "--served-model-name"),
        ({"storage_backend": "file"}, "built without storage"),
    ],
)
def test_storage_attached_at_run_time_is_refused_with_a_reason(options, why):
    cache, _ = build()
    accepted, said = cache.attach_storage_backend(**options)
    assert not accepted
    assert why in said
    cache.release_host_resources()
