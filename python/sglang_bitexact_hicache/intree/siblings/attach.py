"""The in-tree form of attaching: the points at SGLang's functions (seam_point.py) are armed.

seam_checks.py asks here what is in place.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from sglang_bitexact_hicache import seam_table
from sglang_bitexact_hicache.intree.siblings import seam_point
from sglang_bitexact_hicache.seam import ATTACHED, Seam, When


def install(*when: When) -> None:
    """Puts the seams of these phases in place in this process. Idempotent.

    A seam whose point is not there, because the switch was off when SGLang was imported, stays as it is:
    `seam_checks.require_live` names it.
    """
    for seam in seam_table.SEAMS:
        if seam.when in when and seam.kind in ATTACHED:
            point = point_of(seam)
            if point is not None:
                point.arm(seam.kind, seam.load())


def is_live(seam: Seam) -> bool:
    """Whether the seam's handler is called in this process. For the kinds that are attached only."""
    point = point_of(seam)
    if point is None:
        return False
    return point.waits_for == seam if point.handler is None else point.handler is seam.load()


def point_of(seam: Seam) -> seam_point.SeamPoint | None:
    """The point at the function that SGLang calls now, None where there is none."""
    try:
        function = pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError):
        return None
    for value in wrapped_values(function):
        if isinstance(value, seam_point.SeamPoint):
            return value
    return None


def wrapped_values(function: Any) -> Iterator[Any]:
    """Everything that the wrappers around a function close over, outermost first; of a point also its
    handler.

    Follows `__wrapped__`, so a point is found below a plugin's hook as well.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        for cell in getattr(function, "__closure__", None) or ():
            # A cell that is not filled yet raises.
            with contextlib.suppress(ValueError):
                value = cell.cell_contents
                yield value
                if isinstance(value, seam_point.SeamPoint) and value.handler is not None:
                    yield value.handler
        function = getattr(function, "__wrapped__", None)
