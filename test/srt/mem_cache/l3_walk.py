"""A random walk of servers on one storage directory: restarts, other computations, damage on disk.

A hit is right only if the bytes that its row reads are the ones that its record was captured over
(TreeDriver has the model, claim 2). With some seeds every forward writes bytes that no other forward ever
writes, also for the same tokens in another server, so that KV of another computation is the rule; with
others the bytes follow from the tokens, so that servers go on where others stopped; with others it is
now this and now that. Records carry a number; what is true of a number is kept outside of all servers.
Files are changed, cut, deleted and exchanged under the running servers.
"""

from __future__ import annotations

import random
import shutil
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitexact_fixtures import PAGE
from l3_fixtures import Server, make_storage
from tree_driver import TreeDriver, Violation

from sglang_bitexact_hicache.slots import SlotState


class World:
    """What outlives servers: the directory, and what each record is true of."""

    def __init__(self, directory: Path, follows: Callable[[], bool]) -> None:
        self.directory = directory
        self.follows = follows
        """Whether the bytes of the next page follow from its tokens."""
        self.stamps = 0
        self.true_of: list[set[bytes]] = []


class StorageDriver(TreeDriver):
    """A TreeDriver whose records are real ones: numbered, in the host pools, with every byte set."""

    def __init__(self, world: World, server: Server, seed: int, keep: Any) -> None:
        self.world = world
        self.server = server
        super().__init__(server.stack, keep, seed, cuts=True)
        self.pools = self.cache.truth_runtime.pools
        section = self.pools.layout.sections("swa_window")[0]
        self._number_at = section.offset
        self._ending = False

    def settle(self) -> None:
        """As TreeDriver; storage goes on by itself, but for the end."""
        self.flush_loads()
        self.cache.check_hicache_events()
        if self._ending:
            self.server.settle()
            # A prefetch that nobody waits for any more keeps its slot until its thread is done with it.
            self.server.wait(lambda: not self.cache.store.slots.count(SlotState.RESERVED))

    def check_no_leak(self) -> None:
        """As TreeDriver; nor is a host page, a slot, a lock or a prefetch left."""
        self._ending = True
        super().check_no_leak()
        self.settle()
        store, pool = self.cache.store, self.stack.host_pool
        if any(store.slots.is_locked(slot) for slot in range(store.capacity)):
            raise Violation("a slot is locked")
        scratch = self.server.storage.scratch
        aside = 0 if scratch is None else len(scratch)
        if pool.available_size() + aside != pool.size:
            raise Violation("host pages leaked")
        if self.server.storage._pages or self.server.storage._writes:
            raise Violation("marks of pages or writes that are gone")

    def _compute(self, req: Any, end: int) -> None:
        first = max(self.computed[req] // PAGE, req.kv.cache_protected_len // PAGE)
        ids = array("q", [*req.origin_input_ids, *req.output_ids])
        self._following = [
            zlib.crc32(ids[: min(end, (page + 1) * PAGE)].tobytes()) << 20
            for page in range(first, -(-end // PAGE))
        ]
        super()._compute(req, end)

    def _stamp(self) -> int:
        following = self._following.pop(0)
        if self.world.follows():
            return following
        self.world.stamps += 1
        return self.world.stamps

    def _record(self, req: Any, boundary: int, slot: int) -> None:
        number = len(self.world.true_of)
        filler = np.random.default_rng(number)
        part = self.pools.device_part(slot)
        part.copy_(torch.from_numpy(filler.integers(0, 256, len(part), dtype=np.uint8)))
        self._number(slot)[:] = torch.tensor([number])
        super()._record(req, boundary, slot)
        self.world.true_of.append(self.true_of[slot])

    def _number(self, slot: int) -> torch.Tensor:
        record = self.pools.record("swa_window", slot)
        return record[self._number_at : self._number_at + 8].view(torch.int64)

    def _check_hit(self, req: Any) -> None:
        pages = self.prefix_pages(req)
        if pages:
            truth = self.cache.final_truth(req)
            if truth is None:
                raise Violation(f"{req.rid}: no truth at its final prefix of {pages} pages")
            number = int(self._number(truth[1]))
            if not 0 <= number < len(self.world.true_of):
                raise Violation(f"{req.rid}: record {number} was never captured")
            self.true_of[truth[1]] = self.world.true_of[number]
        super()._check_hit(req)


class Walk:
    """One seed: up to two servers at a time on one directory."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        alike = self.random.choice([0.0, 0.97, 1.0])
        self.world = World(directory, lambda: self.random.random() < alike)
        self.drivers: list[StorageDriver] = []
        self.fetching: list[tuple[StorageDriver, Any]] = []
        self.stats: dict[str, int] = {}
        rnd = self.random
        pages = [[array("q", rnd.choices(range(1000), k=PAGE)) for _ in range(2)] for _ in range(8)]
        self.prompts = []
        for _ in range(4):
            prompt = array("q")
            for level in range(rnd.randrange(2, 8)):
                prompt += pages[level][rnd.randrange(2 if level in (2, 5) else 1)]
            self.prompts.append(prompt)
        self.start_server()

    # ---- steps

    def step(self) -> None:
        rnd = self.random
        driver = rnd.choice(self.drivers)
        weighted = [
            (10, self.request),
            (12, self.fetch),
            (8, self.come_back),
            (3, lambda d: d.evict_device(rnd.choice([2, 99]))),
            (2, lambda d: d.evict_host(rnd.randrange(1, 5))),
            (2, self.empty),
            (2, self.forget),
            (1, self.damage),
            (1, self.restart),
            (1, self.flush),
        ]
        actions = [action for _, action in weighted]
        action = rnd.choices(actions, [weight for weight, _ in weighted])[0]
        self.count(getattr(action, "__name__", "evict"))
        action(driver)
        if rnd.random() < 0.5:
            self.land()
        for driver in self.drivers:
            driver.settle()
            driver.check()

    def request(self, driver: StorageDriver) -> None:
        """A whole request: hit, prefill in chunks, a few tokens, finish."""
        rnd = self.random
        req = driver.admit(self.prompt())
        driver.prefill(req, rnd.choice([1, 2, None]))
        if rnd.random() < 0.4:
            driver.decode(req, rnd.choices(range(3000, 3002), k=rnd.choice([1, 3])))
        driver.finish(req)

    def come_back(self, driver: StorageDriver) -> None:
        """A request, then much else, then its like: what storage is for."""
        prompt = self.prompt()
        req = driver.admit(prompt)
        driver.prefill(req, self.random.choice([1, 2, None]))
        driver.finish(req)
        driver.server.settle()
        self.random.choice([self.empty, self.flush, self.forget])(driver)
        req = driver.request(prompt + array("q", [9]))
        if driver.server.submit_prefetch(req):
            self.fetching.append((driver, req))
            self.land()

    def fetch(self, driver: StorageDriver) -> None:
        """A request arrives, and its prefetch begins; other steps may come before it ends."""
        req = driver.request(self.prompt())
        if driver.server.submit_prefetch(req):
            self.fetching.append((driver, req))

    def land(self) -> None:
        """A prefetch comes to its end, is cut short, or its request goes; then the request runs."""
        if not self.fetching:
            return
        rnd = self.random
        driver, req = self.fetching.pop(rnd.randrange(len(self.fetching)))
        if rnd.random() < 0.15:
            driver.cache.release_aborted_request(req.cache_request_handle)
            return
        if rnd.random() < 0.15:
            driver.cache.prefetch_stop_policy = "best_effort"
        driver.server.finish_prefetch(req)
        driver.cache.prefetch_stop_policy = "wait_complete"
        driver.admit((), req=req)
        self.count("hit after fetch", req.prefix_len > 0)
        driver.prefill(req, None)
        driver.finish(req)

    def empty(self, driver: StorageDriver) -> None:
        """Everything cached leaves the device and the host; storage stays."""
        driver.evict_device()
        driver.evict_host(10**4)

    def forget(self, driver: StorageDriver) -> None:
        """Some truths are evicted; storage may have them."""
        driver.forget_truth(lambda _lineage: self.random.random() < 0.4)

    def flush(self, driver: StorageDriver) -> None:
        """As Scheduler.flush_cache, which waits until nothing runs."""
        self.abandon(driver)
        driver.server.settle()
        driver.cache.reset()
        driver.stack.allocator.clear()
        driver.stack.req_to_token.clear()

    def restart(self, driver: StorageDriver) -> None:
        """A server stops (its queued writes are lost) and another starts, or joins it."""
        if len(self.drivers) > 1 or self.random.random() < 0.6:
            self.stop_server(driver)
        self.start_server()

    def damage(self, _driver: StorageDriver) -> None:
        """Storage is not what it was."""
        rnd = self.random
        files = sorted(self.world.directory.glob("*.bin"))
        if not files:
            return
        for _ in range(rnd.choice([1, 1, 4])):
            path = rnd.choice(files)
            try:
                data = bytearray(path.read_bytes())
                how = rnd.choice(["flip", "flip", "cut", "delete", "exchange", "longer"])
                if how == "delete" or not data:
                    path.unlink()
                elif how == "flip":
                    data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)
                    path.write_bytes(data)
                elif how == "cut":
                    path.write_bytes(data[: rnd.randrange(len(data))])
                elif how == "longer":
                    path.write_bytes(bytes(data) + b"more")
                else:
                    kind = path.name.split(".", 1)[1]
                    shutil.copyfile(rnd.choice([f for f in files if f.name.endswith(kind)]), path)
            except (FileNotFoundError, shutil.SameFileError):
                continue

    # ---- servers

    def start_server(self) -> None:
        rnd = self.random
        server = make_storage(
            self.world.directory,
            slots=rnd.choice([6, 20]),
            ratio=rnd.choice([1.2, 2.0]),
            pages=rnd.choice([24, 40]),
            rows=8,
        )
        chance = rnd.choice([0.3, 0.7, 1.0])
        keep = lambda _pages: rnd.random() < chance  # noqa: E731
        self.drivers.append(StorageDriver(self.world, server, rnd.randrange(10**9), keep))

    def stop_server(self, driver: StorageDriver) -> None:
        self.abandon(driver)
        if self.random.random() < 0.7:
            driver.check_no_leak()
        self.drivers.remove(driver)
        self.close_server(driver)

    def close_server(self, driver: StorageDriver) -> None:
        driver.server.close()
        self.count("hits", driver.stats["hits"])
        for name, value in driver.server.storage.counters.snapshot().items():
            self.count(name, value)

    def abandon(self, driver: StorageDriver) -> None:
        for entry in [entry for entry in self.fetching if entry[0] is driver]:
            self.fetching.remove(entry)
            driver.cache.release_aborted_request(entry[1].cache_request_handle)

    def run(self, steps: int) -> None:
        try:
            for _ in range(steps):
                self.step()
            for driver in self.drivers:
                self.abandon(driver)
                driver.check_no_leak()
        finally:
            for driver in self.drivers:
                self.close_server(driver)

    def prompt(self) -> array:
        rnd = self.random
        tail = rnd.choice([1, 5, 100, 255])
        return rnd.choice(self.prompts) + array("q", rnd.choices(range(2000, 2003), k=tail))

    def count(self, name: str, by: int = 1) -> None:
        self.stats[name] = self.stats.get(name, 0) + by
