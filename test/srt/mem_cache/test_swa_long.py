"""What is left to `make test LONG=1`: each pattern names tests that there are, and no file goes unrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from long_tests import ALWAYS, LONG, is_long

HERE = Path(__file__).parent
WHOLE_FILES = {"test_swa_replicas.py"}


@pytest.fixture(scope="module")
def names():
    """Names of all tests in the files that the patterns are about."""
    files = sorted({pattern.partition("::")[0] for pattern in (*LONG, *ALWAYS)})
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--collect-only", "-m", ""]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *files], cwd=HERE, capture_output=True, text=True
    )
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and found, done.stdout[-2000:] + done.stderr[-2000:]
    return [line.rpartition("/")[2] for line in found]


@pytest.mark.parametrize("pattern", LONG)
def test_a_pattern_leaves_something_out(pattern, names, monkeypatch):
    monkeypatch.setattr("long_tests.LONG", (pattern,))
    assert any(map(is_long, names))


@pytest.mark.parametrize("pattern", ALWAYS)
def test_a_pattern_keeps_something(pattern, names, monkeypatch):
    kept = {name for name in names if not is_long(name)}
    monkeypatch.setattr("long_tests.ALWAYS", tuple(set(ALWAYS) - {pattern}))
    assert {name for name in names if not is_long(name)} < kept


def test_of_every_other_file_something_is_run(names):
    run = {name.partition("::")[0] for name in names if not is_long(name)}
    assert {name.partition("::")[0] for name in names} - run == WHOLE_FILES
