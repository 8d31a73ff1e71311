"""The in-tree form of attaching, for tests: that it can be done in their process, and is undone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

FLAG = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"


def prepare() -> None:
    """SGLang's functions get their points in this process, as with the switch on; then it is as it was.

    Before SGLang is imported. The points call straight on until a test arms them.
    """
    with mock.patch.dict(os.environ, {FLAG: "1"}):
        # By its full name: the linters would take it for one that is not used.
        __import__("sglang_bitexact_hicache.intree.siblings.seam_point")


@contextlib.contextmanager
def hooks_undone() -> Iterator[None]:
    """Undoes, on exit, what `attach.install` armed in this process."""
    import pkgutil

    from sglang_bitexact_hicache import seam_table
    from sglang_bitexact_hicache.intree.siblings import attach
    from sglang_bitexact_hicache.seam import ATTACHED

    points = []
    for seam in seam_table.SEAMS:
        if seam.kind in ATTACHED:
            point = attach.point_of(seam)
            assert point is not None, seam.target
            owner = pkgutil.resolve_name(seam.target.rpartition(".")[0])
            points.append((point, point.handler, point.call, owner, seam.attribute))
    values = [vars(owner)[name] for *_, owner, name in points]
    try:
        yield
    finally:
        for (point, handler, call, owner, name), value in zip(points, values, strict=True):
            point.handler, point.call = handler, call
            if vars(owner)[name] is not value:
                setattr(owner, name, value)
