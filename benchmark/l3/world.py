"""A server's cache with storage, without a model: one prompt whose pages and records are random bytes.

Everything between the tree and the files is real (`test/srt/mem_cache/l3_fixtures.py` and
`bitexact_fixtures.py` say what is not): SGLang's pools at the model's geometry, its tree, its controller
with the IO threads, its file backend, and the feature's storage side behind its seams.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitexact_fixtures import PAGE
from l3_fixtures import make_storage
from tree_driver import TreeDriver, tokens

from gpu_lanes import RATIOS

CHUNK_PAGES = 32
"""Pages of a prefill chunk: 8,192 tokens. SGLang makes a tree node of each chunk's last page."""

POLL_SECONDS = 0.0002
"""How long the scheduler of this benchmark sleeps between two looks at its queues."""


@dataclass(frozen=True)
class Geometry:
    """Compression ratios of a model's layers, and the dimensions of a head."""

    layers: tuple[int, ...]
    nope: int
    rope: int


PRO = Geometry(tuple(RATIOS), 448, 64)
"""DeepSeek-V4-Pro: 61 layers, of which 30 have ratio 4 and 30 ratio 128."""

TINY = Geometry((4, 128, 4, 0), 12, 4)
"""For what does not depend on the bytes."""


class FillingDriver(TreeDriver):
    """A TreeDriver that captures nothing: the records are there, and of no computation."""

    def _record(self, req: Any, boundary: int, slot: int) -> None:
        pass

    def _check_hit(self, req: Any) -> None:
        pass


class World:
    """See the module's docstring.

    Args:
        directory: of the file backend.
        pages: whole pages of the prompt.
        keep: the boundaries, in pages, that get a record.
        slots: truth slots.
        geometry: of the model.
    """

    def __init__(
        self,
        directory: Path,
        pages: int,
        keep: Callable[[int], bool],
        slots: int,
        geometry: Geometry = PRO,
    ) -> None:
        self.directory = directory
        self.pages = pages
        self.prompt = tokens(pages, 20)
        self.server = make_storage(
            directory,
            slots=slots,
            ratio=2.0,
            pages=pages + 4,
            rows=4,
            context=(pages + 4) * PAGE,
            layers=geometry.layers,
            nope=geometry.nope,
            rope=geometry.rope,
        )
        self.storage = self.server.storage
        self.cache = self.server.cache
        self.driver = FillingDriver(self.server.stack, keep)
        self._fill()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.server.close()

    @property
    def controller(self) -> Any:
        """SGLang's HybridCacheController."""
        return self.cache.cache_controller

    @property
    def guard(self) -> Any:
        """SGLang's file backend, behind ours."""
        return self.controller.storage_backend

    def host_pools(self) -> list[Any]:
        """SGLang's host pools that hold bytes of pages."""
        return [self.cache.host_pool_group.get_pool(name) for name in self.storage.kv.names]

    def _fill(self) -> None:
        # Touched once, as pinned memory is: no page faults while something is measured.
        for pool in self.host_pools():
            for device, host in zip(pool.device_buffers, pool.kv_buffer, strict=True):
                device.view(torch.uint8).random_(0, 256)
                host.zero_()
        for buffer in self.storage.pools.buffers.values():
            buffer.random_(0, 256)

    def write(self) -> None:
        """The prompt is computed, chunk by chunk, and goes to host memory and to storage."""
        driver = self.driver
        req = driver.admit(self.prompt)
        while driver.computed[req] < len(self.prompt):
            driver.prefill_chunk(req, CHUNK_PAGES)
            driver.checkpoint(req)
            driver.settle()
        driver.finish(req)
        self.server.settle()

    def restore(self) -> None:
        """The prompt comes from storage.

        Raises:
            RuntimeError: less came than all of its pages.
        """
        req = self.submit(self.prompt)
        handle = req.cache_request_handle
        while True:
            self.cache.check_hicache_events()
            if self.cache.check_prefetch_progress(handle):
                break
            time.sleep(POLL_SECONDS)
        loaded = self.cache.pop_prefetch_loaded_tokens(handle)
        if loaded != self.pages * PAGE:
            raise RuntimeError(f"storage gave {loaded} tokens of {self.pages * PAGE}")

    def submit(self, prompt: array) -> Any:
        """A request arrives, and SGLang asks storage for its prompt."""
        req = self.driver.request(prompt)
        self.server.submit_prefetch(req)
        return req

    def flush(self) -> None:
        """Device and host memory are empty, as after Scheduler.flush_cache."""
        self.server.settle()
        self.cache.reset()
        self.server.stack.allocator.clear()
        self.server.stack.req_to_token.clear()

    def clear(self) -> None:
        """And so is storage.

        Raises:
            RuntimeError: it is not.
        """
        self.flush()
        if not self.cache.clear_storage_backend():
            raise RuntimeError("storage was not cleared")

    def files(self) -> list[Path]:
        """Everything that is stored."""
        return sorted(self.directory.glob("*.bin"))
