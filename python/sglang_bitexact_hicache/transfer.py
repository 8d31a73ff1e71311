"""Copy lanes: one ordered, asynchronous queue of copies, and the events that their readers wait on.

On a device with streams a lane is a stream of its own. Where the device has none (the CPU), it is
one worker thread, so that copies are in flight there too and the same ordering rules are exercised.
Either way:

* copies of one lane run in the order in which they were submitted;
* a copy first waits for the events it was given (`after`), on the lane, never on the caller;
* whoever reads what a copy wrote, or overwrites what it read, waits on the event that it returned.

Nothing here synchronises the device or blocks the scheduler thread on a GPU. Lanes only move bytes
of buffers that they are handed; deciding who owns those is the scheduler thread's.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""(destination, source), of equal shape and dtype."""


class Event(ABC):
    """Completion of work that was queued earlier."""

    @abstractmethod
    def wait(self, stream: Any = None) -> None:
        """Make work that is queued from now on come after: on `stream`, or on the caller's current
        one. Where the device has no streams the calling thread itself waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until it happened. IO threads, tests and debug checks only."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it happened. For counters and tests: decisions must not depend on it, or ranks
        would diverge."""


class CopyLane(ABC):
    """One queue of asynchronous copies; `submit` may be called from the scheduler thread only."""

    @abstractmethod
    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """Queue copies that start when all of `after` happened; the event is their completion."""

    @abstractmethod
    def mark(self) -> Event:
        """An event for everything that the caller's current stream has queued so far."""

    @abstractmethod
    def drain(self) -> None:
        """Block until the lane is empty. Flush, shutdown and tests only."""

    @abstractmethod
    def close(self) -> None:
        """Drain and release what the lane holds (its thread, where it has one)."""


class _DeviceEvent(Event):
    def __init__(self, module: Any, stream: Any) -> None:
        self._module = module
        self._event = module.Event()
        self._event.record(stream)

    def wait(self, stream: Any = None) -> None:
        (stream or self._module.current_stream()).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return self._event.query()


class StreamLane(CopyLane):
    """A lane on a stream of its own (CUDA and HIP alike, through torch's device module)."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        for event in after:
            event.wait(self._stream)
        with self._module.stream(self._stream):
            for dst, src in copies:
                dst.copy_(src, non_blocking=True)
        return _DeviceEvent(self._module, self._stream)

    def mark(self) -> Event:
        return _DeviceEvent(self._module, self._module.current_stream())

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.drain()


class _Happened(Event):
    """Work that was already complete when it was marked (a device without streams)."""

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def done(self) -> bool:
        return True


class _FutureEvent(Event):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, stream: Any = None) -> None:
        self._future.result()

    def synchronize(self) -> None:
        self._future.result()

    def done(self) -> bool:
        return self._future.done()


class ThreadLane(CopyLane):
    """A lane on one worker thread, for a device without streams."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"bitexact-{name}")
        self._open = threading.Event()
        self._open.set()

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        return _FutureEvent(self._pool.submit(self._run, tuple(copies), tuple(after)))

    def _run(self, copies: tuple[Copy, ...], after: tuple[Event, ...]) -> None:
        self._open.wait()
        for event in after:
            event.synchronize()
        for dst, src in copies:
            dst.copy_(src)

    def mark(self) -> Event:
        return _Happened()

    def drain(self) -> None:
        self._pool.submit(lambda: None).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every copy of the lane in flight while the context lasts (tests of races)."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


def open_lane(device: torch.device, name: str) -> CopyLane:
    """A lane for copies between `device` and host memory; `name` labels its thread, if it has one."""
    return ThreadLane(name) if device.type == "cpu" else StreamLane(device)
