"""The tables and the plot, and the one line at the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from reuse.cpu_cost import Cost
from reuse.replay import GRID_ONLY, POOL_SHARES, SLOT_BYTES, STOCK, STRICT, STRIDES, Result

QUARTER_TRACES = ("chat", "fan-out")
"""The traces whose reuse at the largest stride with a quarter of the pool has a target."""

_BLOCK = r"(<!-- begin {0}[^>]*-->\n).*?(<!-- end {0} -->)"


class Results:
    """Results by trace, arm, stride and share."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.all = list(results)
        self.traces = list(dict.fromkeys(result.trace for result in self.all))
        self._by_key = {(r.trace, r.job.arm, r.job.stride, r.job.share): r for r in self.all}

    def get(self, trace: str, arm: str, stride: int = 1, share: float = 1.0) -> Result:
        """One result; KeyError if it was not run."""
        return self._by_key[trace, arm, stride, share]

    def least(
        self, arm: str, stride: int | None = None, share: float = 1.0, traces: Sequence[str] = ()
    ) -> float:
        """The least ratio of an arm over traces (all by default) and strides (all by default)."""
        return min(
            r.ratio
            for r in self.all
            if r.job.arm == arm
            and r.job.share == share
            and stride in (None, r.job.stride)
            and (not traces or r.trace in traces)
        )


def trace_table(results: Results) -> str:
    """What each trace is, as stock sees it."""
    rows = []
    for trace in results.traces:
        stock = results.get(trace, STOCK)
        rows.append(
            (
                trace,
                stock.requests,
                round(stock.prompt / stock.requests),
                f"{stock.kv / stock.prompt:.3f}",
            )
        )
    head = ("trace", "requests", "mean prompt", "in the KV cache")
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def reuse_table(results: Results) -> str:
    """Tokens reused ÷ tokens that the KV match alone would reuse."""
    rows = []
    for trace in results.traces:
        for stride in STRIDES:
            strict = (results.get(trace, STRICT, stride, share).ratio for share in POOL_SHARES)
            grid = results.get(trace, GRID_ONLY, stride).ratio
            stock = results.get(trace, STOCK).ratio
            rows.append((trace, stride, *(f"{ratio:.3f}" for ratio in (*strict, grid, stock))))
    shares = (f"strict, {share:.0%} of the pool" for share in POOL_SHARES)
    head = ("trace", "stride", *shares, "grid only", "stock (not exact)")
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def detail_table(results: Results) -> str:
    """What it takes, and what is missing where something is."""
    rows = []
    for trace in results.traces:
        stock = results.get(trace, STOCK)
        for stride in STRIDES:
            for arm, share in (*((STRICT, share) for share in POOL_SHARES), (GRID_ONLY, 1.0)):
                r = results.get(trace, arm, stride, share)
                rows.append(
                    (
                        trace,
                        stride,
                        arm if arm == GRID_ONLY else f"{share:.0%}",
                        r.slots,
                        f"{r.slots * SLOT_BYTES / 1e9:.2f}",
                        f"{r.held * SLOT_BYTES / 1e9:.2f}",
                        r.evicted,
                        f"{r.forwards / stock.forwards:.2f}",
                        f"{r.cuts / r.requests:.2f}",
                        _losses(r),
                    )
                )
    head = (
        "trace",
        "stride",
        "pool",
        "slots",
        "GB",
        "GB held (mean)",
        "truths evicted",
        "forwards ÷ stock",
        "cuts a request",
        "not reused, % of the KV match",
    )
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def cost_table(costs: Sequence[Cost]) -> str:
    """Milliseconds, and ratios to the stock Python core."""
    rows = []
    for c in costs:
        cells = [f"{c.tokens:,}", f"{c.rust:.3f}", f"{c.python:.3f}", f"{c.python_cut:.3f}"]
        for strict in (c.node_end, c.first_interior, c.steady):
            cells.append(f"{strict:.3f} ({strict / c.python:.2f} x)")
        cells.append(f"{c.node_end / c.rust:.1f} x")
        rows.append(cells)
    head = (
        "tokens",
        "stock, Rust core",
        "stock, Python core",
        "the same, cutting a node",
        "strict, node end",
        "strict, first interior",
        "strict, steady",
        "node end ÷ Rust",
    )
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def last_line(results: Results, costs: Sequence[Cost]) -> str:
    """The figures with a target, and what stands beside them."""
    quarter = results.least(STRICT, max(STRIDES), min(POOL_SHARES), QUARTER_TRACES)
    figures = {
        "reuse_min_full_pool": results.least(STRICT),
        "reuse_min_quarter_pool_stride32": quarter,
        "grid_only_min": results.least(GRID_ONLY),
        "stock_min": results.least(STOCK),
        "match_vs_python_core": max(c.node_end / c.python for c in costs),
        "match_vs_rust_core": max(c.node_end / c.rust for c in costs),
    }
    return " ".join(f"{name}={value:.3f}" for name, value in figures.items())


def write_page(path: Path, blocks: dict[str, str]) -> None:
    """Put each block between its `<!-- begin NAME ... -->` and `<!-- end NAME -->` in a page."""
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        pattern = re.compile(_BLOCK.format(re.escape(name)), re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{path} has no place for {name}")
        text = pattern.sub(lambda found, new=block: f"{found[1]}\n{new}\n\n{found[2]}", text)
    path.write_text(text, encoding="utf-8")


def plot(results: Results, path: Path) -> None:
    """One panel a trace: reuse over the stride, a line for each arm and pool."""
    import matplotlib

    matplotlib.use("Agg")
    # Same results, same file.
    matplotlib.rcParams["svg.hashsalt"] = "reuse"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results.traces), figsize=(3.1 * len(results.traces), 3.4), sharey=True, squeeze=False
    )
    for panel, trace in zip(panels[0], results.traces, strict=True):
        for share, marker in zip(POOL_SHARES, "os^", strict=True):
            ratios = [results.get(trace, STRICT, stride, share).ratio for stride in STRIDES]
            panel.plot(STRIDES, ratios, marker=marker, label=f"strict, {share:.0%} of the pool")
        grid = [results.get(trace, GRID_ONLY, stride).ratio for stride in STRIDES]
        panel.plot(STRIDES, grid, marker="x", color="tab:gray", label="grid only, full pool")
        stock = results.get(trace, STOCK).ratio
        panel.axhline(
            stock, color="black", linestyle=":", label="stock: window recomputed, not exact"
        )
        panel.set_xscale("log", base=2)
        panel.set_xticks(STRIDES, [str(stride) for stride in STRIDES])
        panel.set_ylim(0, 1.03)
        panel.set_title(trace)
        panel.set_xlabel("stride (pages)")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens reused ÷ KV match alone")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _losses(result: Result) -> str:
    return ", ".join(
        f"{reason} {tokens / result.kv:.1%}"
        for reason, tokens in sorted(result.lost.items(), key=lambda item: -item[1])
        if tokens / result.kv >= 0.0005
    )
