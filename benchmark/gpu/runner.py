"""One run of the benchmark: its parts, one after the other; see the package's docstring."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu import config, stubs


class Main:
    """One run. A part that fails is reported, and the others still run."""

    def __init__(self, shape: config.Shape, run: config.Run) -> None:
        self._shape = shape
        self._run = run
        self._failed = False
        self._started = time.perf_counter()

    def run(self, *, exactness: bool, path: Path | None) -> int:
        """The whole of it; the exit status."""
        stubs.prepare()
        import torch

        from gpu import feature, report, stock, strict

        self._said("imported")
        device = torch.device("cuda", 0)
        self._part("compiling", stock.compile_kernels)
        strict.install()
        feature.install_hooks()
        print(f"\n{report.machine()}\n", flush=True)
        noticed = strict.catches_everything()
        print(f"waits are noticed: {noticed}", flush=True)

        found, debug, kernels = [], [], []
        if exactness:
            kernels = self._part("kernels", self._kernels, device) or []
            found.append(self._part("exactness, window-only layers", self._exact_small, device))
            debug = self._part("debug checks", self._debug, device) or []
        run = self._run
        server = feature.Server(self._shape, run.rows, run.tokens, run.positions, device)
        self._said("built")
        if exactness:
            found.append(self._part("exactness", self._exact, server, config.PRO_SCENARIO))
        found = [f for f in found if f is not None]
        exact = noticed and exactness and not self._failed
        exact &= all(f.exact for f in found) and all(c.passed for c in (*kernels, *debug))
        unread = found[-1].unread_bytes if found else 0
        measured = self._part("measurements", self._measure, server, unread)
        if path is not None:
            path.write_text(
                json.dumps(report.raw(found, [*kernels, *debug], measured), indent=1, default=str)
            )
        self._said("done")
        if measured is None:
            print("exact=0: not everything ran")
            return 1
        print(report.last_line(exact, measured))
        return 0 if exact and not self._failed else 1

    # ---- parts

    def _kernels(self, device: Any) -> Any:
        from gpu import kernel_cases, report
        from gpu.exactness import Check

        found = kernel_cases.cases(device)
        checks = [Check(what, False, wrong, 1) for what, wrong in found.items()]
        for what, noticed in kernel_cases.controls(device).items():
            checks.append(Check(what, True, int(noticed), 1))
        wrong = [check for check in checks if not check.passed]
        summary = Check(f"{len(checks)} cases and controls", False, len(wrong), len(checks))
        title = "kernels = plain torch"
        print(report.exactness_table(title, [*wrong, summary]), end="\n\n", flush=True)
        return checks

    def _exact(self, server: Any, scenario: config.Scenario) -> Any:
        from gpu import exactness, report

        pages = scenario.positions // config.PAGE
        server.engage(slots=4 * pages, chunk_tokens=max(scenario.chunks))
        server.stack.scored = True
        found = exactness.Exactness(server, scenario).run()
        print(report.exactness_table(found.stack, found.checks), end="\n\n", flush=True)
        return found

    def _exact_small(self, device: Any) -> Any:
        from gpu import feature

        scenario = config.FLASH_SCENARIO
        server = feature.Server(
            config.FLASH_START, 12, 24 * scenario.positions // 256 * 256, scenario.positions, device
        )
        found = self._exact(server, scenario)
        server.release()
        return found

    def _debug(self, device: Any) -> Any:
        from gpu import exactness, feature, report, strict

        shape = replace(config.PRO.first(8), selected=64)
        server = feature.Server(shape, 8, 64 * config.PAGE, 16 * config.PAGE, device)
        server.engage(slots=32, chunk_tokens=8 * config.PAGE, debug=True)
        # Its reports of the controls are wanted here, not on the terminal.
        logging.disable(logging.CRITICAL)
        try:
            with strict.relaxed():
                checks = exactness.debug_checks(server, config.PRO_SCENARIO)
        finally:
            logging.disable(logging.NOTSET)
            server.release()
        print(report.exactness_table(shape.name, checks), end="\n\n", flush=True)
        return checks

    def _measure(self, server: Any, unread: int) -> Any:
        taken: list[Any] = []
        try:
            return self._all_measured(server, unread, taken)
        except Exception:
            print("measured before the failure:", *taken, sep="\n", flush=True)
            raise

    def _all_measured(self, server: Any, unread: int, taken: list[Any]) -> Any:
        from gpu import bench, capture, decode, floors, launches, report, restore

        run = self._run
        shared = bench.Bench(server, run)
        server.engage(slots=1, chunk_tokens=config.PAGE)
        moved = bench.moved_bytes(server)
        floor = floors.measure(moved, run.restores, run.repeats)
        print(report.bytes_table(server.view.layout, unread), end="\n\n", flush=True)
        print(report.floors_table(floor), end="\n\n", flush=True)
        self._said("floors")
        largest = launches.measure(server, run.repeats)
        print(report.launches_table(largest, floor), end="\n\n", flush=True)
        taken += largest
        self._said("launches")
        captures = [capture.CaptureBench(shared, stride).timed() for stride in (1, 2)]
        taken += captures
        self._said("capture")
        restores = restore.RestoreBench(shared)
        restored = [restores.timed(count) for count in run.restores]
        taken += restored
        again = {count: restores.computed_again(count) for count in (128, 255)}
        taken.append(again)
        self._said("restore")
        decoded = decode.DecodeBench(shared).timed()
        taken.append(decoded)
        self._said("decode")
        launched = {
            f"capture {c.stride}": capture.CaptureBench(shared, c.stride).launched()
            for c in captures
        }
        restores = restore.RestoreBench(shared)
        launched |= {f"restore {count}": restores.launched(count) for count in run.restores}
        launched["decode"] = decode.DecodeBench(shared).launched()
        found = report.Measured(
            self._shape,
            run,
            server.view.layout,
            moved,
            floor,
            captures,
            restored,
            again,
            decoded,
            launched,
            largest,
        )
        for table in (report.capture_table, report.restore_table, report.decode_table):
            print(table(found), end="\n\n", flush=True)
        return found

    def _part(self, name: str, part: Callable[..., Any], *args: Any) -> Any:
        """The part's result, or None where it raised."""
        try:
            result = part(*args)
        except Exception:
            self._failed = True
            print(f"FAILED: {name}\n{traceback.format_exc()}", flush=True)
            return None
        self._said(name)
        return result

    def _said(self, what: str) -> None:
        print(f"[{time.perf_counter() - self._started:6.1f} s] {what}", flush=True)
