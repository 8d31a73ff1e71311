"""EAGLE with tensor parallelism: real schedulers of two ranks, each with its own rings of both models.

As in test_swa_tp.py, everything is asserted for each rank by itself, and SGLang's rank consensus checker,
which is on, compares matches, captures (a round's candidates included) and restores with their slots as
they happen. As in test_swa_eagle.py, a hit has the accepted lengths of the cold run. That ranks decide
alike under pressure is test_swa_ranks.py's.
"""

from __future__ import annotations

import eagle_scenarios as eagle
import l3_rank_scenarios as l3r
import l3_scenarios as l3
import pytest
import scenarios
from scenarios import PAGE, prompt
from scheduler_harness import failure_lines
from test_swa_eagle import (
    AROUND_A_PAGE,
    EAGLE,
    assert_drafts_alike,
    assert_goes_on,
    assert_hits,
    assert_restored,
    plan,
)
from test_swa_tp import ONE_RANK, RANKS, same_everywhere

TIERS = ["host", "device"]


@pytest.fixture(scope="module")
def ranks(scheduler_process):
    """The two ranks of one server, with an overlap schedule."""
    args = [*EAGLE, "--chunked-prefill-size", "512"]
    env = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with scheduler_process("eagle-tp", args, ranks=RANKS, **env) as running:
        yield running
        log = running.log()
    # Only the controls, which break something on purpose, may say so.
    lines = failure_lines(log)
    assert all("MISMATCH" in x for x in lines), lines[:5]


def assert_hits_everywhere(
    answers, tiers: list[str], expected: list[int], loaded: list[int] | None = None
) -> None:
    assert len(answers) == RANKS
    for colds, found in answers:
        assert_hits(colds, dict(zip(tiers, found, strict=True)), expected, loaded)
    for of_tier in zip(*(found for _, found in answers), strict=True):
        same_everywhere([gains for _, gains in of_tier])
    # What a round accepts is one rank's word.
    first, *others = [[r.accepted for r in colds] for colds, _ in answers]
    assert all(other == first for other in others)


def test_repeats_of_every_length_around_a_page(ranks):
    prompts = [prompt(10 + length, length) for length in AROUND_A_PAGE]
    answers = ranks.run(eagle.hits, prompts, prompts, 6, TIERS)
    assert_hits_everywhere(answers, TIERS, [(n - 2) // PAGE * PAGE for n in AROUND_A_PAGE])


def test_forks_of_stems_of_every_length_around_a_page(ranks):
    stems = [prompt(20 + shared, shared) for shared in AROUND_A_PAGE]
    prompts = [[*stem, 3, *prompt(len(stem), 20)] for stem in stems]
    donors = [[*stem, 4, *prompt(len(stem), 20)] for stem in stems]
    answers = ranks.run(eagle.hits, prompts, donors, 6, ["host"])
    assert_hits_everywhere(answers, ["host"], [(n - 1) // PAGE * PAGE for n in AROUND_A_PAGE])


def test_forks_inside_a_chunk_and_at_its_end(ranks):
    donor = prompt(30, 3 * PAGE + 20)
    prompts = [[*donor[: pages * PAGE + 1], *prompt(30 + pages, 9)] for pages in (1, 2, 3)]
    answers = ranks.run(eagle.hits, prompts, [donor], 8, TIERS)
    assert_hits_everywhere(answers, TIERS, [PAGE, 2 * PAGE, 3 * PAGE], [PAGE] * 3)


def test_pages_that_rounds_complete_resume_as_their_writers_would(ranks):
    """Claim 2 on every rank; control: nothing is put there."""
    ways = [(1, 1), (1, 4), (2, 3), (3, 3), (4, 4)]
    plans, lengths = plan(ways, 0)
    # Two more, of which many rounds that may complete the page do not.
    plans += [[1] * 9, [2, 1, 1, 1, 1]]
    lengths += [PAGE - 5, PAGE - 6]
    turns = [*TIERS, "placed", "nothing"]
    reports = ranks.run(eagle.decoded_pages, plans, lengths, 700, 6, turns)
    assert len(reports) == RANKS
    for report in reports:
        assert_goes_on(report, [*ways, (1, 1), (1, 1)], TIERS)
        assert report["first turns"]["round_discarded"] >= len(plans)
        writers = report["placed"]["results"]
        for result, writer in zip(report["nothing"]["results"], writers, strict=True):
            assert not result.same_answer(writer), "the control noticed nothing"
    for way in ("first turns", *TIERS):
        same_everywhere([r[way] if way == "first turns" else r[way]["gains"] for r in reports])


@pytest.mark.parametrize("late", [(0,), (1,)], ids="rank {0[0]} is late".format)
def test_a_copy_that_is_late_on_one_rank_decides_nothing(ranks, late):
    answers = ranks.run(scenarios.hit_while_copy_in_flight, prompt(45, 600), 6, late)
    for rank, (first, second, landed) in enumerate(answers):
        assert landed == [rank not in late], "the ranks were alike: the test shows nothing"
        assert second.cached == 2 * PAGE
        assert_drafts_alike(first, second)


@pytest.mark.parametrize("how", ["abort", "retract", "flush"])
def test_a_request_that_goes_away_during_a_round_leaves_nothing(ranks, how):
    answers = ranks.run(eagle.leaves_with_a_candidate, prompt(60, PAGE - 3), how)
    for results, gone, gains in answers:
        assert gone["round_captured"] == gone["round_discarded"] > 0
        assert gone["captured"] == 0
        back = gains["round_captured"] - gains["round_discarded"]
        if how == "retract":
            assert [r.error for r in results] == [None, None]
            assert back == gains["decode_captured"] == 1, "it came back and completed its page"
        else:
            assert "Aborted" in results[0].error
            assert back == gains["captured"] == 0
    same_everywhere([gains for *_, gains in answers])


# ---- controls: one rank only, and not the one that answers


@pytest.mark.parametrize("how", ["skip", "window"])
def test_control_a_restore_broken_on_one_rank_changes_the_answer(ranks, how):
    args = (prompt(70, PAGE + 44), 6, how, False, ONE_RANK)
    for first, hit, _ in ranks.run(scenarios.broken_restore, *args):
        assert hit.cached == PAGE
        assert hit.logprobs != first.logprobs


def test_control_a_bit_of_the_drafts_window_on_one_rank_is_answered_by_none(ranks):
    answers = ranks.run(eagle.broken_draft, prompt(71, PAGE + 3), 6, True, ONE_RANK)
    for rank, (_, hit, gains) in enumerate(answers):
        assert gains["checks_failed"] == (rank in ONE_RANK)
        assert "differ" in hit.error
        assert ("on another rank" in hit.error) == (rank not in ONE_RANK)
        assert hit.ids == []


def test_control_a_bit_of_the_drafts_window_on_one_rank_changes_no_answer(ranks):
    for first, hit, gains in ranks.run(
        eagle.broken_draft, prompt(72, PAGE + 3), 6, False, ONE_RANK
    ):
        assert gains["restored"] == 1
        assert hit.cached == PAGE
        assert hit.same_answer(first)


# ---- storage (L3)


@pytest.fixture(scope="module")
def with_storage(ranks, tmp_path_factory):
    """The ranks, with storage attached at run time."""
    ranks.run(l3r.attach, str(tmp_path_factory.mktemp("l3") / "store"))
    return ranks


def assert_from_storage(first, told, cached: int) -> None:
    hit, gains, _ = told
    assert hit.cached == hit.storage == cached
    assert_restored(gains, cached > 0)
    assert_drafts_alike(first, hit)


def test_a_hit_from_storage_drafts_like_the_cold_run(with_storage):
    ids = prompt(80, 3 * PAGE + 129)
    colds = with_storage.run(l3.populate, ids, 12)
    answers = with_storage.run(l3.from_storage, ids, 12)
    for first, told in zip(colds, answers, strict=True):
        assert_from_storage(first, told, 3 * PAGE)
        assert told[2]["records_loaded"] == 1
    same_everywhere([gains for _, gains, _ in answers])


def test_a_page_that_rounds_completed_comes_from_storage_twice(with_storage):
    """A cold run computes it as a prefill, which is not the same: two hits are compared."""
    ids = prompt(81, PAGE - 3)
    answer = with_storage.run(l3.populate, ids, 12)[0].ids
    longer = [*ids, *answer, 7]
    firsts, seconds = (with_storage.run(l3.from_storage, longer, 8) for _ in range(2))
    for (first, gains, _), told in zip(firsts, seconds, strict=True):
        assert_restored(gains, 1)
        assert_from_storage(first, told, PAGE)


@pytest.mark.parametrize("where", [(0,), (1,)], ids="rank {0[0]}".format)
def test_a_record_that_is_damaged_on_one_rank_is_used_by_none(with_storage, where):
    ids = prompt(83 + where[0], 3 * PAGE + 30)
    answers = with_storage.run(l3r.harmed, ids, 6, "a_bit_is_flipped", where)
    for rank, (first, twice) in enumerate(answers):
        for told, cached in zip(twice, (0, 2 * PAGE), strict=True):
            assert_from_storage(first, told, cached)
        assert twice[0][2]["refused_record"] == (rank in where)


def test_control_without_the_restore_on_one_rank_the_answer_differs(with_storage):
    for first, hit in with_storage.run(
        l3r.from_storage_without_restore, prompt(85, 700), 6, ONE_RANK
    ):
        assert hit.cached == hit.storage == 2 * PAGE
        assert hit.logprobs != first.logprobs


def test_control_a_candidate_that_one_rank_does_not_compare_ends_the_ranks(ranks):
    """The last test of its processes: one rank takes the first round that might complete the page at its
    word, and restores from another slot than the other. The checker sees it."""
    args = ([[1] * 9, [2, 1, 1, 1, 1]], [PAGE - 5, PAGE - 6], 740, 6, ["device"], "first")
    with pytest.raises(RuntimeError, match="died"):
        ranks.run(eagle.decoded_pages, *args, ONE_RANK)
        ranks.run(scenarios.slot_taken, prompt(86, 300), ())
    assert "Found rank divergence" in ranks.log()
    assert "bit-exact HiCache: " in ranks.log()
