"""The Triton kernels leave the bytes and the checksums of their plain torch reference.

`benchmark/gpu/kernel_cases.py` holds the cases and their controls. Here they run in a child process
under Triton's interpreter, which has to be chosen before Triton is imported; `make bench-gpu` runs the
same ones on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmark" / "gpu" / "kernel_cases.py"


@pytest.fixture(scope="module")
def lines() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("what", ["chunk", "reach back", "rings", "restores", "restore of one"])
@pytest.mark.parametrize(
    "world",
    [
        "as the model",
        "rings of a draft",
        "fp8 rows",
        "narrow rows",
        "chunks that are views",
        "chunks that are not aligned",
    ],
)
def test_a_kernel_leaves_what_plain_torch_leaves(lines, world, what):
    assert f"{world}: {what} equal" in lines


@pytest.mark.parametrize(
    "broken",
    [
        "a bit of K",
        "a bit of a compressor's input",
        "a bit of a ring",
        "a bit of a state ring",
        "nothing, where the bit is not in a window",
        "two rows swapped",
        "a window that is moved on",
        "nothing, where they are back",
        "a ring of every other row",
        "a ring that begins within a word",
    ],
)
def test_control(lines, broken):
    assert f"control {broken} noticed" in lines
