"""The table, the last line, and what does not hold. Pure: from what was measured to text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from tabulate import tabulate

from compare.arms import ARMS
from compare.measure import Measured, SpeedPass

Values = Mapping[str, Sequence[float]]
"""What every pass of an arm gave, by arm."""


Differ = Callable[[Sequence[float], Sequence[float]], str]
"""The difference of the second arm's values from the first's, as text."""


class Metric(NamedTuple):
    """A row of the table for each workload: its name, how it is read, its decimals."""

    name: str
    read: Callable[[SpeedPass], float | None]
    decimals: int
    of_decode: bool = True
    """Whether the workloads of the decode batches have it."""
    when_zero: bool = True
    """Whether the row is there when all of it is zero."""


SPEED_METRICS = (
    Metric("prompt tok/s", lambda p: p.speed.prompt_tok_s, 0, of_decode=False),
    Metric("server CPU, s", lambda p: p.cpu_seconds, 1),
    Metric("median TPOT, ms", lambda p: p.speed.tpot_ms, 1),
    Metric("peak output tok/s", lambda p: p.speed.peak_output_tok_s, 0),
    Metric("cached tokens", lambda p: p.speed.cached_tokens, 0),
    Metric("restored hits", lambda p: p.counts and p.counts.restored, 0),
    Metric(
        "cached without truth, tokens",
        lambda p: p.counts and p.counts.recomputed,
        0,
        when_zero=False,
    ),
)
VERIFIED = Metric("restores verified", lambda p: p.counts and p.counts.verified, 0)


def table(arms: Mapping[str, Measured]) -> str:
    """Off, dev and their difference, a row a metric of each workload; mean, and the passes' range."""
    keys = [key for key in ARMS if key in arms]
    header = ["workload", "", *(ARMS[key].title for key in keys)]
    pairs = [(a, "dev") for a in ("off", "python") if a in arms and "dev" in arms]
    header += [f"dev − {ARMS[a].title}" for a, _ in pairs]
    rows = []
    for label, metric, values, decimals, differ in _metrics(arms):
        cells = [spread(values[key], decimals) if key in values else "-" for key in keys]
        differences = [
            differ(values[a], values[b]) if a in values and b in values else "-" for a, b in pairs
        ]
        rows.append([label, metric, *cells, *differences])
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def _metrics(arms: Mapping[str, Measured]) -> Iterator[tuple[str, str, Values, int, Differ]]:
    """The rows: workload, metric, values by arm (only arms that have one), decimals, their difference."""
    metrics = (*SPEED_METRICS, VERIFIED) if "checked" in arms else SPEED_METRICS
    for workload in _names(m.speeds for m in arms.values()):
        for metric in metrics:
            if workload.startswith("decode") and not metric.of_decode:
                continue
            values = {
                key: read
                for key, arm in arms.items()
                if (read := _read(metric, arm.speeds.get(workload, ())))
            }
            if values and (metric.when_zero or any(map(any, values.values()))):
                yield workload, metric.name, values, metric.decimals, difference
    for evaluation in _names(m.scores for m in arms.values()):
        scores = {key: m.scores[evaluation] for key, m in arms.items() if evaluation in m.scores}
        yield evaluation, "accuracy", {k: [s.score.accuracy] for k, s in scores.items()}, 3, points
        invalid = {k: [s.score.invalid] for k, s in scores.items() if s.score.invalid is not None}
        if invalid:
            yield evaluation, "invalid", invalid, 3, points
        restored = {k: [s.counts.restored] for k, s in scores.items() if s.counts}
        if restored:
            yield evaluation, "restored hits", restored, 0, difference


def _names(groups) -> list[str]:
    """Keys of all groups, each once, in the order of their first appearance."""
    return list(dict.fromkeys(name for group in groups for name in group))


def _read(metric: Metric, passes: Sequence[SpeedPass]) -> list[float]:
    return [value for p in passes if (value := metric.read(p)) is not None]


def spread(values: Sequence[float], decimals: int) -> str:
    """The mean, and the range of the passes where they differ: "965 (940 to 990)"."""
    low, high = (f"{value:.{decimals}f}" for value in (min(values), max(values)))
    middle = f"{mean(values):.{decimals}f}"
    return middle if low == high else f"{middle} ({low} to {high})"


def difference(base: Sequence[float], other: Sequence[float]) -> str:
    """Of the means in percent, with a mark where the ranges of the passes overlap or cannot be known."""
    if mean(base) == 0:
        return "0" if mean(other) == 0 else f"{mean(other):+.3g}"
    percent = 100 * (mean(other) / mean(base) - 1)
    several = len(base) > 1 and len(other) > 1
    apart = several and (max(base) < min(other) or max(other) < min(base))
    same = list(base) == list(other)
    return f"{percent:+.1f} %" + ("" if apart or same else " ~")


def points(base: Sequence[float], other: Sequence[float]) -> str:
    """Of two fractions of 1, as such."""
    return f"{mean(other) - mean(base):+.3f}"


LEGEND = (
    "Mean of the passes (their range). ~: the ranges overlap, or there is one pass only, so the "
    "difference may be chance."
)


def problems(arms: Mapping[str, Measured]) -> Iterator[str]:
    """What does not hold, in words; nothing where the comparison is one."""
    for key, arm in arms.items():
        title = ARMS[key].title
        for workload, passes in arm.speeds.items():
            lost = sum(p.speed.requests - p.speed.completed for p in passes)
            if lost:
                yield f"{title}: {workload}: {lost} requests did not complete"
        engaged = [p.counts for passes in arm.speeds.values() for p in passes if p.counts]
        engaged += [s.counts for s in arm.scores.values() if s.counts]
        if key in ("off", "python"):
            if engaged:
                yield f"{title}: the feature's metrics are there, so it was on"
            continue
        if not engaged:
            yield f"{title}: none of the feature's metrics (is it on, with --enable-metrics?)"
            continue
        for workload, passes in arm.speeds.items():
            reused = sum(p.speed.cached_tokens for p in passes)
            restored = sum(p.counts.restored for p in passes if p.counts)
            if reused and not restored:
                yield f"{title}: {workload}: {reused} tokens were cached, nothing was restored"
        failed = sum(counts.failed for counts in engaged)
        if failed:
            yield f"{title}: {failed} failed checks or failure lines in its log"
        if key == "checked":
            restored = sum(counts.restored for counts in engaged)
            verified = sum(counts.verified for counts in engaged)
            if not restored == verified > 0:
                yield f"{title}: {restored} hits restored, {verified} verified"
    for workload in shared_workloads(arms):
        for key, arm in arms.items():
            if not any(p.speed.cached_tokens for p in arm.speeds.get(workload, ())):
                yield f"{ARMS[key].title}: {workload}: nothing was cached, so this compares nothing"


def shared_workloads(arms: Mapping[str, Measured]) -> list[str]:
    """The workloads whose prompts share a prefix, without those of the decode batches."""
    return [n for n in _names(m.speeds for m in arms.values()) if n.startswith("shared prefix")]


def prompt_rate(arm: Measured) -> float | None:
    """Prompt tokens a second of all passes of the shared-prefix workloads together."""
    names = shared_workloads({"off": arm})
    speeds = [p.speed for name in names for p in arm.speeds[name]]
    seconds = sum(speed.seconds for speed in speeds)
    return sum(speed.prompt_tokens for speed in speeds) / seconds if seconds else None


def last_line(arms: Mapping[str, Measured]) -> str:
    """The result as key=value pairs; "-" for what was not measured."""
    rates = {key: prompt_rate(arms[key]) if key in arms else None for key in ("off", "dev")}
    accuracies = {
        key: arms[key].scores["gsm8k"].score.accuracy
        if key in arms and "gsm8k" in arms[key].scores
        else None
        for key in ("off", "dev")
    }
    percent = None
    if rates["off"] and rates["dev"]:
        percent = 100 * (rates["dev"] / rates["off"] - 1)

    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"off_tok_s={text(rates['off'], '.0f')} dev_tok_s={text(rates['dev'], '.0f')} "
        f"diff_pct={text(percent, '+.1f')} "
        f"off_acc={text(accuracies['off'], '.3f')} dev_acc={text(accuracies['dev'], '.3f')}"
    )
