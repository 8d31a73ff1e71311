"""The seam table against the installed SGLang, and that each way of losing a seam is found."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from startup_fixtures import seam_named

from sglang_bitexact_hicache import seam_checks, seam_table
from sglang_bitexact_hicache.seam import HOOKS, Kind, When

# ---- the table


def test_sglang_is_the_one_the_table_was_written_for():
    seam_checks.require_source()


@pytest.mark.parametrize("seam", seam_table.SEAMS, ids=lambda seam: seam.target.rpartition(".")[2])
def test_every_row_is_complete(seam):
    assert seam.why
    assert seam.parameters
    assert ":" in seam.handler
    assert callable(seam.load())
    # In the scheduler, resolution is long over.
    assert seam.kind is not Kind.RESOLUTION or seam.when is When.FLAG


def test_no_target_is_hooked_twice():
    hooked = [seam.target for seam in seam_table.SEAMS if seam.kind in HOOKS]
    assert len(hooked) == len(set(hooked))


def test_the_subclass_rows_are_exactly_what_our_classes_override():
    from sglang_bitexact_hicache import components, tree

    overridden = set()
    for ours in (components.BxFull, components.BxSWA, components.BxTreeCore, tree.BxCache):
        stock = ours.__mro__[1]
        overridden |= {
            f"{ours.__module__.rpartition('.')[2]}:{ours.__name__}.{name}"
            for name, value in vars(ours).items()
            if inspect.isfunction(value) and name[:2] != "__" and hasattr(stock, name)
        }
    assert overridden == {s.handler for s in seam_table.SEAMS if s.kind is Kind.SUBCLASS}


def test_our_overrides_take_what_stock_passes():
    for seam in seam_table.SEAMS:
        if seam.kind is Kind.SUBCLASS:
            ours = inspect.signature(seam.load()).parameters
            named = tuple(n for n, p in ours.items() if p.kind is not p.VAR_KEYWORD)
            assert named == seam.parameters[: len(named)], seam.target
            # What is not named goes on to stock as it came.
            assert len(named) in (len(ours) - 1, len(seam.parameters)), seam.target


# ---- a lost seam is found


def test_a_missing_target_is_named_with_the_version(table):
    seam = seam_named("prepare_for_extend")
    for lost in (f"{seam.target}_gone", "sglang.srt.gone.Nothing.at_all", "no_such_package.f"):
        gone = dataclasses.replace(seam, target=lost)
        table(seam, gone)
        with pytest.raises(ValueError) as error:
            seam_checks.require_source(seam_table.SEAMS)
        text = str(error.value)
        assert f"{lost} (around): missing" in text
        assert "0.5.23" in text
        assert len(text.splitlines()) == 2


@pytest.mark.parametrize("seam", seam_table.SEAMS, ids=lambda seam: seam.target)
def test_a_changed_signature_is_named(seam):
    changed = dataclasses.replace(seam, parameters=(*seam.parameters[:-1], "another"))
    with pytest.raises(ValueError) as error:
        seam_checks.require_source([changed])
    assert f"{seam.target} ({seam.kind.value}): signature: " in str(error.value)
    assert f"({', '.join(seam.parameters)}) and not " in str(error.value)


def test_a_handler_that_is_not_there_is_named():
    lost = dataclasses.replace(seam_named("prepare_for_extend"), handler="scheduling:gone")
    with pytest.raises(ValueError, match="no handler"):
        seam_checks.require_live(When.ENGAGED, seams=[lost])


def test_an_override_that_overrides_something_else_is_named():
    lost = dataclasses.replace(seam_named("_match_tree"), handler="tree:BxCache._reset_full")
    with pytest.raises(ValueError, match="does not override"):
        seam_checks.require_live(When.ENGAGED, seams=[lost])
