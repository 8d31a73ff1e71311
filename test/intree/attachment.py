"""The in-tree form of attaching, for tests: that it can be done in their process, and is undone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

FLAG = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"


if TYPE_CHECKING:
    from sglang_bitexact_hicache.settings import Argument

PLUGINS = "none"
"""What SGLang loads in a process that has the feature and nothing else (SGLANG_PLUGINS)."""

FORM_MODULES = {"seam_point"}
"""This form's modules, of those that are loaded with the flag off."""

ENTERED_OFF: list[str] = []
"""All that is entered with the flag off."""

ENTERED_ON = {
    "after_loading": [],
    "after_building": ["sglang.srt.mem_cache.registry.create_unified_radix_cache"],
}
"""All that is entered with the flag on, as long as the feature does not engage: points arm at their first
call."""

STEPS_ON: list[str] = []
"""The steps of argument resolution that have a hook: it is a point, as the others are."""


def entered() -> set[str]:
    """Every function of SGLang whose point is armed; others that run code of this package must not be."""
    from startup_fixtures import our_patches

    from sglang_bitexact_hicache import seam_table
    from sglang_bitexact_hicache.intree.siblings import attach
    from sglang_bitexact_hicache.seam import ATTACHED

    seams = {seam.target: seam for seam in seam_table.SEAMS if seam.kind in ATTACHED}
    found = our_patches()
    assert found <= set(seams)
    points = {target: attach.point_of(seams[target]) for target in found}
    return {target for target, point in points.items() if point is not None and point.handler}


def metavar(argument: Argument) -> str:
    """What `--help` calls the value of an argument: SGLang's fields have no name for it."""
    return "" if argument.metavar is None else argument.field.upper()


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
