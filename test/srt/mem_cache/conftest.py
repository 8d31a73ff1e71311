"""Lets SGLang be imported on a machine whose torch is CPU-only, before any test module does it.

PyPI's torchvision is linked to CUDA; beside a CPU torch its operators are missing and `import
torchvision` (which SGLang's imports reach) fails in a shape function for them. Declaring the schemas
is enough. Does nothing where torch is a CUDA or ROCm build, where the operators exist, or where
torchvision was imported already; so it may run any number of times.
"""

from __future__ import annotations

import os
import sys

import attachment
import pytest
from hypothesis import settings
from long_tests import is_long

# Two cores are all that CI has, and other tests run beside these.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples each time where nobody is there to look at a new one; elsewhere new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def _declare_torchvision_operators() -> None:
    import torch

    if torch.version.cuda or torch.version.hip or "torchvision" in sys.modules:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


_declare_torchvision_operators()
attachment.prepare()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is left to `make test LONG=1` (long_tests.py)."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker("long")


@pytest.fixture
def hooks_of_ours_undone():
    """What a test installs of the feature's seams is gone after it."""
    with attachment.hooks_undone():
        yield


@pytest.fixture
def table(monkeypatch):
    """Replaces the seam table by the rows that it is called with."""
    from sglang_bitexact_hicache import seam_table

    def replace(*rows) -> None:
        monkeypatch.setattr(seam_table, "SEAMS", rows)

    return replace


@pytest.fixture(scope="session")
def scheduler_process(tmp_path_factory):
    """Starts a scheduler process (scheduler_harness.py) with the feature on and its checks on:
    `scheduler_process(name, args, **env)`; sizes that leave device hits alone. With `ranks`: a process
    for each of a server's tensor-parallel ranks."""
    from scheduler_harness import FEATURE_ENV, SchedulerProcess, SchedulerRanks

    def start(
        name: str, args: list[str], *, ranks: int | None = None, **env: str
    ) -> SchedulerRanks:
        log_path = tmp_path_factory.mktemp("scheduler") / f"{name}.log"
        flags = {**FEATURE_ENV, **env}
        # Few request rows make SGLang's vestigial SWA budget push prefixes to host memory.
        args = ["--max-running-requests", "16", *args]
        if ranks is None:
            return SchedulerProcess(args, flags, log_path=log_path)
        return SchedulerRanks(
            ["--tp-size", str(ranks), *args], flags, ranks=ranks, log_path=log_path
        )

    return start


@pytest.fixture
def forwards(ranks):
    """Counts the forwards of a test on the data parallel `ranks` of its module; call it at the end."""
    import dp_scenarios

    ranks.run(dp_scenarios.watch_forwards)
    ended = []

    def seen():
        ended.append(True)
        return ranks.run(dp_scenarios.forwards_seen)

    yield seen
    if not ended:
        seen()


@pytest.fixture
def max_len(ranks):
    """SGLang pads each of the `ranks` to the longest one's rows."""
    import dp_scenarios

    ranks.run(dp_scenarios.pad_to_the_longest, True)
    yield
    ranks.run(dp_scenarios.pad_to_the_longest, False)
