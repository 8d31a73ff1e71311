"""Off against dev on a whole server, with SGLang's own clients; docs/compare.md has a run of it.

    python compare_arms.py                                       the CPU reference platform
    python compare_arms.py --sizes request -- python3 -m sglang.launch_server ... --enable-metrics
    python compare_arms.py --off-url http://127.0.0.1:30001 --dev-url http://127.0.0.1:30002

Three arms, each a server of its own that differs from the others in one variable of its environment:
"off" is stock; "off, python tree" is stock with the tree core that the feature needs; "dev" has the
feature on. A fourth, "dev, checked" (--arms off python dev checked), verifies every restore.

In each arm, with the cache flushed before each pass: bench_serving on prompts that share a prefix of
0.6 and 0.8 of their length, on decode batches and on random prompts, then GSM8K without and with
thinking. Ends with one line of key=value pairs: prompt tokens a second over all passes of the
shared-prefix workloads, and the accuracy without thinking.

Exit status 0 if every request completed, prefixes were reused in every arm, and dev restored what it
reused; 1 otherwise; 2 for arguments that make no sense.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Its launcher starts any server. Where the reference platform is not installed (on a ROCm machine) it
# is taken from here, by this process only.
sys.path.append(str(Path(__file__).parents[1] / "test/reference_platform/src"))

from compare import arms, measure, options, report, workloads
from compare.clients import ClientError
from compare.measure import Measured
from compare.options import Options
from dsv4_reference_platform.launch import ServerError


def main(argv: Sequence[str]) -> int:
    """Run it; see the module's docstring."""
    chosen = options.parse(argv, __doc__.splitlines()[0])
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    try:
        results = _merged(chosen)
        with TemporaryDirectory() as folder:
            _measure(chosen, Path(folder), results, say)
    # OSError: a running server went away, or never was there.
    except (ClientError, ServerError, subprocess.TimeoutExpired, OSError, ValueError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print("\n" + report.table(results))
    print(report.LEGEND + "\n")
    for key, measured in results.items():
        if measured.tree_core is not None:
            print(f"{arms.ARMS[key].title}: tree core {measured.tree_core}")
    wrong = list(report.problems(results))
    for line in wrong:
        print(f"FAILED: {line}")
    print(report.last_line(results))
    return 1 if wrong else 0


def _measure(
    chosen: Options, scratch: Path, results: dict[str, Measured], say: measure.Say
) -> None:
    """Every arm that was asked for, into `results`; saved after each, if that was asked for."""
    speeds = list(workloads.speed(chosen, scratch))
    evaluations = list(workloads.evaluations(chosen, scratch))
    logs = chosen.logs or scratch
    logs.mkdir(parents=True, exist_ok=True)
    for key in chosen.arms:
        title = arms.ARMS[key].title
        say(f"{title}: waiting for its server")
        with arms.serve(key, chosen, logs) as endpoint:
            say(f"{title}: {endpoint.url} is up")
            results[key] = measure.run(
                endpoint, speeds, evaluations, chosen, scratch, partial(_say_of, say, title)
            )
        if chosen.json is not None:
            measure.save(chosen.json, _sent(chosen), results)


def _say_of(say: measure.Say, title: str, text: str) -> None:
    """A line about one arm."""
    say(f"{title}: {text}")


def _merged(chosen: Options) -> dict[str, Measured]:
    """The arms of earlier calls.

    Raises:
        ValueError: they were sent something else, or are measured anew, or come twice.
    """
    results: dict[str, Measured] = {}
    for path in chosen.merge:
        for key, measured in measure.load(path, _sent(chosen)).items():
            if key in results or key in chosen.arms:
                raise ValueError(f"{path}: the arm {key!r} is there twice")
            results[key] = measured
    return results


def _sent(chosen: Options) -> dict[str, Any]:
    """What must be the same for arms to be compared."""
    return {
        "sizes": asdict(chosen.sizes),
        "shares": chosen.shares,
        "workloads": chosen.workloads,
        "gsm8k_data": chosen.gsm8k_data and chosen.gsm8k_data.name,
        "random_data": chosen.random_data and chosen.random_data.name,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
