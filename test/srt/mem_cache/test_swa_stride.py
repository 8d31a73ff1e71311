"""The stride is honoured, a small host pool stays exact, and other KV layouts make no difference.

One scheduler with room for few boundaries: stride 3, no slots off the grid, the `kernel` io backend
(the other tests run `direct`).
"""

from __future__ import annotations

import pytest
import scenarios
from scenarios import PAGE, prompt

STRIDE = 3


@pytest.fixture(scope="module")
def tight(scheduler_process):
    """Stride 3 and 11 host slots: 32 host pages on a grid of 3, nothing off it."""
    flags = [
        *("--chunked-prefill-size", "512"),
        *("--max-total-tokens", "4096"),
        *("--hicache-swa-offload-page-stride", str(STRIDE)),
        *("--hicache-swa-offload-tail-slots", "0"),
        *("--hicache-swa-offload-reuse-points", "grid,prompt,decode,junction"),
        *("--hicache-io-backend", "kernel"),
    ]
    with scheduler_process("tight", flags) as process:
        yield process


@pytest.mark.parametrize(
    ("length", "points"),
    [
        (7 * PAGE + 10, {7}),  # the last whole page
        (7 * PAGE, {6, 7}),  # and the page that a repeat can hit
        (2 * PAGE + 1, {2}),
    ],
)
def test_truth_is_kept_on_the_grid_and_at_the_two_prompt_points(tight, length, points):
    found = tight.run(scenarios.boundaries_with_truth, prompt(length, length))
    grid = set(range(STRIDE, length // PAGE + 1, STRIDE))
    assert found == sorted(p * PAGE for p in grid | points)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("leaves", [1, 4, 5])
def test_siblings_of_an_off_grid_stem_hit_where_they_leave_it(tight, leaves, tier):
    """The first goes its way; the second computes the stem again, from the grid on, and heals the
    page where it leaves; the third hits there. The first one's own pages stay reachable."""
    stem = prompt(200 + leaves, leaves * PAGE + 40)
    prompts = [[*stem, *prompt(210 + i, 600)] for i in range(3)]
    prompts.append([*prompts[0], 5, 6, 7])
    colds, results, gains = tight.run(scenarios.siblings, prompts, 3, tier)
    below = leaves // STRIDE * STRIDE * PAGE
    whole = len(prompts[0]) // PAGE * PAGE
    assert [r.cached for r in results] == [0, below, leaves * PAGE, whole]
    assert [g["gate_healed"] for g in gains] == [0, 1, 0, 0]
    if tier == "host" and leaves != 1:
        assert gains[1]["gate_loaded_for_healing"] > 0
    for first, result, gain in zip(colds, results, gains, strict=True):
        assert result.same_answer(first)
        assert gain["checks_verified"] == gain["restored"] == (result.cached > 0)
        assert gain["checks_failed"] == gain["restore_impossible"] == 0


def test_siblings_that_come_together_wait_for_the_one_that_heals(tight):
    stem = prompt(220, 4 * PAGE + 10)
    prompts = [[*stem, *prompt(230 + i, 300)] for i in range(4)]
    colds, results, gains = tight.run(scenarios.siblings_at_once, prompts, 3)
    assert [r.cached for r in results] == [3 * PAGE, 4 * PAGE, 4 * PAGE]
    assert gains["healed"] == 1
    assert all(result.same_answer(first) for first, result in zip(colds, results, strict=True))


def test_who_waited_for_an_aborted_healer_goes_on(tight):
    stem = prompt(240, 4 * PAGE + 10)
    prompts = [[*stem, *prompt(250 + i, 300)] for i in range(3)]
    first, result, gains = tight.run(scenarios.healer_aborted, prompts, 3)
    assert result.cached == 3 * PAGE
    assert gains["healed"] == 1, "the one that had waited heals now"
    assert result.same_answer(first)


def test_the_decode_page_of_an_aborted_request_is_an_ordinary_point(tight):
    captured, running, afterwards, hit = tight.run(
        scenarios.decoding_aborted, prompt(260, 2 * PAGE - 8)
    )
    assert captured == 1
    assert running == ["LIVE", "PASSED"]
    assert afterwards == ["PASSED", "POINT"], "nothing is held for a request that is gone"
    assert hit.cached == hit.device == 2 * PAGE


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(("leaves", "hit"), [(3, 3), (4, 3), (5, 3), (2, 0)])
def test_a_fork_hits_the_grid_below_where_it_leaves(tight, leaves, hit, tier):
    stem, tail = prompt(70 + leaves, leaves * PAGE), prompt(80 + leaves, 2 * PAGE + 30)
    first, got, gains = tight.run(scenarios.fork, stem, tail, 3, tier)
    assert got.cached == hit * PAGE
    assert (got.device, got.host) == ((got.cached, 0) if tier == "device" else (0, got.cached))
    assert gains["checks_verified"] == gains["restored"] == (hit > 0)
    assert got.same_answer(first)


def test_a_repeat_hits_its_prompt_point_off_the_grid(tight):
    first, hit, gains = tight.run(scenarios.repeat, prompt(90, 5 * PAGE + 3), 3, "device")
    assert hit.cached == 5 * PAGE
    assert gains["checks_verified"] == 1
    assert hit.same_answer(first)


def test_a_full_pool_evicts_the_least_recently_used_truth_and_stays_exact(tight):
    # One boundary each; the KV of all of them stays cached, the truth of the oldest does not.
    prompts = [prompt(100 + i, PAGE + 20) for i in range(14)]
    colds, repeats, capacity, evicted = tight.run(scenarios.under_pressure, prompts, 2)
    assert capacity == 11
    assert evicted == len(prompts) - capacity
    assert all(r.same_answer(c) for r, c in zip(repeats, colds, strict=True))
    # Newest first: each of the eleven with truth is hit; the others are computed again.
    assert [r.cached for r in repeats] == [0] * 3 + [PAGE] * 11


def test_a_retracted_request_comes_back_through_its_truth(tight):
    """The tokens that it had decoded come back as a prefill, which stock does not compute bit for bit
    as it decodes (with the feature off as well); so what must be equal is what came before, and the
    other request."""
    ids, other = prompt(120, 3 * PAGE + 5), prompt(121, 300)
    colds, results, retracted_at, gains = tight.run(scenarios.retracted, ids, other, 6)
    assert sorted(times for times, _ in retracted_at) == [0, 1]
    assert gains["restored"] == gains["checks_verified"] == 1
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    for first, result, (times, done) in zip(colds, results, retracted_at, strict=True):
        equal = done if times else len(first.ids)
        assert result.error is None
        assert len(result.ids) == len(first.ids) == 6
        assert result.ids[:equal] == first.ids[:equal]
        assert result.logprobs[:equal] == first.logprobs[:equal]
