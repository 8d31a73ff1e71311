"""The GPU benchmark: what it says where there is no GPU; its comparisons find what they are for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
BENCHMARK = HERE.parents[2] / "benchmark"


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=cwd, capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    done = run("-m", "gpu", cwd=BENCHMARK)
    assert done.returncode == 2
    assert done.stdout == "this needs a GPU that torch can use\n"
    assert not done.stderr


def test_comparisons_hold_on_the_reference_kernels_and_controls_are_noticed():
    done = run("gpu_bench_on_cpu.py", cwd=HERE)
    assert done.returncode == 0, done.stderr
    *checks, unread = done.stdout.splitlines()
    checks = [json.loads(check) for check in checks]
    assert not [what for what, passed, _ in checks if not passed]
    assert sum(control for *_, control in checks) == 11
    assert len(checks) == 23
    # Four windows' row P-128, and half of four rows of the states of two layers.
    assert int(unread) == 4 * 1024 + 2 * 4 * (8192 + 2048) // 2
