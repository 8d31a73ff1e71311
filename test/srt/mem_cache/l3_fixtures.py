"""A cache with storage (L3) on a CPU, without a scheduler or a model: real pools, tree, controller, IO
threads, file backend, and the feature's storage side as the factory joins them.

    with storage_hooked():
        server = make_storage(directory)
        ...
        server.close()

Use it inside `bitexact_fixtures.cpu_hicache()`. Two servers on one directory may live at a time, but not
be built at a time (SGLang's PoolName is one a process, and so is `storage_hooks.activate`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from attachment import hooks_undone
from bitexact_fixtures import PAGE, CpuStack, make_cache, make_server_args

FACTS: Mapping[str, Any] = {"model": "tiny", "weights": "default"}


class NoCopies:
    """Stands where runtime.TruthRuntime stands, for storage: the records, no copy in flight."""

    def __init__(self, pools: Any) -> None:
        self.pools = pools

    def slot_events(self, slot: int) -> tuple:
        return ()

    def slot_landed(self, slot: int) -> None:
        pass

    def forget(self, req: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def storage_hooked() -> Iterator[None]:
    """The feature's hooks are in place in this process."""
    from sglang_bitexact_hicache import attach, storage_hooks
    from sglang_bitexact_hicache.seam import When

    with hooks_undone():
        attach.install(When.ENGAGED)
        try:
            yield
        finally:
            storage_hooks.activate(None)


@dataclass
class Server:
    """What `make_storage` built."""

    stack: CpuStack
    storage: Any
    directory: Path

    @property
    def cache(self) -> Any:
        """The BxCache."""
        return self.stack.cache

    def settle(self, seconds: float = 30.0) -> None:
        """Let every copy, backup and prefetch come to its end, as scheduler steps do."""
        cache = self.cache
        self.wait(
            lambda: (
                not (cache.ongoing_backup or cache.ongoing_write_through or cache.ongoing_prefetch)
            ),
            seconds,
        )

    def wait(self, done: Callable[[], bool], seconds: float = 30.0) -> None:
        """Scheduler steps until it is done."""
        deadline = time.monotonic() + seconds
        while True:
            self.cache.check_hicache_events()
            if done():
                return
            if time.monotonic() > deadline:
                raise TimeoutError("storage did not come to its end")
            time.sleep(0.001)

    def submit_prefetch(self, req: Any) -> bool:
        """What the scheduler does when a request arrives; whether a prefetch is under way."""
        from types import SimpleNamespace

        from sglang.srt.managers.scheduler import Scheduler

        scheduler = SimpleNamespace(
            enable_hicache_storage=True, enable_lmcache=False, tree_cache=self.cache
        )
        Scheduler._prefetch_kvcache(scheduler, req)
        return req.cache_request_handle in self.cache.ongoing_prefetch

    def finish_prefetch(self, req: Any, seconds: float = 30.0) -> int:
        """Scheduler steps until the request's prefetch is over; the tokens that storage gave."""
        handle = req.cache_request_handle
        self.wait(lambda: self.cache.check_prefetch_progress(handle), seconds)
        return self.cache.pop_prefetch_loaded_tokens(handle)

    def close(self) -> None:
        """Threads ended, and SGLang's hook for the end of the process let go."""
        self.cache.shutdown()
        atexit.unregister(self.cache.shutdown)


def make_storage(
    directory: Path,
    *,
    facts: Mapping[str, Any] = FACTS,
    unit: int = PAGE,
    policy: str = "wait_complete",
    backend: str | None = "file",
    slots: int = 64,
    stack: Callable[..., CpuStack] = make_cache,
    ratio: float = 2.0,
    served_model_name: str = "tiny",
    **cache: Any,
) -> Server:
    """A cache with storage in `directory`; `cache` goes to `make_cache`, facts into the identity."""
    from sglang_bitexact_hicache import storage, storage_backends, storage_hooks
    from sglang_bitexact_hicache.host_pool import TruthHostPools
    from sglang_bitexact_hicache.storage_names import StorageNames, whole_model

    # Pools read the published arguments.
    server_args = make_server_args(
        hicache_ratio=ratio,
        hicache_storage_backend=backend,
        hicache_storage_prefetch_policy=policy,
        served_model_name=served_model_name,
    )
    geometry = {name: cache[name] for name in ("layers", "nope", "rope") if name in cache}
    layout = _layout(geometry)
    whole = whole_model(layout, layout.ratios).digest()
    names = StorageNames.of({"layout": whole, "aligned": 0 if unit == PAGE else unit, **facts})
    planned = storage.TruthStorage(names, layout, unit)
    storage_hooks.activate(planned)
    storage_backends.register_backends()
    with mock.patch.dict(os.environ, SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=str(directory)):
        built = stack(server_args, slots=slots, **cache)
    bx = built.cache
    bx.truth_runtime = NoCopies(TruthHostPools(layout, slots, pin=False))
    bx.truth_storage = planned
    planned.bind(bx)
    return Server(built, planned, directory)


def _layout(geometry: Mapping[str, Any]) -> Any:
    """The record layout of a pool of this geometry."""
    from bitexact_fixtures import make_kv_pool

    from sglang_bitexact_hicache.device_view import DeviceView

    return DeviceView(make_kv_pool(pages=2, rows=1, **geometry)).layout
