"""The doctor reads what a scheduler reports on /metrics."""

from __future__ import annotations

from test_swa_metrics import a_hit, folder, page, process, report, scrape, value  # noqa: F401 (fixtures)

from sglang_bitexact_hicache import exporter
from sglang_bitexact_hicache.doctor import server
from sglang_bitexact_hicache.exporter import METRICS, PREFIX


def test_the_doctor_reads_the_page(process, folder):  # noqa: F811
    process.run(a_hit)
    process.run(report)
    values, reported = server.read_metrics(page(folder))
    samples = scrape(folder)
    assert reported
    parts = {m.name: ("_count", "_sum") for m in METRICS if m.type is exporter.MetricType.HISTOGRAM}
    expected = {
        (name, dict(labels).get("reason", "")): number
        for metric in METRICS
        for name in (metric.name + part for part in parts.get(metric.name, ("",)))
        for labels, number in samples[name].items()
    }
    assert values == expected
    assert {finding.key: finding.value for finding in server._health(values)} == {
        "captured": value(samples, "captured_total"),
        "restored": value(samples, "restored_total"),
        "verified": value(samples, "checks_verified_total"),
        "mismatches": 0,
        "impossible": 0,
        "pool": {
            "used": value(samples, "slots_used"),
            "slots": value(samples, "slots_total"),
        },
    }
    assert values[(PREFIX + "restored_total", "")] >= 1
