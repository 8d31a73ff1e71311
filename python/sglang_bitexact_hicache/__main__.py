"""`python -m sglang_bitexact_hicache doctor`: does this package fit the SGLang that is installed?

Prints the SGLang version, the facts that decide whether the feature engages, and a line for every
seam. Exit status 0 when everything fits, 1 otherwise. Whether the feature is switched on makes no
difference to the verdict.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import entry_points

from sglang_bitexact_hicache import seams
from sglang_bitexact_hicache.options import (
    BACKEND,
    BOOLEAN_FLAGS,
    ENV_ALLOW_NON_HIP,
    ENV_BACKEND,
    env_problem,
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sglang_bitexact_hicache")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser(
        "doctor", help="check the installed SGLang against every seam of this package"
    )
    doctor_parser.add_argument(
        "--source-only",
        action="store_true",
        help="read SGLang's source files, and neither import SGLang nor install the hooks",
    )
    return doctor(source_only=parser.parse_args(argv).source_only)


def doctor(*, source_only: bool) -> int:
    """Prints the report; returns 0 when everything fits and 1 otherwise."""
    problems = 0

    def line(subject: str, state: str, problem: bool = False) -> None:
        nonlocal problems
        problems += problem
        print(f"{subject:<46} {state}")

    try:
        version = seams.version_problem()
    except ValueError as error:
        line("SGLang version", str(error), problem=True)
        return 1
    line("SGLang version", version or f"{seams.SGLANG_VERSION}, ok", bool(version))
    found = [e.value for e in entry_points(group="sglang.srt.plugins") if _is_ours(e.value)]
    line(
        "plugin entry point",
        f"{found[0]}, ok" if found else "missing: install this package with pip",
        not found,
    )
    for name in BOOLEAN_FLAGS:
        unreadable = None if source_only else env_problem(name)
        line(name, unreadable or os.environ.get(name, "not set"), unreadable is not None)
    backend = os.environ.get(ENV_BACKEND, "not set")
    needed = "" if backend == BACKEND else f" (the feature runs with {BACKEND} only)"
    line(ENV_BACKEND, backend + needed)
    if not source_only:
        line("ROCm/HIP", _hip())
        _install_everything()

    print()
    print(f"{'when':<9} {'kind':<11} {'state':<9} seam")
    for seam in seams.SEAMS:
        problem = seams.source_problem(seam)
        if problem is None and not source_only:
            problem = seams.live_problem(seam)
        problems += problem is not None
        state, _, detail = (problem or "found").partition(": ")
        print(f"{seam.when.value:<9} {seam.kind.value:<11} {state:<9} {seam.target}")
        if detail:
            print(f"{'':<31} {detail}")
    print()
    print("everything fits" if not problems else f"{problems} problem(s)")
    return 1 if problems else 0


def _is_ours(value: str) -> bool:
    return value.partition(":")[0].partition(".")[0] == __package__


def _hip() -> str:
    from sglang.srt.runtime_context import get_platform

    return "yes" if get_platform().is_hip else f"no (production needs it; {ENV_ALLOW_NON_HIP})"


def _install_everything() -> None:
    # As a scheduler does it, other plugins included: one of them may be in our way.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    seams.install(*seams.When)


if __name__ == "__main__":
    sys.exit(main())
