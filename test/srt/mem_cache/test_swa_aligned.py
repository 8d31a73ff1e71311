"""Aligned prefill: a hit equals a cold run on kernels whose bits depend on how a prompt is cut.

The rule by itself, then a real scheduler whose matrix products sum in an order that depends on the
number of rows (aligned_scenarios.cutting_matters): with the option a hit has the bits of a cold run,
without it the same requests differ. As everywhere, each test of exactness asserts cached tokens, tier,
verified restores, ids and logprobs, over dirty rings.
"""

from __future__ import annotations

import aligned_scenarios
import pytest
import scenarios
from hypothesis import given
from hypothesis import strategies as st
from scenarios import PAGE, prompt

from sglang_bitexact_hicache.aligned import AlignedPrefill
from sglang_bitexact_hicache.policy import Keep, Kind, prefill_points, prompt_points

CHUNK = 2 * PAGE
FLAGS = ["--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "8192"]

# ---- the rule

chunks = st.integers(1, 40).map(lambda pages: pages * PAGE)
lengths = st.integers(1, 50_000)


def cut(rule: AlignedPrefill, start: int, length: int) -> list[tuple[int, int]]:
    """The chunks of a prompt from `start` on."""
    found = []
    while start < length:
        found.append((start, rule.chunk_end(start, length)))
        start = found[-1][1]
    return found


@given(chunks, lengths)
def test_every_chunk_but_the_last_is_whole_and_ends_at_a_multiple(chunk, length):
    found = cut(AlignedPrefill(chunk), 0, length)
    assert [end - start for start, end in found[:-1]] == [chunk] * (len(found) - 1)
    assert all(start % chunk == 0 for start, _ in found)
    assert found[-1][1] == length
    assert 0 < found[-1][1] - found[-1][0] <= chunk


@given(chunks, lengths, st.data())
def test_a_hit_leaves_the_chunks_that_a_cold_run_has(chunk, length, data):
    rule = AlignedPrefill(chunk)
    shared = data.draw(st.integers(0, length - 1))
    hit = rule.whole(shared)
    assert hit <= shared < hit + chunk
    assert cut(rule, hit, length) == [c for c in cut(rule, 0, length) if c[0] >= hit]


@given(chunks, lengths, lengths)
def test_what_two_prompts_may_keep_of_a_shared_part_was_cut_alike(chunk, one, two):
    rule = AlignedPrefill(chunk)
    kept = min(rule.whole(one), rule.whole(two))
    pieces = [[c for c in cut(rule, 0, n) if c[1] <= kept] for n in (one, two)]
    assert pieces[0] == pieces[1]
    assert sum(end - start for start, end in pieces[0]) == kept


@given(chunks, lengths, st.integers(1, 12))
def test_points_are_multiples_and_the_grid_has_no_other(chunk, length, stride):
    rule = AlignedPrefill(chunk)
    spacing = rule.spacing(stride)
    assert (spacing * PAGE) % chunk == 0
    assert spacing % stride == 0
    points = prefill_points(0, length, length, spacing, unit=chunk)
    assert [p.boundary for p in points] == list(range(chunk, length + 1, chunk))
    assert all(p.boundary % (stride * PAGE) == 0 for p in points if p.keep is Keep.GRID)
    wanted = {p.boundary for p in points if p.keep is Keep.POINT}
    assert wanted == {p for p in (rule.whole(length - 1), rule.whole(length)) if p > 0}


@given(lengths, st.integers(1, 12), st.sets(st.sampled_from(sorted(Kind, key=str))))
def test_without_the_option_points_are_what_they_were(length, stride, kinds):
    points = prefill_points(0, length, length, stride, kinds=kinds)
    assert points == prefill_points(0, length, length, stride, kinds=kinds, unit=PAGE)
    assert prompt_points(length) == prompt_points(length, PAGE)


@pytest.mark.parametrize("chunk", [0, -256, 100, 257])
def test_a_chunk_that_is_no_number_of_pages_has_no_rule(chunk):
    with pytest.raises(ValueError, match="whole number of pages"):
        AlignedPrefill(chunk)


# ---- on a real scheduler


@pytest.fixture(scope="module")
def aligned(scheduler_process):
    """Chunks of two pages, aligned. Overlap schedule."""
    flags = [*FLAGS, "--hicache-swa-offload-aligned-prefill"]
    with scheduler_process("aligned", flags) as running:
        yield running
        log = running.log()
    for word in ("MISMATCH", "AssertionError", "Traceback"):
        assert not [x for x in log.splitlines() if word in x and "server_args=" not in x], word


@pytest.fixture(scope="module")
def unaligned(scheduler_process):
    """The same without the option. Asked for by its environment variable, which says no."""
    with scheduler_process(
        "unaligned", FLAGS, SGLANG_HICACHE_SWA_OFFLOAD_ALIGNED_PREFILL="0"
    ) as running:
        yield running


def traces() -> dict[str, list[tuple[list[int], int]]]:
    """Prompts served one after another, and what of each is reused with the option."""
    base = prompt(700, 1300)
    stem = prompt(701, 800)
    forks = [[*stem, *prompt(702, 300)], [*stem, *prompt(703, 400)]]
    edited = [*base[:1100], base[1100] ^ 1, *base[1101:]]
    longer = [*base, *prompt(704, 600)]
    return {
        "repeat": [(base, 0), (base, 1024)],
        # Longer than what enters the tree of the first one, so it computes pages again that were
        # computed in a chunk of another length.
        "extension": [(base, 0), (longer, 1024), (longer, 1536), (base, 1024)],
        "fork": [(forks[0], 0), (forks[1], 512), (forks[1], 1024), (forks[0], 1024)],
        "edit": [(base, 0), (edited, 1024), (edited, 1024)],
    }


def assert_as_cold(first, result, gains, cached: int, tier: str) -> None:
    assert result.error is None
    assert result.cached == cached
    assert (result.device, result.host) == ((cached, 0) if tier == "device" else (0, cached))
    assert gains["checks_verified"] == gains["restored"] == (cached > 0)
    assert gains["checks_failed"] == gains["restore_impossible"] == 0
    assert result.ids == first.ids
    assert result.logprobs == first.logprobs
    assert len(set(result.logprobs)) > 1, "flat logprobs prove nothing"


def assert_aligned(pieces) -> None:
    """Chunks end at multiples or where their prompt ends; a whole one is alone in its forward."""
    last = {}
    for piece in pieces:
        last[piece.rid] = max(last.get(piece.rid, 0), piece.end)
    for piece in pieces:
        assert piece.start % CHUNK == 0, piece
        assert piece.end % CHUNK == 0 or piece.end == last[piece.rid], piece
        assert piece.end - piece.start <= CHUNK, piece
        assert piece.end - piece.start < CHUNK or piece.beside == 0, piece


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("trace", traces())
def test_a_hit_equals_a_cold_run(aligned, trace, tier):
    prompts, cached = zip(*traces()[trace], strict=True)
    served, pieces = aligned.run(aligned_scenarios.one_after_another, prompts, 3, tier)
    for (first, result, gains), reused in zip(served, cached, strict=True):
        assert_as_cold(first, result, gains, reused, tier)
    assert_aligned(pieces)


@pytest.mark.parametrize("trace", traces())
def test_control_without_the_option_a_hit_differs(unaligned, trace):
    prompts = [ids for ids, _ in traces()[trace]]
    served, _ = unaligned.run(aligned_scenarios.one_after_another, prompts, 3, "device")
    hits = [(first, result) for first, result, _ in served if result.cached]
    assert len(hits) == len(prompts) - 1
    assert any(result.logprobs != first.logprobs for first, result in hits)
    # It is the cutting and nothing else: where nothing was reused nothing differs.
    assert served[0][1].same_answer(served[0][0])


def test_control_pages_of_an_incomplete_chunk_in_the_tree_change_who_reads_them(aligned):
    """Hits at multiples are not enough: a longer prompt, which computes those pages in a whole chunk,
    is made to read the ones that the tree kept."""
    prompts = [ids for ids, _ in traces()["extension"]][:2]
    served, pieces = aligned.run(aligned_scenarios.without_the_cap, prompts, 3)
    assert_aligned(pieces)
    first, result, _ = served[1]
    assert result.cached == 1024
    assert result.logprobs != first.logprobs


@pytest.mark.parametrize(
    "length", [CHUNK - 200, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1]
)
def test_lengths_around_a_chunk(aligned, length):
    ids = prompt(length, length)
    served, pieces = aligned.run(aligned_scenarios.one_after_another, [ids, ids], 3, "device")
    reused = (length - 1) // CHUNK * CHUNK
    for (first, result, gains), cached in zip(served, (0, reused), strict=True):
        assert_as_cold(first, result, gains, cached, "device")
    rule = AlignedPrefill(CHUNK)
    assert [p[1:3] for p in pieces] == [*cut(rule, 0, length), *cut(rule, reused, length)]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_next_turn_of_a_chat_computes_the_answer_as_a_prompt(aligned, tier):
    # The answer completes a page and a chunk: neither is kept.
    first, hit, gains = aligned.run(
        aligned_scenarios.two_turns, prompt(710, 1000), 40, prompt(711, 600), tier
    )
    assert_as_cold(first, hit, gains, 512, tier)


def test_prompts_at_once_leave_what_each_alone_would(aligned):
    stem = prompt(720, 600)
    prompts = [
        prompt(721, 1300),
        [*stem, *prompt(722, 300)],
        prompt(723, 200),
        prompt(724, 150),
        [*stem, *prompt(725, 1100)],
        prompt(726, 1024),
    ]
    prompts.append(prompts[0])
    served, pieces = aligned.run(aligned_scenarios.together, prompts, 3)
    assert_aligned(pieces)
    assert any(p.beside for p in pieces), "no two prompts shared a forward"
    for ids, (first, _, after) in zip(prompts, served, strict=True):
        assert after.cached == (len(ids) - 1) // CHUNK * CHUNK
        assert after.ids == first.ids
        assert after.logprobs == first.logprobs


def test_prompts_at_once_where_the_budget_is_charged_by_the_token(aligned):
    prompts = [prompt(730 + i, length) for i, length in enumerate([1300, 300, 212, 100, 513])]
    served, pieces = aligned.run(aligned_scenarios.exact_fill, prompts, 2)
    assert_aligned(pieces)
    for ids, (first, _, after) in zip(prompts, served, strict=True):
        assert after.cached == (len(ids) - 1) // CHUNK * CHUNK
        assert after.same_answer(first)


def test_a_later_chunk_without_room_waits_and_nobody_passes_it(aligned):
    result, alone, pieces, waited = aligned.run(
        aligned_scenarios.waits_for_memory, prompt(740, 1300), prompt(741, 100)
    )
    assert waited == 3
    assert_aligned(pieces)
    assert [p[:3] for p in pieces] == [
        ("long", 0, 512),
        ("long", 512, 1024),
        ("long", 1024, 1300),
        ("small", 0, 100),
    ]
    assert result.same_answer(alone)


def test_a_retracted_request_is_a_longer_prompt(aligned):
    results, times, pieces, alone, hit = aligned.run(
        aligned_scenarios.retracted_and_resumed, prompt(750, 1023), prompt(751, 300), 12
    )
    assert sorted(n for n, _ in times) == [0, 1]
    assert [r.error for r in results] == [None, None]
    assert [len(r.ids) for r in results] == [12, 12]
    # The two tokens that it had decoded complete a chunk: computed as a prompt's, they are kept.
    assert [p[:3] for p in pieces] == [("one", 512, 1024), ("one", 1024, 1025)]
    assert hit.cached == 1024
    assert hit.ids == alone.ids
    assert hit.logprobs == alone.logprobs


def test_an_abort_between_chunks_leaves_nothing(aligned):
    first, later = aligned.run(scenarios.abort_in_flight, prompt(752, 1200))
    assert later.same_answer(first)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_truth_that_was_lost_is_healed_at_the_end_of_a_whole_chunk(aligned, tier):
    first, again, healed = aligned.run(
        aligned_scenarios.truth_lost, prompt(770, 1300), 2 * CHUNK, tier
    )
    assert [result.cached for result in again] == [512, 1024]
    assert healed == 1
    assert all(result.same_answer(first) for result in again)


def test_the_option_off_changes_nothing(unaligned):
    """Hits at pages, chunks from wherever the hit ends, decoded pages in the cache."""
    ids = prompt(760, 1300)
    served, pieces = unaligned.run(aligned_scenarios.one_after_another, [ids, ids], 2, "device")
    assert [result.cached for _, result, _ in served] == [0, 1280]
    assert [p[1:3] for p in pieces] == [(0, 512), (512, 1024), (1024, 1300), (1280, 1300)]
    found = unaligned.run(scenarios.boundaries_with_truth, ids)
    assert found == [n * PAGE for n in range(1, 6)]


def test_truth_is_kept_at_multiples_only(aligned):
    assert aligned.run(scenarios.boundaries_with_truth, prompt(761, 1300)) == [512, 1024]
