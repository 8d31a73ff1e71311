"""Where the feature does not run, it is not there: SGLang's own functions, cache, tree core and pools.

Each group of cases is one process that loads SGLang's plugins as a scheduler does (noop_probe.py).
What is patched is found by looking at SGLang's functions, not by asking the hook registry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attachment import ENTERED_OFF, ENTERED_ON, FORM_MODULES, PLUGINS, STEPS_ON
from startup_fixtures import ENGAGING_ENV

STOCK_HOST_POOLS = [
    "deepseek_v4_c128",
    "deepseek_v4_c4",
    "deepseek_v4_c4_indexer",
    "kv",
]

NOT_ENGAGED = {
    "not HIP": "not ROCm/HIP",
    "another backend": "not the unified_kv_triton one",
    "HiCache off": "--enable-hierarchical-cache",
    "another model": "not DeepSeek-V4",
}
"""Case, and what its warning says."""


@pytest.fixture(scope="module")
def findings() -> dict[str, dict[str, Any]]:
    """What the probe found, by case."""
    found = dict(_probe({"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0"}, ["flag off"]))
    found.update(_probe(ENGAGING_ENV, list(NOT_ENGAGED)))
    return found


def _probe(env: dict[str, str], cases: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("noop_probe.py")), *cases],
        # Other plugins have hooks of their own; the reference platform stays out of it.
        env={**os.environ, **ENGAGING_ENV, **env, "SGLANG_PLUGINS": PLUGINS},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            yield found["case"], found


@pytest.mark.parametrize("case", ["flag off", *NOT_ENGAGED])
def test_the_plugin_was_loaded(case, findings):
    # Or the tests below would hold for a machine without it.
    assert findings[case]["after_loading"]["environment"]


def test_flag_off_enters_nothing_but_the_handling_of_arguments(findings):
    for moment in ("after_loading", "after_building"):
        facts = findings["flag off"][moment]
        assert facts["patches"] == ENTERED_OFF
        assert facts["resolution"] == []


@pytest.mark.parametrize("case", NOT_ENGAGED)
def test_not_engaged_enters_what_asks_the_gate_and_nothing_else(case, findings):
    for moment, entered in ENTERED_ON.items():
        facts = findings[case][moment]
        assert facts["patches"] == entered
        assert facts["resolution"] == STEPS_ON


@pytest.mark.parametrize("case", ["flag off", *NOT_ENGAGED])
def test_cache_components_and_tree_core_are_sglangs(case, findings):
    found = findings[case]
    assert found["cache"] == "UnifiedRadixCache"
    assert found["tree_core"] == "RustUnifiedTreeCore"
    swa = [] if case == "another model" else ["SWAComponent"]
    assert found["components"] == ["FullComponent", *swa]
    assert found["after_building"]["tree_cores"] == ["python", "rust"]


@pytest.mark.parametrize("case", ["flag off", "not HIP"])
def test_host_pools_are_sglangs(case, findings):
    assert findings[case]["host_pools"] == STOCK_HOST_POOLS
    assert findings[case]["after_building"]["strategies"] == [
        "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
    ]


@pytest.mark.parametrize("case", ["flag off", *NOT_ENGAGED])
def test_nothing_of_the_byte_side_is_imported(case, findings):
    # Pure Python all of them. The options name the kinds of reuse point, which policy.py defines.
    light = {"arguments", "constants", "geometry", "options", "policy", "seam", "settings"}
    light |= FORM_MODULES
    if case != "flag off":
        light |= {"aligned", "attach", "engagement", "factory", "refusals", "release"}
        light |= {"seam_checks", "seam_table", "sizing"}
    modules = {name.rpartition(".")[2] for name in findings[case]["after_building"]["modules"]}
    assert modules == light


def test_flag_off_is_silent(findings):
    assert findings["flag off"]["messages"] == []


@pytest.mark.parametrize("case", NOT_ENGAGED)
def test_a_scheduler_no_launcher_has_told_warns_once(case, findings):
    (message,) = findings[case]["messages"]
    assert message.startswith("WARNING SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE=1 has no effect")
    assert NOT_ENGAGED[case] in message
