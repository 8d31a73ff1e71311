"""Scenarios of storage (L3) with several ranks, which find out different things about it.

As in l3_scenarios.py; `ranks` are the ones where something is otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import l3_faults
from l3_faults import Stored, flip
from l3_scenarios import forget_truth, page_hashes, populate, stored, stored_since
from scenarios import (
    counters,
    dirty_rings,
    leak_free,
    patched,
    settle_storage,
    since,
    skipping,
    to_storage,
)
from scheduler_harness import Harness, Steps

from sglang_bitexact_hicache.layout import WINDOW_POOL


def attach(h: Harness, root: str) -> Steps:
    """Storage in this directory, from now on; SGLang's threads for it are expected to be there then."""
    yield from leak_free(h)
    success, message = l3_faults.attach(h, root)
    assert success, message
    del h.state["threads"]


def again(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """The prompt over dirty rings: (result, counter gains, storage gains)."""
    dirty_rings(h)
    before, before_stored = counters(h), stored(h)
    result = yield from h.generate(ids, new)
    yield from settle_storage(h)
    return result, since(h, before), stored_since(h, before_stored)


def a_bit_is_flipped(where: Stored) -> None:
    """In the last record."""
    flip(where.path(len(where.hashes) - 1, WINDOW_POOL), 5000)


def a_record_is_gone(where: Stored) -> None:
    """The last one."""
    where.path(len(where.hashes) - 1, WINDOW_POOL).unlink()


def a_page_is_gone(where: Stored) -> None:
    """The first one, of one pool: nothing of the prompt is left."""
    where.path(0, "deepseek_v4_c128").unlink()


HARMS: Mapping[str, Callable[[Stored], None]] = {
    harm.__name__: harm for harm in (a_bit_is_flipped, a_record_is_gone, a_page_is_gone)
}


def harmed(h: Harness, ids: Sequence[int], new: int, harm: str, ranks: Container[int]) -> Steps:
    """A stored prompt, of which something is harmed: (cold, twice what `again` returns)."""
    first = yield from populate(h, ids, new)
    yield from to_storage(h)
    if h.rank in ranks:
        HARMS[harm](Stored.of(h, ids))
    results = []
    for _ in range(2):
        results.append((yield from again(h, ids, new)))
        yield from to_storage(h)
    yield from leak_free(h)
    return first, results


def slow(h: Harness, ids: Sequence[int], new: int, ranks: Container[int]) -> Steps:
    """The prompt from storage, which is slow: (cold, what `again` returns)."""
    first = yield from populate(h, ids, new)
    yield from to_storage(h)
    backend = h.cache.cache_controller.storage_backend.backend
    with ExitStack() as late:
        for name in ("batch_exists_v2", "batch_get_v2"):
            own = getattr(backend, name)

            def slowly(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                time.sleep(0.2)
                return own(*args, **kwargs)

            if h.rank in ranks:
                late.enter_context(patched(backend, name, slowly))
        result = yield from again(h, ids, new)
    yield from leak_free(h)
    return first, result


def known_of(h: Harness, ids: Sequence[int], page: int) -> Any:
    """What is known of a page of the prompt that the tree holds."""
    (known,) = (
        known
        for span in h.cache.truth_storage._spans.values()
        for page_hash, known in zip(span.hashes, span.pages, strict=True)
        if page_hash == page_hashes(ids)[page]
    )
    return known


def survivor_differs(
    h: Harness,
    ids: Sequence[int],
    page: int,
    digest: bytes | None,
    new: int,
    ranks: Container[int],
) -> Steps:
    """The tree holds other bytes for a page than storage does, or nobody has hashed them: (cold, twice
    what `again` returns)."""
    first = yield from populate(h, ids, new)
    if h.rank in ranks:
        known_of(h, ids, page).digest = digest
    results = []
    for _ in range(2):
        forget_truth(h)
        results.append((yield from again(h, ids, new)))
    yield from leak_free(h)
    return first, results


def nothing_known_of_records(
    h: Harness, ids: Sequence[int], new: int, ranks: Container[int]
) -> Steps:
    """Only the truth is gone, and some ranks do not know that storage has it: (cold, what `again`
    returns, pages of KV that were read)."""
    first = yield from populate(h, ids, new)
    forget_truth(h)
    if h.rank in ranks:
        h.cache.truth_storage.records.clear()
    told = yield from again(h, ids, new)
    yield from leak_free(h)
    storage = h.cache.truth_storage
    kv_bytes = told[2]["bytes_read"] - storage.layout.slot_bytes
    return first, told, kv_bytes / storage.kv.nbytes()


def flush_while_one_hangs(h: Harness, ids: Sequence[int], ranks: Container[int]) -> Steps:
    """A flush while a call of the backend does not return on some ranks: (whether it was done, whether
    it is done afterwards)."""
    yield from populate(h, ids, 2)
    calls = h.cache.truth_storage.calls
    with ExitStack() as hanging:
        if h.rank in ranks:
            hanging.enter_context(calls)
            hanging.enter_context(patched(calls, "all_returned", lambda seconds: False))
        done = h.scheduler.flush_cache(empty_cache=False)
    later = h.scheduler.flush_cache(empty_cache=False)
    yield from leak_free(h)
    return done, later


def from_storage_without_restore(
    h: Harness, ids: Sequence[int], new: int, ranks: Container[int]
) -> Steps:
    """A hit from storage whose restore some ranks skip: (cold, result)."""
    first = yield from populate(h, ids, new)
    yield from to_storage(h)
    runtime = h.runtime
    with ExitStack() as broken:
        broken.enter_context(patched(runtime, "_checks", None))
        if h.rank in ranks:
            broken.enter_context(patched(runtime._restore, "apply", skipping(runtime._restore)))
        result, _, _ = yield from again(h, ids, new)
    yield from leak_free(h)
    return first, result
