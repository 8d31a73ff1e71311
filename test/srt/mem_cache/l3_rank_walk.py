"""Eight ranks with storage (L3) in one process: the real tree, controller, IO threads and files of each.

Each rank takes the same random walk (l3_walk.py) in a thread of its own, one at a time: a thread gives
its turn away only inside a collective of the scheduler (rank_replicas.Meeting). SGLang's IO threads run
as they like and reduce among themselves. What a real rank may find different is different here: what is
in its files (some are harmed, some forwards write other bytes), how long its storage takes, what it knows
of what storage holds and of the bytes of its pages. What a rank decided is compared with the others after
every step.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from l3_walk import StorageDriver, Walk
from rank_replicas import RANKS, Meeting
from tree_driver import Violation


class IoMeeting:
    """What one kind of IO thread reduces over the ranks."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, action=self._reduce)
        self._values: dict[int, torch.Tensor] = {}
        self._result: torch.Tensor | None = None
        self.problem: str | None = None
        """Why the threads do not meet any more."""

    def all_reduce(self, rank: int, tensor: torch.Tensor) -> None:
        """MIN over the ranks, in place."""
        self._values[rank] = tensor.clone()
        self._barrier.wait(timeout=60)
        tensor.copy_(self._result)

    def abort(self) -> None:
        """Nobody waits any more."""
        self._barrier.abort()

    def _reduce(self) -> None:
        shapes = {tuple(value.shape) for value in self._values.values()}
        if len(shapes) > 1:
            self.problem = f"IO threads of the ranks meet over different spans: {shapes}"
        self._result = torch.stack(list(self._values.values())).amin(0)


class World:
    """What the ranks share: how they meet."""

    def __init__(self) -> None:
        self.meeting = Meeting()
        self.hits, self.completions = IoMeeting(), IoMeeting()


class RankWalk(Walk):
    """One rank's walk; see the module's docstring. Equal seeds on all ranks."""

    def __init__(self, seed: int, directory: Path, rank: int, ranks: World) -> None:
        self.rank = rank
        self.ranks = ranks
        self.own = random.Random(1000 * seed + rank)
        """What this rank only can know: never read by anything that decides."""
        super().__init__(seed, directory)
        follows = self.own.choice([0.99, *[1.0] * 7])
        self.world.follows = lambda: self.own.random() < follows

    def start_server(self) -> None:
        """As a walk's, with the other ranks to meet."""
        super().start_server()
        cache, storage = self.drivers[-1].cache, self.drivers[-1].server.storage
        cache.tp_world_size = RANKS
        cache._all_reduce_attn_groups = lambda tensor, op: self.ranks.meeting.all_reduce(
            self.rank, tensor, op
        )
        storage.ranks = type(storage.ranks).of(cache)
        controller = cache.cache_controller
        controller.prefetch_hits_sync_groups = [self.ranks.hits]
        controller.prefetch_completion_sync_groups = [self.ranks.completions]
        controller._destroy_sync_groups = lambda groups: None

        def reduce(tensor: torch.Tensor, op: Any, groups: list[IoMeeting]) -> None:
            for group in groups:
                group.all_reduce(self.rank, tensor)

        controller._all_reduce = reduce
        self._take_time(controller.storage_backend.backend)
        self._compare_while_waiting(cache)

    def _compare_while_waiting(self, cache: Any) -> None:
        """Ranks that wait for something that only some of them submitted would wait for long."""
        stock, polls = cache.check_hicache_events, itertools.count(1)

        def poll() -> None:
            stock()
            for io in (self.ranks.hits, self.ranks.completions):
                if io.problem:
                    raise Violation(io.problem)
            if next(polls) % 50 == 0:
                self.compare()

        cache.check_hicache_events = poll

    def _take_time(self, backend: Any) -> None:
        for name in ("batch_exists_v2", "batch_get_v2", "batch_set_v2"):
            stock, clock = getattr(backend, name), random.Random(self.own.random())

            def late(*args: Any, stock: Any = stock, clock: Any = clock, **kwargs: Any) -> Any:
                time.sleep(clock.choice([0, 0, 0, 0.002]))
                return stock(*args, **kwargs)

            setattr(backend, name, late)

    # ---- steps

    def step(self) -> None:
        """As a walk's, between steps of which this rank alone knows; then all ranks compare."""
        if self.own.random() < 0.01:
            self.damage_own()
        if self.own.random() < 0.04:
            self.forget_own()
        if self.random.random() < 0.3:
            self.lose_truth(self.drivers[0])
        super().step()
        self.compare()

    def compare(self) -> None:
        """Raises Violation on every rank if one of them decided otherwise."""
        (driver,) = self.drivers
        told = zlib.crc32(repr(self.state(driver)).encode())
        pair = torch.tensor([told, -told])
        self.ranks.meeting.all_reduce(self.rank, pair, None)
        if pair[0] != -pair[1]:
            raise Violation(f"rank {self.rank} decided otherwise: {self.state(driver)}")

    def lose_truth(self, driver: StorageDriver) -> None:
        """A prompt stays in memory, its truth is in storage only, and it comes again."""
        prompt = self.prompt()
        driver.run(prompt, self.random.choice([1, 2]))
        driver.server.settle()
        driver.forget_truth(lambda _lineage: False)
        if self.own.random() < 0.04:
            self.forget_own()
        req = driver.request(prompt)
        if driver.server.submit_prefetch(req):
            self.fetching.append((driver, req))
            self.land()

    def damage_own(self) -> None:
        """This rank's storage is not what it was."""
        shared, self.random = self.random, self.own
        try:
            super().damage(self.drivers[0])
        finally:
            self.random = shared

    def forget_own(self) -> None:
        """This rank does not know any more what it knew of storage, or of the bytes of its pages."""
        storage = self.drivers[0].server.storage
        for table in (storage.records, storage.stored):
            if self.own.random() < 0.5:
                table.clear()
        for page in list(storage._pages.values()):
            if self.own.random() < 0.3:
                page.digest = self.own.choice([None, None, bytes(16)])

    def damage(self, _driver: StorageDriver) -> None:
        """Each rank has its own way with storage."""

    def flush(self, driver: StorageDriver) -> None:
        """As Scheduler.flush_cache, with what our hook around it waits for."""
        self.abandon(driver)
        driver.server.settle()
        assert driver.server.storage.may_flush()
        super().flush(driver)

    def restart(self, driver: StorageDriver) -> None:
        """The servers stop, and others start."""
        self.abandon(driver)
        driver.server.settle()
        assert driver.server.storage.may_flush()
        driver.check_no_leak()
        self.drivers.remove(driver)
        self.close_server(driver)
        self.start_server()

    def state(self, driver: StorageDriver) -> tuple[Any, ...]:
        """All that later decisions depend on, as far as it is told by few numbers."""
        cache, store = driver.cache, driver.cache.store
        slots = tuple(
            (store.slots.state(s).name, store.slots.owner(s), store.slots.is_locked(s))
            for s in range(store.capacity)
        )
        # SGLang numbers the nodes of a process: their order is each tree's own.
        chains = tuple((c.dev, c.host) for _, c in sorted(cache.copies.items()))
        free = driver.stack.device_pages_free(), driver.stack.host_pool.available_size()
        known = *vars(cache.gate_counters).items(), *vars(store.counters).items()
        under_way = len(cache.ongoing_prefetch), len(cache.ongoing_backup)
        return slots, chains, free, known, under_way, self.random.getstate()[1][-1]


def walk_together(seed: int, directory: Path, steps: int) -> Counter[str]:
    """What all ranks met on the way, summed.

    Raises:
        Violation: ranks decided differently, or waited for each other in vain, or one of them failed.
    """
    ranks = World()
    walks = [RankWalk(seed, directory / str(rank), rank, ranks) for rank in range(RANKS)]
    failures: list[BaseException] = []

    def run(walk: RankWalk) -> None:
        try:
            with ranks.meeting:
                walk.run(steps)
                ranks.meeting.leave()
        except BaseException as error:  # handed to the caller below
            failures.append(error)
            ranks.hits.abort()
            ranks.completions.abort()

    threads = [threading.Thread(target=run, args=(walk,), daemon=True) for walk in walks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise Violation(f"a rank failed: {failures[0]!r}") from failures[0]
    return sum((Counter(walk.stats) for walk in walks), Counter())
