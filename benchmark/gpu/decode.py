"""What a decode step costs with the feature, where no request completes a page and where one does.

As in production, a step is replayed from a graph, and the feature's part comes behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gpu.bench import AHEAD_MS, Bench, Launched, forward, timed
from gpu.config import PAGE
from gpu.timing import Graphed, device_ms, host_ms, launches, whole


@dataclass(frozen=True)
class Decode:
    """A decode step of a batch.

    Attributes:
        batch: requests.
        plain, quiet: device time of a step without a boundary, without and with the feature.
        plain_boundary, boundary: the same of a step with one.
        alone: device time of the feature's part of a step with one boundary.
        quiet_host, boundary_host: the calling thread's time for the feature's part.
    """

    batch: int
    plain: float
    quiet: float
    plain_boundary: float
    boundary: float
    alone: float
    quiet_host: float
    boundary_host: float

    @property
    def added(self) -> float:
        """Device time that a boundary adds to a step: the larger of the two ways to take it."""
        return max(self.alone, self.boundary - self.plain_boundary)


class DecodeBench:
    """A batch of requests behind contexts of `run.context` tokens and more."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._server = server = bench.server
        run = bench.run
        server.engage(slots=2 * run.batch, chunk_tokens=PAGE)
        server.pages = PAGE
        reqs = [
            server.open(bench.name(), 1 + i, i, run.context + PAGE, admit=False)
            for i in range(run.batch)
        ]
        for i, req in enumerate(reqs):
            # Tokens before the step; no sum of it and the step's is a page, but for `_boundary`.
            req.seqlen = run.context + 1 + i % (PAGE - 2)
            server.tree.row_taken(req)
        self._plain = server.decode_batch(reqs, plugin=False)
        self._quiet = server.decode_batch(reqs)
        self._replay = self._graphed(self._quiet)
        self._first = reqs[0]
        self._first.seqlen = run.context - 1
        self._boundary = server.decode_batch(reqs)
        self._replay_boundary = self._graphed(self._boundary)

    def timed(self) -> Decode:
        """All times."""
        ms = timed(
            {
                "plain": lambda: self._device(self._plain, self._replay),
                "quiet": lambda: self._device(self._quiet, self._replay),
                "plain_boundary": lambda: self._device(self._plain, self._replay_boundary),
                "boundary": lambda: self._anew(
                    lambda: self._device(self._boundary, self._replay_boundary)
                ),
                "alone": lambda: self._anew(lambda: self._device(self._boundary, _nothing)),
                "quiet_host": self._quiet_host,
                "boundary_host": lambda: self._anew(lambda: self._host(self._boundary)),
            },
            2 * self._bench.run.repeats,
        )
        return Decode(self._bench.run.batch, **ms)

    def launched(self) -> Launched:
        """What the feature launches in a step with one boundary."""
        found = self._anew(lambda: launches(lambda: forward(self._boundary, _nothing)))
        return Launched(*found)

    def _anew(self, work: Callable[[], Any]) -> Any:
        """With a first request that completes its page anew."""
        self._server.tree.discard(self._first)
        self._server.runtime.forget(self._first)
        self._server.tree.row_taken(self._first)
        found = work()
        self._server.runtime.drain()
        return found

    def _graphed(self, batch: SimpleNamespace) -> Callable[[], None]:
        prepared = self._server.prepared(batch)
        return Graphed(lambda: self._server.stack.run(prepared))

    def _device(self, batch: SimpleNamespace, body: Callable[[], None]) -> float:
        return device_ms(whole(lambda: forward(batch, body)), ahead_ms=AHEAD_MS)

    def _quiet_host(self, steps: int = 100) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            forward(self._quiet, _nothing)
        return 1e3 * (time.perf_counter() - start) / steps

    def _host(self, batch: SimpleNamespace) -> float:
        return host_ms(lambda: forward(batch, _nothing), ahead_ms=5)


def _nothing() -> None:
    """In the place of the model."""
