"""`make intree-check`: the in-tree form on a scratch tree; its tests, the demo, the plugin not imported.

    python intree_check.py [--all]

Exit status 0 only if everything passed. The last line is one of key=value pairs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import intree_scratch
from intree_scratch import ROOT

from sglang_bitexact_hicache.intree import builder
from sglang_bitexact_hicache.intree.landing import TEST_FOLDER

SOME = (
    *("seam_points", "seams", "runtime", "record", "slots", "gate", "lineage", "capture"),
    *("startup", "exact", "stride", "l3", "l3_names"),
)
"""Of the test files, those that are run without --all, by name without test_swa_: the table, the pools,
the tree, startup, and on the real scheduler a hit of each tier."""


def main() -> int:
    """Builds, tests, shows; the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="every test file that the tree gets")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="intree-") as folder:
        tree = intree_scratch.make(Path(folder))
        *_, built = builder.build(tree)
        env = intree_scratch.environment(tree)
        tests = tree / TEST_FOLDER
        names = sorted(p.name for p in tests.glob("test_swa_*.py"))
        if not args.all:
            names = [f"test_swa_{name}.py" for name in SOME]
        print(f"{len(names)} test files in the tree", flush=True)
        status, passed = _pytest(tests, names, args.workers, env)
        demo = _demo(tree, env)
    print(f"{built} tests_passed={passed} demo={'exact' if demo == 0 else 'FAILED'}")
    return 0 if status == demo == 0 else 1


def _pytest(tests: Path, names: list[str], workers: str, env: dict[str, str]) -> tuple[int, int]:
    """Exit status, and how many passed."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-n", workers, "--dist", "loadfile", *names),
    ]
    passed = 0
    with subprocess.Popen(command, cwd=tests, env=env, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            found = re.search(r"(\d+) passed", line)
            if found:
                passed = int(found[1])
    return run.returncode, passed


def _demo(tree: Path, env: dict[str, str]) -> int:
    """The demo on the tree; its exit status. It is a client, and knows nothing of the package."""
    script = ROOT / "benchmark" / "demo.py"
    command = [sys.executable, "-W", "ignore", str(script), "--report", str(tree / "demo.html")]
    return subprocess.run(command, cwd=tree, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
