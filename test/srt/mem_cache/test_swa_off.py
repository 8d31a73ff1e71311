"""Flag off, on a real scheduler: nothing of this project is there, and answers are byte-identical to
those of a server that never had the plugin.

Both schedulers run on the reference platform; the second loads only it (SGLANG_PLUGINS).
"""

from __future__ import annotations

import pytest
import scenarios
from scenarios import PAGE, prompt

STEM = prompt(60, 3 * PAGE + 40)
PROMPTS = [STEM, STEM, [*STEM[: 2 * PAGE], *prompt(61, 300)], prompt(62, 500), STEM]


@pytest.fixture(scope="module")
def observed(scheduler_process):
    """What each arm has installed and answers."""
    arms = {
        "off": {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0"},
        "never": {
            "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0",
            "SGLANG_PLUGINS": "dsv4_reference",
        },
    }
    found = {}
    for name, env in arms.items():
        with scheduler_process(name, ["--chunked-prefill-size", "512"], **env) as process:
            found[name] = (
                process.run(scenarios.what_is_installed),
                process.run(scenarios.answers, PROMPTS, 4),
            )
    return found


def test_off_patches_only_the_handling_of_arguments(observed):
    off, never = observed["off"][0], observed["never"][0]
    assert sorted(set(off["patched"]) - set(never["patched"])) == [
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
    ]


def test_off_has_stock_cache_tree_core_and_host_pools(observed):
    off, never = observed["off"][0], observed["never"][0]
    assert off["cache"] == "UnifiedRadixCache"
    assert off["runtime"] is False
    for fact in ("cache", "tree_core", "runtime", "host_pools"):
        assert off[fact] == never[fact], fact


def test_off_answers_are_byte_identical_to_a_server_without_the_plugin(observed):
    off, never = observed["off"][1], observed["never"][1]
    assert off == never
    assert any(result.cached > 0 for result in off), "no reuse: the comparison shows little"


def test_control_without_the_feature_a_hit_differs_from_a_cold_run(observed):
    """What the feature is for: stock computes the tail again over another request's ring rows."""
    answers = observed["off"][1]
    first, hit = answers[0], answers[1]
    assert hit.cached > 0
    assert hit.logprobs != first.logprobs
