"""Tests that `make test` leaves to `make test LONG=1`: one more layout, schedule or tier of what it runs.

Each pattern has beside it what of the same module is still run, so that nothing is left out whole but
what another test shows in a smaller way.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

LONG = (
    # bf16 rows run all of it.
    "test_swa_eagle.py::*[[]fp8*",
    # Two launchers of two schedulers; a replica is a server of one rank, which test_swa_eagle.py runs.
    "test_swa_replicas.py::*",
    # The overlap schedule, SGLang's default, runs all of it.
    "test_swa_exact.py::*[[]serial*",
    # From the device they run too.
    "test_swa_aligned.py::*-host]",
    # Each kind by itself runs too.
    "test_swa_l3_processes.py::test_fault_of_every_kind_at_random",
    # What rounds do is EAGLE's on one rank, what ranks do is that of tensor parallelism; both run.
    "test_swa_eagle_tp.py::*",
    "test_swa_eagle_dp.py::*",
    # A server for two minutes; that the soak notices what is wrong runs without one.
    "test_swa_soak.py::test_two_minutes_of_everything_at_once",
    # They run the built tree; what is built is compared without that.
    "test_swa_intree.py::test_the_series_builds_up_to_the_tree_and_each_stage_runs",
    "test_swa_intree.py::test_the_tree_runs_without_the_plugin",
)

ALWAYS = (
    "test_swa_eagle.py::test_a_repeat*",
    "test_swa_eagle.py::test_control_a_flipped_bit_of_the_targets_rows*",
    "test_swa_eagle_dp.py::test_ranks*",
    "test_swa_eagle_dp.py::test_control*",
    "test_swa_eagle_tp.py::test_repeats*",
    "test_swa_eagle_tp.py::test_control*",
    "test_swa_exact.py::test_a_repeat*",
    "test_swa_exact.py::test_control_a_broken_restore_changes_the_answer*",
)
"""Of those above, the ones that are run all the same."""


def is_long(nodeid: str) -> bool:
    """Whether a test is left out; `nodeid` as pytest has it."""
    name = nodeid.rpartition("/")[2]
    return _matches(name, LONG) and not _matches(name, ALWAYS)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
