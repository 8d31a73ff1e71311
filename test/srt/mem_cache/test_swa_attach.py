"""The plugin's form of attaching, release and doctor: SGLang's registry takes every hook, another release
is refused, and each way of losing a hook is found."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys

import pytest
from startup_fixtures import ENGAGING_ENV, environment, seam_named

from sglang_bitexact_hicache import __main__ as command
from sglang_bitexact_hicache import attach, release, seam_checks, seam_table
from sglang_bitexact_hicache.seam import When, wrapped_values


@pytest.mark.usefixtures("hooks_of_ours_undone")
def test_a_hook_that_the_registry_swallows_is_named(table):
    gone = dataclasses.replace(
        seam_named("prepare_for_extend"), target="sglang.srt.gone.Nothing.at_all"
    )
    table(gone)
    attach.install(When.ENGAGED)  # SGLang logs an error, and nothing else happens
    with pytest.raises(ValueError, match=r"sglang\.srt\.gone\.Nothing\.at_all .*not in place"):
        seam_checks.require_live(When.ENGAGED, seams=[gone])


@pytest.mark.usefixtures("hooks_of_ours_undone")
def test_a_hook_that_somebody_removed_is_named():
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    seam = seam_named("prepare_for_extend")
    stock = ScheduleBatch.prepare_for_extend
    attach.install(When.ENGAGED)
    assert seam_checks.live_problem(seam) is None
    ScheduleBatch.prepare_for_extend = stock
    with pytest.raises(ValueError, match="prepare_for_extend"):
        seam_checks.require_live(When.ENGAGED)


@pytest.mark.usefixtures("hooks_of_ours_undone")
def test_a_target_that_another_plugin_hooked_first_gets_our_hook_too():
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seam, calls = seam_named("prepare_for_extend"), []

    def theirs(original, batch):
        calls.append(batch)
        return original(batch)

    HookRegistry.register(seam.target, theirs, HookType.AROUND)
    HookRegistry.apply_hooks()
    attach.install(When.ENGAGED)
    seam_checks.require_live(When.ENGAGED)
    wrapped = list(wrapped_values(ScheduleBatch.prepare_for_extend))
    assert seam.load() in wrapped
    assert wrapped.count(theirs) == 1


@pytest.mark.usefixtures("hooks_of_ours_undone")
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
        release.sglang_version()


@pytest.mark.usefixtures("hooks_of_ours_undone")
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
    seam = seam_named("prepare_for_extend")
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
