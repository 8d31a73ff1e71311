"""What aligned prefill costs: reuse and forwards on traces, and the time of one mixed workload.

    python benchmark/aligned_prefill.py            # both tables; about 5 minutes on two cores
    python benchmark/aligned_prefill.py traces     # the count alone: no model, no SGLang

The count serves the traces of benchmark/reuse one request at a time from a cache that never evicts, so
the two arms differ in nothing but where prompts are cut and what is kept. The workload runs on a real
scheduler on the reference platform, everything submitted at once; its time is a CPU's, where tokens
computed are what costs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "srt" / "mem_cache")]

from benchmark.reuse.traces import PAGE, Segment, Trace, agents, chat, edit, fanout, rag  # noqa: E402

from sglang_bitexact_hicache.aligned import AlignedPrefill  # noqa: E402

TRACES = (chat, fanout, edit, agents, rag)
CHUNKS = (512, 2048, 8192)


class Count(NamedTuple):
    """What a trace took."""

    prompt: int
    reused: int
    forwards: int


def pages_of(segments: tuple[Segment, ...]) -> Iterator[int]:
    """A number for each whole page, which stands for the page and all before it."""
    chain, page, room = 0, [], PAGE
    for segment in segments:
        at = 0
        while at < segment.length:
            take = min(room, segment.length - at)
            page.append((segment.id, at, take))
            at, room = at + take, room - take
            if room == 0:
                chain = hash((chain, *page))
                yield chain
                page, room = [], PAGE


def count(trace: Trace, chunk: int, aligned: bool) -> Count:
    """Serve a trace, one request after another, from a cache that keeps everything it may."""
    rule = AlignedPrefill(chunk)
    cached: set[int] = set()
    prompt = reused = forwards = 0
    for turn in trace.turns:
        length = turn.prompt_len
        pages = list(pages_of((*turn.prompt, turn.answer)))
        known = next((i for i, page in enumerate(pages) if page not in cached), len(pages))
        hit = min(known, (length - 1) // PAGE) * PAGE
        kept = pages
        if aligned:
            hit = rule.whole(hit)
            kept = pages[: rule.whole(length) // PAGE]
        prompt, reused = prompt + length, reused + hit
        forwards += -(-(length - hit) // chunk)
        cached.update(kept)
    return Count(prompt, reused, forwards)


def trace_table() -> None:
    """Reused tokens as a part of all prompt tokens, and forwards, with and without."""
    print("| trace | requests | mean prompt | chunk | reused, off | on | forwards, off | on |")
    print("|---|---|---|---|---|---|---|---|")
    for make in TRACES:
        trace = make()
        for chunk in CHUNKS:
            off, on = (count(trace, chunk, aligned) for aligned in (False, True))
            print(
                f"| {trace.name} | {len(trace.turns)} | {off.prompt // len(trace.turns)} | {chunk} "
                f"| {off.reused / off.prompt:.3f} | {on.reused / on.prompt:.3f} "
                f"| {off.forwards} | {on.forwards} |"
            )


# ---- a real scheduler


def workload() -> tuple[list[list[int]], list[list[int]]]:
    """Two waves of prompts: three stems of 1,150 tokens with four children each and six short ones;
    then each of the twelve goes on for 300 tokens."""
    rng = random.Random(5)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, 300) for _ in range(length)]

    stems = [text(1150) for _ in range(3)]
    children = [[*stem, *text(rng.randrange(150, 500))] for _ in range(4) for stem in stems]
    shorts = [text(rng.randrange(60, 400)) for _ in range(6)]
    first = [*children, *shorts]
    rng.shuffle(first)
    return first, [[*child, *text(300)] for child in children]


def serve(h: Any, waves: tuple[list[list[int]], ...]) -> Any:
    """Scenario: both waves. (wall and CPU seconds, prompt tokens, reused, forwards, chunks)"""
    forwards: list[int] = []
    forward = h.runtime.forward

    def watched(batch: Any) -> Any:
        if batch.forward_mode.is_extend():
            forwards.append(len(batch.reqs))
        return forward(batch)

    yield from h.flush()
    h.runtime.forward = watched
    wall, cpu, reused, prompt = time.monotonic(), time.process_time(), 0, 0
    for wave in waves:
        results = yield from h.finish(*[h.submit(ids, 8) for ids in wave])
        reused += sum(result.cached for result in results)
        prompt += sum(len(ids) for ids in wave)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    h.runtime.forward = forward
    return wall, cpu, prompt, reused, len(forwards), sum(forwards)


def workload_table() -> None:
    """The workload with and without the option, twice each, chunks of 512."""
    from scheduler_harness import SchedulerProcess

    env = {
        "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1",
        "SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP": "1",
    }
    base = ["--max-running-requests", "24", "--chunked-prefill-size", "512"]
    print(
        "| option | wall, s | CPU, s | prompt tokens | reused | extend forwards | chunks in them |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, flags in (("off", []), ("on", ["--hicache-swa-offload-aligned-prefill"])):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "scheduler.log"
            with SchedulerProcess([*base, *flags], env, log_path=log) as process:
                runs = [process.run(serve, workload(), timeout=580) for _ in range(2)]
        assert runs[0][2:] == runs[1][2:], "the two runs were not served alike"
        times = [" and ".join(f"{run[i]:.1f}" for run in runs) for i in (0, 1)]
        print(f"| {name} | " + " | ".join(map(str, [*times, *runs[0][2:]])) + " |")


def main() -> None:
    """Prints the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("traces", "workload", "both"), default="both")
    what = parser.parse_args().what
    if what != "workload":
        trace_table()
    if what != "traces":
        workload_table()


if __name__ == "__main__":
    main()
