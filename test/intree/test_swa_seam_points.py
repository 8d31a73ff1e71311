"""The points at SGLang's functions: not there with the switch off, passed straight through until the
feature engages, and of the kinds that SGLang's plugin hooks have.

What depends on the switch at import is asked of processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from attachment import FLAG, hooks_undone
from startup_fixtures import ENGAGING_ENV, environment, resolve, write_model

from sglang_bitexact_hicache import seam_checks, seam_table
from sglang_bitexact_hicache.intree.siblings import attach, seam_point
from sglang_bitexact_hicache.seam import ATTACHED, Kind, When, wrapped_values
from sglang_bitexact_hicache.settings import SETTINGS

POINTS = [seam for seam in seam_table.SEAMS if seam.kind in ATTACHED]

PROBE = """
import json, pkgutil, sys
targets = json.loads(sys.argv[1])
found = {}
for target in targets:
    owner = pkgutil.resolve_name(target.rpartition(".")[0])
    value = vars(owner)[target.rpartition(".")[2]]
    function = getattr(value, "__func__", value)
    wrapped = hasattr(function, "__wrapped__")
    found[target] = [wrapped, function.__qualname__, function.__code__.co_filename]
ours = sorted(name for name in sys.modules if name.startswith("sglang_bitexact_hicache."))
print(json.dumps({"found": found, "modules": ours}))
"""


def _probe(flag: str) -> dict:
    """What the targets are in a process that was started with this value of the switch."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, json.dumps([s.target for s in POINTS])],
        env={**os.environ, FLAG: flag},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# ---- the switch


def test_off_every_function_is_the_function_itself():
    found = _probe("0")
    for target, (wrapped, name, file) in found["found"].items():
        assert not wrapped, target
        assert target.endswith(name)
        assert "bitexact_hicache" not in file
    light = {"arguments", "constants", "geometry", "options", "policy", "seam", "seam_point"}
    assert {name.rpartition(".")[2] for name in found["modules"]} == {*light, "settings"}


@pytest.mark.parametrize("value", ["1", "true", "neither"])
def test_on_or_unreadable_every_function_has_its_point(value):
    # What cannot be read is refused later, by the point in argument resolution.
    found = _probe(value)
    assert all(wrapped for wrapped, _, _ in found["found"].values())


def test_the_decorator_gives_the_function_back_when_off(monkeypatch):
    monkeypatch.setattr(seam_point, "_WANTED", False)

    def function() -> None: ...

    assert seam_point.bitexact_seam(function) is function


def test_a_function_that_the_table_does_not_name_is_an_error():
    def function() -> None: ...

    with pytest.raises(KeyError):
        seam_point.bitexact_seam(function)


def test_a_value_that_cannot_be_read_ends_a_server_in_its_launcher(tmp_path):
    with (
        environment(**{**ENGAGING_ENV, FLAG: "neither"}),
        pytest.raises(ValueError, match=f"{FLAG} must be 0 or 1"),
    ):
        resolve(write_model(tmp_path / "model"))


# ---- arming


def test_only_the_points_of_the_switch_arm_themselves():
    for seam in POINTS:
        point = attach.point_of(seam)
        assert point is not None, seam.target
        if seam.when is When.FLAG:
            # The launcher asks before a scheduler has called the second.
            assert seam_checks.live_problem(seam) is None
        else:
            assert point.handler is None, seam.target
            assert point.call is point.function
            assert seam_checks.live_problem(seam) == "not in place in this process"


@pytest.mark.usefixtures("hooks_of_ours_undone")
def test_installing_arms_every_point_and_twice_changes_nothing():
    attach.install(*When)
    calls = [attach.point_of(seam).handler for seam in POINTS]
    attach.install(*When)
    seam_checks.require_live(*When)
    assert [attach.point_of(seam).handler for seam in POINTS] == calls
    assert all(handler is seam.load() for handler, seam in zip(calls, POINTS, strict=True))


@pytest.mark.usefixtures("hooks_of_ours_undone")
def test_a_point_that_somebody_replaced_is_named():
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    attach.install(When.ENGAGED)
    ScheduleBatch.prepare_for_extend = ScheduleBatch.prepare_for_extend.__wrapped__
    with pytest.raises(ValueError, match="prepare_for_extend"):
        seam_checks.require_live(When.ENGAGED)


@pytest.mark.usefixtures("hooks_of_ours_undone")
def test_below_a_hook_of_a_plugin_the_point_is_found():
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    (seam,) = (s for s in POINTS if s.attribute == "prepare_for_extend")

    def theirs(original, batch):
        return original(batch)

    # As the registry applies it, without its memory of it.
    HookRegistry._apply_target(seam.target, [(HookType.AROUND, theirs, None)])
    assert theirs in list(wrapped_values(ScheduleBatch.prepare_for_extend))
    attach.install(When.ENGAGED)
    seam_checks.require_live(When.ENGAGED)


# ---- the kinds


def _point(function):
    return seam_point.SeamPoint(function)


def test_a_point_that_is_not_armed_calls_straight_on():
    point = _point(lambda a, *, b: (a, b))
    assert point.call(1, b=2) == (1, 2)


def test_before_may_change_what_is_passed():
    point = _point(lambda a, *, b: (a, b))
    point.arm(Kind.BEFORE, lambda a, *, b: None)
    assert point.call(1, b=2) == (1, 2)
    point.arm(Kind.BEFORE, lambda a, *, b: ((b,), {"b": a}))
    assert point.call(1, b=2) == (2, 1)


def test_after_may_change_what_comes_back():
    point = _point(lambda a: a)
    point.arm(Kind.AFTER, lambda result, a: None)
    assert point.call(1) == 1
    point.arm(Kind.AFTER, lambda result, a: (result, a))
    assert point.call(1) == (1, 1)


def test_around_has_the_function_in_its_hands():
    point = _point(lambda a: a + 1)
    point.arm(Kind.AROUND, lambda original, a: (original(a), original(10 * a)))
    assert point.call(1) == (2, 11)


def test_resolution_gets_the_record_and_the_step():
    steps = []
    point = _point(lambda server_args: steps.append(("stock", server_args)))

    def handler(server_args, previous):
        previous(server_args)
        steps.append(("ours", server_args))

    point.arm(Kind.RESOLUTION, handler)
    point.call("record")
    assert steps == [("stock", "record"), ("ours", "record")]


def test_the_class_of_a_classmethod_is_passed_on():
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    value = vars(StorageBackendFactory)["create_backend"]
    assert isinstance(value, classmethod)
    seen = []
    with hooks_undone():
        (seam,) = (s for s in POINTS if s.attribute == "create_backend")
        attach.point_of(seam).arm(
            Kind.AROUND, lambda original, *args: seen.append((original, args))
        )
        StorageBackendFactory.create_backend("file", None, None)
    ((original, args),) = seen
    assert args == (StorageBackendFactory, "file", None, None)
    assert original.__name__ == "create_backend"


# ---- the settings are SGLang's own fields


def test_the_arguments_are_fields_and_help_names_them():
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    text = parser.format_help()
    for setting in SETTINGS:
        if setting.argument is not None:
            assert setting.argument.name in text
            assert setting.argument.field in ServerArgs.__struct_fields__
            given = [setting.argument.name]
            if setting.type is not bool:
                given.append("7")
            args = parser.parse_args(["--model-path", "x", *given])
            assert getattr(args, setting.argument.field) in (True, 7, "7")
            args = parser.parse_args(["--model-path", "x"])
            assert getattr(args, setting.argument.field) in (False, None)


def test_the_environment_variables_are_fields():
    from sglang.srt.environ import Envs, envs

    with environment(**{setting.env: None for setting in SETTINGS}):
        for setting in SETTINGS:
            assert setting.env in vars(Envs)
            assert getattr(envs, setting.env).get() == setting.default
