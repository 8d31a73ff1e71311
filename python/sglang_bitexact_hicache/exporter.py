"""Seam: the plain counters as Prometheus metrics, through SGLang's own collector.

`METRICS` is the table of what is exported; docs/metrics.md is the same table for readers (a test
holds them equal). The metrics join SGLang's: made with the classes and the labels of its scheduler
collector, in the registry of the scheduler process. So they need `--enable-metrics`, and appear on
the ranks that report, with the first report.

SGLang reports after a prefill batch, every `--decode-log-interval` decode steps, and every 30 s when
idle; then, and at no other time, what the counters gained is added. The counters themselves
(metrics.py, truth.py, gate.py) know nothing of this. Scheduler thread only; nothing is read from the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from sglang_bitexact_hicache.metrics import Counters, StorageCounters

if TYPE_CHECKING:
    from sglang_bitexact_hicache.runtime import TruthRuntime
    from sglang_bitexact_hicache.storage import TruthStorage
    from sglang_bitexact_hicache.tree import BxCache

PREFIX = "sglang:bitexact_hicache_"

RESTORE_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
"""Upper bounds in seconds."""

Read = Callable[["BxCache"], Any]


class MetricType(Enum):
    """How a metric is made and fed."""

    COUNTER = "counter"
    """Reads a number that only grows."""
    GAUGE = "gauge"
    """Reads a number."""
    HISTOGRAM = "histogram"
    """Reads, and thereby takes, the observations since the last report."""


@dataclass(frozen=True)
class Metric:
    """One exported metric.

    Attributes:
        name: as on /metrics.
        type: counter, gauge or histogram.
        meaning: its documentation, on /metrics and in docs/metrics.md.
        read: its value, from the cache; or one for each value of the label `reason`.
    """

    name: str
    type: MetricType
    meaning: str
    read: Read | Mapping[str, Read]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels beside SGLang's."""
        return ("reason",) if isinstance(self.read, Mapping) else ()

    def series(self) -> list[tuple[dict[str, str], Read]]:
        """Its label values, and where the value of each comes from."""
        if isinstance(self.read, Mapping):
            return [({"reason": reason}, read) for reason, read in self.read.items()]
        return [({}, self.read)]


def _counters(cache: BxCache) -> Counters:
    return cast("TruthRuntime", cache.truth_runtime).counters


def _storage(cache: BxCache) -> TruthStorage:
    return cast("TruthStorage", cache.truth_storage)


def _stored(cache: BxCache) -> StorageCounters:
    return _storage(cache).counters


def _count(name: str, meaning: str, read: Read | Mapping[str, Read]) -> Metric:
    return Metric(f"{PREFIX}{name}_total", MetricType.COUNTER, meaning, read)


METRICS: tuple[Metric, ...] = (
    _count(
        "captured",
        "Boundaries whose truth was captured, by prefill or decode.",
        lambda c: _counters(c).captured,
    ),
    _count(
        "decode_captured",
        "Of the captured, those after a decode step.",
        lambda c: _counters(c).decode_captured,
    ),
    _count(
        "round_captured",
        "Boundaries captured after a speculative round that might complete them: more than are captured, "
        "because the host learns only later what a round accepted.",
        lambda c: _counters(c).round_captured,
    ),
    _count(
        "captured_bytes",
        "Bytes copied from the device to host slots.",
        lambda c: _counters(c).bytes_captured,
    ),
    _count(
        "bound",
        "Truths whose page the tree took from the request that computed it: a hit can end there.",
        lambda c: c.gate_counters.bound,
    ),
    _count("restored", "Hits restored into a request's rows.", lambda c: _counters(c).restored),
    _count(
        "restored_bytes",
        "Bytes copied from host slots to the device.",
        lambda c: _counters(c).bytes_restored,
    ),
    _count(
        "evicted",
        "Truths given up. pool_full: for a new capture. superseded: a decode page off the grid, for a "
        "newer one of its request. page_gone: no tier holds their page any more.",
        {
            "pool_full": lambda c: c.store.counters.evicted,
            "superseded": lambda c: c.store.counters.superseded,
            "page_gone": lambda c: c.store.counters.died_with_lineage,
        },
    ),
    _count(
        "healed",
        "Cached pages without truth that got it from a later request.",
        lambda c: c.gate_counters.healed,
    ),
    _count(
        "rehung_pages",
        "Cached pages whose chain was broken and that a later request joined again.",
        lambda c: c.gate_counters.rehung_pages,
    ),
    _count(
        "healing_loaded_pages",
        "Host pages loaded back only so that a request could heal what lies below them.",
        lambda c: c.gate_counters.loaded_for_healing,
    ),
    _count(
        "recomputed_tokens",
        "Prompt tokens of admitted requests that the cache holds, in whole pages, but had no truth for, "
        "or not in one chain: they were computed again.",
        lambda c: _counters(c).recomputed_tokens,
    ),
    _count(
        "chunks_cut",
        "Prefill chunks that end where the prompt leaves a cached path, so that the path is healed.",
        lambda c: c.gate_counters.chunks_cut,
    ),
    _count(
        "rejected",
        "What was not done. Not captured: no_slot (every slot locked or reserved), over_staging (more "
        "boundaries in one forward than device staging), over_row_limit (the request holds its most "
        "slots), publish_refused (the page was gone, or had truth), not_completed (a speculative round "
        "that did not complete the page, or whose request was gone). Not restored: load_back_declined "
        "(the path changed after the match), request_gone (aborted or retracted before its forward). "
        "Ended with an error: restore_impossible (a bug of ours), check_failed (the debug checks).",
        {
            "no_slot": lambda c: _counters(c).capture_no_slot,
            "over_staging": lambda c: _counters(c).capture_over_staging,
            "over_row_limit": lambda c: _counters(c).capture_over_row_limit,
            "publish_refused": lambda c: c.store.counters.publish_refused,
            "not_completed": lambda c: _counters(c).round_discarded,
            "load_back_declined": lambda c: c.gate_counters.load_backs_declined,
            "request_gone": lambda c: _counters(c).restore_dropped,
            "restore_impossible": lambda c: _counters(c).restore_impossible,
            "check_failed": lambda c: _counters(c).checks_failed,
        },
    ),
    _count(
        "unknown_pages",
        "Pages cached without identity; a hit never passes them.",
        lambda c: c.gate_counters.unknown_pages,
    ),
    _count(
        "staging_waits",
        "Forwards that queued behind an older capture for device staging.",
        lambda c: _counters(c).staging_waits,
    ),
    _count(
        "restore_waves",
        "Extra waves of batches with more hits than restore staging.",
        lambda c: _counters(c).restore_waves,
    ),
    _count(
        "checks_verified",
        "Restores that the debug checks verified on the device.",
        lambda c: _counters(c).checks_verified,
    ),
    _count(
        "storage_written",
        "Records of boundaries that went to storage (L3).",
        lambda c: _stored(c).records_written,
    ),
    _count(
        "storage_written_bytes",
        "Bytes of those records.",
        lambda c: _stored(c).bytes_written,
    ),
    _count(
        "storage_not_written",
        "Boundaries whose record did not go to storage. present: storage has one. not_own: storage has "
        "other bytes for a page of the prefix, or not all of it. failed: storage did not take it.",
        {
            "present": lambda c: _stored(c).records_present,
            "not_own": lambda c: _stored(c).write_not_own,
            "failed": lambda c: _stored(c).write_failed,
        },
    ),
    _count(
        "storage_loaded",
        "Records that came from storage, were verified with their KV, and became a hit.",
        lambda c: _stored(c).records_loaded,
    ),
    _count(
        "storage_read_bytes",
        "Bytes of KV and records that were read from storage for prefetches.",
        lambda c: _stored(c).bytes_read,
    ),
    _count(
        "storage_used_bytes",
        "Of those, the bytes that came with a record that became a hit.",
        lambda c: _stored(c).bytes_used,
    ),
    _count(
        "storage_read_back_pages",
        "KV pages read back, to find out whether storage holds what this server would have written.",
        lambda c: _stored(c).pages_read_back,
    ),
    _count(
        "storage_refused",
        "Prefetches from storage that came to nothing. record: the record's own bytes are wrong. kv: the "
        "KV is of another computation than the record. unreadable: storage did not give what it had "
        "announced. unproved: host memory holds other pages than were read, or pages not hashed yet. "
        "not_asked: not even started, because the prefix in host memory is no proof.",
        {
            "record": lambda c: _stored(c).refused_record,
            "kv": lambda c: _stored(c).refused_kv,
            "unreadable": lambda c: _stored(c).unreadable,
            "unproved": lambda c: _stored(c).unproved,
            "not_asked": lambda c: _stored(c).not_asked,
        },
    ),
    Metric(
        f"{PREFIX}restore_seconds",
        MetricType.HISTOGRAM,
        "From the admission of a hit, when its copy from host memory is queued, until its scatter "
        "into the rings is queued: host clock of the scheduler thread, no synchronisation.",
        lambda c: _counters(c).restore_seconds.take(),
    ),
    Metric(
        f"{PREFIX}slots_used",
        MetricType.GAUGE,
        "Host slots that are not free.",
        lambda c: c.store.in_use(),
    ),
    Metric(
        f"{PREFIX}storage_closed",
        MetricType.GAUGE,
        "1 once storage is neither read nor written because the weights changed.",
        lambda c: int(_storage(c).closed),
    ),
    Metric(f"{PREFIX}slots_total", MetricType.GAUGE, "Host slots.", lambda c: c.store.capacity),
)
"""Everything that is exported."""


@dataclass
class _Growing:
    """A series of a counter, and how much of it was reported."""

    child: Any
    read: Read
    reported: int = 0

    def update(self, cache: BxCache) -> None:
        value = self.read(cache)
        # Prometheus raises at a negative step, and that would end the scheduler.
        if value > self.reported:
            self.child.inc(value - self.reported)
            self.reported = value


@dataclass
class _Level:
    """A series of a gauge."""

    child: Any
    read: Read

    def update(self, cache: BxCache) -> None:
        self.child.set(self.read(cache))


@dataclass
class _Observed:
    """A series of a histogram."""

    child: Any
    read: Read

    def update(self, cache: BxCache) -> None:
        for observation in self.read(cache):
            self.child.observe(observation)


class Exporter:
    """The metrics of one scheduler process, and what was reported of them so far.

    Registers every metric in this process's Prometheus registry, so there can be one.

    Args:
        collector: SGLang's `SchedulerMetricsCollector`: its labels, and its metric classes (which
            are Ray's under Ray).
    """

    def __init__(self, collector: Any) -> None:
        # Not earlier: the client looks for PROMETHEUS_MULTIPROC_DIR, which SGLang sets, when imported.
        import prometheus_client

        makers: dict[MetricType, tuple[Any, Any, dict[str, Any]]] = {
            MetricType.COUNTER: (
                collector._counter_cls or prometheus_client.Counter,
                _Growing,
                {},
            ),
            MetricType.GAUGE: (
                collector._gauge_cls or prometheus_client.Gauge,
                _Level,
                {"multiprocess_mode": "mostrecent"},
            ),
            MetricType.HISTOGRAM: (
                collector._histogram_cls or prometheus_client.Histogram,
                _Observed,
                {"buckets": RESTORE_BUCKETS},
            ),
        }
        self._series: list[_Growing | _Level | _Observed] = []
        for metric in METRICS:
            make, series, options = makers[metric.type]
            made = make(
                name=metric.name,
                documentation=metric.meaning,
                labelnames=[*collector.labels, *metric.labels],
                **options,
            )
            for labels, read in metric.series():
                # Having the child is what makes the series appear, at 0, before anything happened.
                self._series.append(series(made.labels(**collector.labels, **labels), read))

    def update(self, cache: BxCache) -> None:
        """Report what happened since the last call."""
        for series in self._series:
            series.update(cache)


_exporter: Exporter | None = None


def after_log_hicache_stats(result: None, reporter: Any) -> None:
    """AFTER SchedulerMetricsReporter._log_hicache_stats: SGLang reports, and so do we.

    With metrics off, or on a rank that does not report, SGLang does not come here.
    """
    # Not with the module: the doctor reads the table where there is neither SGLang nor torch.
    from sglang_bitexact_hicache.tree import BxCache

    global _exporter
    cache = reporter.scheduler.tree_cache
    if not isinstance(cache, BxCache) or cache.truth_runtime is None:
        return
    if _exporter is None:
        _exporter = Exporter(reporter.metrics_collector)
    _exporter.update(cache)
