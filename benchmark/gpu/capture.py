"""What the capture of a prefill chunk costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu.bench import AHEAD_MS, Bench, Launched, forward, timed
from gpu.config import PAGE
from gpu.timing import device_ms, host_ms, launches, whole
from sglang_bitexact_hicache import forward_hooks
from sglang_bitexact_hicache.policy import ALL_KINDS, Kind


@dataclass(frozen=True)
class Capture:
    """One chunk, captured at one stride.

    Attributes:
        stride: in pages; boundaries: captured of the chunk.
        stack, stack_with: device time of the stack's forward, without and with the feature.
        alone: device time of the forward stream's part of the feature, without the stack.
        host: the calling thread's time for that.
        landed: from an idle device until the host has every byte, without the stack.
    """

    stride: int
    boundaries: int
    stack: float
    stack_with: float
    alone: float
    host: float
    landed: float

    @property
    def added(self) -> float:
        """Device time added to the forward stream: the larger of the two ways to take it."""
        return max(self.alone, self.stack_with - self.stack)


class CaptureBench:
    """A chunk from position 0 on, with every `stride`-th page captured."""

    def __init__(self, bench: Bench, stride: int) -> None:
        self._server = server = bench.server
        self._bench = bench
        self._stride = stride
        self._chunk = bench.run.chunk
        pages = self._chunk // PAGE
        server.engage(
            slots=2 * pages,
            chunk_tokens=self._chunk,
            stride=stride,
            # With fill, every page is captured while slots are free, whatever the stride.
            kinds=ALL_KINDS if stride == 1 else ALL_KINDS - {Kind.FILL},
        )
        with bench.request(self._chunk) as req:
            self._plain = server.extend_batch([req], [self._chunk], plugin=False)
            self._prepared = server.prepared(self._plain)

    def timed(self) -> Capture:
        """All times."""
        ms = timed(
            {
                "stack": lambda: _of_stack(lambda: forward(self._plain, self._stack)),
                "stack_with": lambda: self._captured(self._stack, _of_stack),
                "alone": lambda: self._captured(self._hooks, _on_device),
                "host": lambda: self._captured(self._hooks, _on_host),
                "landed": lambda: self._captured(self._hooks, self._landing),
            },
            self._bench.run.repeats,
        )
        before = self._server.runtime.counters.captured
        self._captured(self._hooks, _on_device)
        boundaries = self._server.runtime.counters.captured - before
        return Capture(self._stride, boundaries, **ms)

    def launched(self) -> Launched:
        """What a chunk's capture launches."""
        counted: list[Launched] = []
        self._captured(self._hooks, lambda work: counted.append(Launched(*launches(work))))
        return counted[0]

    def _captured(self, body: Callable[[], object], time_of: Callable[[Any], Any]) -> Any:
        """`time_of` a forward with the feature, of a request of its own; its copies have landed after."""
        with self._bench.request(self._chunk) as req:
            batch = self._server.extend_batch([req], [self._chunk])
            taken = time_of(lambda: forward(batch, body))
            self._server.runtime.drain()
        return taken

    def _stack(self) -> None:
        self._server.stack.run(self._prepared)

    def _hooks(self) -> None:
        self._server.stack.hooks_only(
            self._prepared, forward_hooks.before_forward_unified_kv, forward_hooks.before_compress
        )

    def _landing(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        self._server.runtime.drain()
        return 1e3 * (time.perf_counter() - start)


def _on_device(work: Callable[[], object]) -> float:
    return device_ms(whole(work), ahead_ms=AHEAD_MS)


def _of_stack(work: Callable[[], object]) -> float:
    return device_ms(whole(work), ahead_ms=AHEAD_MS, longer=True)


def _on_host(work: Callable[[], object]) -> float:
    return host_ms(work, ahead_ms=AHEAD_MS)
