"""The KV chain, and what a process remembers about keys in storage."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bitexact_hicache.kv_chain import (
    START,
    chain_values,
    extend,
    first_doubtful,
    mark_pages,
    page_digest,
)
from sglang_bitexact_hicache.layout import KV_DIGEST_BYTES, KV_MARKS
from sglang_bitexact_hicache.refused import RefusedKeys
from sglang_bitexact_hicache.stored_pages import StoredPages

# ---- the digest of a page

names = st.text(max_size=6)
pages_of_pools = st.lists(st.tuples(names, st.binary(max_size=40)), max_size=4)


def whole(page: list[tuple[str, bytes]]) -> bytes:
    return page_digest([(name, len(content), [content]) for name, content in page])


@given(pages_of_pools)
def test_a_digest_is_of_names_lengths_and_bytes(page):
    text = b"".join(
        len(name.encode()).to_bytes(8, "little")
        + name.encode()
        + len(content).to_bytes(8, "little")
        + content
        for name, content in page
    )
    assert whole(page) == xxhash.xxh3_128_digest(text)


@given(pages_of_pools, pages_of_pools)
def test_digests_are_equal_exactly_when_the_pages_are(a, b):
    assert (whole(a) == whole(b)) == (a == b)


@given(pages_of_pools, st.randoms())
def test_how_bytes_are_cut_into_parts_makes_no_difference(page, rng):
    cut = []
    for name, content in page:
        at = sorted(rng.randint(0, len(content)) for _ in range(rng.randint(0, 3)))
        edges = [0, *at, len(content)]
        cut.append((name, len(content), [content[a:b] for a, b in pairwise(edges)]))
    assert page_digest((name, n, iter(parts)) for name, n, parts in cut) == whole(page)


def test_a_part_may_lie_where_the_one_before_it_lay():
    buffer = bytearray(4)

    def parts():
        for content in (b"abcd", b"efgh"):
            buffer[:] = content
            yield buffer

    assert page_digest([("c4", 8, parts())]) == whole([("c4", b"abcdefgh")])


@pytest.mark.parametrize("announced", [7, 9])
def test_bytes_that_were_not_announced_have_no_digest(announced):
    with pytest.raises(ValueError, match=f"c4 has 8 bytes, not {announced}"):
        page_digest([("c4", announced, [b"abcd", b"efgh"])])


@given(names, names, st.binary(min_size=1, max_size=20), st.integers(0, 20), st.integers(0, 20))
def test_bytes_cannot_move_from_one_pool_to_the_next(first, second, content, a, b):
    a, b = a % (len(content) + 1), b % (len(content) + 1)
    one = whole([(first, content[:a]), (second, content[a:])])
    other = whole([(first, content[:b]), (second, content[b:])])
    assert (one == other) == (a == b)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 29), st.integers(0, 65_535), st.integers(0, 7))
def test_a_digest_sees_every_bit_of_every_part(part, byte, bit):
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, 65_536, np.uint8) for _ in range(30)]
    page = [("c4", 20 * 65_536, parts[:20]), ("indexer", 10 * 65_536, parts[20:])]
    before = page_digest(page)
    parts[part][byte] ^= 1 << bit
    assert page_digest(page) != before


def test_anything_contiguous_is_a_part():
    rows = np.arange(64, dtype=np.uint8)
    right = page_digest([("c4", 64, [rows])])
    frozen = rows.copy()
    frozen.flags.writeable = False
    for same in (
        rows.tobytes(),
        memoryview(rows),
        rows.reshape(8, 8),
        rows.view(np.uint32),
        frozen,
    ):
        assert page_digest([("c4", 64, [same])]) == right
    with pytest.raises((BufferError, ValueError)):
        page_digest([("c4", 32, [rows[::2]])])


# ---- the chain

digests = st.binary(min_size=KV_DIGEST_BYTES, max_size=KV_DIGEST_BYTES)


@given(st.lists(digests, max_size=20), st.integers(0, 20))
def test_a_chain_continues_from_any_of_its_values(pages, at):
    values = chain_values(pages)
    assert len(values) == len(pages)
    at = min(at, len(pages))
    start = values[at - 1] if at else START
    assert values[:at] + chain_values(pages[at:], start=start) == values
    for page, before, after in zip(pages, [START, *values], values, strict=False):
        assert extend(before, page) == after == xxhash.xxh3_128_digest(before + page)


@given(st.lists(digests, min_size=1, max_size=12, unique=True), st.randoms())
def test_a_value_depends_on_every_page_before_it_and_on_their_order(pages, rng):
    values = chain_values(pages)
    assert len({START, *values}) == len(pages) + 1
    other = rng.sample(pages, len(pages))
    first = next((i for i in range(len(pages)) if other[i] != pages[i]), len(pages))
    for i, (a, b) in enumerate(zip(values, chain_values(other), strict=True)):
        assert (a == b) == (i < first)


@pytest.mark.parametrize("wrong", [b"", bytes(15), bytes(17)])
def test_only_whole_digests_are_chained(wrong):
    with pytest.raises(ValueError, match="16 bytes"):
        extend(START, wrong)
    with pytest.raises(ValueError, match="16 bytes"):
        extend(wrong, START)


# ---- marks


def assert_good_marks(pages: int) -> None:
    marks = mark_pages(pages)
    assert marks[-1] == pages
    assert all(a < b for a, b in pairwise((0, *marks)))
    assert len(marks) == min(pages, KV_MARKS)
    gaps = [b - a for a, b in pairwise((0, *marks))]
    assert max(gaps) - min(gaps) <= 1


def test_marks_are_spread_evenly_and_end_at_the_boundary():
    for pages in range(1, 1025):
        assert_good_marks(pages)
    assert mark_pages(5) == (1, 2, 3, 4, 5)
    # Where exactly is a part of the stored format (record.VERSION).
    assert mark_pages(100)[:6] == (1, 3, 4, 6, 7, 9)
    assert mark_pages(200)[:4] == (3, 6, 9, 12)


@given(st.integers(1, 10**7))
def test_marks_of_any_length(pages):
    assert_good_marks(pages)


@pytest.mark.parametrize("wrong", [0, -1])
def test_no_page_has_no_mark(wrong):
    with pytest.raises(ValueError, match="one page"):
        mark_pages(wrong)


def page_digests(pages: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(KV_DIGEST_BYTES) for _ in range(pages)]


@settings(deadline=None)
@given(st.integers(1, 400), st.data())
def test_what_changed_is_behind_the_last_mark_that_agrees(pages, data):
    changed = data.draw(st.sets(st.integers(0, pages - 1), max_size=3))
    written = page_digests(pages)
    read = [bytes(16) if i in changed else digest for i, digest in enumerate(written)]
    marks = [chain_values(written)[page - 1] for page in mark_pages(pages)]
    good = first_doubtful(marks, chain_values(read), pages)
    if not changed:
        assert good is None
        return
    first = min(changed)
    # By hand: the deepest of the marks before which all pages are the same, and the one after it.
    assert good == max(k for k in (0, *mark_pages(pages)) if written[:k] == read[:k])
    following = min(k for k in mark_pages(pages) if k > good)
    assert good <= first < following


def test_every_single_changed_page_is_found():
    for pages in (1, 2, 63, 64, 65, 129, 200):
        written = page_digests(pages)
        at = mark_pages(pages)
        marks = [chain_values(written)[page - 1] for page in at]
        for changed in range(pages):
            read = [*written[:changed], bytes(16), *written[changed + 1 :]]
            good = first_doubtful(marks, chain_values(read), pages)
            assert good == max(k for k in (0, *at) if k <= changed)
        assert first_doubtful(marks, chain_values(written), pages) is None


def test_control_digests_that_are_not_chained_hide_what_lies_between_marks():
    pages = 4 * KV_MARKS
    written = page_digests(pages)
    marks = [written[page - 1] for page in mark_pages(pages)]
    read = [bytes(16), *written[1:]]
    assert 1 not in mark_pages(pages)
    assert first_doubtful(marks, read, pages) is None


@pytest.mark.parametrize(("marks", "values"), [(2, 3), (3, 2), (4, 3), (3, 4), (0, 0)])
def test_marks_and_values_must_be_of_the_same_pages(marks, values):
    with pytest.raises(ValueError, match="do not fit"):
        first_doubtful([bytes(16)] * marks, [bytes(16)] * values, 3)


# ---- keys that are refused


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


keys = st.sampled_from("abcdefgh")
operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["record", "page"]), keys, st.none() | st.integers(1, 20)),
        st.tuples(st.just("forgive"), keys),
        st.tuples(st.just("clear")),
        st.tuples(st.just("wait"), st.integers(1, 15)),
        st.tuples(st.just("ask"), st.permutations("abcdefgh"), st.lists(st.integers(1, 8))),
    ),
    max_size=40,
)


@given(operations)
def test_refusals_are_those_of_a_simple_model(steps):
    clock = Clock()
    refused = RefusedKeys(clock=clock)
    records: dict[str, float] = {}
    pages: dict[str, float] = {}
    for name, *rest in [*steps, ("ask", list("hgfedcba"), list(range(1, 9)))]:
        if name in ("record", "page"):
            key, seconds = rest
            refuse = refused.refuse_record if name == "record" else refused.refuse_page
            refuse(key, seconds=seconds)
            until = math.inf if seconds is None else clock.now + seconds
            table = records if name == "record" else pages
            table[key] = max(table.get(key, 0), until)
        elif name == "forgive":
            refused.forgive(*rest)
            records.pop(rest[0], None)
            pages.pop(rest[0], None)
        elif name == "clear":
            refused.clear()
            records.clear()
            pages.clear()
            assert len(refused) == 0
        elif name == "wait":
            clock.now += rest[0]
        else:
            hashes, asked = rest
            assert [key for key in hashes if refused.refuses_page(key)] == [
                key for key in hashes if pages.get(key, 0) > clock.now
            ]
            assert refused.usable(hashes, asked) == [
                b
                for b in range(1, 9)
                if b in asked
                and records.get(hashes[b - 1], 0) <= clock.now
                and all(pages.get(key, 0) <= clock.now for key in hashes[:b])
            ]


def test_a_bad_record_costs_its_boundary_and_a_bad_page_all_behind_it():
    refused = RefusedKeys(clock=Clock())
    refused.refuse_record("b")
    assert refused.usable("abcde", [5, 1, 2, 3, 4, 5]) == [1, 3, 4, 5]
    refused.refuse_page("d")
    assert refused.usable("abcde", range(1, 6)) == [1, 3]
    assert refused.usable("abcde", [4, 5]) == []
    assert refused.usable("abcde", []) == refused.usable("", []) == []


@pytest.mark.parametrize("kind", ["record", "page"])
def test_a_key_is_refused_for_its_time_and_the_longer_of_two_holds(kind):
    clock = Clock()
    refused = RefusedKeys(clock=clock)
    refuse = getattr(refused, f"refuse_{kind}")
    refuse("a", seconds=10)
    refuse("a", seconds=1)
    clock.now += 9.5
    assert refused.usable("a", [1]) == []
    clock.now += 0.5
    assert len(refused) == 1
    assert refused.usable("a", [1]) == [1]
    assert len(refused) == 0
    refuse("a")
    refuse("a", seconds=1)
    clock.now += 1e9
    assert refused.usable("a", [1]) == []


def test_what_is_wrong_for_ever_outlives_what_is_wrong_for_a_time():
    clock = Clock()
    refused = RefusedKeys(clock=clock)
    refused.refuse_record("b")
    refused.refuse_page("b", seconds=1)
    assert refused.usable("abc", [1, 2, 3]) == [1]
    clock.now += 2
    assert refused.usable("abc", [1, 2, 3]) == [1, 3]


def test_refusals_are_bounded_and_the_longest_unmet_goes_first():
    refused = RefusedKeys(capacity=3, clock=Clock())
    for key in "abc":
        refused.refuse_record(key)
    assert refused.usable("ax", [1, 2]) == [2]
    refused.refuse_page("d")
    assert len(refused) == 3
    assert refused.usable("b", [1]) == [1]
    assert refused.usable("a", [1]) == refused.usable("c", [1]) == refused.usable("d", [1]) == []
    refused.refuse_record("a")
    refused.refuse_record("e")
    assert refused.usable("c", [1]) == [1]


@pytest.mark.parametrize("asked", [[0], [-1], [3], [1, 3]])
def test_a_boundary_that_the_pages_do_not_have_is_a_mistake(asked):
    with pytest.raises(ValueError, match="2 pages"):
        RefusedKeys().usable("ab", asked)


@pytest.mark.parametrize("kind", ["record", "page"])
@pytest.mark.parametrize("seconds", [0, -1, math.nan])
def test_a_refusal_for_no_time_is_a_mistake(seconds, kind):
    with pytest.raises(ValueError, match="no time"):
        getattr(RefusedKeys(), f"refuse_{kind}")("a", seconds=seconds)


def test_a_query_takes_the_lock_once(monkeypatch):
    refused = RefusedKeys()
    for key in "abc":
        refused.refuse_record(key)
    entered = []

    class Counting:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(refused, "_lock", Counting())
    assert refused.usable("abcd" * 1000, range(1, 4001)) == list(range(4, 4001, 4))
    assert len(entered) == 1


# ---- what storage holds


@given(
    st.lists(
        st.tuples(st.sampled_from(["learn", "ask", "forget", "clear"]), keys, digests), max_size=60
    ),
    st.integers(1, 5),
)
def test_stored_pages_are_those_of_a_simple_model(steps, capacity):
    known = StoredPages(capacity)
    model: list[tuple[str, bytes]] = []
    for name, key, digest in steps:
        held = [entry for entry in model if entry[0] == key]
        others = [entry for entry in model if entry[0] != key]
        if name == "learn":
            known.learn(key, digest)
            model = [*others, (key, digest)][-capacity:]
        elif name == "ask":
            assert known.digest(key) == (held[0][1] if held else None)
            model = [*others, *held]
        elif name == "forget":
            known.forget(key)
            model = others
        elif digest[0] < 32:
            known.clear()
            model = []
        assert len(known) == len(model)
    for key, digest in model:
        assert known.digest(key) == digest


def test_stored_pages_are_bounded_and_the_longest_unused_goes_first():
    known = StoredPages(capacity=3)
    for key in "abc":
        known.learn(key, key.encode() * 16)
    known.learn("a", bytes(16))
    assert known.digest("b") == b"b" * 16
    known.learn("d", bytes(16))
    assert [key for key in "abcd" if known.digest(key) is not None] == ["a", "b", "d"]


@pytest.mark.parametrize("wrong", [b"", bytes(15), bytes(17)])
def test_only_whole_digests_are_learned(wrong):
    known = StoredPages()
    with pytest.raises(ValueError, match="16 bytes"):
        known.learn("a", wrong)
    assert known.digest("a") is None


@pytest.mark.parametrize("table", [RefusedKeys, StoredPages])
def test_a_table_of_nothing_is_refused(table):
    with pytest.raises(ValueError, match="capacity"):
        table(capacity=0)


# ---- threads


def beside_each_other(work: Callable[[random.Random], None], threads: int = 4) -> None:
    """Run `work` in several threads that are interrupted as often as possible; raises what they
    raise."""
    errors = []

    def run(seed: int) -> None:
        try:
            work(random.Random(seed))
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        started = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def test_refusals_from_many_threads():
    refused = RefusedKeys(capacity=16)
    refused.refuse_page("z")

    def work(rng: random.Random) -> None:
        for _ in range(1500):
            key = rng.choice("abcdefghijklmnopqrstuvwxy")
            rng.choice([refused.refuse_record, refused.refuse_page, refused.forgive])(key)
            # "z" is met all the time, so that nothing displaces it.
            assert refused.usable("z" + key, [1, 2]) == []
            hashes = "".join(rng.sample("abcdefghij", 10))
            usable = refused.usable(hashes, [2, 4, 6, 8, 10])
            assert usable == sorted(set(usable) & {2, 4, 6, 8, 10})
            assert len(refused) <= 16

    beside_each_other(work)


def test_stored_pages_from_many_threads():
    known = StoredPages(capacity=16)

    def work(rng: random.Random) -> None:
        for _ in range(3000):
            key = rng.choice("abcdefghijklmnopqrstuvwxyz")
            rng.choice([known.forget, lambda k: known.learn(k, k.encode() * 16)])(key)
            assert known.digest(key) in (None, key.encode() * 16)
            assert len(known) <= 16

    beside_each_other(work)
