"""Data parallel attention: two ranks over one model, each with requests, rings, records and a tree of
its own. They meet in every forward (one that has nothing to do runs an idle batch) and decide nothing
together. They share a storage (L3) as servers of their own would.

Asserted for each rank by itself, as with one rank: exact cached tokens, tier, restores verified on the
device, ids and logprobs equal to a cold run.
"""

from __future__ import annotations

import math

import dp_scenarios
import l3_rank_scenarios as l3r
import pytest
from scenarios import PAGE, prompt
from scheduler_harness import failure_lines

RANKS = 2

IDLE = None


def running(scheduler_process, name: str, *more: str):
    """The two ranks of one server; SGLang halves the chunk and the request rows."""
    args = [
        *("--dp-size", str(RANKS), "--enable-dp-attention"),
        *("--chunked-prefill-size", "1024"),
        *more,
    ]
    env = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with scheduler_process(name, args, ranks=RANKS, **env) as running:
        yield running
        log = running.log()
    # Only the controls, which break something on purpose, may say so, and on their rank.
    lines = failure_lines(log)
    assert all("MISMATCH" in x and " DP1 " in x for x in lines), lines[:5]


@pytest.fixture(scope="module")
def ranks(scheduler_process):
    yield from running(scheduler_process, "dp")


def on_each(ranks, name, *per_rank):
    return ranks.run(dp_scenarios.on_each, name, per_rank)


def assert_exact(answer, cached: int, tier: str, tokens: int = 2) -> None:
    """Of one rank (cold run, hit, counter gains)."""
    first, hit, gains = answer
    assert hit.error is None
    assert hit.cached == getattr(hit, tier) == cached
    assert gains["checks_verified"] == gains["restored"] == (cached > 0)
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert hit.same_answer(first)
    assert len(set(hit.logprobs)) >= tokens, "flat logprobs prove nothing"


def assert_only_the_second_differs(right, wrong) -> None:
    """Of two ranks (cold run, hit, counter gains): the second one's restore was broken."""
    for _, hit, _ in (right, wrong):
        assert hit.cached == PAGE
        assert all(math.isfinite(x) for x in hit.logprobs)
    assert right[1].same_answer(right[0])
    assert wrong[1].logprobs != wrong[0].logprobs


def test_a_prompt_is_repeated_until_every_rank_has_hit(ranks):
    """The request's rounds: one prompt again and again, to one rank after the other."""
    ids = prompt(1, 2 * PAGE + 129)
    answers = {rank: [] for rank in range(RANKS)}
    while not all(any(r.cached for r in results) for results in answers.values()):
        rank = sum(map(len, answers.values())) % RANKS
        told = ranks.run(dp_scenarios.one_round, ids, 3, rank)
        for other, (_, gains) in enumerate(told):
            hits = other == rank and len(answers[rank]) > 0
            assert gains["restored"] == gains["checks_verified"] == hits
            assert gains["captured"] > 0 or other != rank or hits
            assert not any(gains.values()) or other == rank, "an idle rank did something"
        answers[rank].append(told[rank][0])
    ranks.run(dp_scenarios.finish_rounds)
    # A rank's tree is its own: each computes the prompt once.
    assert [[r.cached for r in answers[rank]] for rank in range(RANKS)] == [[0, 2 * PAGE]] * RANKS
    first, *others = [result for results in answers.values() for result in results]
    assert all(other.same_answer(first) for other in others)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_ranks_with_prompts_of_their_own_at_once(ranks, forwards, tier):
    """One rank still prefills while the other decodes, or is done."""
    short, long = prompt(2, PAGE + 30), prompt(3, 4 * PAGE + 77)
    answers = on_each(ranks, "repeat", (short, 9, tier), (long, 3, tier))
    assert_exact(answers[0], PAGE, tier)
    assert_exact(answers[1], 4 * PAGE, tier)
    seen = forwards()
    assert all(s["EXTEND"] and s["DECODE"] and s["captures"] for s in seen)
    assert any(s["IDLE"] for s in seen), "the ranks never parted"


@pytest.mark.parametrize("busy", range(RANKS))
def test_a_rank_hits_while_the_other_is_idle(ranks, forwards, busy):
    args = [IDLE] * RANKS
    args[busy] = (prompt(4 + busy, 2 * PAGE + 40), 3, "host")
    answers = on_each(ranks, "repeat", *args)
    assert_exact(answers[busy], 2 * PAGE, "host")
    seen = forwards()[1 - busy]
    # Nothing but idle batches there (padded, where the other decodes), and nothing captured in them.
    assert seen["IDLE"] > 4
    assert set(seen) == {"IDLE", "padded IDLE"}


def test_forks_of_one_stem_from_different_tiers(ranks):
    stem, tail = prompt(20, PAGE), prompt(21, 400)
    device, host = on_each(ranks, "fork", (stem, tail, 4, "device"), (stem, tail[::-1], 4, "host"))
    assert_exact(device, PAGE, "device")
    assert_exact(host, PAGE, "host")


def test_the_next_turn_resumes_on_a_decoded_page(ranks):
    """Of different lengths, so that the ranks part."""
    answers = on_each(
        ranks,
        "chat",
        (prompt(50, 2 * PAGE - 8), 16, 50, 3, "host"),
        (prompt(51, PAGE - 5), 12, 30, 3, "device"),
    )
    for _, (restored, placed, without), first_turn, gains in answers:
        assert first_turn["decode_captured"] == 1
        assert gains["checks_verified"] == gains["restored"] == 1
        assert restored.same_answer(placed)
        assert not without.same_answer(placed), "the control noticed nothing"


def test_a_page_is_decoded_in_a_padded_batch(ranks, forwards):
    """SGLang pads the rank that decodes fewer requests with rows of nobody."""
    beside = [[prompt(80 + i, 60) for i in range(3)], []]
    args = [(prompt(60 + i, PAGE - 20), others) for i, others in enumerate(beside)]
    answers = on_each(ranks, "answer_beside", *args)
    for captured, hit, gains in answers:
        assert captured == 1
        assert hit.cached == hit.device == PAGE
        assert gains["checks_verified"] == gains["restored"] == 1
    assert forwards()[1]["padded DECODE"] > 10


def test_prompts_in_padded_batches(ranks, forwards, max_len):
    # No token is decoded: beside a prompt SGLang would compute it as one, with other rope tables.
    args = (prompt(6, PAGE + 30), 1, "device"), (prompt(7, 3 * PAGE + 77), 1, "device")
    answers = on_each(ranks, "repeat", *args)
    assert_exact(answers[0], PAGE, "device", tokens=1)
    assert_exact(answers[1], 3 * PAGE, "device", tokens=1)
    assert forwards()[0]["padded EXTEND"]


def test_an_idle_rank_that_computes_a_made_up_prompt_captures_nothing(ranks, forwards, max_len):
    answers = on_each(ranks, "repeat", (prompt(8, 2 * PAGE + 30), 2, "device"), IDLE)
    assert_exact(answers[0], 2 * PAGE, "device")
    seen = forwards()[1]
    assert seen["IDLE as EXTEND"] > 1 and not seen["captures"]


# ---- controls: one rank only


@pytest.mark.parametrize("how", ["skip", "window"])
def test_control_a_restore_broken_on_one_rank_changes_its_answer(ranks, how):
    args = (3, how, False, (1,))
    (right, wrong) = on_each(
        ranks, "broken_restore", (prompt(70, 300), *args), (prompt(71, 300), *args)
    )
    assert_only_the_second_differs(right, wrong)


def test_control_a_mismatch_is_the_business_of_its_rank(ranks):
    args = (2, "state", True, (1,))
    right, wrong = on_each(
        ranks, "broken_restore", (prompt(72, 300), *args), (prompt(73, 300), *args)
    )
    assert right[2]["checks_verified"] == 1 and right[1].same_answer(right[0])
    assert wrong[2]["checks_failed"] == 1 and "restored bytes differ" in wrong[1].error


def test_no_truth_on_one_rank_is_the_business_of_that_rank(ranks):
    answers = on_each(ranks, "no_truth_at_admission", (prompt(74, 300), (1,)), IDLE)
    assert answers[0][0].error is None
    answers = on_each(ranks, "no_truth_at_admission", IDLE, (prompt(75, 300), (1,)))
    assert "no truth" in answers[1][0].error


# ---- storage (L3)


@pytest.fixture(scope="module")
def with_storage(ranks, tmp_path_factory):
    """The ranks, with one storage attached at run time, whose directory each of them would make."""
    store = tmp_path_factory.mktemp("l3") / "store"
    ranks.run(l3r.attach, str(store))
    return ranks


def test_what_one_rank_stored_the_other_reads(with_storage, forwards):
    """One rank computes a prompt and is idle from then on; the other one's tree is empty."""
    ids = prompt(100, 3 * PAGE + 129)
    first, _ = on_each(with_storage, "populate", (ids, 3), IDLE)
    _, (hit, gains, stored) = on_each(with_storage, "from_storage", IDLE, (ids, 3))
    assert_exact((first, hit, gains), 3 * PAGE, "storage")
    assert stored["records_loaded"] == stored["records_read"] == 1
    assert stored["records_written"] == 0
    assert forwards()[0]["IDLE"] > 1


def test_both_ranks_read_at_once(with_storage):
    """What one of them wrote and, of another prompt, what both of them wrote at the same time: the first
    to write an object wins."""
    shared, own = prompt(101, 2 * PAGE + 40), prompt(102, 3 * PAGE + 40)
    on_each(with_storage, "populate", IDLE, (shared, 3))
    colds = on_each(with_storage, "populate", (own, 3), (own, 3))
    for ids, pages in ((shared, 2), (own, 3)):
        told = on_each(with_storage, "from_storage", (ids, 3), (ids, 3))
        for rank, (hit, gains, stored) in enumerate(told):
            first = colds[rank] if ids is own else told[0][0]
            assert_exact((first, hit, gains), pages * PAGE, "storage")
            assert stored["records_loaded"] == 1


def test_a_damaged_record_is_refused_by_each_rank_that_meets_it(with_storage):
    ids = prompt(103, 3 * PAGE + 40)
    flipped = (ids, 3, "a_bit_is_flipped", (1,))
    _, (first, told) = on_each(with_storage, "harmed", IDLE, flipped)
    for (hit, gains, stored), pages, refused in zip(told, (0, 2), (1, 0), strict=True):
        assert_exact((first, hit, gains), pages * PAGE, "storage")
        assert stored["refused_record"] == refused
    # The other rank knows nothing of that.
    (hit, gains, stored), _ = on_each(with_storage, "again", (ids, 3), IDLE)
    assert_exact((first, hit, gains), 0, "storage")
    assert stored["refused_record"] == 1


def test_control_without_the_restore_on_one_rank_its_answer_differs(with_storage):
    args = [(prompt(104 + rank, 700), 4, (1,)) for rank in range(RANKS)]
    right, wrong = on_each(with_storage, "from_storage_without_restore", *args)
    assert right[1].cached == right[1].storage == wrong[1].storage == 2 * PAGE
    assert right[1].same_answer(right[0])
    assert wrong[1].logprobs != wrong[0].logprobs
