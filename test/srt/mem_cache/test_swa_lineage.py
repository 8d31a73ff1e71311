"""Lineage: pure bookkeeping, and what it holds together on SGLang's real tree, pools and controller.

The scenarios are those in which stock pairs bytes of different computations. Each byte-compares what
a request reads (KV and truth) and has a negative control: with the rule broken, the same check fails.
"""

from __future__ import annotations

import broken_rules
import pytest
from bitexact_fixtures import PAGE, cpu_hicache, make_cache, make_server_args
from tree_driver import TreeDriver, Violation, checked, tokens

from sglang_bitexact_hicache.lineage import (
    ROOT,
    UNKNOWN,
    Copy,
    CopyTable,
    LineageError,
    Lineages,
    Row,
    RowTable,
)

# ---- pure


def chain(ids, start=ROOT):
    return Copy(tuple(ids), (start, *ids[:-1]))


def test_copy_caches_what_the_gate_asks():
    copy = Copy((5, 6, 9, 10), (ROOT, 5, 8, 9))
    assert (copy.first_parent, copy.last_id, copy.intact, copy.whole) == (ROOT, 10, 2, False)
    assert chain([5, 6, 7]).whole
    assert Copy.unknown(3).intact == 0
    assert Copy((5, UNKNOWN, 7), (ROOT, 5, UNKNOWN)).intact == 1


@pytest.mark.parametrize("at", [1, 2, 3])
def test_cut_keeps_ids_and_parents(at):
    copy = Copy((5, 6, 9, 10), (ROOT, 5, 8, 9))
    upper, lower = copy.cut(at)
    assert upper.ids + lower.ids == copy.ids and upper.parents + lower.parents == copy.parents
    assert upper.intact == min(copy.intact, at)
    assert lower.first_parent == copy.parents[at]


def test_empty_or_uneven_copies_are_refused():
    with pytest.raises(LineageError):
        Copy((), ())
    with pytest.raises(LineageError):
        Copy((1,), (1, 2))


def test_lineage_dies_with_its_last_reference():
    died = []
    lineages = Lineages(on_death=died.append)
    a, b = lineages.mint(), lineages.mint()
    assert a != b and ROOT not in (a, b) and not lineages.alive(a)
    lineages.hold((a, b, UNKNOWN))
    lineages.hold((a,))
    lineages.release((a, b, UNKNOWN))
    assert died == [b] and lineages.alive(a)
    lineages.release((a,))
    assert died == [b, a]
    with pytest.raises(LineageError):
        lineages.release((a,))
    lineages.reset()
    assert lineages.mint() not in (a, b)


def test_copy_table_counts_new_before_old():
    died = []
    lineages = Lineages(on_death=died.append)
    table = CopyTable(lineages)
    table.set_device(1, chain([5, 6]))
    table.backed_up(1, 2)
    assert table.of(1).host is table.of(1).dev
    table.set_device(1, None)
    table.loaded_back(1, 2)
    assert not died, "an id that moves between tiers must never be without a reference"
    table.split(2, 1, 1)
    assert table.of(2).dev.ids == (5,) and table.of(1).host.ids == (6,)
    assert lineages.references() == dict(table.count_references())
    table.set_device(1, None)
    table.set_host(1, None)
    assert died == [6] and len(table) == 1
    # A copy of unknown origin keeps the tier's presence without an identity.
    table.backed_up(7, 3)
    assert table.of(7).host.ids == (UNKNOWN,) * 3


def test_row_mints_at_launch_and_remembers_what_it_read():
    lineages = Lineages()
    row = Row(lineages, tail=50, base=2)
    row.upto(4)
    third, fourth = row.ids
    assert row.parents == [50, third] and row.pages == 4
    assert (row.id_of(3), row.id_of(4)) == (third, fourth)
    assert row.id_of(2) == row.id_of(5) == UNKNOWN
    row.upto(3)
    assert row.pages == 4, "minting is idempotent"
    taken = row.take(1, 4)
    assert taken.ids == (UNKNOWN, third, fourth, UNKNOWN)
    # In flight: the fifth page is launched before the checkpoint gives the row other pages.
    row.upto(5)
    fifth = row.id_of(5)
    row.rebase(tail=99, base=4)
    assert row.parents == [99] and row.id_of(5) != fifth, "it read its own fourth page"
    assert not any(lineages.alive(lineage) for lineage in (third, fourth, fifth))
    row.upto(6)
    row.rebase(tail=row.id_of(6), base=6)
    row.upto(7)
    assert row.parents == [row.tail]
    with pytest.raises(LineageError):
        row.rebase(tail=1, base=3)
    row.close()
    row.close()
    assert lineages.references() == {}


def test_rows_are_found_by_identity_not_by_equality():
    class Equal:
        def __eq__(self, other):
            return True

        __hash__ = None

    rows, a, b = RowTable(Lineages()), Equal(), Equal()
    first = rows.open(a, ROOT, 0)
    assert rows.get(a) is first and rows.get(b) is None
    first.upto(1)
    second = rows.open(a, ROOT, 0)
    assert rows.get(a) is second and first.ids == [], "a stale row is closed"
    rows.drop(a)
    rows.drop(a)
    assert len(rows) == 0


# ---- on the real tree


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache():
        yield


@pytest.fixture
def drive():
    """Drivers on fresh caches."""

    def build(keep=lambda _pages: True, **options):
        return TreeDriver(make_cache(make_server_args(), **options), keep)

    with checked(build) as make:
        yield make


def path(driver, prompt):
    """Nodes along a prompt's whole pages, root first."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(prompt).page_aligned(PAGE)
    node, nodes, position = driver.cache.tree_core.root_node, [], 0
    while position < len(key):
        node = node.children.get(key.child_key_at(position, PAGE))
        if node is None:
            break
        nodes.append(node)
        position += len(node.key)
    return nodes


def stamps_on(driver, prompt, *, host):
    return [s for node in path(driver, prompt) for s in driver.node_stamps(node, host=host)]


def unevicted_then_demoted(driver):
    """(a) B recomputes pages whose host copy is A's; then B's rows leave the device."""
    driver.run(tokens(4, 1))
    a_bytes = stamps_on(driver, tokens(4), host=True)
    driver.evict_device()
    b = driver.blind(tokens(4, 2))
    driver.prefill(b)
    driver.finish(b)
    driver.settle()
    assert (
        stamps_on(driver, tokens(4), host=True)
        == a_bytes
        != stamps_on(driver, tokens(4), host=False)
    )
    before = driver.hit(tokens(4, 3))
    driver.evict_device()
    return before, driver.hit(tokens(4, 4))


def test_a_unevict_then_demote(drive):
    driver = drive()
    assert unevicted_then_demoted(driver) == (4, 4)
    driver.check()


def test_a_control_identity_kept_on_unevict(drive, monkeypatch):
    cache_cls = type(drive().cache)
    monkeypatch.setattr(
        cache_cls,
        "device_rows_from_insert",
        lambda self, node, params, start: self.copies.set_device(
            node.id, self.copies.of(node.id).host or stock(self, node, params, start)
        ),
    )

    def stock(self, node, params, start):
        return self._insert_of[1].take(start // PAGE, self.pages_of(node))

    with pytest.raises(Violation):
        unevicted_then_demoted(drive(check_leaks=False))


def ancestor_unevicted(driver):
    """(b) An ancestor is recomputed by B under a descendant that A computed."""
    a = driver.admit(tokens(4, 1))
    driver.prefill(a)
    driver.finish(a)
    driver.settle()
    lineage = path(driver, tokens(4))[-1]
    last = driver.cache.copies.of(lineage.id).dev.last_id
    driver.forget_truth(lambda held: held == last)
    driver.evict_device()
    b = driver.admit(tokens(2, 2))
    assert driver.prefix_pages(b) == 0
    driver.keep = lambda _pages: False
    driver.prefill(b)
    driver.finish(b)
    driver.settle()
    mixed = driver.hit(tokens(4, 3))
    driver.evict_device()
    return mixed, driver.hit(tokens(4, 4))


def test_b_ancestor_unevicted_under_a_live_descendant(drive):
    driver = drive()
    assert ancestor_unevicted(driver) == (0, 4), "B's pages under A's truth; then A's again"


def test_b_control_truth_without_chain(drive, monkeypatch):
    break_chain(monkeypatch)
    with pytest.raises(Violation):
        ancestor_unevicted(drive(check_leaks=False))


def break_chain(monkeypatch):
    """A gate that asks for truth at the page alone."""
    from sglang_bitexact_hicache import gate, tree

    class Blind(gate.Walk):
        __slots__ = ()

        def step(self, copy, pages):
            self._pages += pages
            found = copy is not None and copy.last_id in self._truth
            if found:
                self.best = self._pages
            return found

    monkeypatch.setattr(tree, "Walk", Blind)
    monkeypatch.setattr(tree, "chain_end", lambda copies: [c.last_id for c in copies][-1])


def load_back_then_overlap(driver):
    """(c) A's pages are loaded back; an insert of B, computed without them, overlaps them."""
    driver.run(tokens(4, 1))
    driver.evict_device()
    reader = driver.admit(tokens(4, 2))
    assert driver.prefix_pages(reader) == 4 and driver.stats["loaded"] == 1
    driver.drop(reader)
    driver.settle()
    b = driver.blind(tokens(4, 3))
    driver.keep = lambda _pages: False
    driver.prefill(b)
    driver.finish(b)
    driver.settle()
    first = driver.hit(tokens(4, 4))
    same = stamps_on(driver, tokens(4), host=False) == stamps_on(driver, tokens(4), host=True)
    driver.evict_device()
    return first, same, driver.hit(tokens(4, 5))


def test_c_load_back_then_an_overlapping_insert(drive):
    driver = drive()
    assert load_back_then_overlap(driver) == (4, True, 4), "the tree keeps its rows"


def test_c_control_stock_re_points_the_rows(drive, monkeypatch):
    from sglang.srt.mem_cache.unified_cache.components import SWAComponent

    from sglang_bitexact_hicache.components import BxSWA

    monkeypatch.setattr(
        BxSWA,
        "update_component_on_insert_overlap",
        SWAComponent.update_component_on_insert_overlap,
    )
    with pytest.raises(Violation):
        load_back_then_overlap(drive(check_leaks=False))


def twins(driver):
    """(d) Two identical prompts are computed at once; the second one's pages are duplicates."""
    a, b = driver.admit(tokens(4, 7)), driver.admit(tokens(4, 7))
    assert driver.prefix_pages(a) == driver.prefix_pages(b) == 0
    for end in (2 * PAGE, 4 * PAGE + 7):
        for req in (a, b):
            driver.forward(req, end)
        for req in (a, b):
            driver.checkpoint(req)
    mine, theirs = driver.row_stamps(a, 4), driver.row_stamps(b, 4)
    for req in (b, a):
        driver.finish(req)
    driver.settle()
    return mine == theirs, driver.hit(tokens(4, 9))


def test_d_two_identical_prompts_in_flight(drive):
    driver = drive()
    assert twins(driver) == (True, 4)
    assert driver.cache.store.counters.died_with_lineage >= 4, "the twin's truths are freed"
    assert len(driver.cache.store) == 4


def test_d_control_kept_rows_get_the_newcomers_identity(drive, monkeypatch):
    from sglang_bitexact_hicache.components import BxSWA

    relabel_overlap(monkeypatch, BxSWA)
    with pytest.raises(Violation):
        twins(drive(check_leaks=False))


def relabel_overlap(monkeypatch, swa_cls):
    """Overlap keeps the tree's rows but gives them the inserting request's identity."""

    def relabel(
        self, node, prefix_len, total_prefix_len, value_slice, params, result, cache_actions
    ):
        cache = self.cache
        if params.prev_prefix_len < total_prefix_len + prefix_len and cache._insert_of is not None:
            copy = cache._insert_of[1].take(total_prefix_len // PAGE, cache.pages_of(node))
            if UNKNOWN not in copy.ids:
                cache.copies.set_device(node.id, copy)
        return prefix_len

    monkeypatch.setattr(swa_cls, "update_component_on_insert_overlap", relabel)


def partly_deduplicated(driver, truth_at=lambda _pages: True):
    """(e) One insert: its first pages are duplicates of A's, the rest is adopted."""
    driver.run(tokens(2, 1))
    b = driver.blind(tokens(4, 2))
    driver.keep = truth_at
    driver.forward(b, 4 * PAGE)
    driver.checkpoint(b)
    mixed = driver.row_stamps(b, 4)
    driver.finish(b)
    driver.settle()
    first = driver.hit(tokens(4, 3))
    # Continued from the mixed row by a request of its own: that is a whole chain again.
    c = driver.admit(tokens(6, 4))
    driver.keep = lambda _pages: True
    driver.prefill(c)
    stamps = driver.row_stamps(c, 6)
    driver.finish(c)
    driver.settle()
    return first, mixed, stamps, driver.hit(tokens(6, 5))


def test_e_one_insert_partly_deduplicated_and_partly_adopted(drive):
    driver = drive()
    first, mixed, continued, again = partly_deduplicated(driver)
    assert first == 4, "B went on from A, A, B, B with the window of its fourth page"
    assert continued[:4] == mixed, "C's rows are the tree's: A, A, B, B"
    assert again == 6, "what is built on the mended chain is reused"


def test_e_the_page_inside_the_insert_is_nobodys_state(drive):
    driver = drive()
    first, *_ = partly_deduplicated(driver, lambda pages: pages == 3)
    assert first == 2, "B's third page was computed over B's own first two, and B never stood there"


def test_e_control_pages_hung_on_a_path_they_did_not_read(drive, monkeypatch):
    broken_rules.mended_pages_keep_their_truth(monkeypatch.setattr)
    with pytest.raises(Violation):
        partly_deduplicated(drive(check_leaks=False), lambda pages: pages == 3)


def demoted_between_match_and_load_back(driver):
    """(f) Device B1-4 over host A1-4, host-only B5-6: B1-4 are demoted after the match."""
    driver.run(tokens(4, 1))
    driver.evict_device()
    b = driver.blind(tokens(6, 2))
    driver.keep = lambda pages: pages == 6
    driver.prefill(b)
    driver.finish(b)
    driver.settle()
    last = driver.cache.copies.of(path(driver, tokens(6))[-1].id).dev.last_id
    driver.forget_truth(lambda held: held == last)
    driver.evict_device(1)
    assert [node.evicted for node in path(driver, tokens(6))][-1]
    assert not path(driver, tokens(6))[0].evicted
    req = driver.admit(tokens(6, 3), between=driver.evict_device)
    return driver.prefix_pages(req)


def test_f_page_demoted_between_match_and_load_back(drive):
    driver = drive()
    assert demoted_between_match_and_load_back(driver) == 0
    assert driver.cache.gate_counters.load_backs_declined == 1


def test_f_control_no_second_look(drive, monkeypatch):
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_bitexact_hicache.tree import BxCache

    monkeypatch.setattr(BxCache, "init_load_back", UnifiedRadixCache.init_load_back)
    with pytest.raises(Violation):
        demoted_between_match_and_load_back(drive(check_leaks=False))


def test_f_without_the_demotion_it_is_a_hit(drive):
    """The positive half of (f): the same state, nothing demoted."""
    driver = drive()
    driver.run(tokens(4, 1))
    driver.evict_device()
    b = driver.blind(tokens(6, 2))
    driver.keep = lambda pages: pages == 6
    driver.prefill(b)
    driver.finish(b)
    driver.settle()
    driver.evict_device(1)
    req = driver.admit(tokens(6, 3))
    assert driver.prefix_pages(req) == 6 and driver.stats["loaded"] == 1
    assert driver.cache.pop_loaded_tokens(req) == PAGE * (
        sum(len(n.key) for n in path(driver, tokens(6))[-1:]) // PAGE
    ), "only what was off the device was loaded"
    assert driver.cache.pop_loaded_tokens(req) == 0


@pytest.mark.parametrize("shared", range(1, 8))
def test_node_splits_keep_identity_on_both_tiers(drive, shared):
    driver = drive(lambda pages: pages in (3, 7))
    driver.run(tokens(8, 1))
    driver.run(tokens(8, 1, branch_at=shared, branch=1))
    assert len(path(driver, tokens(8))) >= 2
    expected = 7
    assert driver.hit(tokens(8, 2)) == expected
    driver.evict_device()
    assert driver.hit(tokens(8, 3)) == expected
    driver.check()


def test_split_control_halves_swapped(drive, monkeypatch):
    def swapped(self, pages):
        return (
            Copy(self.ids[-pages:], self.parents[-pages:]),
            Copy(self.ids[:-pages], self.parents[:-pages]),
        )

    driver = drive(lambda pages: pages in (3, 7), check_leaks=False)
    monkeypatch.setattr(Copy, "cut", swapped)
    driver.run(tokens(8, 1))
    driver.run(tokens(8, 1, branch_at=4, branch=1))
    assert driver.hit(tokens(8, 2)) != 7


def test_a_request_continuing_its_own_chunks_is_never_gated(drive):
    driver = drive(lambda _pages: False)
    req = driver.admit(tokens(6, 9))
    driver.prefill(req, chunk_pages=2)
    assert driver.computed[req] == 6 * PAGE + 9
    assert driver.stats["matches"] == 1, "chunks do not match again"
    driver.finish(req)
    driver.settle()
    assert driver.hit(tokens(6, 10)) == 0, "another request finds no truth"


def test_decode_pages_are_reused_by_the_next_turn(drive):
    driver = drive()
    req = driver.admit(tokens(2, 250))
    driver.prefill(req)
    driver.decode(req, range(5000, 5000 + 10))
    answer = req.origin_input_ids + req.output_ids
    driver.finish(req)
    driver.settle()
    assert driver.hit(answer + tokens(1)) == 3
    driver.evict_device()
    assert driver.hit(answer + tokens(1)) == 3


def test_abort_and_retraction_end_the_row(drive):
    driver = drive()
    req = driver.admit(tokens(3, 1))
    driver.forward(req, 2 * PAGE)
    driver.checkpoint(req)
    driver.forward(req, 3 * PAGE)
    driver.drop(req)
    assert len(driver.cache.rows) == 0 and len(driver.cache.store) == 2
    req.reset_for_retract()
    again = driver.admit(tokens(3, 1), req=req)
    assert again is req and driver.prefix_pages(req) == 2
    driver.prefill(req)
    driver.finish(req)
    driver.settle()
    assert driver.hit(tokens(3, 2)) == 3


def test_direct_inserts_have_no_identity(drive):
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    driver = drive()
    rows = driver.stack.allocator.full_attn_allocator.alloc(3 * PAGE)
    driver.cache.insert(InsertParams(key=RadixKey(tokens(3)), value=rows))
    assert driver.cache.gate_counters.unknown_pages == 3
    assert driver.hit(tokens(3, 1)) == 0
    driver.check()


def test_storage_inserts_are_unknown_until_proved(drive):
    driver = drive()
    result = driver.insert_from_storage(tokens(4), 0, [driver.stamp() for _ in range(4)])
    assert result.inserted_host_node is not None
    driver.check()
    assert driver.hit(tokens(4, 1)) == 0
    # Storage below pages of our own: those still hit, the new ones do not.
    driver.run(tokens(4, 1, branch_at=0, branch=1))
    driver.insert_from_storage(
        tokens(6, branch_at=0, branch=1), 4, [driver.stamp(), driver.stamp()]
    )
    driver.evict_device()
    assert driver.hit(tokens(6, 1, branch_at=0, branch=1)) == 4
    driver.check()


def test_no_storage_insert_below_an_unbacked_anchor(drive):
    driver = drive()
    hog = driver.stack.host_pool.alloc(driver.stack.host_pool.available_size())
    req = driver.admit(tokens(2, 1))
    driver.prefill(req, chunk_pages=1)
    driver.finish(req)
    driver.settle()
    driver.stack.host_pool.free(hog)
    result = driver.insert_from_storage(tokens(2), 1, [driver.stamp()])
    assert result.host_insert_dropped
    assert driver.cache.gate_counters.host_inserts_dropped == 1
    driver.check()


def test_no_storage_insert_control_without_the_guard(drive):
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    driver = drive(check_leaks=False)
    hog = driver.stack.host_pool.alloc(driver.stack.host_pool.available_size())
    req = driver.admit(tokens(2, 1))
    driver.prefill(req, chunk_pages=1)
    driver.finish(req)
    driver.settle()
    driver.stack.host_pool.free(hog)
    anchor = path(driver, tokens(2))[0]
    host = driver.stack.host_pool.alloc(PAGE)
    UnifiedTreeCore.insert_host(
        driver.cache.tree_core, anchor.id, RadixKey(tokens(2)[PAGE:]), host, ["x"]
    )
    with pytest.raises(AssertionError, match="not backed up"):
        driver.cache.sanity_check()


def test_flush_forgets_everything_and_slots_come_back(drive):
    driver = drive()
    driver.run(tokens(4, 1))
    store = driver.cache.store
    held = store.lookup(next(iter(store._slot_of)))
    store.lock(held)
    driver.cache.reset()
    driver.stack.allocator.clear()
    assert len(store) == 0 and store.in_use() == 1
    assert len(driver.cache.copies) == 0 and len(driver.cache.rows) == 0
    store.unlock(held)
    assert store.in_use() == 0
    assert driver.hit(tokens(4, 2)) == 0
    driver.check()


def test_truth_runtime_is_told_of_releases_and_flushes(drive):
    class Runtime:
        def __init__(self):
            self.calls = []

        def forget(self, req):
            self.calls.append(("forget", req))

        def flush(self):
            self.calls.append("flush")

    driver = drive()
    driver.cache.truth_runtime = runtime = Runtime()
    done, dropped = driver.run(tokens(1, 1)), driver.admit(tokens(2, 1))
    driver.drop(dropped)
    driver.cache.reset()
    driver.stack.allocator.clear()
    calls = [c if c == "flush" else (c[0], c[1].rid) for c in runtime.calls]
    assert calls == [("forget", done.rid), ("forget", dropped.rid), "flush"]


# ---- what is refused, and what is checked at startup


def test_other_components_are_refused(drive):
    import dataclasses

    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from sglang_bitexact_hicache.tree import BxCache

    params = drive().stack.params
    for components in ((ComponentType.FULL,), (ComponentType.SWA, ComponentType.FULL)):
        with pytest.raises(ValueError, match="FULL and SWA"):
            BxCache(dataclasses.replace(params, tree_components=components))


def test_truth_is_attached_to_an_empty_cache_only(drive):
    from sglang_bitexact_hicache.truth import TruthStore

    driver = drive()
    driver.run(tokens(1, 1))
    with pytest.raises(ValueError, match="empty"):
        driver.cache.attach_truth(TruthStore(3))


def test_the_stock_factory_builds_it(drive):
    """`create_unified_radix_cache(..., cache_class=BxCache)`, the route of the plugin."""
    import types

    from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache

    from sglang_bitexact_hicache.components import BxFull, BxSWA, BxTreeCore
    from sglang_bitexact_hicache.tree import BxCache

    stack = drive().stack
    ctx = TreeCacheBuildContext(
        server_args=stack.server_args,
        params=stack.params,
        is_hybrid_swa=True,
        is_hybrid_ssm=False,
        enable_hierarchical_cache=True,
        disable_radix_cache=False,
        tp_worker=types.SimpleNamespace(register_hicache_layer_transfer_counter=lambda _c: None),
        model_config=None,
        tp_size=1,
        tp_rank=0,
        tp_group=None,
    )
    cache = create_unified_radix_cache(ctx, cache_class=BxCache)
    assert type(cache.tree_core) is BxTreeCore
    assert [type(c) for c in cache.components.values()] == [BxFull, BxSWA]
    assert cache.swa_reprefill_tail_tokens() == 0 and not cache.tree_core.has_swa_host_pool
    assert cache.store.capacity == 0, "until the factory attaches the store, nothing is a hit"


def test_installed_sglang_writes_tree_rows_only_where_we_look():
    from sglang_bitexact_hicache.tree_writers import check_tree_writers

    check_tree_writers()


def test_an_unknown_writer_is_named():
    from sglang_bitexact_hicache.tree_writers import (
        WRITERS,
        Known,
        Writer,
        check_tree_writers,
        writers_in_source,
    )

    source = """
class Core:
    def sneaky(self, node):
        node.component_data[0].value = 1
        cd.host_value, other = rows
        setattr(cd, "value", 2)
        del cd.host_value
        reads = cd.value
        cd.values = 3
"""
    found = writers_in_source(source, "m")
    assert found == {
        Writer("m", "Core.sneaky", "value"): 2,
        Writer("m", "Core.sneaky", "host_value"): 2,
    }
    split = next(w for w in WRITERS if w.function == "FullComponent.redistribute_on_node_split")
    fewer = {w: k for w, k in WRITERS.items() if w is not split}
    with pytest.raises(ValueError, match=r"FullComponent\.redistribute_on_node_split"):
        check_tree_writers(fewer)
    with pytest.raises(ValueError, match=r"writes \d times, expected 9"):
        check_tree_writers({**WRITERS, split: Known(9, "x")})
    with pytest.raises(ValueError, match=r"m\.gone \(\.value\) does not write any more"):
        check_tree_writers({**WRITERS, Writer("m", "gone", "value"): Known(1, "x")})
