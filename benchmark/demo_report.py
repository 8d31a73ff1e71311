"""The demo's report: one HTML file that needs nothing else, to be looked at.

A verdict, a picture of where each prompt's tokens came from in either arm, and the table with times and
bytes. The picture is SVG, drawn here; nothing is loaded from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from demo import Row


@dataclass(frozen=True)
class Line:
    """One request of the script in both arms.

    Attributes:
        name: as in the table that is printed.
        what: what it is, in a few words.
        boundary: what kind of boundary the hit ends at.
        off, on: what it did; off is None where the off-arm was not asked.
    """

    name: str
    what: str
    boundary: str
    off: Row | None
    on: Row


@dataclass(frozen=True)
class Verdict:
    """What the demo found as a whole: its problems in words, and figures by name."""

    problems: Sequence[str]
    figures: Mapping[str, object]


# Told apart by most colour-blind people too, and in print.
COLOURS = {
    "device": "#0072b2",
    "host": "#e69f00",
    "storage": "#8a4f9e",
    "recomputed": "#d4d7db",
}
_LEGEND = {
    "device": "reused, from device memory (L1)",
    "host": "reused, from host memory (L2)",
    "storage": "reused, from storage (L3)",
    "recomputed": "computed again",
}
_EQUAL, _DIFFERENT = "#1a7f37", "#c62828"

# The picture, in pixels.
_WIDTH, _LEFT, _BAR, _RIGHT = 1120, 200, 560, 16
_TOP, _ROW, _GAP, _HEIGHT = 74, 19, 13, 15
_TICK = 512


def page(lines: Sequence[Line], verdict: Verdict) -> str:
    """The whole file."""
    good = not verdict.problems
    head = "Every hit is exact" if good else "Something does not hold"
    figures = "".join(
        f"<div><b>{escape(str(value))}</b><span>{escape(name)}</span></div>"
        for name, value in verdict.figures.items()
    )
    wrong = "".join(f"<li>{escape(problem)}</li>" for problem in verdict.problems)
    return _PAGE.format(
        style=_STYLE,
        state="good" if good else "bad",
        head=head,
        wrong=f"<ul>{wrong}</ul>" if wrong else "",
        figures=figures,
        picture=picture(lines),
        table=table(lines),
    )


def picture(lines: Sequence[Line]) -> str:
    """Two bars a request, off above on, each as long as its prompt: an SVG element."""
    longest = max(line.on.prompt_tokens for line in lines)
    scale = _BAR / longest
    parts, y = [], _TOP
    for line in lines:
        rows = [(title, row) for title, row in (("off", line.off), ("on", line.on)) if row]
        middle = y + len(rows) * _ROW / 2
        parts.append(_text(8, middle + 4, line.name, "name"))
        for title, row in rows:
            parts.append(_text(_LEFT - 8, y + 12, title, "arm"))
            parts.extend(_bar(row, y, scale))
            parts.append(_outcome(row, line.what, y))
            y += _ROW
        y += _GAP
    height = y + 6
    grid = []
    for tokens in range(0, longest + 1, _TICK):
        x = _LEFT + tokens * scale
        grid.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - 14}" class="grid"/>'
        )
        grid.append(_text(x, _TOP - 14, f"{tokens:,}", "tick"))
    grid.append(_text(_LEFT - 16, _TOP - 14, "tokens", "arm"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="where the tokens of each prompt came from, off against on">'
        f"{_legend()}{''.join(grid)}{''.join(parts)}</svg>"
    )


def _legend() -> str:
    out, x = [], 8
    for tier, text in _LEGEND.items():
        out.append(f'<rect x="{x}" y="8" width="14" height="14" fill="{COLOURS[tier]}"/>')
        out.append(_text(x + 20, 20, text, "legend"))
        x += 40 + 7 * len(text)
    return "".join(out)


def _bar(row: Row, y: float, scale: float) -> list[str]:
    """The pieces of one bar: tiers in the order of the prefix's way, then what was computed."""
    pieces = [(tier, row.tiers.get(tier, 0)) for tier in ("device", "host", "storage")]
    pieces.append(("recomputed", row.prompt_tokens - row.cached))
    out, x = [], float(_LEFT)
    for tier, tokens in pieces:
        if not tokens:
            continue
        width = tokens * scale
        out.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_HEIGHT}" '
            f'fill="{COLOURS[tier]}"><title>{_LEGEND[tier]}: {tokens:,} tokens</title></rect>'
        )
        if width > 44:
            dark = tier in ("device", "storage")
            out.append(_text(x + width / 2, y + 12, f"{tokens:,}", "in light" if dark else "in"))
        x += width
    return out


def _outcome(row: Row, what: str, y: float) -> str:
    """What the bar's answer is worth, beside it."""
    x = _LEFT + _BAR + _RIGHT
    if not row.cached:
        return _text(x, y + 12, f"nothing reused: {what}", "note")
    exact = row.text_equal and row.logprobs_equal
    words = "= reference, bit for bit" if exact else "≠ reference: other "
    if not exact:
        words += "logprobs" if row.text_equal else "logprobs, other text"
    colour = _EQUAL if exact else _DIFFERENT
    mark = "✓" if exact else "✗"
    return _text(x, y + 12, f"{mark} {words}", "note strong", colour)


def _text(x: float, y: float, text: str, kind: str, colour: str | None = None) -> str:
    # As a style: a rule for the class would win over an attribute.
    fill = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{fill}>{escape(text)}</text>'


def table(lines: Sequence[Line]) -> str:
    """The hit table, with times and bytes."""
    body = "".join(_table_row(line) for line in lines)
    return f'<div class="wide"><table><thead>{_HEAD}</thead><tbody>{body}</tbody></table></div>'


def _table_row(line: Line) -> str:
    off, on = line.off, line.on
    cells = [
        f"<th>{escape(line.name)}<small>{escape(line.what)}</small></th>",
        _cell(line.boundary, "word"),
        _cell(f"{on.prompt_tokens:,}"),
        _cell(f"{off.cached:,}" if off else "–"),
        _cell(f"{on.cached:,}"),
        _cell(on.source, "word"),
        _equal(off),
        _equal(on),
        _cell(str(on.verified)),
        _cell(str(on.mismatches)),
        _cell(f"{on.restored_bytes / 2**20:.2f}" if on.restored_bytes else "–"),
        _cell(f"{off.seconds:.2f}" if off else "–"),
        _cell(f"{on.seconds:.2f}"),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>'


def _equal(row: Row | None) -> str:
    if row is None:
        return _cell("–")
    good = row.text_equal and row.logprobs_equal
    return _cell("✓" if good else "✗", "yes" if good else "no")


_HEAD = (
    '<tr><th rowspan="2">request</th><th rowspan="2">hit ends at</th>'
    '<th rowspan="2">prompt<br>tokens</th><th colspan="2">reused tokens</th>'
    '<th rowspan="2">from (on)</th><th colspan="2">= reference</th>'
    '<th rowspan="2">restores<br>verified</th><th rowspan="2">mis-<br>matches</th>'
    '<th rowspan="2">restored<br>MiB</th><th colspan="2">seconds</th></tr>'
    "<tr><th>off</th><th>on</th><th>off</th><th>on</th><th>off</th><th>on</th></tr>"
)

_STYLE = """
body{font:15px/1.5 system-ui,"DejaVu Sans",sans-serif;color:#1c2127;background:#fff;
 max-width:1160px;margin:28px auto;padding:0 20px}
h1{font-size:24px;margin:0 0 4px} h2{font-size:18px;margin:32px 0 6px} p{margin:4px 0 12px;max-width:95ch}
.verdict{border-radius:8px;padding:14px 18px;margin:16px 0;border:1px solid}
.good{background:#e8f5ec;border-color:#1a7f37} .bad{background:#fdecea;border-color:#c62828}
.verdict>b{font-size:18px} .good>b{color:#1a7f37} .bad>b{color:#c62828}
.figures{display:flex;flex-wrap:wrap;gap:10px 34px;margin-top:8px}
.figures b{display:block;font-size:20px} .figures span{color:#555d66;font-size:13px}
svg{width:100%;height:auto;display:block;font-family:inherit}
svg text{font-size:12.5px;fill:#1c2127} svg .name{font-weight:600}
svg .arm{text-anchor:end;fill:#555d66} svg .tick{text-anchor:middle;fill:#555d66;font-size:11.5px}
svg .in{text-anchor:middle;font-size:11.5px} svg .light{fill:#fff} svg .note{fill:#555d66}
svg .strong{font-weight:600} .grid{stroke:#c9ced4;stroke-dasharray:2 3}
table{border-collapse:collapse;width:100%;font-size:13.5px}
thead th{text-align:center;background:#f3f5f7;font-weight:600;line-height:1.25}
th,td{border:1px solid #dde1e6;padding:5px 8px} tbody th{text-align:left;white-space:nowrap}
th small{display:block;font-weight:400;color:#555d66}
td{text-align:right;font-variant-numeric:tabular-nums} td.word{text-align:left;white-space:nowrap}
.wide{overflow-x:auto}
td.yes,td.no{text-align:center;font-weight:700} td.yes{color:#1a7f37} td.no{color:#c62828}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Bit-exact prefix reuse: demo</title>
<style>{style}</style></head><body>
<h1>Bit-exact prefix reuse, demo report</h1>
<p>The same requests went to stock SGLang twice: with the feature <b>off</b> and <b>on</b>
(<code>SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE</code>), on the CPU reference platform with a tiny model of
random weights. Each answer, tokens and log probabilities, is compared with its reference: the same prompt
on an empty cache (for a second turn of a chat: the first turn's request itself, continued).</p>
<div class="verdict {state}"><b>{head}</b>{wrong}<div class="figures">{figures}</div></div>
<h2>Where each prompt's tokens came from</h2>
<p>Off reuses as well, but answers differently than without a cache. On reuses up to the last page and
answers the same, bit for bit.</p>
{picture}
<h2>Every request</h2>
{table}
<p style="margin-top:12px">Restored MiB: window and compressor state, copied from host memory for the
hit and compared byte for byte; the compressed KV is not counted. Seconds are of the whole request, with
every check on, on a CPU, whatever else it does; the first request of a server warms it up as well. They
show what reuse saves, not what the feature costs (for that: docs/performance.md, docs/compare.md).</p>
</body></html>
"""
