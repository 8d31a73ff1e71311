"""The in-tree form of attaching: the points at SGLang's functions (seam_point.py) are armed.

seam_checks.py asks here what is in place.
"""

from __future__ import annotations

import pkgutil

from sglang_bitexact_hicache import seam_table
from sglang_bitexact_hicache.intree.siblings import seam_point
from sglang_bitexact_hicache.seam import ATTACHED, Seam, When, wrapped_values


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
