"""Scenarios that run inside a scheduler process (scheduler_harness.py): what the tests assert about.

Each is a function of a Harness and returns plain values. All end with `leak_free`, so a slot, lock,
row, staging record, token or thread that a scenario leaves behind fails whichever test ran it.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from scheduler_harness import Harness, Result, Steps

from dsv4_reference_platform.kernels import two_pool
from sglang_bitexact_hicache.device_view import DeviceView

PAGE = 256

EVERY_RANK = range(1 << 10)
"""Of the scenarios that break something: where."""


def prompt(seed: int, length: int) -> list[int]:
    """A prompt of random token ids; two seeds share nothing."""
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


# ---- building blocks


def dirty_rings(h: Harness) -> None:
    """Scribble every ring row and state row of every free request slot, as other requests would."""
    # A view of its own, so that it works in a server without the feature as well.
    view = DeviceView(h.pool, h.draft_pools)
    generator = torch.Generator().manual_seed(h.state.setdefault("dirt", 1))
    h.state["dirt"] += 1
    free = sorted(h.scheduler.req_to_token_pool.free_slots)
    for rings in view.rings.values():
        for ring in rings:
            for slot in free:
                rows = ring.buffer[slot * ring.size : (slot + 1) * ring.size]
                noise = torch.randn(rows.shape, generator=generator) * 3
                if rows.dtype == torch.uint8:
                    rows.random_(generator=generator)
                    packed = two_pool.pack_nope(noise[:, : two_pool.NOPE_DIM], floor=1e-12)
                    two_pool.store(rows, slice(None), packed)
                else:
                    rows.copy_(noise)


def cold(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """The answer on an empty cache."""
    yield from h.flush()
    result = yield from h.generate(ids, new)
    assert result.cached == 0, result
    return result


def to_host(h: Harness) -> Steps:
    """Push everything that is cached out of the device pool."""
    yield from h.settle()
    h.evict_device(1 << 30)
    yield


def settle_storage(h: Harness) -> Steps:
    """Step until storage has everything that is on its way there."""
    yield from h.settle()
    while h.cache.ongoing_backup or h.cache.ongoing_prefetch:
        yield
    yield from h.settle()


def to_storage(h: Harness) -> Steps:
    """What is cached is in storage, and nowhere else."""
    yield from settle_storage(h)
    yield from h.flush()


def stays(h: Harness) -> Steps:
    """What is cached stays where it is."""
    yield from ()


AWAY = {"device": stays, "host": to_host, "storage": to_storage}
"""By tier: how the next hit is made to come from there."""


def counters(h: Harness) -> dict[str, int]:
    """The feature's counters."""
    return h.runtime.counters.snapshot()


def since(h: Harness, before: dict[str, int]) -> dict[str, int]:
    """What the counters gained."""
    return {name: value - before[name] for name, value in counters(h).items()}


def leak_free(h: Harness) -> Steps:
    """Nothing is held any more, the tables agree with the tree, and a flush empties everything."""
    yield from h.settle()
    cache, runtime, scheduler = h.cache, h.runtime, h.scheduler
    cache.check_integrity()
    cache.sanity_check()
    store = cache.store
    assert not runtime._pending, "a pending restore was left"
    assert not runtime._rounds, "a round was left in flight"
    assert len(cache.rows) == 0, "a row outlived its request"
    assert not any(store.slots.is_locked(s) for s in range(store.capacity)), "a slot is locked"
    assert store.in_use() == len(store), "a slot is reserved"
    for staging in (runtime._capture.staging, runtime._restore.staging):
        assert staging.free == staging.slots, "device staging was not given back"
    yield from h.flush()
    assert store.in_use() == 0
    assert len(cache.copies) == 0
    assert not runtime._written
    assert not runtime._read
    pool = scheduler.req_to_token_pool
    assert len(pool.free_slots) == pool.size, "a request row leaked"
    allocator = scheduler.token_to_kv_pool_allocator.full_attn_allocator
    assert allocator.available_size() == allocator.size, "device KV leaked"
    for entry in cache.host_pool_group.entry_map.values():
        # With storage one page is kept aside to read into (TruthStorage.scratch).
        aside = cache.truth_storage.scratch if entry.is_primary_index_anchor else None
        free = entry.host_pool.available_size() + (0 if aside is None else len(aside))
        assert free == entry.host_pool.size, "host KV leaked"
    # SGLang starts its storage threads anew at a flush; unnamed ones are numbered.
    threads = Counter(re.sub(r"-\d+", "", t.name) for t in threading.enumerate())
    assert threads <= h.state.setdefault("threads", threads), "a thread was left"


@contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object for a while (controls: break one thing)."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def hit_over_dirt(h: Harness, ids: Sequence[int], new: int, tier: str) -> Steps:
    """A prompt that hits, from device or host memory, over dirty rings: (its result, counter gains)."""
    yield from AWAY[tier](h)
    dirty_rings(h)
    before = counters(h)
    hit = yield from h.generate(ids, new)
    gains = since(h, before)
    yield from leak_free(h)
    return hit, gains


def skipping(pipeline: Any) -> Any:
    """Stands for `RestorePipeline.apply`: gives the staging back and writes nothing."""

    def skipped(restores: Sequence[Any]) -> None:
        for restore in restores:
            pipeline.drop(restore)

    return skipped


# ---- scenarios


def repeat(h: Harness, ids: Sequence[int], new: int, tier: str) -> Steps:
    """Cold, then the same prompt again after its rings were dirtied: (cold, hit, counter gains)."""
    first = yield from cold(h, ids, new)
    hit, gains = yield from hit_over_dirt(h, ids, new, tier)
    return first, hit, gains


def without_restore(h: Harness, ids: Sequence[int], new: int, tier: str) -> Steps:
    """Control: a cached prompt from a tier over dirty rings, its restore left out and not checked."""
    yield from AWAY[tier](h)
    dirty_rings(h)
    runtime = h.runtime
    skipped = patched(runtime._restore, "apply", skipping(runtime._restore))
    with skipped, patched(runtime, "_checks", None):
        hit = yield from h.generate(ids, new)
    yield from leak_free(h)
    return hit


def cold_gains(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """A cold run alone: ((its result,), counter gains)."""
    yield from h.flush()
    before = counters(h)
    result = yield from h.generate(ids, new)
    gains = since(h, before)
    yield from leak_free(h)
    return (result,), gains


def fork(h: Harness, stem: Sequence[int], tail: Sequence[int], new: int, tier: str) -> Steps:
    """A prompt that leaves a cached one: (its cold run, its hit, counter gains)."""
    ids = [*stem, *tail]
    first = yield from cold(h, ids, new)
    yield from h.flush()
    # The donor goes on differently after the stem.
    yield from h.generate([*stem, *reversed(tail)], 1)
    hit, gains = yield from hit_over_dirt(h, ids, new, tier)
    return first, hit, gains


def broken_restore(
    h: Harness,
    ids: Sequence[int],
    new: int,
    how: str,
    checked: bool,
    ranks: Container[int] = EVERY_RANK,
) -> Steps:
    """A repeat with one thing broken on some ranks: (cold, hit, counter gains).

    `how`: "skip" leaves the rings as they were dirtied; in host memory, "window" flips a bit of one
    window row, "rope" one of its rope plane, "state" one of a C4 state row, "indexer" overwrites indexer
    state rows with values that pull their block into the selection. `checked`: whether the debug checks
    run.
    """
    first = yield from cold(h, ids, new)
    yield from h.settle()
    runtime = h.runtime
    broken = h.rank in ranks
    skip = how == "skip" and broken
    apply = skipping(runtime._restore) if skip else runtime._restore.apply
    if not broken:
        pass
    elif how == "indexer":
        overwrite_indexer_state(runtime)
    elif how != "skip":
        pool, plane = {
            "window": ("swa_window", 0),
            "rope": ("swa_window", 1),
            "state": ("c4_state", 0),
        }[how]
        ring = [ring for ring in runtime.view.rings[pool] if ring.section.plane == plane][1]
        section = ring.section
        # An exponent bit of the last row, which bf16 and fp32 both keep in the top byte: the value
        # stays finite, so that the answer differs for the right reason.
        row = section.offset + section.nbytes - section.row_bytes
        bit = 0x40 if ring.buffer.dtype == torch.uint8 else 0x08
        for slot in range(runtime.pools.slots):
            runtime.pools.record(pool, slot)[row + ring.buffer.element_size() - 1] ^= bit
    dirty_rings(h)
    before = counters(h)
    with (
        patched(runtime._restore, "apply", apply),
        patched(runtime, "_checks", runtime._checks if checked else None),
    ):
        hit = yield from h.generate(ids, new)
    gains = since(h, before)
    again = yield from h.generate(prompt(77, 300), 2)
    assert again.error is None, "the server did not go on"
    yield from leak_free(h)
    return first, hit, gains


def broken_fork(
    h: Harness, stem: Sequence[int], tail: Sequence[int], ranks: Container[int] = EVERY_RANK
) -> Steps:
    """A check that fails on some ranks with chunks still to come: (the fork's result, counter gains, the
    same again)."""
    yield from h.flush()
    yield from h.generate([*stem, *reversed(tail)], 1)
    dirty_rings(h)
    before = counters(h)
    pipeline = h.runtime._restore
    apply = skipping(pipeline) if h.rank in ranks else pipeline.apply
    with patched(pipeline, "apply", apply):
        broken = yield from h.generate([*stem, *tail], 2)
    gains = since(h, before)
    again = yield from h.generate([*stem, *tail], 2)
    yield from leak_free(h)
    return broken, gains, again


def slot_taken(h: Harness, ids: Sequence[int], ranks: Container[int]) -> Steps:
    """A prompt, after some ranks took a host slot that the others did not; then as many steps as SGLang's
    checker, which runs in a thread, may take to notice."""
    yield from h.flush()
    if h.rank in ranks:
        h.cache.store.reserve()
    yield from h.generate(ids, 2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        yield


def overwrite_indexer_state(runtime: Any) -> None:
    """Every host record's indexer state: large keys, and scores that make them count."""
    for ring in runtime.view.rings["c4_indexer_state"]:
        section = ring.section
        width = section.row_bytes // ring.buffer.element_size()
        rows = torch.full((section.rows, width), 3.0)
        rows[:, width // 2 :] = 50.0
        stored = rows.to(ring.buffer.dtype).view(torch.uint8).flatten()
        for slot in range(runtime.pools.slots):
            record = runtime.pools.record(section.pool, slot)
            record[section.offset : section.offset + section.nbytes] = stored


def no_truth_at_admission(
    h: Harness, ids: Sequence[int], ranks: Container[int] = EVERY_RANK
) -> Steps:
    """The re-check in prepare_for_extend fails on some ranks: (result, counter gains, hit of a later
    repeat)."""
    first = yield from cold(h, ids, 2)
    before = counters(h)
    final_truth = (lambda req: None) if h.rank in ranks else h.cache.final_truth
    with patched(h.cache, "final_truth", final_truth):
        result = yield from h.generate(ids, 2)
    gains = since(h, before)
    later = yield from h.generate(ids, 2)
    assert later.same_answer(first)
    yield from leak_free(h)
    return result, gains, later


def twins(h: Harness, ids: Sequence[int], new: int) -> Steps:
    """Two identical prompts at once: (cold, both results, counter gains)."""
    first = yield from cold(h, ids, new)
    yield from h.flush()
    dirty_rings(h)
    before = counters(h)
    both = yield from h.finish(h.submit(ids, new), h.submit(ids, new))
    gains = since(h, before)
    yield from leak_free(h)
    return first, both, gains


def hit_while_copy_in_flight(
    h: Harness, ids: Sequence[int], new: int, ranks: Container[int] = EVERY_RANK
) -> Steps:
    """A second, identical prompt is admitted while the first one's capture is still being copied on some
    ranks.

    Returns (cold, second's result, whether the capture had landed when its restore began).
    """
    first = yield from cold(h, ids, new)
    yield from h.flush()
    dirty_rings(h)
    runtime = h.runtime
    landed: list[bool] = []
    stage = runtime._restore.stage

    def observed(restore: Any) -> bool:
        if h.rank not in ranks:
            runtime._out_lane.drain()
        landed.append(restore.written.done())
        # The second request's forward waits for the copy: let it go while it waits.
        threading.Timer(0.3, lane._open.set).start()
        return stage(restore)

    lane = runtime._out_lane
    held = lane.held() if h.rank in ranks else nullcontext()
    with held, patched(runtime._restore, "stage", observed):
        one = h.submit(ids, new)
        while (one.extend_end or 0) < len(ids) or not one.kv.holds_kv:
            yield
        two = h.submit(ids, new)
        _, second = yield from h.finish(one, two)
    yield from leak_free(h)
    return first, second, landed


def interleaved(h: Harness, one: Sequence[int], two: Sequence[int], new: int) -> Steps:
    """Two prompts in flight together, cold and then again: results of both rounds."""
    colds = []
    for ids in (one, two):
        colds.append((yield from cold(h, ids, new)))
    yield from h.flush()
    dirty_rings(h)
    together = yield from h.finish(h.submit(one, new), h.submit(two, new))
    dirty_rings(h)
    again = yield from h.finish(h.submit(one, new), h.submit(two, new))
    yield from leak_free(h)
    return colds, together, again


def abort_in_flight(h: Harness, ids: Sequence[int]) -> Steps:
    """A request is aborted while its capture is still being copied: (cold, a later repeat)."""
    first = yield from cold(h, ids, 2)
    yield from h.flush()
    with h.runtime._out_lane.held():
        req = h.submit(ids, 2)
        while not h.runtime._written:
            yield
        h.abort(req)
        for _ in range(3):
            yield
        threading.Timer(0.3, h.runtime._out_lane._open.set).start()
        while req.kv.holds_kv:
            yield
    dirty_rings(h)
    later = yield from h.generate(ids, 2)
    yield from leak_free(h)
    return first, later


def watching_decodes(h: Harness, seen: Any) -> Any:
    """Context: `seen(batch)` after each forward that completed a page by decoding, before the next."""
    runtime = h.runtime
    forward = runtime.forward

    @contextmanager
    def watched(batch: Any) -> Iterator[Any]:
        with forward(batch) as active:
            yield active
        seen(batch)

    return patched(runtime, "forward", watched)


@contextmanager
def copying_decoded_pages(h: Harness, copies: dict[int, Any]) -> Iterator[list[Any]]:
    """Context: of the requests that are put into the list that it gives, `copies` gets every ring row,
    whole, after the step, or with EAGLE the round, that completed a page, by the page's boundary."""
    runtime, reqs, rounds = h.runtime, [], {}

    def stepped(batch: Any) -> None:
        for req in reqs:
            if req in batch.reqs and not batch.forward_mode.is_prefill():
                end = int(batch.seq_lens_cpu[batch.reqs.index(req)])
                if end % PAGE == 0:
                    copies[end] = slot_rows(runtime.view, req.kv.req_pool_idx)

    def round_over(batch: Any) -> None:
        for req in reqs:
            if req in batch.reqs:
                rounds[batch.forward_iter] = slot_rows(runtime.view, req.kv.req_pool_idx)

    settle = runtime.settle

    def settled(req: Any, number: int, before: int, after: int) -> None:
        settle(req, number, before, after)
        if req in reqs and before // PAGE < after // PAGE:
            copies[after // PAGE * PAGE] = rounds[number]

    if h.draft_pools:
        with watching_decodes(h, round_over), patched(runtime, "settle", settled):
            yield reqs
    else:
        with watching_decodes(h, stepped):
            yield reqs


def slot_rows(view: DeviceView, row: int) -> dict[tuple[str, int], torch.Tensor]:
    """Every ring row and state row of one request row, whole, as they are now."""
    return {
        (pool, i): ring.buffer[row * ring.size : (row + 1) * ring.size].clone()
        for pool, rings in view.rings.items()
        for i, ring in enumerate(rings)
    }


def chat(h: Harness, ids: Sequence[int], answer: int, more: int, new: int, tier: str) -> Steps:
    """Two turns; the second resumes where the first one's answer completed a page.

    The writer's ring rows are copied aside, whole, after the decode step that completed the page. The
    second turn runs three times over dirty rings, from the same cached KV: restored by the feature;
    with the copied rows put into its row instead (an independent copy: the writer, continued); and
    with nothing put there. Returns (turn 2's prompt length, the three results, counter gains of the
    first turn, of the restored one).
    """
    yield from h.flush()
    runtime, view = h.runtime, DeviceView(h.pool, h.draft_pools)
    copies: dict[int, Any] = {}
    before = counters(h)
    req = h.submit(ids, answer)
    with copying_decoded_pages(h, copies) as reqs:
        reqs.append(req)
        yield from h.finish(req)
    first_turn = since(h, before)
    turn = [*ids, *req.output_ids_through_stop, *prompt(len(ids), more)]

    def placed(restores: Sequence[Any]) -> None:
        for restore in restores:
            runtime._restore.drop(restore)
            for (pool, i), rows in copies[restore.boundary].items():
                ring = view.rings[pool][i]
                ring.buffer[restore.row * ring.size : (restore.row + 1) * ring.size] = rows

    results = []
    for apply in (runtime._restore.apply, placed, skipping(runtime._restore)):
        yield from AWAY[tier](h)
        dirty_rings(h)
        before = counters(h)
        checks = runtime._checks if apply == runtime._restore.apply else None
        with patched(runtime._restore, "apply", apply), patched(runtime, "_checks", checks):
            results.append((yield from h.generate(turn, new)))
        if len(results) == 1:
            restored = since(h, before)
    yield from leak_free(h)
    return len(turn), results, first_turn, restored


def chat_beside_a_prefill(h: Harness, ids: Sequence[int], beside: Sequence[int], new: int) -> Steps:
    """The answer completes a page in a MIXED batch: (mode of that step, turn 2's hit, gains)."""
    yield from h.flush()
    modes = []

    def seen(batch: Any) -> None:
        if req in batch.reqs and batch.forward_mode.is_mixed():
            modes.append(int(batch.seq_lens_cpu[batch.reqs.index(req)]) % PAGE == 0)

    req = h.submit(ids, 60, logprob=False)
    with watching_decodes(h, seen):
        while len(ids) + len(req.output_ids) < -(-len(ids) // PAGE) * PAGE - 1:
            yield
        other = h.submit(beside, 1, logprob=False)
        yield from h.finish(req, other)
    yield from h.settle()
    hit, gains = yield from hit_over_dirt(h, [*ids, *req.output_ids, 7], new, "device")
    return any(modes), hit, gains


def siblings(h: Harness, prompts: Sequence[Sequence[int]], new: int, tier: str) -> Steps:
    """Prompts that share a stem, one after the other on a cache that starts empty, over dirty rings.

    Returns (their cold runs, their results, each one's gains of counters and of the gate's).
    """
    colds = []
    for ids in prompts:
        colds.append((yield from cold(h, ids, new)))
    yield from h.flush()
    results, gains = [], []
    for ids in prompts:
        if tier == "host":
            yield from to_host(h)
        dirty_rings(h)
        before, gate = counters(h), dict(vars(h.cache.gate_counters))
        results.append((yield from h.generate(ids, new)))
        now = vars(h.cache.gate_counters)
        gains.append(since(h, before) | {f"gate_{k}": now[k] - v for k, v in gate.items()})
    yield from leak_free(h)
    return colds, results, gains


def siblings_at_once(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """The first prompt alone, then all others submitted at once: (colds, results, gate gains)."""
    colds = []
    for ids in prompts:
        colds.append((yield from cold(h, ids, new)))
    yield from h.flush()
    yield from h.generate(prompts[0], new)
    dirty_rings(h)
    before = dict(vars(h.cache.gate_counters))
    results = yield from h.finish(*[h.submit(ids, new) for ids in prompts[1:]])
    now = vars(h.cache.gate_counters)
    gains = {name: now[name] - value for name, value in before.items()}
    yield from leak_free(h)
    return colds[1:], results, gains


def healer_aborted(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """The first prompt alone; of two that part from it at one place, the one that heals is aborted on
    its way there while the other waits: (the other's cold run, its result, gate gains)."""
    first = yield from cold(h, prompts[2], new)
    yield from h.flush()
    yield from h.generate(prompts[0], 1)
    before = dict(vars(h.cache.gate_counters))
    healer, waiting = h.submit(prompts[1], new), h.submit(prompts[2], new)
    while not h.cache._healers:
        yield
    # Its chunk is launched and not checkpointed: the abort drops it.
    assert not waiting.kv.holds_kv, "it did not wait"
    h.abort(healer)
    (result,) = yield from h.finish(waiting)
    now = vars(h.cache.gate_counters)
    yield from leak_free(h)
    return first, result, {name: now[name] - value for name, value in before.items()}


def decoding_aborted(h: Harness, ids: Sequence[int]) -> Steps:
    """A request is aborted after its answer completed a page, which SGLang keeps as it keeps a finished
    one's: (decode captures, classes of the slots while it ran and afterwards, a later turn's hit)."""
    yield from h.flush()
    slots = h.cache.store.slots
    before = counters(h)
    req = h.submit(ids, 200)
    while not since(h, before)["decode_captured"]:
        yield
    running = sorted(slots.keep(s).name for s in slots.least_recent_first())
    h.abort(req)
    while req.kv.holds_kv:
        yield
    yield from h.settle()
    afterwards = sorted(slots.keep(s).name for s in slots.least_recent_first())
    captured = since(h, before)["decode_captured"]
    hit, _ = yield from hit_over_dirt(h, [*ids, *req.output_ids, 9], 2, "device")
    return captured, running, afterwards, hit


def capture_of(h: Harness, ids: Sequence[int], beside: Sequence[int] | None) -> Steps:
    """The host records of a prompt's boundaries, captured alone or in batches with a decoding
    request; with the forward modes that its chunks ran in."""
    yield from h.flush()
    other = None
    if beside is not None:
        other = h.submit(beside, 40, logprob=False)
        while not other.output_ids:
            yield
    modes: list[str] = []
    records: dict[int, bytes] = {}
    runtime = h.runtime
    finish = runtime._finish_capture

    def observed(plan: Any, wanted: Sequence[Any]) -> None:
        finish(plan, wanted)
        runtime.drain()
        for source, w in wanted:
            if source.slot == req.kv.req_pool_idx:
                records[source.boundary] = bytes(runtime.pools.device_part(w.slot).numpy())

    forward = runtime.forward

    def watched(batch: Any) -> Any:
        if req in batch.reqs and batch.forward_mode.is_extend():
            modes.append(batch.forward_mode.name)
        return forward(batch)

    with patched(runtime, "_finish_capture", observed), patched(runtime, "forward", watched):
        req = h.submit(ids, 2, logprob=False)
        yield from h.finish(req)
    if other is not None:
        yield from h.finish(other)
    yield from leak_free(h)
    return records, modes


def answers(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """Each prompt in turn, over dirty rings, on a cache that starts empty: their Results (any arm)."""
    yield from h.flush()
    results: list[Result] = []
    for ids in prompts:
        dirty_rings(h)
        results.append((yield from h.generate(ids, new)))
    return results


def boundaries_with_truth(h: Harness, ids: Sequence[int]) -> Steps:
    """Boundaries (tokens) of a prompt that have truth after it ran alone on an empty cache."""
    yield from cold(h, ids, 1)
    yield from h.settle()
    cache, found, position = h.cache, [], 0
    node = cache.tree_core.root_node
    while node.children:
        (node,) = node.children.values()
        for lineage in cache.copies.of(node.id).dev.ids:
            position += PAGE
            if lineage in cache.store:
                found.append(position)
    yield from leak_free(h)
    return found


def under_pressure(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """More prompts than the store has slots, then each again, newest first.

    Returns (cold results, results of the repeats, capacity, truths evicted).
    """
    colds = []
    for ids in prompts:
        colds.append((yield from cold(h, ids, new)))
    yield from h.flush()
    evicted = h.cache.store.counters.evicted
    for ids in prompts:
        yield from h.generate(ids, 1)
    evicted = h.cache.store.counters.evicted - evicted
    repeats = []
    for ids in reversed(prompts):
        dirty_rings(h)
        repeats.append((yield from h.generate(ids, new)))
    yield from leak_free(h)
    return colds, repeats[::-1], h.cache.store.capacity, evicted


def retracted(h: Harness, ids: Sequence[int], other: Sequence[int], new: int) -> Steps:
    """Two requests run, one is retracted for want of KV and comes back.

    Returns (cold results, results, how often each was retracted and after how many tokens, counter
    gains since the retraction).
    """
    colds = []
    for prompt_ids in (ids, other):
        colds.append((yield from cold(h, prompt_ids, new)))
    yield from h.flush()
    reqs = [h.submit(ids, new), h.submit(other, new)]
    while not all(len(req.output_ids) >= 2 for req in reqs):
        yield
    before = counters(h)
    batch_class = type(h.scheduler.running_batch)
    with patched(batch_class, "check_decode_mem", fails_once(batch_class.check_decode_mem)):
        while not any(req.retraction_count for req in reqs):
            yield
    retracted_at = [(req.retraction_count, len(req.output_ids)) for req in reqs]
    dirty_rings(h)
    results = yield from h.finish(*reqs)
    gains = since(h, before)
    yield from leak_free(h)
    return colds, results, retracted_at, gains


def fails_once(stock: Any) -> Any:
    """SGLang's check for room to decode, failing the first time."""
    failures = iter([True])
    return lambda *args, **kwargs: not next(failures, False) and stock(*args, **kwargs)


def what_is_installed(h: Harness) -> dict[str, Any]:
    """Facts about the process that the strict no-op test compares."""
    cache = h.cache
    from sglang.srt.plugins.hook_registry import HookRegistry

    return {
        "cache": type(cache).__name__,
        "tree_core": type(cache.tree_core).__name__,
        "runtime": h.runtime is not None,
        "host_pools": sorted(str(name) for name in cache.host_pool_group.entry_map),
        "patched": sorted(HookRegistry._patched),
    }
