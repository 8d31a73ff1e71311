"""fp8 rows (SGLANG_DSV4_UNIFIED_KV_FP8): a window has two planes, and a hit equals a cold run.

On a real scheduler over the two-pool layout, and on one with storage. As everywhere, an exactness test
asserts the cached tokens, the tier, the restores verified, ids and logprobs, over rings that were
scribbled.
"""

from __future__ import annotations

import math

import l3_scenarios as l3
import pytest
import scenarios
from scenarios import PAGE, prompt
from test_swa_l3 import ARGS, assert_clean, directory
from test_swa_l3 import assert_exact as assert_exact_from

FP8 = {"SGLANG_DSV4_UNIFIED_KV_FP8": "1"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("fp8") / "store"


@pytest.fixture(scope="module")
def process(scheduler_process):
    with scheduler_process("fp8", ["--chunked-prefill-size", "512"], **FP8) as running:
        yield running


@pytest.fixture(scope="module")
def storing(scheduler_process, store):
    with scheduler_process("fp8-l3", ARGS, **FP8, **directory(store)) as running:
        yield running
        log = running.log()
    assert_clean(log)


def layout(h):
    """(row bytes of the window's planes, dtype of the ring, sections)."""
    yield
    found = h.runtime.view.layout
    return found.window_planes, found.window_dtype, found.num_sections


def test_the_layout_is_that_of_two_pools(process):
    planes, dtype, _ = process.run(layout)
    assert planes == (512, 128)
    assert dtype == "float8_e4m3fn"


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("beyond", [0, 1, 129])
def test_a_repeat_hits_the_last_page_before_its_last_token(process, beyond, tier):
    length = 2 * PAGE + beyond
    first, hit, gains = process.run(scenarios.repeat, prompt(8000 + beyond, length), 3, tier)
    assert_exact_from(first, hit, gains, (length - 1) // PAGE * PAGE, tier)


@pytest.mark.parametrize("pages", [1, 2], ids="leaves after page {}".format)
def test_a_fork_hits_inside_a_chunk_and_at_its_end(process, pages):
    stem, tail = prompt(8100 + pages, pages * PAGE), prompt(8110 + pages, 700)
    first, hit, gains = process.run(scenarios.fork, stem, tail, 4, "host")
    assert_exact_from(first, hit, gains, pages * PAGE, "host")


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_next_turn_resumes_on_the_last_page_of_the_answer(process, tier):
    ids = prompt(8200, 2 * PAGE - 20)
    _, results, first_turn, gains = process.run(scenarios.chat, ids, 40, 50, 4, tier)
    restored, placed, without = results
    assert first_turn["decode_captured"] == 1
    assert {result.cached for result in results} == {2 * PAGE}
    assert gains["checks_verified"] == gains["restored"] == 1
    assert restored.same_answer(placed)
    assert not without.same_answer(placed), "the control noticed nothing"


@pytest.mark.parametrize("how", ["skip", "window", "rope", "state"])
def test_control_a_broken_restore_changes_the_answer(process, how):
    first, hit, gains = process.run(scenarios.broken_restore, prompt(8400, 700), 4, how, False)
    assert hit.cached == 2 * PAGE
    assert gains["checks_verified"] == 0
    assert all(math.isfinite(x) for x in hit.logprobs)
    assert hit.logprobs != first.logprobs


@pytest.mark.parametrize("how", ["window", "rope"])
def test_control_a_flipped_bit_of_either_plane_is_a_mismatch(process, how):
    _, hit, gains = process.run(scenarios.broken_restore, prompt(8401, 700), 4, how, True)
    assert gains["checks_failed"] == 1
    assert "differ" in hit.error
    assert hit.ids == []


def test_a_hit_from_storage_and_a_bf16_server_that_finds_nothing_there(
    storing, scheduler_process, store
):
    ids = prompt(8300, 3 * PAGE + 40)
    first = storing.run(l3.populate, ids, 3)
    hit, gains, _ = storing.run(l3.from_storage, ids, 3)
    assert_exact_from(first, hit, gains, 3 * PAGE)
    with scheduler_process("bf16-beside", ARGS, **directory(store)) as other:
        (answer,), gains = other.run(scenarios.cold_gains, ids, 3)
        assert answer.cached == 0
        assert gains["restored"] == 0
        assert answer.logprobs != first.logprobs, "the other server has fp8 rows too"
        assert_clean(other.log())
