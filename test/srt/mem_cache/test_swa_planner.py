"""CapturePlanner on a real BxCache: what gets a slot, how dearly it is held, and who gives way.

Pages are counted from the start of a prompt: "page 3" is the boundary at 768 tokens. Each test ends
with a leak check.
"""

from __future__ import annotations

import logging

import pytest
from bitexact_fixtures import PAGE, cpu_hicache, make_cache, make_server_args
from tree_driver import PlannedDriver, tokens

from sglang_bitexact_hicache.policy import ALL_KINDS, Keep, Kind

FILL, GRID, POINT, LIVE = Keep


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache():
        yield


@pytest.fixture
def plan():
    """Drivers with a planner on fresh caches; each is checked for leaks at the end."""
    made = []

    def make(*, slots=64, pages=40, **options):
        driver = PlannedDriver(make_cache(make_server_args(), slots=slots, pages=pages), **options)
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.check_no_leak()
        assert driver.planner._newest == {} and driver.restores == {}


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


def test_a_finished_request_leaves_its_newest_pages_as_points(plan):
    driver = plan(stride=8)
    req = answered(driver, tokens(1, 10), 5)
    whole = req.origin_input_ids + req.output_ids
    driver.finish(req)
    driver.settle()
    slots = driver.cache.store.slots
    assert driver.live_slots() == [] and len(driver.cache.store) == 3
    assert {slots.keep(i) for i in slots.least_recent_first()} == {POINT}
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
