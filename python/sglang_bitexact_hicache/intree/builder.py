"""The four things that can be done with a checkout; each says in lines what it did."""

from __future__ import annotations

from pathlib import Path

from sglang_bitexact_hicache.intree import changes, series
from sglang_bitexact_hicache.intree.checkout import Checkout
from sglang_bitexact_hicache.intree.landing import landing
from sglang_bitexact_hicache.intree.tree_plan import TreePlan, plan


def build(folder: Path) -> list[str]:
    """Builds the feature into the checkout.

    Raises:
        IntreeError: it does not fit, or cannot be written; nothing was changed.
    """
    checkout, planned = _planned(folder)
    left = planned.apply()
    changes.apply(checkout.root, left)
    return [*_touched(left, planned), _last(planned, len(left))]


def check(folder: Path) -> list[str]:
    """What `build` would do; the last line begins with "nothing to do" where it is done.

    Raises:
        IntreeError: it does not fit.
    """
    _, planned = _planned(folder)
    left = planned.apply()
    if not left:
        return [f"nothing to do: {_last(planned, 0)}"]
    return [*_touched(left, planned), f"would write: {_last(planned, len(left))}"]


def revert(folder: Path) -> list[str]:
    """Takes out all that `build` adds, and nothing else.

    Raises:
        IntreeError: a file that was new has been edited, or cannot be removed; nothing was changed.
    """
    checkout, planned = _planned(folder)
    left = planned.revert()
    changes.apply(checkout.root, left)
    return [f"{'removed ' if after is None else 'restored'} {p}" for p, (_, after) in left.items()]


def write_series(folder: Path, out: Path) -> list[str]:
    """Writes the patches of series.py.

    Raises:
        IntreeError: the checkout does not fit, or the folder cannot be written.
    """
    return [f"wrote {path}" for path in series.write(Checkout.at(folder), out)]


def _planned(folder: Path) -> tuple[Checkout, TreePlan]:
    checkout = Checkout.at(folder)
    return checkout, plan(checkout, landing())


def _touched(left: changes.Changes, planned: TreePlan) -> list[str]:
    lines = planned.lines_added()
    return [
        f"new     {path}" if path not in lines else f"edit +{lines[path]:<2} {path}"
        for path in sorted(left)
    ]


def _last(planned: TreePlan, touched: int) -> str:
    lines = planned.lines_added()
    return (
        f"seams={planned.seams} files_touched={touched} existing_files={len(lines)} "
        f"lines_in_existing_files={sum(lines.values())}"
    )
