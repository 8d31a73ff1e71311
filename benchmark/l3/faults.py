"""The fault tests, run in a process of their own and counted."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

TESTS = Path(__file__).parents[2] / "test" / "srt" / "mem_cache"
FILES = (TESTS / "test_swa_l3_faults.py", TESTS / "test_swa_l3_processes.py")
"""Each test of these whose name begins with `test_fault_` injects one fault (l3_faults.py)."""

_FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


@dataclass(frozen=True)
class Faults:
    """How many faults were injected, and how many of them did no harm."""

    injected: int
    survived: int

    @property
    def all_survived(self) -> bool:
        """And there were some."""
        return 0 < self.injected == self.survived


def run(files: Sequence[Path] = FILES, workers: int = 2) -> Faults:
    """Run the fault tests of these files, one file a worker; pytest's output goes to ours.

    A test that fails, errors or is skipped was not survived. Where pytest does not come to its end (a
    file is not there, or cannot be read), nothing was.
    """
    with TemporaryDirectory() as directory:
        results = Path(directory) / "results.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-n", str(workers), "--dist", "loadfile", "-k", "test_fault_"),
            *(f"--junitxml={results}", *map(str, files)),
        ]
        process = subprocess.run(command, cwd=TESTS.parents[1], check=False)
        cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    if process.returncode not in _FINISHED:
        return Faults(len(cases), 0)
    harmed = ("failure", "error", "skipped")
    survived = sum(all(case.find(tag) is None for tag in harmed) for case in cases)
    return Faults(len(cases), survived)
