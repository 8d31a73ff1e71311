"""All passes of one arm, one behind the other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compare import clients, counters
from compare.arms import Endpoint
from compare.clients import Score, Speed
from compare.counters import Counts
from compare.options import Options
from compare.workloads import Evaluation, Workload

Say = Callable[[str], None]
"""Prints one line about what has just happened."""


@dataclass
class SpeedPass:
    """One pass of a speed workload; `counts` is what the server counted meanwhile, `cpu_seconds` what its
    processes used (with the request that warms it up)."""

    speed: Speed
    counts: Counts | None
    cpu_seconds: float | None = None


@dataclass
class ScorePass:
    """One evaluation; `counts` is what the server counted meanwhile."""

    score: Score
    counts: Counts | None


@dataclass
class Measured:
    """What one arm did, by the names of workloads and evaluations."""

    speeds: dict[str, list[SpeedPass]] = field(default_factory=dict)
    scores: dict[str, ScorePass] = field(default_factory=dict)
    tree_core: str | None = None
    """SGLang's class of the prefix tree's core, from the server's log; None where there is no log."""


def run(
    endpoint: Endpoint,
    speeds: Sequence[Workload],
    evaluations: Iterable[Evaluation],
    options: Options,
    scratch: Path,
    say: Say,
) -> Measured:
    """Measure a server. The cache is flushed before each pass, and by the client once more behind its
    request to warm up.

    Raises:
        ClientError: a client failed.
    """
    url, measured = endpoint.url, Measured()
    cpu = endpoint.cpu_seconds

    def counted(call: Callable[[], Any]) -> tuple[Any, Counts | None, float | None]:
        counters.flush(url)
        before, cpu_before = counters.read(url, endpoint.log), cpu and cpu()
        result = call()
        seconds = cpu and cpu() - cpu_before
        after = counters.read(url, endpoint.log)
        return result, after.since(before or Counts()) if after else None, seconds

    for workload in speeds:
        measured.speeds[workload.name] = []
    for repeat in range(options.sizes.repeats):
        for workload in speeds:
            speed, counts, seconds = counted(
                lambda workload=workload: clients.bench(
                    url, workload, scratch, options.tokenizer, options.client_timeout
                )
            )
            measured.speeds[workload.name].append(SpeedPass(speed, counts, seconds))
            restored = "" if counts is None else f", restored {counts.restored}"
            say(
                f"{workload.name}, pass {repeat + 1}: {speed.prompt_tok_s:.0f} prompt tok/s, "
                f"cached {speed.cached_tokens}{restored}"
            )
    for evaluation in evaluations:
        score, counts, _ = counted(
            lambda evaluation=evaluation: clients.evaluate(
                url, evaluation, scratch, options.client_timeout
            )
        )
        measured.scores[evaluation.name] = ScorePass(score, counts)
        say(f"{evaluation.name}: accuracy {score.accuracy:.3f}")
    if endpoint.log is not None:
        measured.tree_core = tree_core(endpoint.log.read_text(errors="replace"))
    return measured


def tree_core(log: str) -> str | None:
    """The tree core that SGLang says it uses when it makes the cache."""
    found = re.search(r"Tree Core: (\w+)", log)
    return found[1] if found else None


def save(path: Path, what: dict[str, Any], arms: dict[str, Measured]) -> None:
    """Write every pass, and what was sent, as JSON."""
    path.write_text(
        json.dumps({"sent": what, "arms": {k: asdict(m) for k, m in arms.items()}}, indent=1)
    )


def load(path: Path, what: dict[str, Any]) -> dict[str, Measured]:
    """The arms of a file that `save` wrote.

    Raises:
        ValueError: something else was sent then.
    """
    saved = json.loads(path.read_text())
    if saved["sent"] != json.loads(json.dumps(what)):
        raise ValueError(f"{path}: other requests were sent then: {saved['sent']}, now {what}")
    return {key: _measured(arm) for key, arm in saved["arms"].items()}


def _measured(arm: dict[str, Any]) -> Measured:
    def counts(value: list[int] | None) -> Counts | None:
        return None if value is None else Counts(*value)

    return Measured(
        speeds={
            name: [
                SpeedPass(Speed(*one["speed"]), counts(one["counts"]), one["cpu_seconds"])
                for one in passes
            ]
            for name, passes in arm["speeds"].items()
        },
        scores={
            name: ScorePass(Score(*one["score"]), counts(one["counts"]))
            for name, one in arm["scores"].items()
        },
        tree_core=arm["tree_core"],
    )
