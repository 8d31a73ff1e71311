"""The gate: where a match ends. As pure rules, then on SGLang's real tree with every hit compared."""

from __future__ import annotations

import pytest
import torch
from bitexact_fixtures import PAGE, cpu_hicache, make_cache, make_server_args
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_driver import TreeDriver, checked, tokens

from sglang_bitexact_hicache.gate import Walk, chain_end
from sglang_bitexact_hicache.lineage import ROOT, UNKNOWN, Copy

# ---- pure


@st.composite
def paths(draw):
    """Nodes down a path, most of them hanging together, and a set of lineages with truth."""
    copies, previous, fresh = [], ROOT, 10
    for _ in range(draw(st.integers(0, 5))):
        ids, parents = [], []
        for _ in range(draw(st.integers(1, 4))):
            fresh += 1
            broken = draw(st.integers(0, 11))
            ids.append(UNKNOWN if broken == 0 else fresh)
            parents.append(fresh + 1000 if broken == 1 else previous)
            previous = ids[-1]
        absent = draw(st.integers(0, 11)) == 0
        copies.append((None if absent else Copy(tuple(ids), tuple(parents)), len(ids)))
    truth = draw(st.sets(st.integers(10, fresh)))
    return copies, truth


def brute_force(copies, truth):
    """Deepest accepted node end, deepest accepted page, and whether the whole path is one chain."""
    page = end = best = 0
    previous, intact = ROOT, True
    for copy, pages in copies:
        for i in range(pages):
            page += 1
            intact = intact and copy is not None and copy.ids[i] != UNKNOWN
            intact = intact and copy.parents[i] == previous
            if intact:
                previous = copy.ids[i]
                if previous in truth:
                    best = page
                    end = page if i == pages - 1 else end
    return end, best, intact


@settings(max_examples=400, deadline=None)
@given(paths())
def test_walk_finds_the_deepest_page_with_truth_on_an_unbroken_chain(path):
    copies, truth = path
    walk = Walk(truth)
    accepted = [walk.step(copy, pages) for copy, pages in copies]
    end, best, intact = brute_force(copies, truth)
    assert walk.best == end and walk.deepest() == best
    ends = [sum(n for _, n in copies[: i + 1]) for i, ok in enumerate(accepted) if ok]
    assert (ends[-1] if ends else 0) == end
    last = chain_end(copy for copy, _ in copies)
    assert (last is not None) == intact
    if copies and intact:
        assert last == copies[-1][0].last_id


def test_chain_of_nothing_ends_at_the_root():
    assert chain_end([]) == ROOT and Walk({}).deepest() == 0


def test_scan_looks_at_no_page_above_the_best_node_end():
    class Counting(dict):
        asked = 0

        def __contains__(self, key):
            self.asked += 1
            return super().__contains__(key)

    truth = Counting({10 + 299: 1})
    walk = Walk(truth)
    previous = ROOT
    for node in range(30):
        ids = tuple(range(10 + node * 10, 20 + node * 10))
        walk.step(Copy(ids, (previous, *ids[:-1])), 10)
        previous = ids[-1]
    assert walk.deepest() == walk.best == 300
    assert truth.asked == 30, "one question a node, none a page"


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


def at(*pages):
    """Truth at these boundaries only."""
    return lambda page: page in pages


RESIDENCE = ("device and host", "host only", "device only")


def place(driver, residence, prompt):
    """Run a prompt and leave its KV on the tiers named."""
    pool = driver.stack.host_pool
    hog = pool.alloc(pool.available_size()) if residence == "device only" else None
    driver.run(prompt)
    if hog is not None:
        pool.free(hog)
    if residence == "host only":
        driver.evict_device()
    tiers = {
        (known.dev is not None, known.host is not None) for _, known in driver.cache.copies.items()
    }
    assert tiers == {(residence != "host only", residence != "device only")}, (
        "the fixture did not place the pages"
    )


@pytest.mark.parametrize("residence", RESIDENCE)
@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ((6,), 6),  # the end of the path
        ((5,), 5),  # the end of an inner node: stock splits the last window off a leaf
        ((3,), 3),  # in the middle of a long node
        ((1, 4), 4),  # the deepest of two
        ((1,), 1),
        ((), 0),  # nowhere
    ],
)
def test_hit_ends_at_the_deepest_truth(drive, residence, truth, expected):
    driver = drive(at(*truth))
    place(driver, residence, tokens(6, 10))
    longest = max(driver.cache.pages_of(n) for n in driver.cache.tree_core._collect_all_nodes())
    assert longest == 5, "pages 1-5 are one node"
    assert driver.hit(tokens(6, 20)) == expected
    inside = 0 < expected < 5
    assert driver.cache.gate_counters.second_walks == inside
    # The split stays: the same question costs one walk from now on.
    walks = driver.cache.gate_counters.second_walks
    assert driver.hit(tokens(6, 20)) == expected
    assert driver.cache.gate_counters.second_walks == walks
    driver.check()


@pytest.mark.parametrize("residence", RESIDENCE)
@pytest.mark.parametrize("delta", [-1, 0, 1, 127, 128, 129])
def test_hit_of_each_prompt_length(drive, residence, delta):
    driver = drive()
    place(driver, residence, tokens(5, 200))
    whole = tokens(5, 200)
    for k in (1, 2, 4, 5):
        length = k * PAGE + delta
        # One token at least is computed: a prompt of exactly k pages hits k - 1.
        expected = k if delta > 0 else k - 1
        assert driver.hit(whole[:length]) == expected, f"{length} tokens"
        if residence == "host only":
            driver.evict_device()
    driver.check()


def test_nothing_cached_is_no_hit(drive):
    driver = drive()
    assert driver.hit(tokens(3, 1)) == 0
    assert driver.hit(tokens(0, 100)) == 0
    driver.run(tokens(2, 1))
    assert driver.hit(tokens(2, 1, branch_at=0, branch=5)) == 0


def test_without_hicache_the_device_set_alone_decides(drive):
    driver = TreeDriver(make_cache(make_server_args(), hicache=False), at(2))
    cache = driver.cache
    # No byte buffers without host pools: identity and lengths only.
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    class Request:
        last_node, prefix_len = cache.tree_core.root_node.id, 0

    row = cache.rows.open(Request, ROOT, 0)
    row.upto(4)
    slot = cache.store.reserve()
    assert cache.store.publish(row.id_of(2), slot)
    params = InsertParams(
        key=RadixKey(tokens(4)),
        value=driver.stack.allocator.full_attn_allocator.alloc(4 * PAGE),
    )
    cache._insert_of = (params, row)
    cache.insert(params)
    result = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens(4, 1))))
    assert result.device_prefix_len == 2 * PAGE and result.host_hit_length == 0
    cache.rows.drop(Request)
    cache.check_integrity()


# ---- the two tiers together


def half_demoted(driver, device_truth, host_truth):
    """Pages 1-4 on both tiers, 5-8 on the host only; one chain, truth where asked."""
    driver.keep = at(*device_truth, *host_truth)
    # In chunks, and by one request: another one would compute pages without truth again, and what
    # it adds below its own, freed pages hangs together with nothing.
    driver.run(tokens(8, 1), chunk_pages=4)
    driver.evict_device(4)
    copies = [known for _, known in driver.cache.copies.items()]
    assert sum(len(known.dev) for known in copies if known.dev is not None) == 4
    assert sum(len(known.host) for known in copies if known.host is not None) == 8


@pytest.mark.parametrize(
    ("device_truth", "host_truth", "taken", "declined", "cuts"),
    [
        ((4,), (8,), 8, 4, 0),  # a node end on each tier
        ((1,), (5,), 5, 1, 1),  # both inside nodes: each is cut
        ((1,), (8,), 8, 1, 1),  # the device one inside a node, the host one a node end
        ((), (5,), 5, 0, 0),  # nothing to fall back to
        ((3,), (), 3, 3, 0),  # nothing to load
    ],
)
def test_declined_load_back_falls_back_to_a_boundary_with_truth(
    drive, device_truth, host_truth, taken, declined, cuts
):
    for decline, expected in ((False, taken), (True, declined)):
        driver = drive()
        half_demoted(driver, device_truth, host_truth)
        req = driver.admit(tokens(8, 2), decline=decline)
        assert driver.prefix_pages(req) == expected
        assert driver.cache.gate_counters.device_walks == cuts
        if host_truth:
            assert driver.stats["declined" if decline else "loaded"] == 1
        if expected:
            assert driver.cache.final_truth(req) is not None
        driver.drop(req)
        driver.settle()
        driver.check()


def test_pages_between_the_anchors_are_not_reported_as_loaded(drive):
    driver = drive()
    half_demoted(driver, (2,), (8,))
    req = driver.admit(tokens(8, 2))
    assert req.host_hit_length == 6 * PAGE, "stock counts resident pages below the device anchor"
    assert driver.cache.pop_loaded_tokens(req) == 4 * PAGE


def test_truth_that_went_between_match_and_load_back_declines(drive):
    driver = drive()
    half_demoted(driver, (2,), (8,))
    last = max(driver.cache.store._slot_of)
    req = driver.admit(
        tokens(8, 2), between=lambda: driver.forget_truth(lambda lineage: lineage != last)
    )
    assert driver.prefix_pages(req) == 2
    assert driver.cache.gate_counters.load_backs_declined == 1


def test_final_truth_says_none_when_the_prefix_is_not_exact(drive):
    driver = drive()
    driver.run(tokens(4, 1))
    req = driver.admit(tokens(4, 2))
    lineage, slot = driver.cache.final_truth(req)
    assert driver.cache.store.lookup(lineage) == slot
    req.prefix_len -= PAGE
    assert driver.cache.final_truth(req) is None, "the path does not end there"
    req.prefix_len += PAGE
    driver.forget_truth(lambda held: held != lineage)
    assert driver.cache.final_truth(req) is None, "no truth"
    driver.cache.store.publish(lineage, driver.cache.store.reserve())
    assert driver.cache.final_truth(req) is not None
    node = driver.cache.tree_core.node_by_id(req.last_node)
    driver.cache.copies.set_device(node.id, Copy.unknown(driver.cache.pages_of(node)))
    assert driver.cache.final_truth(req) is None, "the chain is broken"
    cold = driver.admit(tokens(1, 1, branch_at=0, branch=3))
    with pytest.raises(ValueError, match="no prefix"):
        driver.cache.final_truth(cold)


def test_rows_start_where_the_tree_ends(drive):
    driver = drive()
    driver.run(tokens(2, 1))
    req = driver.admit(tokens(4, 1))
    cache = driver.cache
    assert cache.row_lineage(req, 2) == UNKNOWN, "the tree's page"
    assert cache.row_lineage(req, 3) == UNKNOWN, "not launched"
    driver.forward(req, 4 * PAGE)
    third, fourth = cache.row_lineage(req, 3), cache.row_lineage(req, 4)
    assert UNKNOWN not in (third, fourth)
    row = cache.rows.get(req)
    tail = cache.copies.of(req.last_node).dev.last_id
    assert row.parents == [tail, third]
    driver.checkpoint(req)
    assert cache.row_lineage(req, 4) == UNKNOWN, "the tree took it over"
    assert row.tail == fourth
    driver.drop(req)
    cache.row_dropped(req)
    assert cache.row_lineage(req, 3) == UNKNOWN
    cache.row_launched(req, 5)


class CountsHostReads(torch.overrides.TorchFunctionMode):
    """Counts torch calls that would wait for a device."""

    NAMES = ("tolist", "item", "cpu", "numpy", "nonzero", "__int__", "__bool__", "__float__", "to")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_match_reads_no_tensor(drive):
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    driver = drive()
    half_demoted(driver, (1,), (5,))
    with CountsHostReads() as reads:
        result = driver.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens(8, 1))))
    assert driver.cache.gate_counters.second_walks == driver.cache.gate_counters.device_walks == 1
    assert result.device_prefix_len + result.host_hit_length == 5 * PAGE
    assert reads.seen == []
    with CountsHostReads() as control:
        torch.zeros(1).item()
    assert control.seen == ["item"]


def test_keys_keep_their_namespace_when_a_match_is_repeated(drive):
    """extra_key and cache_salt separate trees; the shortened key must stay in its own."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    driver = drive(at(2))
    driver.run(tokens(4, 1))
    match = driver.cache.match_prefix
    for namespace in ({"extra_key": "lora"}, {"cache_salt": "tenant"}):
        result = match(MatchPrefixParams(key=RadixKey(tokens(4, 1), **namespace)))
        assert result.device_prefix_len == 0
    result = match(MatchPrefixParams(key=RadixKey(tokens(4, 1))))
    assert result.device_prefix_len == 2 * PAGE
    assert result.full_kv_hit_length == 4 * PAGE, "how far the KV reaches is still told"
    assert result.swa_host_hit_length == 0 and result.swa_branching_seqlen is None
