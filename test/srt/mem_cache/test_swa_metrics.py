"""Metrics: what the counters say is what /metrics shows, when SGLang reports and at no other time.

On real schedulers with `--enable-metrics`; the text is served by SGLang's own route over the directory
that its scheduler process writes to.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from scenarios import PAGE, prompt
from scheduler_harness import Harness, Steps
from startup_fixtures import environment

from sglang_bitexact_hicache import exporter
from sglang_bitexact_hicache.exporter import METRICS, PREFIX
from sglang_bitexact_hicache.metrics import Durations

STEM = prompt(70, 3 * PAGE + 40)

NOT_EXPORTED = {
    "TruthCounters.published": "captured",
    "TruthCounters.moved": "healed",
    "TruthCounters.reserve_failed": "rejected, no_slot",
    "Counters.capture_unpublished": "rejected, publish_refused",
    "GateCounters.matches": "SGLang counts requests; a waiting one is matched again and again",
    "GateCounters.second_walks": "cost of the gate, for the benchmark",
    "GateCounters.device_walks": "cost of the gate, for the benchmark",
    "GateCounters.host_inserts_dropped": "storage_refused counts what came of it: SGLang logs it",
    "StorageCounters.records_read": "storage_read_bytes",
}
"""Counters that /metrics leaves out, and what says the same or why it is of no use there."""

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


# ---- scenarios: what happens in the scheduler process


def report(h: Harness) -> None:
    """Makes SGLang report now, as it does when it was idle for 30 s."""
    h.scheduler.metrics_collector.last_log_time = float("-inf")
    h.scheduler.metrics_reporter._maybe_log_idle_metrics()


def a_hit(h: Harness) -> Steps:
    """A prompt and its repeat; what the plain counters say afterwards."""
    yield from h.generate(STEM)
    hit = yield from h.generate(STEM)
    yield from h.settle()
    report(h)
    counters = {c.__class__.__name__: dataclasses.asdict(c) for c in plain_counters(h)}
    store = h.cache.store
    return hit.cached, counters, (store.in_use(), store.capacity)


def plain_counters(h: Harness) -> tuple[Any, ...]:
    """The dataclasses that are exported."""
    stored = h.cache.truth_storage.counters
    return h.runtime.counters, h.cache.store.counters, h.cache.gate_counters, stored


def a_prompt_without_truth(h: Harness) -> Steps:
    """A cached prompt loses its truths and is asked again, twice; the cached tokens of each."""
    yield from h.flush()
    yield from h.generate(STEM)
    yield from h.settle()
    for lineage in list(h.cache.store._slot_of):
        h.cache.store.supersede(lineage)
    again = yield from h.generate(STEM)
    healed = yield from h.generate(STEM)
    yield from h.settle()
    report(h)
    return again.cached, healed.cached


def bump_each(h: Harness) -> list[str]:
    """Adds 1, 2, 4, ... to every plain counter; their names in that order."""
    names = []
    for counters in plain_counters(h):
        for counter in dataclasses.fields(counters):
            step = 1 << len(names)
            setattr(counters, counter.name, getattr(counters, counter.name) + step)
            names.append(f"{type(counters).__name__}.{counter.name}")
    report(h)
    return names


def observe(h: Harness, *seconds: float) -> None:
    """Restores took this long."""
    for duration in seconds:
        h.runtime.counters.restore_seconds.add(duration)
    report(h)


def count_updates(h: Harness, new: int) -> Steps:
    """How often the metrics were brought up to date while one request ran, and its decode steps."""
    yield from h.settle()
    updates = 0
    stock = exporter.Exporter.update

    def counting(self: exporter.Exporter, cache: Any) -> None:
        nonlocal updates
        updates += 1
        stock(self, cache)

    exporter.Exporter.update = counting
    try:
        result = yield from h.generate(prompt(71, 300), new)
        yield from h.settle()
    finally:
        exporter.Exporter.update = stock
    return updates, len(result.ids)


def fall_back(h: Harness) -> None:
    """A counter falls, which none should, and SGLang reports."""
    h.runtime.counters.captured -= 1
    report(h)
    h.runtime.counters.captured += 1


def what_is_there(h: Harness) -> tuple[bool, bool, list[str]]:
    """Whether a report went by, whether there is an exporter, and what of ours is registered."""
    import sys

    if h.scheduler.metrics_reporter.enable_metrics:
        report(h)
    registered: list[str] = []
    if "prometheus_client" in sys.modules:
        from prometheus_client import REGISTRY

        registered = [name for name in REGISTRY._names_to_collectors if "bitexact" in name]
    module = sys.modules.get("sglang_bitexact_hicache.exporter")
    return (
        h.scheduler.metrics_reporter.enable_metrics,
        module is not None and module._exporter is not None,
        registered,
    )


# ---- reading


def page(folder: Path) -> str:
    """GET /metrics, answered by SGLang's route."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from sglang.srt.utils.common import add_prometheus_middleware

    app = FastAPI()
    with environment(PROMETHEUS_MULTIPROC_DIR=str(folder)):
        add_prometheus_middleware(app)
        return TestClient(app).get("/metrics").text


def scrape(folder: Path) -> Samples:
    """What is on the page: value by name and labels, only the numbers."""
    from prometheus_client.parser import text_string_to_metric_families

    text = page(folder)
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = samples.setdefault(sample.name, {})
            series[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def value(samples: Samples, name: str, reason: str | None = None) -> float:
    """The one value of one of our metrics."""
    (found,) = (
        v
        for labels, v in samples[PREFIX + name].items()
        if reason is None or ("reason", reason) in labels
    )
    return found


def ours(samples: Samples) -> set[str]:
    """Names of our metrics, a histogram by its own name."""
    names = {name for name in samples if name.startswith(PREFIX)}
    histograms = {n.removesuffix("_bucket") for n in names if n.endswith("_bucket")}
    parts = {h + suffix for h in histograms for suffix in ("_bucket", "_count", "_sum")}
    return names - parts | histograms


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the scheduler process keeps its metrics; in a server the launcher chooses it."""
    return tmp_path_factory.mktemp("prometheus")


@pytest.fixture(scope="module")
def process(scheduler_process, folder):
    args = ["--chunked-prefill-size", "512", "--enable-metrics", "--served-model-name", "tiny"]
    env = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    with scheduler_process("metrics", args, **env) as running:
        yield running


# ---- the table


def test_every_reason_is_explained():
    for metric in METRICS:
        for labels, _ in metric.series():
            assert labels.get("reason", "") in metric.meaning


def test_durations_nobody_reads_do_not_pile_up():
    durations = Durations()
    for i in range(Durations.KEPT + 3):
        durations.add(float(i))
    assert len(durations) == Durations.KEPT
    assert durations.take()[0] == 3.0
    assert durations.take() == []


# ---- a scheduler with metrics


def test_a_hit_is_on_the_page_and_the_page_is_what_the_counters_say(process, folder):
    cached, counters, (used, capacity) = process.run(a_hit)
    samples = scrape(folder)
    assert cached == 3 * PAGE
    assert ours(samples) == {metric.name for metric in METRICS}
    runtime, store = counters["Counters"], counters["TruthCounters"]
    assert value(samples, "captured_total") == runtime["captured"] == 3
    assert value(samples, "restored_total") == runtime["restored"] == 1
    assert value(samples, "captured_bytes_total") == 3 * value(samples, "restored_bytes_total") > 0
    assert value(samples, "restore_seconds_count") == 1
    assert 0 < value(samples, "restore_seconds_sum") < 10
    assert value(samples, "recomputed_tokens_total") == 0
    assert value(samples, "checks_verified_total") == 1
    assert value(samples, "evicted_total", "pool_full") == store["evicted"] == 0
    assert value(samples, "rejected_total", "restore_impossible") == 0
    assert value(samples, "slots_used") == used > 0
    assert value(samples, "slots_total") == capacity


def test_what_healing_does_and_costs_is_on_the_page(process, folder):
    process.run(report)
    before = scrape(folder)
    assert process.run(a_prompt_without_truth) == (0, 3 * PAGE)
    after = scrape(folder)

    def gain(name: str, reason: str | None = None) -> float:
        return value(after, name, reason) - value(before, name, reason)

    assert gain("recomputed_tokens_total") == 3 * PAGE
    assert gain("chunks_cut_total") == 1
    # At the two checkpoints, which are where its chunks end.
    assert gain("healed_total") == 2
    assert gain("evicted_total", "superseded") == 3


def test_the_labels_are_sglangs(process, folder):
    process.run(report)
    samples = scrape(folder)
    (labels,) = samples["sglang:hicache_host_total_tokens"]
    assert ("model_name", "tiny") in labels
    for metric in METRICS:
        suffix = "_count" if metric.type is exporter.MetricType.HISTOGRAM else ""
        expected = {tuple(sorted([*labels, *own.items()])) for own, _ in metric.series()}
        # One process, so that a gauge has no label of its own either.
        assert set(samples[metric.name + suffix]) == expected, metric.name


def test_every_counter_is_exported_once_or_left_out_on_purpose(process, folder):
    process.run(report)
    before = scrape(folder)
    names = process.run(bump_each)
    after = scrape(folder)
    exported = []
    for metric in METRICS:
        if metric.type is exporter.MetricType.COUNTER:
            for labels, v in after[metric.name].items():
                gain = int(v - before[metric.name][labels])
                # Each counter gained a power of two of its own.
                assert gain.bit_count() == 1, (metric.name, labels)
                exported.append(names[gain.bit_length() - 1])
    assert len(exported) == len(set(exported)), "a counter is exported twice"
    assert set(names) - set(exported) == set(NOT_EXPORTED)


def test_a_restore_is_observed_with_its_duration(process, folder):
    process.run(report)
    before = scrape(folder)
    process.run(observe, 0.0015, 0.3)
    after = scrape(folder)

    def gain(name: str, bound: str | None = None) -> float:
        def pick(samples: Samples) -> float:
            series = samples[f"{PREFIX}restore_seconds_{name}"]
            return sum(v for k, v in series.items() if bound is None or ("le", bound) in k)

        return pick(after) - pick(before)

    assert gain("count") == 2
    assert gain("sum") == pytest.approx(0.3015)
    assert [gain("bucket", b) for b in ("0.001", "0.002", "0.2", "0.5")] == [0, 1, 1, 2]


def test_it_is_brought_up_to_date_when_sglang_reports_and_not_per_token(process):
    updates, tokens = process.run(count_updates, 100)
    assert tokens == 100
    # One prefill, a report every 40 decode steps, and the first idle pass.
    assert 1 <= updates <= 5


def test_a_counter_that_falls_does_not_end_the_scheduler(process, folder):
    process.run(report)
    before = value(scrape(folder), "captured_total")
    process.run(fall_back)
    process.run(report)
    assert value(scrape(folder), "captured_total") == before


# ---- and without


@pytest.mark.parametrize(
    ("flag", "args"),
    [("0", ["--enable-metrics"]), ("1", [])],
    ids=["flag off, metrics on", "flag on, metrics off"],
)
def test_nothing_is_registered_without_the_flag_or_without_metrics(
    flag, args, scheduler_process, tmp_path
):
    env = {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": flag,
        "SGLANG_SWA_DBG_CHECKSUM": "0",
    }
    with scheduler_process("without", args, **env) as process:
        for _ in range(2):
            process.run(serve, STEM)
        assert process.run(what_is_there) == (bool(args), False, [])
        log = process.log().splitlines()
    assert ours(scrape(tmp_path)) == set()
    # One line at startup, and none for a request.
    lines = [line for line in log if "bit-exact" in line or "SWA-DBG" in line]
    assert len(lines) == int(flag), lines
    assert all("windows of" in line and "device staging" in line for line in lines)


def serve(h: Harness, ids: list[int]) -> Steps:
    """One request, after which SGLang has reported."""
    yield from h.generate(ids)
    yield from h.settle()
