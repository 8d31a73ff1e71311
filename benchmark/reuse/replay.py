"""Arms, pool sizes and figures: what one replay of a trace measures, and the replays of a run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from bitexact_fixtures import CpuStack

from reuse import public, world
from reuse.fates import NotingStore
from reuse.scheduler import CHUNK_TOKENS, Replay, StockArm, StrictArm
from reuse.traces import GENERATORS, PAGE, Trace

HOST_PAGES = 2048
"""Pages of the host KV pool (524,288 tokens): every trace wants at least twice that."""

DEVICE_SHARE = 4
"""The host pool is this many times the device pool."""

ROWS = 16
"""Requests that run at once."""

SLOT_BYTES = 9_225_472
"""Host bytes of one slot in the geometry of DeepSeek-V4-Pro (61 layers, bf16 rings)."""

CONTEXT = 200_000
"""Context length of the server whose pools are sized."""

STRIDES = (1, 2, 8, 32)
POOL_SHARES = (1.0, 0.5, 0.25)

STRICT, GRID_ONLY, STOCK = "strict", "grid-only", "stock"


@dataclass(frozen=True)
class Job:
    """One replay.

    Attributes:
        trace: name of a generated trace, or path of a public one.
        arm: STRICT, GRID_ONLY (only the grid is captured, nothing is cut) or STOCK (flag off).
        stride: pages between two boundaries of the grid.
        share: part of the slots that the server would allocate at that stride.
        host_pages: pages of the host KV pool.
    """

    trace: str
    arm: str
    stride: int = 1
    share: float = 1.0
    host_pages: int = HOST_PAGES


@dataclass(frozen=True)
class Result:
    """What a replay found. Tokens are summed over the requests of the trace.

    Attributes:
        trace: name of the trace.
        requests, prompt: requests and their prompt tokens.
        kv: tokens that the arm's own KV match would have reused.
        reused: tokens that it did reuse.
        lost: the difference, by reason (scheduler.Arm.loss).
        slots: slots of the truth pools.
        held: truths in the store, mean over the requests.
        evicted: truths given up for others.
        forwards, cuts: prefill forwards, and chunks cut at a junction.
    """

    job: Job
    trace: str
    requests: int
    prompt: int
    kv: int
    reused: int
    lost: dict[str, int]
    slots: int
    held: float
    evicted: int
    forwards: int
    cuts: int

    @property
    def ratio(self) -> float:
        """Tokens reused ÷ tokens that the KV match alone would reuse."""
        return self.reused / self.kv if self.kv else 1.0


def jobs_of(trace: str, host_pages: int = HOST_PAGES) -> Iterator[Job]:
    """The replays of one trace: strict at every stride and pool, grid-only at the full pool, stock."""
    yield Job(trace, STOCK, host_pages=host_pages)
    for stride in STRIDES:
        yield Job(trace, GRID_ONLY, stride, host_pages=host_pages)
        for share in POOL_SHARES:
            yield Job(trace, STRICT, stride, share, host_pages)


def load(name: str) -> Trace:
    """A generated trace by name, or a public one by path."""
    return GENERATORS[name]() if name in GENERATORS else public.load(Path(name))


def slots_of(job: Job) -> int:
    """Slots of the truth pools: the job's share of what the server would allocate."""
    from sglang_bitexact_hicache import sizing

    planned = sizing.size(
        full_host_pages=job.host_pages,
        stride=job.stride,
        request_rows=ROWS,
        slot_bytes=SLOT_BYTES,
        context_length=CONTEXT,
    )
    return round(planned.slots * job.share)


def stack_of(job: Job) -> CpuStack:
    """Pools and cache of one job, inside `world.quiet_cpu_hicache`."""
    device_pages = job.host_pages // DEVICE_SHARE
    slots = None if job.arm == STOCK else slots_of(job)
    stack = world.build(
        device_pages=device_pages,
        host_pages=job.host_pages,
        rows=ROWS,
        context=device_pages * PAGE,
        slots=slots,
        tree_core="python",
    )
    if slots is not None:
        stack.cache.attach_truth(NotingStore(slots))
    return stack


def arm_of(job: Job, stack: CpuStack) -> StockArm | StrictArm:
    """What decides about truth in one job."""
    from sglang_bitexact_hicache import sizing
    from sglang_bitexact_hicache.metrics import Counters
    from sglang_bitexact_hicache.planner import CapturePlanner
    from sglang_bitexact_hicache.policy import DEFAULT_KINDS, Kind

    if job.arm == STOCK:
        return StockArm()
    planner = CapturePlanner(
        stack.cache,
        stride=job.stride,
        kinds=DEFAULT_KINDS if job.arm == STRICT else frozenset({Kind.GRID}),
        row_limit=sizing.row_limit(CONTEXT, job.stride, stack.cache.store.capacity),
        counters=Counters(),
    )
    # Device staging as TruthRuntime sizes it.
    chunk_pages = CHUNK_TOKENS // PAGE
    staging = chunk_pages + -(-chunk_pages // job.stride)
    return StrictArm(stack.cache, planner, staging, cut=job.arm == STRICT)


def replay(job: Job, trace: Trace) -> Result:
    """Run one job, inside `world.quiet_cpu_hicache`."""
    stack = stack_of(job)
    arm = arm_of(job, stack)
    run = Replay(stack, arm, trace)
    served = run.run()
    stack.cache.sanity_check()
    lost: Counter[str] = Counter()
    for one in served:
        if one.loss:
            lost[one.loss] += one.kv - one.reused
    strict = isinstance(arm, StrictArm)
    return Result(
        job=job,
        trace=trace.name,
        requests=len(served),
        prompt=sum(one.prompt for one in served),
        kv=sum(one.kv for one in served),
        reused=sum(one.reused for one in served),
        lost=dict(lost),
        slots=stack.cache.store.capacity if strict else 0,
        held=fmean(arm.truths_held) if strict else 0.0,
        evicted=stack.cache.store.counters.evicted if strict else 0,
        forwards=run.launches.forwards,
        cuts=run.launches.cuts,
    )


def replay_all(jobs: Iterable[Job], processes: int) -> Iterator[Result]:
    """Every job, in order, by worker processes; each result does not depend on how many."""
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(_work, jobs)


def _work(job: Job) -> Result:
    with world.quiet_cpu_hicache():
        result = replay(job, load(job.trace))
    gc.collect()  # a cache and its components refer to each other
    return result
