"""CapturePlanner on a real BxCache: what gets a slot, how dearly it is held, and who gives way.

Pages are counted from the start of a prompt: "page 3" is the boundary at 768 tokens. Each test ends
with a leak check.
"""

from __future__ import annotations

import logging

import pytest
from bitexact_fixtures import PAGE, cpu_hicache, make_cache, make_server_args
from tree_driver import PlannedDriver, checked, tokens

from sglang_bitexact_hicache.policy import ALL_KINDS, Keep, Kind

FILL, GRID, PASSED, POINT, USED, LIVE = Keep


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache():
        yield


@pytest.fixture
def plan():
    """Drivers with a planner on fresh caches."""

    def build(*, slots=64, pages=40, **options):
        return PlannedDriver(make_cache(make_server_args(), slots=slots, pages=pages), **options)

    with checked(build) as make:
        yield make


def started(driver, prompt):
    """A request that has computed its prompt."""
    req = driver.admit(prompt)
    driver.prefill(req)
    return req


def answered(driver, prompt, pages):
    """A request that has decoded up to a page."""
    req = started(driver, prompt)
    driver.decode_to(req, pages * PAGE)
    return req


def captured(driver, prompt, **forward):
    """{page: class} of what one forward over a whole prompt captures."""
    req = driver.admit(prompt)
    wanted = driver.launch([(req, len(prompt))], **forward)
    driver.checkpoint(req)
    driver.finish(req)
    driver.settle()
    return {w.boundary // PAGE: w.keep for w in wanted}


def slots_of(driver, ids):
    """{page: slot} of the truths that the tree has along these tokens."""
    pages = {}
    for node, end in driver.walk(ids):
        copies = driver.cache.copies.of(node.id)
        own = (copies.dev or copies.host).ids
        pages |= {end - len(own) + 1 + i: lineage for i, lineage in enumerate(own)}
    found = {page: driver.cache.store.lookup(lineage) for page, lineage in pages.items()}
    return {page: slot for page, slot in found.items() if slot is not None}


def held(driver, ids):
    """{page: class} of the truths that the tree has along these tokens."""
    return {page: driver.cache.store.slots.keep(s) for page, s in slots_of(driver, ids).items()}


def uses(driver, ids):
    """{page: uses} of the truths that the tree has along these tokens."""
    return {page: driver.cache.store.slots.uses(s) for page, s in slots_of(driver, ids).items()}


def worths(driver, ids):
    """{page: worth} of the truths that the tree has along these tokens."""
    return {page: driver.cache.store.slots.worth(s) for page, s in slots_of(driver, ids).items()}


def other(pages, branch, tail=1):
    """A prompt that shares nothing with the others."""
    return tokens(pages, tail, branch_at=0, branch=branch)


# ---- decode


def test_the_newest_two_decode_pages_are_kept_off_the_grid(plan):
    driver = plan(stride=8)
    req = answered(driver, tokens(1, 10), 5)
    assert driver.kept(req) == {4: LIVE, 5: LIVE}
    assert driver.cache.store.counters.superseded == 2


def test_an_older_decode_page_on_the_grid_is_kept_as_grid(plan):
    driver = plan(stride=2)
    req = answered(driver, tokens(1, 10), 6)
    assert driver.kept(req) == {2: GRID, 4: GRID, 5: LIVE, 6: LIVE}
    assert driver.cache.store.counters.superseded == 1


def test_a_finished_request_leaves_its_newest_page_as_the_point_to_go_on_from(plan):
    driver = plan(stride=8)
    req = answered(driver, tokens(1, 10), 5)
    whole = req.origin_input_ids + req.output_ids
    driver.finish(req)
    driver.settle()
    assert driver.live_slots() == [] and len(driver.cache.store) == 3
    assert held(driver, whole) == {1: PASSED, 4: PASSED, 5: POINT}
    assert driver.hit(whole + tokens(1)) == 5
    assert driver.hit(whole[: 4 * PAGE + 9]) == 4, "had the last step not been committed"


def test_an_aborted_or_retracted_request_leaves_nothing(plan):
    driver = plan(stride=8)
    req = answered(driver, tokens(1, 10), 4)
    driver.drop(req)
    assert driver.cache.store.in_use() == 1, "the prompt's page, which the tree has"
    assert driver.live_slots() == []
    req.reset_for_retract()
    driver.admit(req=req)
    assert driver.prefix_pages(req) == 1
    driver.forward(req, 4 * PAGE)
    assert driver.kept(req) == {2: FILL, 3: POINT, 4: POINT}, "its answer is prompt now"


def test_live_pages_go_only_when_nothing_else_can(plan):
    driver = plan(slots=5, stride=8)
    req = answered(driver, tokens(1, 10), 4)
    for branch in range(1, 6):
        driver.run(other(2, branch))
    assert driver.kept(req) == {3: LIVE, 4: LIVE}


def test_of_live_pages_alone_the_oldest_goes(plan):
    driver = plan(slots=2, stride=8, kinds={Kind.DECODE, Kind.PROMPT})
    req = answered(driver, tokens(0, 10), 2)
    assert driver.kept(req) == {1: LIVE, 2: LIVE}
    driver.run(other(1, 1))
    assert driver.kept(req) == {2: LIVE}


def full_pool_with_a_running_request(plan, accepted):
    """A request whose newest two pages and another's point fill a pool of three slots. `accepted`:
    tokens behind the newest page."""
    driver = plan(slots=3, stride=8, kinds={Kind.DECODE, Kind.PROMPT})
    req = answered(driver, tokens(1, 10), 4)
    driver.run(other(1, 9))
    driver.answer_up_to(req, 4 * PAGE + accepted, 5000)
    return driver, req


@pytest.mark.parametrize("accepted", [0, 1, 200])
def test_the_older_live_page_is_spare_once_the_newer_one_cannot_be_thrown_away(plan, accepted):
    driver, req = full_pool_with_a_running_request(plan, accepted)
    assert driver.kept(req) == {3: LIVE, 4: LIVE}, "nobody wants a slot"
    driver.run(other(1, 1))
    assert driver.kept(req) == {3: PASSED if accepted else LIVE, 4: LIVE}, "the point went"
    driver.run(other(1, 2))
    driver.run(other(1, 3))
    assert driver.kept(req) == ({4: LIVE} if accepted else {3: LIVE, 4: LIVE})


def test_a_spare_page_stays_live_while_there_are_slots(plan):
    driver = plan(slots=8, stride=8, kinds={Kind.DECODE, Kind.PROMPT})
    req = answered(driver, tokens(1, 10), 4)
    driver.answer_up_to(req, 4 * PAGE + 9, 5000)
    for branch in range(1, 6):
        driver.run(other(1, branch))
        assert driver.kept(req) == {3: LIVE, 4: LIVE}
    driver.run(other(1, 6))
    assert driver.kept(req) == {3: PASSED, 4: LIVE}


def test_a_spare_page_that_was_let_go_is_not_held_again_by_the_page_after_it(plan):
    driver, req = full_pool_with_a_running_request(plan, 9)
    driver.run(other(1, 1))
    driver.decode_to(req, 5 * PAGE)
    assert driver.kept(req) == {4: LIVE, 5: LIVE}
    driver.finish(req)
    driver.settle()
    assert held(driver, req.origin_input_ids + req.output_ids) == {4: PASSED, 5: POINT}


# ---- what a request passes


def test_of_a_prompt_computed_in_chunks_the_deepest_point_is_where_it_goes_on(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT})
    req = driver.admit(tokens(6))
    driver.prefill(req, chunk_pages=5)
    assert held(driver, tokens(6)) == {5: PASSED, 6: POINT}
    req = driver.admit(other(6, 1, tail=0))
    driver.prefill(req)
    assert held(driver, other(6, 1, tail=0)) == {5: POINT, 6: POINT}, "one forward, not over yet"
    driver.finish(req)
    assert held(driver, other(6, 1, tail=0)) == {5: PASSED, 6: POINT}


def test_a_decode_page_passes_the_prompt_and_the_hit(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    driver.run(tokens(3, 1))
    prompt = tokens(5, 1)
    req = driver.admit(prompt)
    assert held(driver, prompt) == {3: USED}
    driver.prefill(req)
    assert held(driver, prompt) == {3: PASSED, 5: POINT}
    driver.decode_to(req, 6 * PAGE)
    assert held(driver, prompt) == {3: PASSED, 5: PASSED}


def test_a_hit_at_the_prompts_end_is_passed_by_the_answer_only(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    driver.run(tokens(3, 1))
    req = started(driver, tokens(3, 2))
    assert driver.prefix_pages(req) == 3 and held(driver, tokens(3, 1)) == {3: USED}
    driver.decode_to(req, 4 * PAGE)
    assert held(driver, tokens(3, 1)) == {3: PASSED}


def test_a_request_that_leaves_nothing_deeper_leaves_its_hit_used(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    driver.run(tokens(3, 1))
    driver.run(tokens(3, 2))
    assert held(driver, tokens(3, 1)) == {3: USED} and uses(driver, tokens(3)) == {3: 1}


def test_what_two_requests_used_is_not_passed(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    stem = tokens(3, 1)
    driver.run(stem)
    for branch, keep in ((1, PASSED), (2, USED), (3, USED)):
        prompt = tokens(5, 1, branch_at=3, branch=branch)
        driver.run(prompt)
        assert held(driver, prompt) == {3: keep, 5: POINT}
        assert uses(driver, prompt) == {3: branch, 5: 0}


def test_grid_and_fill_pass_nothing_and_are_passed_by_nothing(plan):
    driver = plan(stride=2, kinds={Kind.GRID, Kind.FILL, Kind.PROMPT})
    prompt = tokens(3, 1)
    driver.run(prompt)
    assert held(driver, prompt) == {1: FILL, 2: GRID, 3: POINT}
    driver = plan(stride=2, kinds={Kind.GRID, Kind.FILL})
    driver.run(prompt)
    driver.run(tokens(5, 1))
    assert held(driver, tokens(5)) == {1: FILL, 2: GRID, 3: USED, 4: GRID, 5: FILL}


def test_a_retracted_requests_prompt_is_where_it_goes_on_again(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    req = answered(driver, tokens(2, 10), 4)
    assert held(driver, tokens(2)) == {2: PASSED}
    driver.drop(req)
    assert held(driver, tokens(2)) == {2: POINT}


def test_a_point_that_others_used_meanwhile_stays_used_when_its_request_ends(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    req = started(driver, tokens(3, 1))
    for branch in (1, 2):
        driver.run(tokens(5, 1, branch_at=3, branch=branch))
    assert held(driver, tokens(3)) == {3: USED}
    driver.finish(req)
    assert held(driver, tokens(3)) == {3: USED}


@pytest.mark.parametrize("chunk_pages", [None, 1])
def test_a_hit_is_one_use_however_long_the_request_lives(plan, chunk_pages):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    driver.run(tokens(2, 1))
    req = driver.admit(tokens(5, 1))
    assert uses(driver, tokens(5)) == {2: 1}
    driver.prefill(req, chunk_pages)
    driver.decode_to(req, 7 * PAGE)
    driver.finish(req)
    driver.settle()
    assert uses(driver, tokens(5)) == {2: 1, 5: 0}


def test_a_forward_that_fails_leaves_no_point_behind(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT})
    driver.run(tokens(2, 1))
    req = driver.admit(tokens(4, 1))
    for point in driver.planner.prefill(req, 2 * PAGE, 4 * PAGE + 1, 4 * PAGE + 1):
        driver.planner.discard(point)
    driver.drop(req)
    assert held(driver, tokens(4)) == {2: PASSED}


# ---- what a point is worth: the pages that would be computed again


def test_a_point_of_a_new_prompt_is_worth_all_its_pages_and_other_pages_one(plan):
    driver = plan(stride=2)
    driver.run(tokens(4))
    assert worths(driver, tokens(4)) == {1: 1, 2: 1, 3: 3, 4: 4}


def test_behind_a_point_that_nobody_else_used_the_whole_conversation_is_at_stake(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    for pages in (2, 4, 7):
        driver.run(tokens(pages, 1))
    assert worths(driver, tokens(7)) == {2: 2, 4: 4, 7: 7}


def test_behind_a_point_that_others_used_only_the_pages_from_there(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    driver.run(tokens(3, 1))
    for branch, worth in ((1, 5), (2, 2), (3, 2)):
        prompt = tokens(5, 1, branch_at=3, branch=branch)
        driver.run(prompt)
        assert worths(driver, prompt) == {3: 3, 5: worth}
    prompt = tokens(9, 1, branch_at=3, branch=3)
    driver.run(prompt)
    assert worths(driver, prompt) == {3: 3, 5: 2, 9: 6}, "from the stem on: the hit was its own"


def test_a_decode_page_is_worth_its_answer_and_prompt(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.DECODE})
    driver.run(tokens(3, 1))
    driver.hit(tokens(3, 2))
    req = answered(driver, tokens(4, 1), 6)
    driver.finish(req)
    assert worths(driver, req.origin_input_ids + req.output_ids) == {3: 3, 4: 1, 5: 2, 6: 3}


# ---- junctions


def test_where_prompts_part_is_used_and_all_below_hangs_on_it(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.JUNCTION, Kind.DECODE})
    driver.run(tokens(6, 1))
    parted = tokens(8, 1, branch_at=3, branch=1)
    req = answered(driver, parted, 9)
    assert held(driver, parted) == {3: USED, 8: PASSED}
    assert uses(driver, parted) == {3: 1, 8: 0}, "the first prompt came this way"
    assert worths(driver, parted) == {3: 3, 8: 5}
    assert held(driver, tokens(6)) == {3: USED, 6: POINT}
    driver.finish(req)
    assert worths(driver, req.origin_input_ids + req.output_ids) == {3: 3, 8: 5, 9: 6}


def test_the_end_of_a_path_whose_truth_is_gone_is_a_point_like_any_other(plan):
    driver = plan(stride=8, kinds={Kind.PROMPT, Kind.JUNCTION})
    driver.run(tokens(4, 1))
    driver.forget_truth(lambda lineage: False)
    prompt = tokens(6, 1)
    driver.run(prompt)
    assert held(driver, prompt) == {4: POINT, 6: POINT}
    assert worths(driver, prompt) == {4: 4, 6: 6} and uses(driver, prompt) == {4: 0, 6: 0}


# ---- the limit of a request, and the staging's


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_a_chunk_keeps_what_is_dearest_within_the_limit_and_counts_the_rest(plan, limit):
    driver = plan(stride=3, row_limit=limit)
    dearest = {6: POINT, 3: GRID, 5: FILL, 4: FILL, 2: FILL, 1: FILL}
    assert captured(driver, tokens(6, 10)) == dict(sorted(list(dearest.items())[:limit]))
    assert driver.counters.capture_over_row_limit == 6 - limit


def test_what_the_tree_has_taken_no_longer_counts(plan):
    driver = plan(row_limit=2)
    req = driver.admit(tokens(6, 10))
    driver.prefill(req, chunk_pages=2)
    assert driver.counters.capture_over_row_limit == 0
    assert len(driver.cache.store) == 6


def test_decoding_keeps_the_grid_within_the_limit_and_the_newest_two_always(plan):
    for limit, most in ((1, 2), (2, 2), (3, 3), (4, 4)):
        driver = plan(row_limit=limit)
        req = answered(driver, tokens(1, 10), 9)
        kept = driver.kept(req)
        assert len(kept) == most and kept[8] is kept[9] is LIVE, limit


def test_what_does_not_fit_into_the_staging_is_counted(plan):
    driver = plan(stride=3)
    assert captured(driver, tokens(6, 10), room=2) == {3: GRID, 6: POINT}
    assert driver.counters.capture_over_staging == 4


# ---- which requests, which kinds


def test_a_request_that_is_never_cached_captures_nothing(plan):
    driver = plan()
    req = driver.admit(tokens(3, 10))
    req.skip_radix_cache_insert = True
    driver.prefill(req)
    driver.decode_to(req, 5 * PAGE)
    assert driver.kept(req) == {} and driver.cache.store.in_use() == 0


ALONE = {
    Kind.GRID: {3: GRID, 6: GRID},
    Kind.PROMPT: {6: POINT, 7: POINT},
    Kind.FILL: dict.fromkeys(range(1, 8), FILL),
    Kind.DECODE: {},
    Kind.JUNCTION: {},
}


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_alone(plan, kind):
    driver = plan(stride=3, kinds={kind})
    assert captured(driver, tokens(7)) == ALONE[kind]


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_switched_off(plan, kind):
    driver = plan(stride=3, kinds=ALL_KINDS - {kind})
    expected = {
        1: FILL,
        2: FILL,
        3: FILL if kind is Kind.GRID else GRID,
        4: FILL,
        5: FILL,
        6: {Kind.PROMPT: GRID}.get(kind, POINT),
        7: {Kind.PROMPT: FILL}.get(kind, POINT),
    }
    if kind is Kind.FILL:
        expected = {page: keep for page, keep in expected.items() if keep is not FILL}
    assert captured(driver, tokens(7)) == expected


def test_without_decode_points_a_decode_page_is_kept_on_the_grid_only(plan):
    driver = plan(stride=2, kinds=ALL_KINDS - {Kind.DECODE})
    req = answered(driver, tokens(1, 10), 6)
    assert driver.kept(req) == {2: GRID, 4: GRID, 6: GRID}
    driver = plan(kinds={Kind.PROMPT})
    assert driver.kept(answered(driver, tokens(1, 10), 4)) == {}


@pytest.mark.parametrize("on", [True, False])
def test_a_junction_is_captured_as_a_point_where_it_is_switched_on(plan, on):
    driver = plan(stride=2, kinds={Kind.GRID, Kind.JUNCTION} if on else {Kind.GRID})
    driver.run(tokens(6, 1))
    driver.run(tokens(6, 1, branch_at=3, branch=1))
    assert driver.cache.gate_counters.healed == on
    assert driver.hit(tokens(6, 1, branch_at=3, branch=2)) == (3 if on else 2)


# ---- pool pressure


def test_used_grid_survives_unused_grid(plan):
    driver = plan(slots=4, kinds={Kind.GRID})
    driver.run(other(2, 1))
    assert driver.hit(other(2, 1, tail=2)) == 2
    driver.run(other(2, 2))
    driver.run(other(3, 3))
    assert driver.hit(other(2, 1, tail=3)) == 2
    assert driver.hit(other(2, 2, tail=2)) == 0, "as old, never used"


def test_prompt_ends_outlive_unused_grid(plan):
    driver = plan(slots=6, kinds={Kind.GRID, Kind.PROMPT})
    for branch in range(4):
        driver.run(other(3, branch))
    assert [driver.hit(other(3, branch, tail=2)) for branch in range(4)] == [3] * 4
    assert [driver.hit(other(2, branch, tail=2)) for branch in range(4)] == [0, 0, 0, 2]


def test_a_stem_that_many_share_outlives_a_crowd_of_answers(plan):
    driver = plan(slots=4, kinds={Kind.PROMPT, Kind.JUNCTION})
    for branch in range(2):
        driver.run(tokens(6, 1, branch_at=4, branch=branch))
    for branch in range(20):
        driver.run(other(1, 100 + branch))
        assert held(driver, tokens(4)) == {4: USED}
    assert driver.hit(tokens(5, 1, branch_at=4, branch=9)) == 4


def test_a_long_conversation_outlives_short_ones_that_are_younger(plan):
    driver = plan(slots=4, kinds={Kind.PROMPT})
    driver.run(other(8, 0))
    for branch in range(1, 9):
        driver.run(other(1, branch))
    assert driver.hit(other(8, 0, tail=2)) == 8
    assert [driver.hit(other(1, branch, tail=2)) for branch in range(1, 9)] == [0] * 5 + [1] * 3


def test_of_conversations_that_go_on_the_turns_before_go_first(plan):
    """A slot for each conversation and two to spare: nobody loses the point to go on from."""
    driver = plan(slots=6, kinds={Kind.PROMPT, Kind.DECODE})
    said = [other(1, branch) for branch in range(4)]
    for turn in range(4):
        for branch in range(4):
            req = driver.admit(said[branch])
            assert driver.prefix_pages(req) == 2 * turn
            driver.prefill(req)
            driver.decode_to(req, (2 * turn + 2) * PAGE + 1)
            driver.finish(req)
            driver.settle()
            said[branch] = req.origin_input_ids + req.output_ids + tokens(1)


def test_fill_takes_free_slots_and_the_place_of_fill_only(plan):
    driver = plan(slots=3, kinds={Kind.FILL, Kind.PROMPT})
    assert captured(driver, other(2, 1)) == {1: FILL, 2: POINT}
    assert captured(driver, other(3, 2)) == {2: FILL, 3: POINT}
    assert driver.counters.capture_no_slot == 0, "fill that finds no room is not counted"
    assert driver.hit(other(2, 1, tail=2)) == 2


def test_the_ends_of_a_prompt_are_served_before_its_fill(plan):
    driver = plan(slots=3, stride=8)
    assert captured(driver, other(6, 1)) == {4: FILL, 5: FILL, 6: POINT}
    assert driver.counters.capture_no_slot == 0


def test_capture_goes_on_when_the_pool_is_full(plan):
    driver = plan(slots=4)
    for branch in range(12):
        before = driver.counters.captured
        driver.run(other(2, branch))
        assert driver.counters.captured > before
        assert driver.hit(other(2, branch, tail=2)) == 2
    assert driver.counters.capture_no_slot == 0
    assert driver.cache.store.counters.evicted == driver.counters.captured - 4


def test_what_finds_every_slot_locked_is_counted_and_said_now_and_then(plan, caplog):
    driver = plan(slots=1, kinds={Kind.PROMPT})
    driver.run(other(1, 0))
    driver.admit(other(1, 0, tail=2))
    with caplog.at_level(logging.WARNING):
        for branch in range(1, 6):
            assert captured(driver, other(1, branch)) == {}
    assert driver.counters.capture_no_slot == 5
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[2] for line in said] == ["1", "2", "4"]
    assert all("--hicache-swa-offload-tail-slots" in line for line in said)


def test_a_forward_that_fails_gives_its_slots_back(plan):
    driver = plan()
    req = driver.admit(tokens(3, 1))
    wanted = driver.planner.prefill(req, 0, len(req.origin_input_ids), len(req.origin_input_ids))
    assert len(wanted) == driver.cache.store.in_use() == 3
    for point in wanted:
        driver.planner.discard(point)
    assert driver.cache.store.in_use() == 0 and driver.counters.captured == 0


def test_a_decode_page_that_finds_no_staging_takes_no_older_page_with_it(plan):
    driver = plan(stride=8)
    req = answered(driver, tokens(1, 10), 4)
    chunk = driver.admit(other(2, 1))
    driver.answer_up_to(req, 5 * PAGE, 5000)
    driver.launch([(chunk, 2 * PAGE)], [(req, 5 * PAGE)], room=1)
    assert driver.kept(req) == {3: LIVE, 4: LIVE}, "page five was not captured"
    driver.decode_to(req, 6 * PAGE)
    assert driver.kept(req) == {4: LIVE, 6: LIVE}
