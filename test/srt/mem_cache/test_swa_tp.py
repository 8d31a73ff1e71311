"""Tensor parallelism: real schedulers of two ranks, each with its own rings, records and decisions.

Every test asserts, for each rank by itself, what the tests of one rank assert: exact cached tokens, tier,
restores verified on the device, ids and logprobs equal to a cold run. And that both did the same: their
counters agree, and SGLang's rank consensus checker, which is on, compares matches, captures and restores
with their slots as they happen and ends the processes at the first difference.

Through storage (L3) each rank writes, reads and proves its own bytes, and all of them take the same of
it.
"""

from __future__ import annotations

import math

import l3_rank_scenarios as l3r
import l3_scenarios as l3
import pytest
import scenarios
import torch
from scenarios import PAGE, prompt
from scheduler_harness import failure_lines

RANKS = 2
ONE_RANK = (1,)
"""Where the controls break something: not the rank that answers."""

TIMING = {"staging_waits"}
"""Counters of what happened to be late."""


@pytest.fixture(scope="module")
def ranks(scheduler_process):
    """The two ranks of one server, with an overlap schedule and a pool that overflows in no test but the
    one that means it to."""
    args = ["--chunked-prefill-size", "512"]
    env = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with scheduler_process("tp", args, ranks=RANKS, **env) as running:
        yield running
        log = running.log()
    # Only the controls, which break something on purpose, may say so.
    lines = failure_lines(log)
    assert all("MISMATCH" in x for x in lines), lines[:5]


def same_everywhere(gains) -> None:
    """The ranks counted the same, but for what depends on time."""
    first, *others = [{k: v for k, v in g.items() if k not in TIMING} for g in gains]
    assert all(other == first for other in others)


def assert_exact(answers, cached: int, tier: str) -> None:
    """Of each rank (cold run, hit, counter gains)."""
    assert len(answers) == RANKS
    for first, hit, gains in answers:
        assert hit.error is None
        assert hit.cached == getattr(hit, tier) == cached
        assert gains["checks_verified"] == gains["restored"] == (cached > 0)
        assert gains["checks_failed"] == gains["restore_impossible"] == 0
        assert hit.same_answer(first)
        assert len(set(hit.logprobs)) > 1, "flat logprobs prove nothing"
    same_everywhere([gains for _, _, gains in answers])


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_repeat_is_the_cold_run_on_every_rank(ranks, tier):
    answers = ranks.run(scenarios.repeat, prompt(1, 2 * PAGE + 129), 3, tier)
    assert_exact(answers, 2 * PAGE, tier)


@pytest.mark.parametrize(("pages", "tier"), [(1, "device"), (2, "host")])
def test_a_fork_is_the_cold_run_on_every_rank(ranks, pages, tier):
    # Page 1 is inside a chunk, page 2 ends one.
    stem, tail = prompt(20 + pages, pages * PAGE), prompt(30 + pages, 400)
    assert_exact(ranks.run(scenarios.fork, stem, tail, 4, tier), pages * PAGE, tier)


def test_the_next_turn_resumes_on_a_decoded_page_on_every_rank(ranks):
    ids = prompt(50, 2 * PAGE - 8)
    answers = ranks.run(scenarios.chat, ids, 16, 50, 3, "host")
    for _, (restored, placed, without), first_turn, gains in answers:
        assert first_turn["decode_captured"] == 1
        assert restored.cached == restored.host == 2 * PAGE
        assert gains["checks_verified"] == gains["restored"] == 1
        assert restored.same_answer(placed)
        assert not without.same_answer(placed), "the control noticed nothing"
    same_everywhere([gains for *_, gains in answers])


def test_what_the_ranks_capture_is_the_same_here(ranks):
    """Nothing relies on it: each rank restores its own bytes. It is what one writer of storage for all
    ranks would rest on, and on this platform, whose sums have one order, it holds."""
    (one, _), (other, _) = ranks.run(scenarios.capture_of, prompt(48, 2 * PAGE + 9), None)
    assert sorted(one) == sorted(other) == [PAGE, 2 * PAGE]
    assert one == other


def test_prompts_that_part_at_one_place_are_cut_there_on_every_rank(ranks):
    stem = prompt(60, PAGE + 100)
    prompts = [[*stem, *prompt(61 + i, 200)] for i in range(2)]
    answers = ranks.run(scenarios.siblings, prompts, 3, "device")
    for colds, results, _ in answers:
        assert all(hit.same_answer(first) for first, hit in zip(colds, results, strict=True))
    same_everywhere([gains[-1] for *_, gains in answers])


def test_two_prompts_interleaved_are_their_cold_runs_on_every_rank(ranks):
    one = prompt(46, 600)
    two = [*one[:400], one[400] ^ 1, *one[401:]]
    for colds, together, again in ranks.run(scenarios.interleaved, one, two, 3):
        for results in (together, again):
            assert all(r.same_answer(c) for r, c in zip(results, colds, strict=True))
        assert max(r.cached for r in again) == 2 * PAGE


@pytest.mark.parametrize("late", [(0,), (1,)], ids="rank {0[0]} is late".format)
def test_a_copy_that_is_late_on_one_rank_decides_nothing(ranks, late):
    answers = ranks.run(scenarios.hit_while_copy_in_flight, prompt(45, 600), 3, late)
    for rank, (first, second, landed) in enumerate(answers):
        assert landed == [rank not in late], "the ranks were alike: the test shows nothing"
        assert second.cached == 2 * PAGE
        assert second.same_answer(first)


def test_a_retracted_request_resumes_on_every_rank(ranks):
    one, two = prompt(63, 2 * PAGE + 30), prompt(64, PAGE + 40)
    answers = ranks.run(scenarios.retracted, one, two, 4)
    for _, results, retracted_at, gains in answers:
        assert sum(count for count, _ in retracted_at) == 1
        assert all(result.error is None for result in results)
        assert gains["checks_failed"] == 0
        assert gains["checks_verified"] == gains["restored"] == 1
    same_everywhere([gains for *_, gains in answers])


@pytest.mark.parametrize(("dim", "blocks"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)])
def test_the_ranks_weights_are_parts_of_one_models(dim, blocks):
    """What the platform gives a rank: of each block (gate, up) a slice; together the whole."""
    from dsv4_reference_platform.weights import Shard

    whole = torch.randn(4, 8, 12)
    parts = [Shard(dim, blocks, rank, RANKS) for rank in range(RANKS)]
    assert all(part.whole(part.of(whole).shape) == list(whole.shape) for part in parts)
    halves = [part.of(whole).chunk(blocks, dim) for part in parts]
    pieces = [half for block in zip(*halves, strict=True) for half in block]
    assert torch.equal(torch.cat(pieces, dim), whole)
    assert torch.equal(Shard().of(whole), whole)


# ---- controls: one rank only, and not the one that answers


@pytest.mark.parametrize("how", ["skip", "window"])
def test_control_a_restore_broken_on_one_rank_changes_the_answer(ranks, how):
    answers = ranks.run(scenarios.broken_restore, prompt(70, 300), 3, how, False, ONE_RANK)
    for first, hit, _ in answers:
        assert hit.cached == PAGE
        assert all(math.isfinite(x) for x in hit.logprobs)
        assert hit.logprobs != first.logprobs


@pytest.mark.parametrize("how", ["skip", "state"])
def test_control_a_mismatch_on_one_rank_is_answered_by_none(ranks, how):
    answers = ranks.run(scenarios.broken_restore, prompt(71, 300), 2, how, True, ONE_RANK)
    for rank, (_, hit, gains) in enumerate(answers):
        assert gains["checks_failed"] == (rank in ONE_RANK)
        assert "differ" in hit.error
        assert ("on another rank" in hit.error) == (rank not in ONE_RANK)
        assert hit.ids == []


def test_a_mismatch_on_one_rank_with_chunks_to_come_inserts_nothing_on_any(ranks):
    stem, tail = prompt(72, PAGE), prompt(73, 600)
    for broken, _, again in ranks.run(scenarios.broken_fork, stem, tail, ONE_RANK):
        assert "differ" in broken.error
        assert broken.ids == []
        assert again.error is None
        assert again.cached == PAGE, "a page of the failed request was reused"


def test_a_prefix_without_truth_on_one_rank_is_aborted_on_all(ranks):
    answers = ranks.run(scenarios.no_truth_at_admission, prompt(74, 300), ONE_RANK)
    for rank, (result, gains, later) in enumerate(answers):
        assert gains["restore_impossible"] == 1
        assert gains["restored"] == 0
        assert "no truth" in result.error
        assert ("on another rank" in result.error) == (rank not in ONE_RANK)
        assert later.cached == PAGE


# ---- storage (L3): what one rank finds out about it, and what all of them make of that


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("l3") / "store"


@pytest.fixture(scope="module")
def with_storage(ranks, store):
    """The ranks, with storage attached at run time. Its directory is not there: the first rank makes it,
    while the other comes."""
    ranks.run(l3r.attach, str(store))
    return ranks


def assert_from_storage(first, told, cached: int) -> None:
    """Of one rank: its cold run, and what `l3r.again` told."""
    hit, gains, _ = told
    assert hit.error is None
    assert hit.cached == hit.storage == cached
    assert gains["checks_verified"] == gains["restored"] == (cached > 0)
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert hit.same_answer(first)
    assert len(set(hit.logprobs)) > 1, "flat logprobs prove nothing"


def test_a_repeat_comes_from_storage_on_every_rank(with_storage, store):
    ids = prompt(80, 3 * PAGE + 129)
    colds = with_storage.run(l3.populate, ids, 3)
    answers = with_storage.run(l3.from_storage, ids, 3)
    for first, told in zip(colds, answers, strict=True):
        assert_from_storage(first, told, 3 * PAGE)
        assert told[2]["records_loaded"] == told[2]["records_read"] == 1
    same_everywhere([gains for _, gains, _ in answers])
    # Each rank has every object for itself.
    names = {path.name for path in store.iterdir()}
    own = [{n for n in names if n.endswith(f"_{rank}_{RANKS}.bin")} for rank in range(RANKS)]
    assert len(own[0]) == len(own[1]) >= 3 * 7
    assert names == own[0] | own[1]


def test_a_fork_comes_from_storage_on_every_rank(with_storage):
    stem, tail = prompt(81, 2 * PAGE), prompt(82, 400)
    for first, *told in with_storage.run(l3.fork_from_storage, stem, tail, 4):
        assert_from_storage(first, told, 2 * PAGE)


@pytest.mark.parametrize("where", [(0,), (1,)], ids="rank {0[0]}".format)
@pytest.mark.parametrize(
    ("harm", "hits", "refused"),
    [
        # Read once, refused by the rank that has it, and thrown away by both; then not asked for again.
        (l3r.a_bit_is_flipped, (0, 2 * PAGE), 1),
        # Seen at the query. The rank that lacks it writes it again.
        (l3r.a_record_is_gone, (2 * PAGE, 3 * PAGE), 0),
        (l3r.a_page_is_gone, (0, 3 * PAGE), 0),
    ],
)
def test_what_one_rank_lacks_no_rank_uses(with_storage, harm, hits, refused, where):
    ids = prompt(83 + 2 * refused + hits[0] + where[0], 3 * PAGE + 30)
    answers = with_storage.run(l3r.harmed, ids, 3, harm.__name__, where)
    for rank, (first, twice) in enumerate(answers):
        for told, cached in zip(twice, hits, strict=True):
            assert_from_storage(first, told, cached)
        assert twice[0][2]["refused_record"] == (refused if rank in where else 0)
    for i in range(2):
        same_everywhere([twice[i][1] for _, twice in answers])


def test_a_rank_whose_storage_is_slow_changes_nothing(with_storage):
    for first, told in with_storage.run(l3r.slow, prompt(90, 700), 3, ONE_RANK):
        assert_from_storage(first, told, 2 * PAGE)


@pytest.mark.parametrize(
    ("digest", "pages"), [(bytes(16), 2), (None, 3)], ids=["other bytes", "not hashed"]
)
def test_a_page_that_one_rank_cannot_prove_is_used_by_none(with_storage, digest, pages):
    """All pages are in the tree, their truth is in storage; of the last page one rank has other bytes
    than storage, or does not know yet which."""
    ids = prompt(91 + pages, 3 * PAGE + 30)
    for first, (before, after) in with_storage.run(
        l3r.survivor_differs, ids, 2, digest, 3, ONE_RANK
    ):
        result, gains, stored = before
        assert result.cached == gains["restored"] == stored["records_loaded"] == 0
        assert stored["unproved"] == 1
        assert result.same_answer(first)
        # Then a boundary before it is taken; or it, since all ranks have hashed it.
        hit, gains, stored = after
        assert hit.cached == hit.device == pages * PAGE
        assert gains["checks_verified"] == gains["restored"] == stored["records_loaded"] == 1
        assert hit.same_answer(first)


@pytest.mark.parametrize(
    ("where", "pages"), [((), 1), (ONE_RANK, 3)], ids=["all know", "one does not"]
)
def test_a_prefetch_begins_where_every_rank_can_begin(with_storage, where, pages):
    ids = prompt(95 + pages, 3 * PAGE + 30)
    for first, told, pages_read in with_storage.run(l3r.nothing_known_of_records, ids, 3, where):
        hit, gains, stored = told
        assert hit.cached == hit.device == 3 * PAGE
        assert gains["checks_verified"] == gains["restored"] == stored["records_loaded"] == 1
        assert hit.same_answer(first)
        assert pages_read == pages


@pytest.mark.parametrize("where", [(0,), (1,)], ids="rank {0[0]}".format)
def test_no_rank_is_flushed_while_a_call_hangs_on_one(with_storage, where):
    ids = prompt(99 + where[0], 300)
    assert with_storage.run(l3r.flush_while_one_hangs, ids, where) == [(False, True)] * RANKS


def test_control_without_the_restore_on_one_rank_the_answer_differs(with_storage):
    for first, hit in with_storage.run(
        l3r.from_storage_without_restore, prompt(101, 700), 4, ONE_RANK
    ):
        assert hit.cached == hit.storage == 2 * PAGE
        assert all(math.isfinite(x) for x in hit.logprobs)
        assert hit.logprobs != first.logprobs


def test_control_a_slot_taken_on_one_rank_only_ends_the_ranks(ranks):
    """The last test of its processes: a decision of one rank, and the checker that all of them ran under
    sees it."""
    with pytest.raises(RuntimeError, match="died"):
        ranks.run(scenarios.slot_taken, prompt(75, 600), ONE_RANK)
    assert "Found rank divergence" in ranks.log()
    assert "bit-exact HiCache: capture" in ranks.log()
