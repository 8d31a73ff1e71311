"""The matrix: claims 1 to 3 (docs/claims.md) in every configuration that is deployed.

    make matrix            # all of it; MATRIX_ARGS="--only fp8 --json FILE"

A configuration is a layout of rows, with or without speculation, and a number of ranks; a cell is one
of its tiers (L1 device, L2 host memory, L3 storage). The tiers of a configuration run one after the
other in one set of scheduler processes (scheduler_harness.py), with every restore verified on the
device. A cell is exact if on each rank

* a prompt again, a long prompt again (device tier only), and a prompt that leaves a cached one, over
  rings that were scribbled, have exactly the cached tokens and the tier that they have to, one verified
  restore each, and the ids and logprobs of their cold runs (claims 1 and 3);
* the next turn of a conversation, which resumes on a page that decode completed, answers as the writer,
  continued from its own ring rows (claim 2);
* the controls are noticed: a repeat without its restore, the next turn without anything in its rings.

What the feature refuses is started too: the cell shows the message. Prints a table for docs/claims.md
and, last, `cells=… cells_exact=… refused=…`. Exit status 0 if every cell is exact or refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matrix_scenarios
import scenarios
from scenarios import PAGE, prompt
from scheduler_harness import FEATURE_ENV, SchedulerRanks, failure_lines
from tabulate import tabulate

from dsv4_reference_platform.launch import EAGLE_ARGS, NEXTN_ARGS
from sglang_bitexact_hicache import settings

CHUNK = 2 * PAGE
TIERS = {"L1": "device", "L2": "host", "L3": "storage"}
LONG = 20 * PAGE + 129
"""Tokens of the long prompt."""

LAYOUTS = {"bf16": {}, "fp8": {"SGLANG_DSV4_UNIFIED_KV_FP8": "1"}}
SPECULATION = {"none": (), "EAGLE": (*NEXTN_ARGS, *EAGLE_ARGS)}
RANKS = {
    "1": (1, ()),
    "2, tensor parallel": (2, ("--tp-size", "2")),
    "2, data parallel attention": (
        2,
        ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
    ),
    "2, pipeline": (2, ("--pp-size", "2")),
}
STORAGE = (
    *("--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
REFUSAL = f"ValueError: {settings.ENV_FLAG}=1 cannot run with this configuration"


@dataclass(frozen=True)
class Configuration:
    """Names of a layout, a kind of speculation and ranks."""

    layout: str
    speculation: str
    ranks: str

    def __str__(self) -> str:
        return f"{self.layout}, {self.speculation}, {self.ranks}"

    def processes(self, log: Path, *, storage: Path | None) -> SchedulerRanks:
        """Its scheduler processes, not started."""
        count, ranks = RANKS[self.ranks]
        env = {**FEATURE_ENV, **LAYOUTS[self.layout]}
        args = [
            *("--max-running-requests", "16", "--chunked-prefill-size", str(CHUNK)),
            *ranks,
            *SPECULATION[self.speculation],
        ]
        if storage is not None:
            args += STORAGE
            env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(storage)
        return SchedulerRanks(args, env, ranks=count, log_path=log)


@dataclass
class Cell:
    """One tier of a configuration.

    Attributes:
        verified: restores that were verified, of all ranks.
        controls: controls that were noticed, on each rank.
        wrong: what does not hold.
        refused: the startup message, where it is refused.
    """

    configuration: Configuration
    tier: str
    verified: int = 0
    controls: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: str | None = None

    @property
    def exact(self) -> bool:
        """Whether all of it held."""
        return self.refused is None and not self.wrong

    @property
    def text(self) -> str:
        """For the table."""
        if self.refused is not None:
            return "refused"
        return (
            f"exact, {self.verified} verified" if self.exact else "WRONG: " + "; ".join(self.wrong)
        )


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    parser.add_argument("--json", type=Path, help="where to write the cells")
    asked = parser.parse_args()
    start = time.monotonic()
    cells: list[Cell] = []
    with TemporaryDirectory() as scratch:
        logs = asked.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        for number, configuration in enumerate(configurations(asked.only)):
            cells += run(configuration, logs / f"matrix{number}", Path(scratch) / f"l3-{number}")
            print(f"[{time.monotonic() - start:6.0f} s] {configuration}", flush=True)
            for cell in cells[-len(TIERS) :]:
                print(f"    {cell.tier}: {cell.text}", flush=True)
    print("\n" + table(cells) + "\n")
    for message in dict.fromkeys(cell.refused for cell in cells if cell.refused):
        print(f"refused: {message}")
    if asked.json:
        asked.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    exact = sum(cell.exact for cell in cells)
    refused = sum(cell.refused is not None for cell in cells)
    print(f"cells={len(cells)} cells_exact={exact} refused={refused}")
    return 0 if cells and exact + refused == len(cells) else 1


def configurations(only: str) -> list[Configuration]:
    """Those whose name contains a text."""
    found = [Configuration(a, b, c) for a in LAYOUTS for b in SPECULATION for c in RANKS]
    return [configuration for configuration in found if only in str(configuration)]


def run(configuration: Configuration, logs: Path, storage: Path) -> list[Cell]:
    """The cells of a configuration: with storage in one go, or where that is refused, without."""
    cells = [Cell(configuration, tier) for tier in TIERS]
    refused = _run_cells(configuration, cells, logs.with_suffix(".l3.log"), storage)
    if refused is None:
        return cells
    cells[-1].refused = refused
    refused = _run_cells(configuration, cells[:-1], logs.with_suffix(".log"), None)
    if refused is not None:
        for cell in cells:
            cell.refused = refused
    return cells


def _run_cells(
    configuration: Configuration, cells: Sequence[Cell], log: Path, storage: Path | None
) -> str | None:
    """Fill the cells; the message, where the configuration is refused."""
    processes = configuration.processes(log, storage=storage)
    try:
        processes.__enter__()
    except (AssertionError, RuntimeError) as error:
        processes.__exit__(None, None, None)
        message = refusal(f"{error}\n{processes.log()}")
        if message is None:
            raise
        return message
    try:
        for cell in cells:
            fill(cell, processes)
    finally:
        processes.__exit__(None, None, None)
    bad = failure_lines(processes.log())
    if bad:
        cells[-1].wrong.append(f"log: {bad[0]}")
    return None


def refusal(text: str) -> str | None:
    """What the feature's startup error names, in the output of a process that did not start."""
    _, found, rest = text.rpartition(REFUSAL)
    if not found:
        return None
    lines = itertools.takewhile(lambda line: line.startswith("  "), rest.splitlines()[1:])
    return "; ".join(line.strip() for line in lines)


def fill(cell: Cell, processes: SchedulerRanks) -> None:
    """Run one cell."""
    tier = TIERS[cell.tier]
    seed = 100 * (1 + list(TIERS).index(cell.tier))
    again, once_more = prompt(seed, 2 * PAGE + 129), prompt(seed + 5, 2 * PAGE + 129)
    hits = [
        ("a repeat", 2 * PAGE, (scenarios.repeat, again, 6, tier)),
        (
            "a fork",
            PAGE,
            (matrix_scenarios.fork, prompt(seed + 1, PAGE + 1), prompt(seed + 2, 400), 6, tier),
        ),
    ]
    if tier == "device":
        hits.append(
            (
                "a long repeat",
                LONG // PAGE * PAGE,
                (scenarios.repeat, prompt(seed + 3, LONG), 3, tier),
            )
        )
    for name, cached, call in hits:
        for rank, (first, hit, gains) in enumerate(processes.run(*call)):
            cell.verified += gains["checks_verified"]
            cell.wrong += [
                f"{name}, rank {rank}: {x}" for x in wrong(first, hit, gains, cached, tier)
            ]
    _control(cell, "a repeat", processes.run(matrix_scenarios.without_restore, once_more, 6, tier))
    turns = processes.run(scenarios.chat, prompt(seed + 4, 2 * PAGE - 20), 40, 50, 6, tier)
    for rank, (_, (restored, placed, without), _, gains) in enumerate(turns):
        cell.verified += gains["checks_verified"]
        found = wrong(placed, restored, gains, 2 * PAGE, tier)
        cell.wrong += [f"the next turn, rank {rank}: {x}" for x in found]
        _noticed(cell, "the next turn", rank, placed, without)


def _control(cell: Cell, name: str, answers: Sequence[tuple[Any, Any]]) -> None:
    for rank, (first, hit) in enumerate(answers):
        _noticed(cell, name, rank, first, hit)


def _noticed(cell: Cell, name: str, rank: int, right: Any, broken: Any) -> None:
    if not broken.cached or broken.same_answer(right):
        cell.wrong.append(f"control of {name}, rank {rank}: nothing noticed")
    else:
        cell.controls += 1


def wrong(first: Any, hit: Any, gains: dict[str, int], cached: int, tier: str) -> Iterator[str]:
    """What does not hold of a hit."""
    if hit.error is not None:
        yield f"error {hit.error}"
    if (hit.cached, getattr(hit, tier)) != (cached, cached):
        yield f"cached {hit.cached}, of them {getattr(hit, tier)} from {tier}, not {cached}"
    if not gains["restored"] == gains["checks_verified"] == 1:
        yield f"restored {gains['restored']}, verified {gains['checks_verified']}"
    if gains["checks_failed"] or gains["restore_impossible"]:
        yield "a check failed"
    if not hit.same_answer(first):
        yield "another answer than the cold run's"
    if len(set(hit.logprobs)) < 2:
        yield "flat logprobs"


def table(cells: Sequence[Cell]) -> str:
    """A row for each configuration."""
    rows: dict[Configuration, list[str]] = {}
    for cell in cells:
        rows.setdefault(cell.configuration, []).append(cell.text)
    header = ["rows", "speculation", "ranks", *TIERS]
    return tabulate(
        [[c.layout, c.speculation, c.ranks, *texts] for c, texts in rows.items()], header, "github"
    )


if __name__ == "__main__":
    sys.exit(main())
