"""The tables, the raw numbers and the last line."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate

from gpu import config
from gpu.bench import Launched
from gpu.capture import Capture
from gpu.config import REQUEST_TOKENS_PER_SECOND, Run, Shape
from gpu.decode import Decode
from gpu.exactness import Check, Found
from gpu.floors import Floors
from gpu.launches import Launch
from gpu.restore import Restored
from sglang_bitexact_hicache.constants import STATE_ROWS, WINDOW
from sglang_bitexact_hicache.layout import POOLS, RecordLayout


@dataclass(frozen=True)
class Measured:
    """Everything that was measured."""

    shape: Shape
    run: Run
    layout: RecordLayout
    moved_bytes: int
    floors: Floors
    captures: list[Capture]
    restores: list[Restored]
    reprefill: dict[int, tuple[float, float]]
    decode: Decode
    launched: dict[str, Launched]
    """By "capture <stride>", "restore <count>" and "decode"."""
    largest: list[Launch]

    @property
    def capture_floor(self) -> float:
        """ms: the captured bytes of the first stride, read and written on the device once."""
        return 2e3 * self.captures[0].boundaries * self.moved_bytes / self.floors.device_copy

    @property
    def capture_vs_floor(self) -> float:
        """Capture's device time over that floor."""
        return self.captures[0].alone / self.capture_floor

    @property
    def model_ms(self) -> float:
        """Stated time of DeepSeek-V4-Pro for the chunk."""
        return 1e3 * config.prefill_seconds(0, self.run.chunk, self.floors.matmul)

    @property
    def request_ms(self) -> float:
        """Time of the chunk at a request's own speed."""
        return 1e3 * self.run.chunk / REQUEST_TOKENS_PER_SECOND

    def capture_added(self, capture: Capture) -> float:
        """Per cent of the model's time; the shorter one, so the larger share."""
        return 100 * capture.added / min(self.model_ms, self.request_ms)

    def restore_vs_pinned(self, restored: Restored) -> float:
        """Rate of a batch of restores over that of bare copies of the same bytes."""
        return 1e3 * self.floors.pinned[restored.count][0] / restored.latency


def _table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def machine() -> str:
    """Card, software and date."""
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {today}"


def exactness_table(stack: str, checks: Sequence[Check]) -> str:
    """Each comparison, and whether it came out as it has to."""
    rows = [
        [
            check.what,
            f"{check.wrong} of {check.of}",
            "some" if check.control else "0",
            "ok" if check.passed else "WRONG",
        ]
        for check in checks
    ]
    return _table(rows, [stack, "differ", "have to", ""])


def bytes_table(layout: RecordLayout, unread: int) -> str:
    """What one reuse point keeps, and what of it no later step reads."""
    kept = {pool: layout.sections(pool) for pool in POOLS}
    rows = [
        [
            f"{pool}: {len(sections)} layers of {sections[0].rows} rows",
            f"{sum(section.nbytes for section in sections):,}",
        ]
        for pool, sections in kept.items()
    ]
    payload = sum(section.nbytes for sections in kept.values() for section in sections)
    window = len(layout.layers) * layout.window_row_bytes
    halves = len(layout.c4_layers) * STATE_ROWS * (layout.c4_row_bytes + layout.indexer_row_bytes)
    rows += [
        ["headers and padding", f"{layout.slot_bytes - payload:,}"],
        ["all of it", f"{layout.slot_bytes:,}"],
        [f"of that never read (poison changed no output): row P-{WINDOW}", f"{window:,}"],
        ["of that never read: half of each state row", f"{halves // 2:,}"],
        ["unread_bytes: never read, as poisoned on the real kernels", f"{unread:,}"],
    ]
    return _table(rows, ["a reuse point", "bytes"])


def launches_table(found: Sequence[Launch], floors: Floors) -> str:
    """The largest launches against their floors."""
    rate = floors.device_copy
    rows = [
        [
            launch.what,
            f"{launch.nbytes / 2**20:.0f}",
            f"{launch.ms:.3f}",
            f"{launch.vs_floor(rate):.2f}",
        ]
        for launch in found
    ]
    return _table(rows, ["one launch", "MiB, read + written", "ms", "over its floor"])


def floors_table(floors: Floors) -> str:
    """Rates."""
    rows = [
        ["copy on the device, read + written", f"{floors.device_copy / 1e12:.2f} TB/s"],
        ["bf16 matrix product, 8192 cubed", f"{floors.matmul / 1e12:.0f} TFLOP/s"],
    ]
    for count in floors.pinned:
        for to_host, where in enumerate(("to the device", "to the host")):
            rate = floors.pinned_rate(count, to_host=bool(to_host)) / 1e9
            ms = 1e3 * floors.pinned[count][to_host]
            rows.append([f"pinned, {count} record(s) {where}", f"{rate:.1f} GB/s ({ms:.3f} ms)"])
    return _table(rows, ["floor", "measured"])


def capture_table(m: Measured) -> str:
    """A chunk's capture."""
    layers = len(m.shape.ratios)

    def each(of: Any) -> list[str]:
        return [of(capture) for capture in m.captures]

    rows = [
        ["boundaries captured", *each(lambda c: f"{c.boundaries}")],
        ["forward of the stack, without, ms", *each(lambda c: f"{c.stack:.3f}")],
        ["forward of the stack, with, ms", *each(lambda c: f"{c.stack_with:.3f}")],
        ["added by difference, ms", *each(lambda c: f"{c.stack_with - c.stack:.3f}")],
        ["our launches alone, ms", *each(lambda c: f"{c.alone:.3f}")],
        [
            "bytes floor (read + write on the device), ms",
            *each(
                lambda c: f"{2e3 * c.boundaries * m.moved_bytes / m.floors.device_copy:.3f}",
            ),
        ],
        ["kernels a layer", *each(lambda c: f"{_captured(m, c).kernels / layers:.2f}")],
        ["copies, all", *each(lambda c: f"{_captured(m, c).copies}")],
        ["host thread, ms", *each(lambda c: f"{c.host:.3f}")],
        ["bytes on the host, from idle, ms", *each(lambda c: f"{c.landed:.2f}")],
        [
            "bare pinned copies of them, ms",
            *each(lambda c: f"{_bare_ms(m, c.boundaries):.2f}"),
        ],
        [
            f"share of {REQUEST_TOKENS_PER_SECOND} tokens/s that the copies need, %",
            *each(lambda c: f"{100 * c.landed / m.request_ms:.2f}"),
        ],
        [
            f"added, % of the model's {m.model_ms:.0f} ms ({config.RANKS} ranks)",
            *each(lambda c: f"{100 * c.added / m.model_ms:.3f}"),
        ],
        [
            f"added, % of the request's {m.request_ms:.0f} ms",
            *each(lambda c: f"{100 * c.added / m.request_ms:.3f}"),
        ],
    ]
    header = [f"capture of {m.run.chunk} tokens"] + [f"stride {c.stride}" for c in m.captures]
    return _table(rows, header)


def _captured(m: Measured, capture: Capture) -> Launched:
    return m.launched[f"capture {capture.stride}"]


def _bare_ms(m: Measured, records: int) -> float:
    most = max(m.floors.pinned)
    return 1e3 * records * m.moved_bytes / m.floors.pinned_rate(most, to_host=True)


def restore_table(m: Measured) -> str:
    """Restores against bare copies, and against computing again."""
    rows = [
        [
            f"{r.count}",
            f"{r.latency:.3f}",
            f"{1e3 * m.floors.pinned[r.count][0]:.3f}",
            f"{m.restore_vs_pinned(r):.2f}",
            f"{1e3 * r.scatter:.1f}",
            f"{m.launched[f'restore {r.count}'].kernels}",
            f"{m.launched[f'restore {r.count}'].copies}",
        ]
        for r in m.restores
    ]
    again = [
        [f"{count} tokens", f"{device:.3f}", f"{latency:.3f}"]
        for count, (device, latency) in m.reprefill.items()
    ]
    return (
        _table(
            rows,
            [
                "restores",
                "admitted to ready, ms",
                "bare copies, ms",
                "rate / bare",
                "forward stream, us",
                "kernels",
                "copies",
            ],
        )
        + "\n\n"
        + _table(
            again, ["computed again (stack only)", "device, ms (a graph)", "eager from idle, ms"]
        )
    )


def decode_table(m: Measured) -> str:
    """A decode step."""
    d = m.decode
    rows = [
        ["step without a boundary, without the feature, ms", f"{d.plain:.3f}"],
        ["the same with the feature, ms", f"{d.quiet:.3f}"],
        ["step with one boundary, without the feature, ms", f"{d.plain_boundary:.3f}"],
        ["the same with the feature, ms", f"{d.boundary:.3f}"],
        ["added without a boundary, us", f"{1e3 * (d.quiet - d.plain):.1f}"],
        [
            "added by one boundary, by difference, us",
            f"{1e3 * (d.boundary - d.plain_boundary):.1f}",
        ],
        ["our launches for one boundary alone, us", f"{1e3 * d.alone:.1f}"],
        ["host thread without a boundary, us", f"{1e3 * d.quiet_host:.1f}"],
        ["host thread with one boundary, us", f"{1e3 * d.boundary_host:.1f}"],
        ["kernels, copies of a boundary", "{}, {}".format(*m.launched["decode"])],
    ]
    return _table(rows, [f"decode, batch {d.batch}", ""])


def last_line(exact: bool, m: Measured) -> str:
    """The figures that are compared between versions."""
    worst = min(m.restore_vs_pinned(restored) for restored in m.restores)
    one = m.restores[0].latency
    return (
        f"exact={int(exact)} capture_vs_floor={m.capture_vs_floor:.2f} "
        f"capture_added_pct={m.capture_added(m.captures[0]):.3f} "
        f"restore_vs_pinned_copy={worst:.2f} "
        f"restore_vs_reprefill128={one / m.reprefill[128][0]:.3f} "
        f"decode_boundary_us={1e3 * m.decode.added:.1f} "
        f"launches_per_layer={_captured(m, m.captures[0]).kernels / len(m.shape.ratios):.2f}"
    )


def raw(
    found: Sequence[Found], debug: Sequence[Check], measured: Measured | None
) -> dict[str, Any]:
    """Everything, for JSON."""
    numbers: dict[str, Any] = {
        "machine": machine(),
        "exactness": [asdict(f) for f in found],
        "debug_checks": [asdict(check) for check in debug],
    }
    if measured is not None:
        fields = asdict(measured)
        fields["floors"]["pinned"] = {str(k): v for k, v in measured.floors.pinned.items()}
        fields["model_ms"] = measured.model_ms
        fields["capture_floor_ms"] = measured.capture_floor
        numbers["measured"] = fields
    return numbers
