"""Scenarios of storage (L3), run inside a scheduler process (scheduler_harness.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scenarios import (
    PAGE,
    cold,
    counters,
    dirty_rings,
    leak_free,
    patched,
    settle_storage,
    since,
    to_storage,
)
from scheduler_harness import Harness, Steps


def stored(h: Harness) -> dict[str, int]:
    """The counters of storage."""
    return h.cache.truth_storage.counters.snapshot()


def stored_since(h: Harness, before: dict[str, int]) -> dict[str, int]:
    """What the counters of storage gained."""
    return {name: value - before[name] for name, value in stored(h).items()}


def populate(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """Cold, and everything of it in storage."""
    result = yield from cold(h, ids, new)
    yield from settle_storage(h)
    return result


def from_storage(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """The prompt with empty L1 and L2, over dirty rings: (result, counter gains, storage gains)."""
    yield from to_storage(h)
    dirty_rings(h)
    before, before_stored = counters(h), stored(h)
    hit = yield from h.generate(ids, new)
    yield from settle_storage(h)
    gains, gains_stored = since(h, before), stored_since(h, before_stored)
    yield from leak_free(h)
    return hit, gains, gains_stored


def fork_from_storage(h: Harness, stem: Sequence[int], tail: Sequence[int], new: int) -> Steps:
    """A prompt that shares a stem with one in storage: (its cold answer, then as `from_storage`)."""
    with patched(h.cache, "write_backup_storage", lambda node_id: None):
        first = yield from cold(h, [*stem, *tail], new)
        yield from h.settle()
    yield from populate(h, [*stem, *reversed(tail)], 1)
    hit, gains, gains_stored = yield from from_storage(h, [*stem, *tail], new)
    return first, hit, gains, gains_stored


def behind_a_prefix(h: Harness, ids: Sequence[int], pages: int, new: int) -> Steps:
    """A prompt of which the first pages are in the tree (from storage), the rest only in storage:
    (result, counter gains, storage gains)."""
    yield from to_storage(h)
    yield from h.generate([*ids[: pages * PAGE], 5], 1)
    dirty_rings(h)
    before, before_stored = counters(h), stored(h)
    hit = yield from h.generate(ids, new)
    gains, gains_stored = since(h, before), stored_since(h, before_stored)
    yield from leak_free(h)
    return hit, gains, gains_stored


def forget_truth(h: Harness) -> None:
    """Every truth in host memory is gone; the pages stay."""
    store = h.cache.store
    for lineage in list(store._slot_of):
        store.supersede(lineage)


def truth_only_in_storage(h: Harness, ids: Sequence[int], new: int, tier: str) -> Steps:
    """The pages are cached, their truth is only in storage: (result, counter gains, storage gains)."""
    yield from populate(h, ids, new)
    if tier == "host":
        h.evict_device(1 << 30)
        yield
    forget_truth(h)
    dirty_rings(h)
    before, before_stored = counters(h), stored(h)
    hit = yield from h.generate(ids, new)
    gains, gains_stored = since(h, before), stored_since(h, before_stored)
    yield from leak_free(h)
    storage = h.cache.truth_storage
    return hit, gains, gains_stored, storage.kv.nbytes() + storage.layout.slot_bytes


def kv_without_records(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """Cold, and its KV goes to storage without a record, as a server that died in between leaves it."""
    with patched(h.cache.truth_storage, "write_transfers", lambda node: None):
        result = yield from populate(h, ids, new)
    h.cache.truth_storage.stored.clear()
    return result


def late_truth(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """Cached pages get their truth after their KV was stored: (first, healed, then from storage,
    storage gains of healing, of the hit)."""
    first = yield from kv_without_records(h, ids, new)
    forget_truth(h)
    before = stored(h)
    healed = yield from h.generate(ids, new)
    yield from settle_storage(h)
    healing = stored_since(h, before)
    hit, _, loading = yield from from_storage(h, ids, new)
    return first, healed, hit, healing, loading


def recomputed_over_stored_kv(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """With the KV in storage from before, the prompt computed on an empty cache: storage gains."""
    yield from h.flush()
    before = stored(h)
    result = yield from h.generate(ids, new)
    yield from settle_storage(h)
    gains = stored_since(h, before)
    yield from leak_free(h)
    return result, gains


def page_hashes(ids: Sequence[int]) -> list[str]:
    """SGLang's storage keys of a prompt's whole pages."""
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(array("q", ids)).page_aligned(PAGE)
    return get_storage_hash_str(key, None, page_size=PAGE)


def another_page_survives(
    h: Harness, ids: Sequence[int], page: int, digest: bytes | None, new: int
) -> Steps:
    """The tree holds other bytes for a page than storage does: [(result, storage gains)], twice.

    The digest that is known of the page is changed, which is what other bytes come to; None: nothing is
    known of it yet.
    """
    yield from populate(h, ids, new)
    (some,) = (
        known
        for span in h.cache.truth_storage._spans.values()
        for page_hash, known in zip(span.hashes, span.pages, strict=True)
        if page_hash == page_hashes(ids)[page]
    )
    some.digest = digest
    results = []
    for _ in range(2):
        forget_truth(h)
        before = stored(h)
        result = yield from h.generate(ids, new)
        yield from settle_storage(h)
        results.append((result, stored_since(h, before)))
    yield from leak_free(h)
    return results


def weights_change(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """Each way in which weights change, and one in which they do not: whether storage was closed. Then
    the prompt again: its result, another's, storage gains, what an attach says."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput
    from sglang.srt.runtime_context import get_serving

    yield from to_storage(h)
    storage, updater = h.cache.truth_storage, h.scheduler.weight_updater

    def written_from_outside() -> None:
        updater.begin_weight_update(BeginWeightUpdateReqInput())
        updater.end_weight_update(EndWeightUpdateReqInput())

    closed = {}
    for how, change in {
        "the same version": lambda: h.scheduler.record_weight_version_change(
            new_version=get_serving().weight_version
        ),
        "written from outside": written_from_outside,
        "loaded": lambda: updater.record_weight_version_after_update(None),
        "another version": lambda: h.scheduler.record_weight_version_change(new_version="another"),
    }.items():
        storage.closed = False
        change()
        closed[how] = storage.closed
    before = stored(h)
    result = yield from h.generate(ids, new)
    other = yield from h.generate([7, *ids], new)
    yield from settle_storage(h)
    gains = stored_since(h, before)
    attached = h.cache.attach_storage_backend("file")
    yield from leak_free(h)
    return closed, result, other, gains, attached


def names(h: Harness) -> tuple[list[str], str]:
    """The truth pools' names, in the order of the enum, and the model name in storage keys."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    ours = [p.value for p in PoolName if p in h.cache.truth_storage.names.pools.values()]
    return ours, h.cache.cache_controller.storage_config.model_name


def pool_groups(h: Harness) -> dict[str, Any]:
    """What the truth pools look like to SGLang."""
    group = h.cache.host_pool_group
    pools = {
        name: group.get_pool(member) for name, member in h.cache.truth_storage.names.pools.items()
    }
    slots = torch.tensor([1, 3])
    return {
        name: (pool.page_size, pool.size, pool.get_page_buffer_meta(slots)[1])
        for name, pool in pools.items()
    }
