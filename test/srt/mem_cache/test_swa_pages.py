"""Pages of this repository say what the tables in the code say."""

from __future__ import annotations

from pathlib import Path

from sglang_bitexact_hicache import seam_table, settings
from sglang_bitexact_hicache.exporter import METRICS

ROOT = Path(__file__).parents[3]


def test_the_page_of_seams_is_the_table():
    page = (ROOT / "docs" / "seams.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    expected = [
        f"| `{s.target.removeprefix('sglang.srt.')}` | {s.kind.value}, {s.when.value} "
        f"| `{s.handler}` | {s.caller} |"
        for s in seam_table.SEAMS
    ]
    assert rows == expected


def test_the_page_of_metrics_is_the_table():
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{m.name}` | {m.type.value} | {m.meaning} |" for m in METRICS]


def test_the_readme_names_every_setting():
    readme = (ROOT / "README.md").read_text()
    for setting in settings.SETTINGS:
        assert f"`{setting.env}" in readme
        assert setting.argument is None or f"`{setting.argument.name}" in readme
