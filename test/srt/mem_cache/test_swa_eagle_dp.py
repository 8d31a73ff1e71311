"""EAGLE with data parallel attention, where each rank attends by itself: claims 1 to 3 on every rank.

A rank's rounds are padded to those of the rank that has more requests, or idle, and wait while another
rank computes a prompt. So the ranks' requests, what their rounds accept and the ends of their answers
all differ here.
"""

from __future__ import annotations

import l3_rank_scenarios as l3r
import pytest
from scenarios import PAGE, prompt
from test_swa_dp import (
    IDLE,
    RANKS,
    assert_exact,
    assert_only_the_second_differs,
    on_each,
    running,
)
from test_swa_eagle import (
    EAGLE,
    assert_drafts_alike,
    assert_goes_on,
    assert_hits,
    assert_restored,
    plan,
)


@pytest.fixture(scope="module")
def ranks(scheduler_process):
    # SGLang halves the request rows too; with few, prefixes are pushed to host memory.
    more = [*EAGLE, "--max-running-requests", "32"]
    yield from running(scheduler_process, "eagle-dp", *more)


def test_ranks_with_prompts_of_their_own_at_once(ranks, forwards):
    tiers = ["host", "device"]
    prompts = [[prompt(10, PAGE + 30)], [prompt(11 + i, PAGE + 2 + 300 * i) for i in range(3)]]
    answers = on_each(
        ranks, "hits", *[(ids, ids, 6 + 8 * i, tiers) for i, ids in enumerate(prompts)]
    )
    for (colds, found), ids in zip(answers, prompts, strict=True):
        expected = [(len(x) - 2) // PAGE * PAGE for x in ids]
        assert_hits(colds, dict(zip(tiers, found, strict=True)), expected)
    seen = forwards()
    # One request beside three, and then none; and while the other rank computes prompts, no round.
    assert seen[0]["padded TARGET_VERIFY"] == seen[0]["padded DRAFT_EXTEND_V2"] > 4
    assert seen[0]["padded IDLE"] > 4 and seen[0]["IDLE"] > 4
    assert seen[1]["DECODE"] > seen[0]["DECODE"] > 4


@pytest.mark.parametrize("busy", range(RANKS))
def test_a_rank_hits_while_the_other_is_idle(ranks, forwards, busy):
    args = [IDLE] * RANKS
    args[busy] = (prompt(20 + busy, 2 * PAGE + 40), 6, "host")
    first, hit, gains = on_each(ranks, "repeat", *args)[busy]
    assert_exact((first, hit, gains), 2 * PAGE, "host")
    assert_drafts_alike(first, hit)
    seen = forwards()[1 - busy]
    # Nothing but idle batches there, also in each part of a round, and nothing captured in them.
    assert seen["padded IDLE"] > 4
    assert set(seen) == {"IDLE", "padded IDLE"}


def test_pages_that_rounds_complete_resume_as_their_writers_would(ranks, forwards):
    """Claim 2, in padded rounds; control: nothing is put there."""
    parts = [(1, 3), (2, 2)], [(1, 1), (1, 2), (3, 4), (4, 4)]
    ways = ["device", "host", "placed", "nothing"]
    args = [(*plan(part, rank), 700 + 20 * rank, 6, ways) for rank, part in enumerate(parts)]
    reports = on_each(ranks, "decoded_pages", *args)
    for report, part in zip(reports, parts, strict=True):
        assert_goes_on(report, part, ["device", "host"])
        placed, nothing = report["placed"]["results"], report["nothing"]["results"]
        for result, writer in zip(nothing, placed, strict=True):
            assert not result.same_answer(writer), "the control noticed nothing"
    assert forwards()[0]["padded TARGET_VERIFY"] > 10


def test_prompts_in_padded_batches(ranks, forwards, max_len):
    args = (prompt(30, PAGE + 30), 6, "device"), (prompt(31, 3 * PAGE + 77), 6, "device")
    answers = on_each(ranks, "repeat", *args)
    for answer, pages in zip(answers, (1, 3), strict=True):
        assert_exact(answer, pages * PAGE, "device")
        assert_drafts_alike(*answer[:2])
    assert forwards()[0]["padded EXTEND"]


def test_an_idle_rank_that_computes_a_made_up_prompt_captures_nothing(ranks, forwards, max_len):
    answers = on_each(ranks, "repeat", (prompt(32, 2 * PAGE + 30), 6, "device"), IDLE)
    assert_exact(answers[0], 2 * PAGE, "device")
    seen = forwards()[1]
    assert seen["IDLE as EXTEND"] > 1 and not seen["captures"]


@pytest.mark.parametrize("how", ["skip", "window"])
def test_control_a_restore_broken_on_one_rank_changes_its_answer(ranks, how):
    args = (6, how, False, (1,))
    right, wrong = on_each(
        ranks, "broken_restore", (prompt(40, 300), *args), (prompt(41, 300), *args)
    )
    assert_only_the_second_differs(right, wrong)


def test_control_a_bit_of_the_drafts_window_is_the_business_of_its_rank(ranks):
    args = (6, True, (1,))
    answers = on_each(ranks, "broken_draft", (prompt(42, 300), *args), (prompt(43, 300), *args))
    _, hit, gains = answers[1]
    assert_restored(answers[0][2], 1)
    assert_drafts_alike(*answers[0][:2])
    assert (gains["checks_verified"], gains["checks_failed"]) == (0, 1)
    assert "restored bytes differ" in hit.error


def test_control_a_candidate_that_one_rank_does_not_compare(ranks):
    args = [[1] * 9, [2, 1, 1, 1, 1]], [PAGE - 5, PAGE - 6]
    ways = ["device", "placed"]
    right, wrong = on_each(
        ranks, "decoded_pages", (*args, 760, 6, ways), (*args, 780, 6, ways, "first")
    )
    assert_goes_on(right, [(1, 1), (1, 1)], ["device"])
    assert_restored(wrong["device"]["gains"], 2)
    for result, writer in zip(wrong["device"]["results"], wrong["placed"]["results"], strict=True):
        assert result.cached == PAGE
        assert not result.same_answer(writer), "the control noticed nothing"


def test_what_one_rank_stored_the_other_reads(ranks, tmp_path):
    """One rank computes a prompt and is idle from then on; the other one's tree is empty."""
    ranks.run(l3r.attach, str(tmp_path / "store"))
    ids = prompt(100, 3 * PAGE + 129)
    first, _ = on_each(ranks, "populate", (ids, 8), IDLE)
    _, (hit, gains, stored) = on_each(ranks, "from_storage", IDLE, (ids, 8))
    assert_exact((first, hit, gains), 3 * PAGE, "storage")
    assert_drafts_alike(first, hit)
    assert stored["records_loaded"] == stored["records_read"] == 1
