"""Healing (healing.py) on the real tree: what a checkpoint makes reachable again, exact pages asserted.

Each test byte-compares what every hit reads (tree_driver.py) and ends with a leak check. The rules by
themselves are checked by property at the end.
"""

from __future__ import annotations

from itertools import count

import broken_rules
import pytest
from bitexact_fixtures import PAGE, cpu_hicache, make_cache, make_server_args
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from tree_driver import TreeDriver, Violation, checked, tokens

from sglang_bitexact_hicache.healing import rehang
from sglang_bitexact_hicache.lineage import ROOT, UNKNOWN, Copy, NodeCopies
from sglang_bitexact_hicache.tree import BxCache


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache():
        yield


@pytest.fixture
def drive():
    """Drivers on fresh caches, whose chunks end at junctions."""

    def build(keep=lambda _pages: True, **options):
        return TreeDriver(make_cache(make_server_args(), **options), keep, cuts=True)

    with checked(build) as make:
        yield make


def followed_beyond_its_truth(driver, *, demoted=False):
    """A computes six pages with truth at the second and the last; B follows four of them and leaves."""
    driver.keep = lambda pages: pages in (2, 6)
    driver.run(tokens(6, 1))
    if demoted:
        driver.evict_device()
    driver.keep = lambda _pages: True
    b = driver.admit(tokens(6, 1, branch_at=4, branch=1))
    assert driver.prefix_pages(b) == 2
    driver.prefill(b)
    driver.finish(b)
    driver.settle()


def hits(driver):
    """Pages that are hit by: a sibling at the junction, one inside, the healer's path, A's path."""
    return [
        driver.hit(tokens(6, 1, branch_at=4, branch=2)),
        driver.hit(tokens(6, 1, branch_at=3, branch=3)),
        driver.hit(tokens(6, 2, branch_at=4, branch=1)),
        driver.hit(tokens(6, 2)),
    ]


def test_a_junction_gets_truth_and_both_branches_stay(drive):
    driver = drive()
    followed_beyond_its_truth(driver)
    gate = driver.cache.gate_counters
    assert gate.healed == 1 and driver.cache.store.counters.moved == 1
    assert gate.loaded_for_healing == 0
    assert hits(driver) == [4, 2, 6, 6]


def test_a_junction_gets_truth_with_pairs_of_tokens_for_keys(drive):
    """With EAGLE: everything that has one token more is found as without. The chunk that ends at the
    junction joins the tree exactly there, because the token behind it is known."""
    driver = drive(is_eagle=True)
    driver.keep = lambda pages: pages in (2, 6)
    driver.run(tokens(6, 2))
    driver.keep = lambda _pages: True
    b = driver.admit(tokens(6, 2, branch_at=4, branch=1))
    assert driver.prefix_pages(b) == 2
    # The path is followed for a whole page less: its fourth page is told by the first token behind it.
    assert driver.cache.junction(b).tokens == 3 * PAGE
    driver.prefill(b)
    driver.finish(b)
    driver.settle()
    assert driver.cache.gate_counters.healed == driver.cache.store.counters.moved == 1
    assert driver.hit(tokens(6, 2, branch_at=4, branch=2)) == 3
    assert driver.hit(tokens(6, 2, branch_at=3, branch=3)) == 2
    assert driver.hit(tokens(6, 2, branch_at=4, branch=1)) == 6
    assert driver.hit(tokens(6, 2)) == 6
    assert driver.hit(tokens(6, 1)) == 3, (
        "A's sixth page needs one token more than a repeat may use"
    )


def test_control_with_pairs_the_stock_checkpoint_joins_a_page_too_early(drive, monkeypatch):
    monkeypatch.setattr(BxCache, "checkpoint_into_tree", UnifiedRadixCache.checkpoint_into_tree)
    driver = drive(is_eagle=True)
    driver.keep = lambda pages: pages in (2, 6)
    driver.run(tokens(6, 2))
    driver.keep = lambda _pages: True
    driver.run(tokens(6, 2, branch_at=4, branch=1))
    assert driver.cache.gate_counters.healed == 0
    assert driver.hit(tokens(6, 2, branch_at=4, branch=2)) == 2


@pytest.mark.parametrize("shared", [2 * PAGE + offset for offset in (-2, -1, 0, 1, 2)])
def test_with_pairs_a_page_is_found_with_one_token_more(drive, shared):
    driver = drive(is_eagle=True)
    driver.run(tokens(3, 7))
    ids = tokens(3, 7)[:shared] + tokens(2, 7, branch_at=0, branch=5)
    assert driver.hit(ids) == (shared - 1) // PAGE


def test_before_the_healer_came_its_sibling_hit_two_pages_less(drive):
    driver = drive(lambda pages: pages in (2, 6))
    driver.run(tokens(6, 1))
    assert driver.hit(tokens(6, 1, branch_at=4, branch=2)) == 2


def test_a_path_in_host_memory_is_loaded_back_and_joined(drive):
    driver = drive()
    followed_beyond_its_truth(driver, demoted=True)
    gate = driver.cache.gate_counters
    assert gate.loaded_for_healing == 2, "pages three and four; the first two were the hit"
    assert gate.healed == 1
    assert hits(driver) == [4, 2, 6, 6]
    driver.evict_device()
    assert hits(driver) == [4, 2, 6, 6], "all of it from host memory"


def test_control_without_the_load_back_a_branch_is_lost_when_it_leaves_the_device(
    drive, monkeypatch
):
    """What the load-back is for. Stock gives the junction's node B's rows and keeps A's host copy: on
    the device A's branch is broken, and after a demotion B's."""
    monkeypatch.setattr(BxCache, "_load_path_back", lambda self, junction, up_to: None)
    driver = drive()
    followed_beyond_its_truth(driver, demoted=True)
    assert driver.cache.gate_counters.loaded_for_healing == 0
    assert hits(driver)[2:] == [6, 4], "A's last two pages hang on pages that are gone"
    driver.evict_device()
    assert hits(driver)[2:] == [2, 6], "and now B's do"


def test_a_path_without_a_chain_is_not_loaded_back(drive):
    """Nothing could be joined to it."""
    driver = drive(lambda _pages: False)
    driver.insert_from_storage(tokens(3), 0, [driver.stamp() for _ in range(3)])
    driver.keep = lambda _pages: True
    driver.run(tokens(5, 1, branch_at=3, branch=1))
    assert driver.cache.gate_counters.loaded_for_healing == 0
    assert driver.hit(tokens(5, 2, branch_at=3, branch=1)) == 5, "its own pages took their place"


# ---- twins


def twins_of_different_lengths(driver, tail=0):
    """Two prompts, one the beginning of the other, are computed in one batch."""
    first, second = driver.admit(tokens(3)), driver.admit(tokens(5, tail))
    for req, end in ((first, 3 * PAGE), (second, 5 * PAGE + tail)):
        driver.forward(req, end)
    for req in (first, second):
        driver.checkpoint(req)
    for req in (first, second):
        driver.finish(req)
    driver.settle()
    return driver.hit(tokens(5, 1)), driver.hit(tokens(5, 1, branch_at=4, branch=1))


def test_the_longer_twin_is_a_hit_at_its_end_and_not_inside(drive):
    driver = drive()
    assert twins_of_different_lengths(driver) == (5, 3)
    gate = driver.cache.gate_counters
    assert gate.rehung_pages == 2 and gate.healed == 1


def test_a_twin_that_ends_inside_a_page_is_no_hit_below_the_shorter_one(drive):
    """Its forward read beyond its last whole page with its own rows."""
    driver = drive()
    assert twins_of_different_lengths(driver, tail=9) == (3, 3)
    assert driver.cache.gate_counters.healed == 0


def test_what_the_longer_twin_computes_after_its_checkpoint_is_a_hit(drive):
    driver = drive()
    first, second = driver.admit(tokens(3)), driver.admit(tokens(7))
    driver.forward(first, 3 * PAGE)
    driver.forward(second, 5 * PAGE)
    for req in (first, second):
        driver.checkpoint(req)
    driver.prefill(second)
    for req in (first, second):
        driver.finish(req)
    driver.settle()
    assert driver.hit(tokens(7, 1)) == 7
    assert driver.hit(tokens(7, 1, branch_at=6, branch=1)) == 6


def interior_pages_recomputed(driver):
    """B computes again, in one chunk, pages of which the tree keeps A's."""
    driver.keep = lambda _pages: False
    driver.run(tokens(4))
    driver.keep = lambda _pages: True
    b = driver.blind(tokens(4, 1))
    driver.forward(b, 4 * PAGE)
    driver.checkpoint(b)
    driver.prefill(b)
    driver.finish(b)
    driver.settle()
    return [driver.hit(tokens(4, 1, branch_at=pages, branch=1)) for pages in range(1, 5)]


def test_truth_of_interior_pages_never_moves(drive):
    driver = drive()
    assert interior_pages_recomputed(driver) == [0, 0, 0, 4]
    assert driver.cache.store.counters.moved == 1


def test_control_interior_truth_moves(drive, monkeypatch):
    broken_rules.interior_truth_moves(monkeypatch.setattr)
    with pytest.raises(Violation, match="is not what truth saw"):
        interior_pages_recomputed(drive(check_leaks=False))


# ---- the overlap schedule


def checkpoint_behind_a_decode_step(driver):
    """The first decode step is launched, with the request's own pages, before the checkpoint."""
    driver.keep = lambda _pages: False
    driver.run(tokens(3))
    driver.keep = lambda _pages: True
    b = driver.blind(tokens(3))
    driver.forward(b, 3 * PAGE)
    driver.decode(b, [5000])
    driver.checkpoint(b, 3 * PAGE)
    driver.finish(b)
    driver.settle()
    return driver.hit(tokens(3, 1))


def test_truth_does_not_move_behind_a_step_in_flight(drive):
    driver = drive()
    assert checkpoint_behind_a_decode_step(driver) == 0
    assert driver.cache.gate_counters.healed == 0


def test_control_truth_moves_behind_a_step_in_flight(drive, monkeypatch):
    broken_rules.truth_moves_after_another_forward(monkeypatch.setattr)
    with pytest.raises(Violation, match="is not what truth saw"):
        checkpoint_behind_a_decode_step(drive(check_leaks=False))


def page_completed_in_flight(driver):
    """As before, and the step in flight completes a page, over pages that the tree does not keep."""
    prompt = tokens(3, PAGE - 1)
    driver.keep = lambda _pages: False
    driver.run(prompt)
    driver.keep = lambda _pages: True
    b = driver.blind(prompt)
    driver.forward(b, len(prompt))
    driver.decode(b, [5000])
    driver.checkpoint(b, len(prompt))
    answered = b.origin_input_ids + b.output_ids
    driver.finish(b)
    driver.settle()
    return driver.hit(answered + tokens(1))


def test_the_page_of_a_step_in_flight_is_no_hit(drive):
    assert page_completed_in_flight(drive()) == 0


def test_control_the_page_of_a_step_in_flight_keeps_its_truth(drive, monkeypatch):
    broken_rules.page_in_flight_at_a_checkpoint_keeps_its_truth(monkeypatch.setattr)
    with pytest.raises(Violation, match="is not what truth saw"):
        page_completed_in_flight(drive(check_leaks=False))


# ---- pages of unknown identity


def test_pages_from_storage_are_never_given_an_identity(drive):
    driver = drive()
    driver.insert_from_storage(tokens(3), 0, [driver.stamp() for _ in range(3)])
    follower = driver.admit(tokens(5, branch_at=3, branch=1))
    assert driver.prefix_pages(follower) == 0
    driver.prefill(follower)
    driver.finish(follower)
    driver.settle()
    (node, _), *_ = driver.walk(tokens(3))
    assert set(driver.cache.copies.of(node.id).host.ids) == {UNKNOWN}
    assert driver.hit(tokens(5, 1, branch_at=3, branch=1)) == 5, "over the follower's own pages"
    driver.evict_device()
    assert driver.hit(tokens(5, 1, branch_at=3, branch=1)) == 0, "storage's pages lie in between"


def test_pages_of_a_direct_insert_are_never_given_an_identity(drive):
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    driver = drive()
    rows = driver.stack.allocator.full_attn_allocator.alloc(3 * PAGE)
    driver.cache.insert(InsertParams(key=RadixKey(tokens(3)), value=rows))
    follower = driver.admit(tokens(5))
    driver.prefill(follower)
    gate = driver.cache.gate_counters
    assert (gate.rehung_pages, gate.healed) == (0, 0)
    driver.finish(follower)
    driver.settle()
    known = [driver.cache.copies.of(node.id).dev for node, _ in driver.walk(tokens(5))]
    assert [page == UNKNOWN for copy in known for page in copy.ids] == [True] * 3 + [False] * 2
    assert driver.hit(tokens(5, 1)) == 0


# ---- the rule by itself


@st.composite
def paths(draw):
    """Node copies of a path, of which any chain may be broken, any page unknown, any host copy the
    device copy's identity, another one or none."""
    fresh = count(ROOT + 1)
    previous, path = ROOT, []
    for _ in range(draw(st.integers(1, 5))):
        ids, parents = [], []
        for _ in range(draw(st.integers(1, 3))):
            fate = draw(st.sampled_from(["whole"] * 6 + ["broken", "broken", "unknown"]))
            page = UNKNOWN if fate == "unknown" else next(fresh)
            parents.append(previous if fate == "whole" else draw(st.sampled_from([0, 1, 999])))
            ids.append(page)
            previous = page
        dev = Copy(tuple(ids), tuple(parents))
        others = Copy(tuple(next(fresh) for _ in ids), tuple(parents))
        host = draw(st.sampled_from([dev, dev, others, None]))
        path.append(NodeCopies(dev, host))
    return path


@given(paths())
def test_rehang_mends_what_it_may_and_nothing_else(path):
    minted = []
    mint = count(10**6)

    def minting():
        minted.append(next(mint))
        return minted[-1]

    after = list(path)
    fresh_pages = 0
    for position, mended, pages in rehang(path, minting):
        after[position] = mended
        fresh_pages += pages
    assert fresh_pages == len(minted)

    previous, known = ROOT, True
    for before, now in zip(path, after, strict=True):
        # Up to the node with the first unknown page the device chain is whole.
        known = known and UNKNOWN not in before.dev.ids
        if known:
            assert now.dev.first_parent == previous and now.dev.whole
            previous = now.dev.last_id
        # A page keeps its identity or gets a fresh one; what it kept is a prefix of the node.
        kept = [new == old for new, old in zip(now.dev.ids, before.dev.ids, strict=True)]
        assert kept == sorted(kept, reverse=True)
        assert all(new in minted for new, same in zip(now.dev.ids, kept, strict=True) if not same)
        unknown = [page == UNKNOWN for page in before.dev.ids]
        assert [page == UNKNOWN for page in now.dev.ids] == unknown
        # A host copy follows its device copy or is left alone.
        if before.host is not before.dev:
            assert now.host is before.host
        else:
            assert now.host is now.dev or now.host is before.host

    ids, parents = [], []
    for copies in path:
        ids += copies.dev.ids
        parents += copies.dev.parents
    if parents == [ROOT, *ids[:-1]] and UNKNOWN not in ids:
        assert not minted and after == path, "nothing was broken"


@given(paths())
def test_a_host_copy_follows_only_over_pages_that_are_the_same_on_both_tiers(path):
    after = list(path)
    fresh = count(10**6)
    for position, mended, _ in rehang(path, lambda: next(fresh)):
        after[position] = mended
    for position, (before, now) in enumerate(zip(path, after, strict=True)):
        if now.dev is not before.dev and now.host is now.dev:
            above = after[position - 1] if position else None
            assert above is None or above.host is not None
            assert above is None or above.host.last_id == above.dev.last_id == now.host.first_parent
