"""Measure reuse and the CPU cost of finding it; see docs/reuse.md.

    python -m reuse                    everything; writes the tables and the plot into docs/
    python -m reuse --trace FILE       replay a public trace (public.py) instead, and print its tables

Prints the tables and, last, one line of key=value pairs (not for a public trace).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter

from reuse import cpu_cost, report, world
from reuse.replay import HOST_PAGES, Job, Result, jobs_of, replay_all
from reuse.traces import GENERATORS

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m reuse", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="replay this public trace only")
    parser.add_argument(
        "--host-pages", type=int, default=HOST_PAGES, help="host pages for --trace (%(default)s)"
    )
    parser.add_argument("--processes", type=int, default=2, help="worker processes (%(default)s)")
    options = parser.parse_args()
    if options.trace is not None:
        jobs = jobs_of(str(options.trace), options.host_pages)
        results = report.Results(_progress(jobs, options.processes))
        for table in (report.trace_table, report.reuse_table, report.detail_table):
            print(table(results), end="\n\n")
        return
    # Alone on the machine, before the workers start.
    with world.quiet_cpu_hicache():
        costs = cpu_cost.measure()
    jobs = (job for trace in GENERATORS for job in jobs_of(trace))
    results = report.Results(_progress(jobs, options.processes))
    blocks = {
        "traces": report.trace_table(results),
        "reuse": report.reuse_table(results),
        "details": report.detail_table(results),
        "cost": report.cost_table(costs),
    }
    report.write_page(DOCS / "reuse.md", blocks)
    report.plot(results, DOCS / "reuse.svg")
    print(blocks["reuse"], blocks["cost"], sep="\n\n", end="\n\n")
    print(report.last_line(results, costs))


def _progress(jobs: Iterable[Job], processes: int) -> Iterator[Result]:
    started = perf_counter()
    for result in replay_all(jobs, processes):
        job = result.job
        took = perf_counter() - started
        print(
            f"[{took:5.0f} s] {result.trace} {job.arm} stride {job.stride} pool {job.share:.0%}: "
            f"{result.ratio:.3f}",
            flush=True,
        )
        yield result


if __name__ == "__main__":
    main()
