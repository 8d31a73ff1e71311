"""With the plugin installed and the flag off, SGLang is what it is without it.

The quick part of `make regression` (regression.py): arguments, environment, log and modules of a process
that loads plugins, and prefix caches over other models' pools, driven at random; in a Python without the
plugin, in one with it, and in one with a plugin that changes SGLang, which must be noticed. No servers.
"""

from __future__ import annotations

import subprocess

import pytest
import regression
from regression_control import ALTERATIONS
from regression_worlds import ALTERED, PACKAGE, PLUGIN, STOCK, make_world


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The transcripts of the three worlds."""
    return regression.run_worlds(regression.QUICK, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(("name", "there"), [(STOCK, False), (PLUGIN, True)])
def test_the_plugin_is_in_one_world_only(name, there, tmp_path):
    world = make_world(tmp_path, name)
    code = (
        "import importlib.metadata as m, importlib.util as u, sys; "
        f"print(u.find_spec({PACKAGE!r}) is not None, "
        "sorted(e.name for e in m.entry_points(group='sglang.srt.plugins')))"
    )
    plugins = ["bitexact_hicache"] * there + ["dsv4_reference"]
    assert world.run(["-c", code], timeout=120).stdout.strip() == f"{there} {plugins}"


def test_a_world_has_nothing_of_the_features_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE", "1")
    monkeypatch.setenv("SGLANG_PLUGINS", "dsv4_reference")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = make_world(tmp_path, PLUGIN).env()
    assert not {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE", "SGLANG_PLUGINS", "PYTHONPATH"} & set(env)


def test_the_plugin_was_loaded_and_added_what_it_says(found):
    # Its own arguments, environment variables and modules, each in full: or the next test is of nothing.
    assert regression.without_additions(found[PLUGIN])[1] == regression.additions()
    assert not any(regression.without_additions(found[STOCK])[1].values())


def test_nothing_else_differs(found):
    plugin, _ = regression.without_additions(found[PLUGIN])
    different = regression.differences(found[STOCK], plugin)
    assert not different, "\n".join(map(str, different))


def test_there_was_something_to_compare(found):
    assert regression.nothing_shown(found[STOCK]) == []
    resolved = [name for name in found[STOCK] if name.startswith("startup: resolved")]
    assert resolved and not any("refused" in found[STOCK][name] for name in resolved)


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_control_a_plugin_that_changes_sglang_is_noticed(alteration, found):
    assert regression.noticed(found[STOCK], found[ALTERED])[alteration]


def test_control_every_kind_of_difference_is_one():
    stock = {"a": {"x": [1, 2], "y": "z"}, "b": [1, 2]}
    assert regression.differences(stock, stock) == []
    for other in (
        {"a": stock["a"]},
        {**stock, "c": 1},
        {**stock, "b": [2, 1]},
        {**stock, "b": [1, 2, 2]},
        {**stock, "b": [1, True + 1.0]},
        {**stock, "a": {"y": "z", "x": [1, 2]}},
        {**stock, "a": {"x": [1, 2], "y": "z", "w": None}},
    ):
        assert len(regression.differences(stock, other)) == 1, other


def test_a_process_that_fails_says_so(tmp_path):
    world = make_world(tmp_path, STOCK)
    with pytest.raises(RuntimeError, match="stock: exit status 3"):
        world.run(["-c", "raise SystemExit(3)"], timeout=60)
    with pytest.raises(subprocess.TimeoutExpired):
        world.run(["-c", "import time; time.sleep(60)"], timeout=1)
