"""How time is taken.

*Device time, host ahead*: events around the work on the current stream, behind a kernel that outlasts
the launching of all of it; the stream never waits for a launch, as under the overlap schedule with work
queued.
*Latency*: the same events on an idle device: what the host takes to launch counts.
Values are medians; compared arms take turns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

CYCLES_PER_MS = 1_980_000
"""Of `torch.cuda._sleep`, at the highest clock."""

Between = Callable[[torch.cuda.Event, torch.cuda.Event], None]
"""Work that records the two events around what is timed."""


def device_ms(work: Between, *, ahead_ms: float) -> float:
    """Device time of one run, in ms; `ahead_ms` is how long the device is kept busy before.

    Raises:
        RuntimeError: the device was done with that before everything was launched.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead_ms:
        torch.cuda._sleep(int(ahead_ms * CYCLES_PER_MS))
    work(begin, end)
    if ahead_ms and begin.query():
        raise RuntimeError(f"launching took longer than {ahead_ms} ms: the host was not ahead")
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def whole(work: Callable[[], object]) -> Between:
    """Times all of `work`."""

    def between(begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        begin.record()
        work()
        end.record()

    return between


def medians(
    arms: dict[str, Callable[[], float]], repeats: int, *, warm: int = 2
) -> dict[str, float]:
    """Median of each arm; the arms take turns, so that a drift of the clock meets all of them."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    with _no_collection():
        for number in range(warm + repeats):
            for name, arm in arms.items():
                value = arm()
                if number >= warm:
                    taken[name].append(value)
    return {name: median(values) for name, values in taken.items()}


def host_ms(work: Callable[[], object], *, ahead_ms: float) -> float:
    """Time of the calling thread for one run, in ms, while the device is busy with earlier work."""
    torch.cuda.synchronize()
    torch.cuda._sleep(int(ahead_ms * CYCLES_PER_MS))
    start = time.perf_counter()
    work()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * taken


def launches(work: Callable[[], object]) -> tuple[int, int]:
    """(kernels, copies) that `work` launches, by the profiler's record of the driver's calls."""
    activities = torch.profiler.ProfilerActivity
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    calls: dict[str, int] = {}
    for entry in profile.key_averages():
        calls[entry.key] = calls.get(entry.key, 0) + entry.count

    def of(*prefixes: str) -> int:
        return sum(count for key, count in calls.items() if key.startswith(prefixes))

    return of("cudaLaunch", "cuLaunch", "hipLaunch", "hipExtLaunch", "hipModuleLaunch"), of(
        "cudaMemcpy", "cuMemcpy", "hipMemcpy"
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
