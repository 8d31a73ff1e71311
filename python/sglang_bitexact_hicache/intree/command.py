"""`intree`: builds the feature into a source checkout of SGLang, takes it out, writes it as patches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_bitexact_hicache.intree.errors import IntreeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "--sglang-src", type=Path, required=True, metavar="DIR", help="a source checkout of SGLang"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check",
        action="store_true",
        help="say what would change and what is missing, and change nothing",
    )
    what.add_argument("--revert", action="store_true", help="take everything out again")
    what.add_argument(
        "--series",
        type=Path,
        metavar="OUT",
        help="write three cumulative patches into this folder, and change nothing in the checkout",
    )


def run(args: argparse.Namespace) -> int:
    """Does it; the exit status: 0 done, 1 a checkout with --check that is not built, 2 refused."""
    try:
        # These need what the extra brings.
        from sglang_bitexact_hicache.intree import builder
    except ImportError as error:
        print(
            f"intree: {error}; it needs: pip install 'sglang-bitexact-hicache[intree]'",
            file=sys.stderr,
        )
        return 2
    try:
        if args.series is not None:
            return _print(builder.write_series(args.sglang_src, args.series))
        if args.revert:
            return _print(builder.revert(args.sglang_src))
        if args.check:
            lines = builder.check(args.sglang_src)
            _print(lines)
            return 0 if lines[-1].startswith("nothing to do") else 1
        return _print(builder.build(args.sglang_src))
    except IntreeError as error:
        for line in str(error).splitlines():
            print(f"intree: {line}", file=sys.stderr)
        return 2


def _print(lines: Sequence[str]) -> int:
    for line in lines:
        print(line)
    return 0
