"""The seam table against the installed SGLang, and that each way of losing a seam is found."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from startup_fixtures import ENGAGING_ENV, environment, hooks_undone

from sglang_bitexact_hicache import __main__ as command
from sglang_bitexact_hicache import attach, seam_checks, seam_table
from sglang_bitexact_hicache.seam import HOOKS, Kind, Seam, When


def _seam(name: str) -> Seam:
    (seam,) = (seam for seam in seam_table.SEAMS if seam.target.endswith(f".{name}"))
    return seam


@pytest.fixture
def table(monkeypatch):
    """Replaces the seam table by these rows."""

    def replace(*rows: Seam) -> None:
        monkeypatch.setattr(seam_table, "SEAMS", rows)

    return replace


@pytest.fixture
def _hooks():
    with hooks_undone():
        yield


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
    seam = _seam("prepare_for_extend")
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


@pytest.mark.usefixtures("_hooks")
def test_a_hook_that_the_registry_swallows_is_named(table):
    gone = dataclasses.replace(_seam("prepare_for_extend"), target="sglang.srt.gone.Nothing.at_all")
    table(gone)
    attach.install(When.ENGAGED)  # SGLang logs an error, and nothing else happens
    with pytest.raises(ValueError, match=r"sglang\.srt\.gone\.Nothing\.at_all .*not in place"):
        seam_checks.require_live(When.ENGAGED, seams=[gone])


@pytest.mark.usefixtures("_hooks")
def test_a_hook_that_somebody_removed_is_named():
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    seam = _seam("prepare_for_extend")
    stock = ScheduleBatch.prepare_for_extend
    attach.install(When.ENGAGED)
    assert seam_checks.live_problem(seam) is None
    ScheduleBatch.prepare_for_extend = stock
    with pytest.raises(ValueError, match="prepare_for_extend"):
        seam_checks.require_live(When.ENGAGED)


@pytest.mark.usefixtures("_hooks")
def test_a_target_that_another_plugin_hooked_first_gets_our_hook_too():
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seam, calls = _seam("prepare_for_extend"), []

    def theirs(original, batch):
        calls.append(batch)
        return original(batch)

    HookRegistry.register(seam.target, theirs, HookType.AROUND)
    HookRegistry.apply_hooks()
    attach.install(When.ENGAGED)
    seam_checks.require_live(When.ENGAGED)
    wrapped = list(attach.wrapped_values(ScheduleBatch.prepare_for_extend))
    assert seam.load() in wrapped
    assert wrapped.count(theirs) == 1


@pytest.mark.usefixtures("_hooks")
def test_installing_twice_changes_nothing():
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.plugins.hook_registry import HookRegistry

    attach.install(*When)
    hooks = {target: len(entries) for target, entries in HookRegistry._hooks.items()}
    steps = {name: len(entries) for name, entries in resolution_hooks._HOOKS.items()}
    attach.install(*When)
    assert {target: len(entries) for target, entries in HookRegistry._hooks.items()} == hooks
    assert {name: len(entries) for name, entries in resolution_hooks._HOOKS.items()} == steps
    seam_checks.require_live(*When)


def test_a_handler_that_is_not_there_is_named():
    lost = dataclasses.replace(_seam("prepare_for_extend"), handler="scheduling:gone")
    with pytest.raises(ValueError, match="no handler"):
        seam_checks.require_live(When.ENGAGED, seams=[lost])


def test_an_override_that_overrides_something_else_is_named():
    lost = dataclasses.replace(_seam("_match_tree"), handler="tree:BxCache._reset_full")
    with pytest.raises(ValueError, match="does not override"):
        seam_checks.require_live(When.ENGAGED, seams=[lost])


# ---- the version


def _pretend(monkeypatch, version: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "sglang" else real(name)
    )


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23.post1", "0.6.0"])
def test_another_version_is_refused(version, monkeypatch):
    _pretend(monkeypatch, version)
    with pytest.raises(ValueError) as error:
        seam_checks.require_source()
    assert f"SGLang 0.5.23 is needed, {version} is installed" in str(error.value)


def test_a_local_build_of_the_version_is_the_version(monkeypatch):
    _pretend(monkeypatch, "0.5.23+rocm700")
    seam_checks.require_source()


def test_no_sglang_is_an_error_too(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ValueError, match="SGLang is not installed"):
        seam_checks.sglang_version()


@pytest.mark.usefixtures("_hooks")
def test_another_version_ends_a_server_in_its_launcher(monkeypatch, tmp_path):
    from startup_fixtures import resolve, write_model

    _pretend(monkeypatch, "0.5.24")
    with environment(**ENGAGING_ENV):
        attach.install(When.ALWAYS, When.FLAG)
        with pytest.raises(ValueError, match=r"0\.5\.24"):
            resolve(write_model(tmp_path / "model"))


# ---- the doctor


def test_doctor_reads_the_source(capsys):
    assert command.main(["doctor", "--source-only"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ok +sglang_version +0\.5\.23\n", out)
    assert "everything fits" in out
    for seam in seam_table.SEAMS:
        assert seam.target in out


def test_doctor_fails_on_a_lost_seam(table, capsys):
    seam = _seam("prepare_for_extend")
    gone = dataclasses.replace(seam, target=f"{seam.target}_gone")
    changed = dataclasses.replace(seam, parameters=("self", "more"))
    table(gone, changed)
    assert command.main(["doctor", "--source-only"]) == 1
    out = capsys.readouterr().out
    assert "missing" in out
    assert "(self) and not (self, more)" in out
    assert "2 problem(s)" in out


def test_doctor_fails_on_another_version(monkeypatch, capsys):
    _pretend(monkeypatch, "0.5.22")
    assert command.main(["doctor", "--source-only"]) == 1
    assert "SGLang 0.5.23 is needed, 0.5.22 is installed" in capsys.readouterr().out


def test_doctor_needs_a_command(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([])
    assert stop.value.code != 0
    assert "usage: python -m sglang_bitexact_hicache" in capsys.readouterr().err


def test_doctor_in_a_process_of_its_own_installs_everything():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang_bitexact_hicache", "doctor"],
        capture_output=True,
        text=True,
        timeout=600,
        # The flag changes nothing about the verdict.
        env={**os.environ, "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "everything fits" in done.stdout
    assert done.stdout.count("found") == len(seam_table.SEAMS)


def test_the_page_in_docs_is_the_table():
    page = (Path(__file__).parents[3] / "docs" / "seams.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    expected = [
        f"| `{s.target.removeprefix('sglang.srt.')}` | {s.kind.value}, {s.when.value} "
        f"| `{s.handler}` | {s.caller} |"
        for s in seam_table.SEAMS
    ]
    assert rows == expected
