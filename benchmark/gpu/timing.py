"""How time is taken.

*Device time*: events around the work on the current stream, behind a kernel that outlasts the launching
of all of it: the stream never waits for a launch, as under the overlap schedule with work queued. A
driver queues about a thousand launches; a whole forward is more, so it is replayed from a graph
(`Graphed`), or takes longer than its launching by itself.
*Latency*: the same events on an idle device: what the host takes to launch counts.
Values are medians; compared arms take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from collector import no_collector

CYCLES_PER_MS = 1_980_000
"""Of `torch.cuda._sleep`, at the highest clock."""

Between = Callable[[torch.cuda.Event, torch.cuda.Event], None]
"""Work that records the two events around what is timed."""


def device_ms(work: Between, *, ahead_ms: float, longer: bool = False) -> float:
    """Device time of one run, in ms; NaN where the host was not ahead.

    Args:
        ahead_ms: how long the device is kept busy before; 0 for a latency.
        longer: the work takes longer than its launching, so the host gets ahead in any case.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead_ms:
        torch.cuda._sleep(int(ahead_ms * CYCLES_PER_MS))
    work(begin, end)
    behind = ahead_ms and not longer and begin.query()
    torch.cuda.synchronize()
    return math.nan if behind else begin.elapsed_time(end)


class Graphed:
    """Work as one launch: captured into a graph once, replayed by each call."""

    def __init__(self, work: Callable[[], object]) -> None:
        # The graph reads tensors that only the work refers to.
        self._work = work
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # what is compiled or allocated at a first call
                work()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            work()

    def __call__(self) -> None:
        """Replays it on the current stream."""
        self._graph.replay()


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
    """Median of each arm; the arms take turns, so that a drift of the clock meets all of them.

    Raises:
        RuntimeError: in half of an arm's runs or more the host was not ahead.
    """
    taken: dict[str, list[float]] = {name: [] for name in arms}
    with no_collector():
        for number in range(warm + repeats):
            for name, arm in arms.items():
                value = arm()
                if number >= warm:
                    taken[name].append(value)
    good = {name: [v for v in values if not math.isnan(v)] for name, values in taken.items()}
    for name, values in good.items():
        if 2 * len(values) <= repeats:
            raise RuntimeError(
                f"{name}: the host was ahead in {len(values)} of {repeats} runs only"
            )
    return {name: median(values) for name, values in good.items()}


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
