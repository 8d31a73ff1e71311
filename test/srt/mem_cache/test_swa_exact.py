"""A hit equals a cold run, bit for bit, on a real scheduler; and each way to break it is noticed.

Every exactness test asserts four things together: the exact number of cached tokens, the tier they
came from, the number of restores verified on the device, and equal ids AND logprobs. Rings are
scribbled before each hit, so a restore that does not happen cannot pass (see the controls).
"""

from __future__ import annotations

import math

import pytest
import scenarios
from scenarios import PAGE, prompt
from scheduler_harness import failure_lines

CONFIGURATIONS = {
    # SGLang mixes only while no logprobs are asked for, and only chunks larger than a page: what
    # is left of one beside decoding rows is floored to whole pages.
    "overlap": ["--chunked-prefill-size", "512", "--enable-mixed-chunk"],
    "serial": ["--chunked-prefill-size", "256", "--disable-overlap-schedule"],
}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def process(request, scheduler_process):
    """One scheduler per configuration: overlap schedule on and off, chunks of 512 and 256."""
    with scheduler_process(request.param, CONFIGURATIONS[request.param]) as running:
        yield running
        log = running.log()
    # Only the controls, which break something on purpose, may say so.
    lines = failure_lines(log)
    assert all("restored bytes" in x or "MISMATCH" in x for x in lines), lines[:5]


def assert_exact(first, hit, gains, cached: int, tier: str) -> None:
    assert hit.error is None
    assert hit.cached == cached
    assert (hit.device, hit.host) == ((cached, 0) if tier == "device" else (0, cached))
    assert gains["checks_verified"] == gains["restored"] == (cached > 0)
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert hit.ids == first.ids
    assert hit.logprobs == first.logprobs
    assert len(set(hit.logprobs)) > 1, "flat logprobs prove nothing"


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 127, 128, 129])
def test_a_repeat_hits_the_last_page_before_its_last_token(process, beyond, tier):
    length = 2 * PAGE + beyond
    first, hit, gains = process.run(scenarios.repeat, prompt(1000 + beyond, length), 3, tier)
    assert_exact(first, hit, gains, (length - 1) // PAGE * PAGE, tier)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("pages", [1, 2, 3], ids="leaves after page {}".format)
def test_a_fork_hits_where_it_leaves_with_chunks_to_come(process, pages, tier):
    # At chunk 512 pages 1 and 3 are inside a chunk, page 2 is its end; two chunks follow the hit.
    stem, tail = prompt(20 + pages, pages * PAGE), prompt(30 + pages, 700)
    first, hit, gains = process.run(scenarios.fork, stem, tail, 4, tier)
    assert_exact(first, hit, gains, pages * PAGE, tier)


def test_a_prompt_that_shares_less_than_a_page_is_not_a_hit(process):
    first, hit, gains = process.run(scenarios.fork, prompt(41, 255), prompt(42, 400), 3, "device")
    assert_exact(first, hit, gains, 0, "device")


def test_the_chunks_of_one_request_are_never_gated(process):
    (answer,), gains = process.run(scenarios.cold_gains, prompt(43, 1300), 4)
    assert answer.cached == 0
    assert gains["restored"] == gains["restore_impossible"] == 0
    assert gains["captured"] == 1300 // PAGE


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_next_turn_resumes_on_the_last_page_of_the_answer(process, tier):
    """Claims 1 and 2 at a page that decode completed: the second turn equals the writer continued
    from its own ring rows, put in place by a copy that is not ours, and nothing less will do."""
    ids = prompt(50, 2 * PAGE - 20)
    length, results, first_turn, gains = process.run(scenarios.chat, ids, 40, 50, 4, tier)
    restored, placed, without = results
    assert length == 2 * PAGE + 70
    assert first_turn["decode_captured"] == 1
    for result in results:
        assert result.error is None
        assert result.cached == 2 * PAGE
        assert (result.device, result.host) == ((512, 0) if tier == "device" else (0, 512))
    assert gains["checks_verified"] == gains["restored"] == 1
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert restored.same_answer(placed)
    assert not without.same_answer(placed), "the control noticed nothing"


def test_a_page_that_decode_completes_in_a_mixed_batch_is_captured(process):
    ids = prompt(51, 2 * PAGE - 20)
    args = scenarios.chat_beside_a_prefill, ids, prompt(52, 700), 3
    mixed, hit, gains = process.run(*args)
    # Without mixing (serial has a chunk of one page) the same page is completed by a decode step.
    assert mixed == ("enable-mixed-chunk" in " ".join(process.args))
    assert hit.cached == hit.device == 2 * PAGE
    assert gains["checks_verified"] == gains["restored"] == 1


def test_two_identical_prompts_at_once(process):
    first, both, gains = process.run(scenarios.twins, prompt(44, 700), 4)
    assert all(result.same_answer(first) for result in both)
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert gains["checks_verified"] == gains["restored"]


def test_a_hit_on_truth_whose_copy_is_still_in_flight(process):
    first, second, landed = process.run(scenarios.hit_while_copy_in_flight, prompt(45, 600), 4)
    assert landed == [False], "the copy had landed: the test shows nothing"
    assert second.cached == 2 * PAGE
    assert second.same_answer(first)


def test_two_prompts_that_differ_in_one_token_interleaved(process):
    one = prompt(46, 800)
    two = [*one[:600], one[600] ^ 1, *one[601:]]
    colds, together, again = process.run(scenarios.interleaved, one, two, 4)
    assert colds[0].logprobs != colds[1].logprobs
    for results in (together, again):
        assert [r.same_answer(c) for r, c in zip(results, colds, strict=True)] == [True, True]
    # One of them may have lost its later pages to the other's (deduplicated) rows; never more.
    assert max(r.cached for r in again) == 3 * PAGE
    assert min(r.cached for r in again) >= 2 * PAGE


@pytest.mark.parametrize("process", ["overlap"], indirect=True)
def test_a_mixed_batch_captures_the_same_bytes_as_a_batch_of_one(process):
    """Rows that prefill beside decoding rows are captured like any others; logprobs cannot show it
    (SGLang does not mix while they are asked for), so whole records are compared."""
    ids = prompt(48, 900)
    alone, modes = process.run(scenarios.capture_of, ids, None)
    assert set(modes) == {"EXTEND"}
    beside, modes = process.run(scenarios.capture_of, ids, prompt(49, 300))
    assert "MIXED" in modes
    assert sorted(alone) == sorted(beside) == [PAGE, 2 * PAGE, 3 * PAGE]
    assert alone == beside


def test_an_abort_with_a_capture_in_flight_leaves_nothing(process):
    first, later = process.run(scenarios.abort_in_flight, prompt(47, 1200))
    assert later.same_answer(first)


# ---- controls: each breaks one thing, and the check that it would slip past must see it


@pytest.mark.parametrize("how", ["skip", "window", "state"])
def test_control_a_broken_restore_changes_the_answer(process, how):
    first, hit, gains = process.run(scenarios.broken_restore, prompt(50, 700), 4, how, False)
    assert hit.cached == 2 * PAGE
    assert gains["checks_verified"] == 0
    assert all(math.isfinite(x) for x in hit.logprobs)
    assert hit.logprobs != first.logprobs


def test_a_long_prompt_hits_with_the_indexer_selecting(process):
    """Above 2,048 tokens the indexer selects among the compressed rows; the hit is inside a chunk of
    512 and at the end of one of 256."""
    stem, tail = prompt(53, 9 * PAGE), prompt(54, 300)
    first, hit, gains = process.run(scenarios.fork, stem, tail, 3, "device")
    assert_exact(first, hit, gains, 9 * PAGE, "device")


def test_control_without_the_indexer_state_a_long_hit_differs(process):
    first, hit, gains = process.run(
        scenarios.broken_restore, prompt(55, 10 * PAGE + 9), 3, "indexer", False
    )
    assert hit.cached == 10 * PAGE
    assert gains["restored"] == 1
    assert all(math.isfinite(x) for x in hit.logprobs)
    assert hit.logprobs != first.logprobs


@pytest.mark.parametrize("how", ["skip", "window", "state"])
def test_control_a_broken_restore_is_a_mismatch_and_is_never_answered(process, how):
    _, hit, gains = process.run(scenarios.broken_restore, prompt(51, 700), 4, how, True)
    assert gains["checks_failed"] == 1
    assert gains["checks_verified"] == 0
    assert "differ" in hit.error
    assert hit.ids == []
    assert "MISMATCH" in process.log()


def test_a_failed_check_with_chunks_to_come_inserts_nothing_of_the_request(process):
    stem, tail = prompt(56, 2 * PAGE), prompt(57, 1100)
    broken, gains, again = process.run(scenarios.broken_fork, stem, tail)
    assert gains["checks_failed"] == 1
    assert "differ" in broken.error
    assert broken.ids == []
    assert again.error is None
    assert again.cached == 2 * PAGE, "a page of the failed request was reused"


def test_a_prefix_without_truth_at_admission_is_aborted_and_the_server_goes_on(process):
    result, gains, later = process.run(scenarios.no_truth_at_admission, prompt(52, 600))
    assert gains["restore_impossible"] == 1
    assert "no truth" in result.error
    assert result.ids == []
    assert later.cached == 2 * PAGE
