"""Scenarios of aligned prefill: kernels that care how a prompt is cut, and who cut it where.

They run inside a scheduler process (scheduler_harness.py). `cutting_matters` is the test knob: it makes
the reference platform's matrix products behave as a GPU's do where a split of the sum is chosen by the
number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from scenarios import PAGE, counters, dirty_rings, leak_free, patched, since, to_host
from scheduler_harness import Harness, Result, Steps

from dsv4_reference_platform import invariant


class Piece(NamedTuple):
    """One request's part of one extend forward."""

    rid: str
    start: int
    end: int
    beside: int
    """Other requests in the same forward."""


def split_of(rows: int) -> int:
    """Parts into which a product over so many rows cuts its sums, as a split-K heuristic chooses."""
    return -(-rows // 128)


@contextmanager
def cutting_matters() -> Iterator[None]:
    """Matrix products of the model sum in an order that depends on how many rows there are, so a
    token's bits depend on the length of the chunk that it is computed in."""
    tiled = invariant._tiled

    def split_k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = split_of(a.shape[1])
        inner = a.shape[2]
        if parts == 1 or inner < parts:
            return tiled(a, b)
        cuts = [inner * part // parts for part in range(parts + 1)]
        total = tiled(a[:, :, : cuts[1]], b[:, : cuts[1]])
        for lo, hi in itertools.pairwise(cuts[1:]):
            total = total + tiled(a[:, :, lo:hi], b[:, lo:hi])
        return total

    with patched(invariant, "_tiled", split_k):
        yield


@contextmanager
def pieces_of(h: Harness, pieces: list[Piece]) -> Iterator[None]:
    """Record how prompts are cut."""
    forward = h.runtime.forward

    def watched(batch: Any) -> Any:
        if batch.forward_mode.is_extend():
            for req, start, count in zip(
                batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
            ):
                pieces.append(Piece(req.rid, start, start + count, len(batch.reqs) - 1))
        return forward(batch)

    with patched(h.runtime, "forward", watched):
        yield


def cold_runs(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """Each prompt alone on an empty cache; what comes more than once is run once."""
    results: dict[tuple[int, ...], Result] = {}
    for ids in dict.fromkeys(tuple(ids) for ids in prompts):
        yield from h.flush()
        dirty_rings(h)
        results[ids] = yield from h.generate(ids, new)
        assert results[ids].cached == 0
    return [results[tuple(ids)] for ids in prompts]


def one_after_another(h: Harness, prompts: Sequence[Sequence[int]], new: int, tier: str) -> Steps:
    """Prompts served in turn from one cache, over dirty rings, by kernels that care about cutting.

    Returns for each (its cold run, its result, counter gains), and all pieces of the served runs.
    """
    pieces: list[Piece] = []
    served = []
    with cutting_matters():
        colds = yield from cold_runs(h, prompts, new)
        yield from h.flush()
        for ids in prompts:
            if tier == "host":
                yield from to_host(h)
            dirty_rings(h)
            before = counters(h)
            with pieces_of(h, pieces):
                result = yield from h.generate(ids, new)
            served.append((result, since(h, before)))
        yield from leak_free(h)
    return [(first, *rest) for first, rest in zip(colds, served, strict=True)], pieces


def without_the_cap(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """`one_after_another`, where prompts leave all their whole pages in the tree (a control)."""
    from sglang_bitexact_hicache.components import BxFull

    capped = BxFull.prepare_for_caching_req

    def uncapped(component: BxFull, *args: Any, **kwargs: Any) -> None:
        capped(component, *args, **kwargs)

    with patched(BxFull, "prepare_for_caching_req", uncapped):
        return (yield from one_after_another(h, prompts, new, "device"))


def two_turns(h: Harness, ids: Sequence[int], answer: int, more: Sequence[int], tier: str) -> Steps:
    """A chat: the second turn's prompt holds the first one's answer. (cold, hit, counter gains)"""
    with cutting_matters():
        yield from h.flush()
        first = yield from h.generate(ids, answer)
        turn = [*ids, *first.ids, *more]
        (alone,) = yield from cold_runs(h, [turn], 3)
        yield from h.flush()
        yield from h.generate(ids, answer)
        if tier == "host":
            yield from to_host(h)
        dirty_rings(h)
        before = counters(h)
        hit = yield from h.generate(turn, 3)
        gains = since(h, before)
        yield from leak_free(h)
    return alone, hit, gains


def truth_lost(h: Harness, ids: Sequence[int], at: int, tier: str) -> Steps:
    """A prompt again and again, after its truth at `at` tokens was given up and nothing else was.

    Returns (its cold run, what the next two were served, truths healed).
    """
    with cutting_matters():
        (first,) = yield from cold_runs(h, [ids], 3)
        yield from h.settle()
        cache, position = h.cache, 0
        node = cache.tree_core.root_node
        while node.children:
            (node,) = node.children.values()
            for lineage in cache.copies.of(node.id).dev.ids:
                position += PAGE
                if position == at:
                    cache.store.supersede(lineage)
        healed = cache.gate_counters.healed
        again = []
        for _ in range(2):
            if tier == "host":
                yield from to_host(h)
            dirty_rings(h)
            again.append((yield from h.generate(ids, 3)))
        healed = cache.gate_counters.healed - healed
        yield from leak_free(h)
    return first, again, healed


def together(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """All prompts at once, then each alone from the cache that they left.

    Returns for each (its cold run, its result among the others, its result afterwards), and all
    pieces of the crowd.
    """
    pieces: list[Piece] = []
    with cutting_matters():
        colds = yield from cold_runs(h, prompts, new)
        yield from h.flush()
        with pieces_of(h, pieces):
            crowd = yield from h.finish(*[h.submit(ids, new) for ids in prompts])
        after = []
        for ids in prompts:
            yield from h.settle()
            dirty_rings(h)
            after.append((yield from h.generate(ids, new)))
        yield from leak_free(h)
    return list(zip(colds, crowd, after, strict=True)), pieces


def retracted_and_resumed(h: Harness, ids: Sequence[int], other: Sequence[int], new: int) -> Steps:
    """Two requests run; one is retracted for want of KV after a few tokens and comes back.

    Returns (results, retractions of each and the tokens it had, pieces after the retraction, then a
    prompt that extends the retracted one's tokens as it resumed: its cold run, its hit).
    """
    pieces: list[Piece] = []
    with cutting_matters():
        yield from h.flush()
        reqs = [h.submit(ids, new, rid="one"), h.submit(other, new, rid="two")]
        while not all(len(req.output_ids) >= 2 for req in reqs):
            yield
        batch_class = type(h.scheduler.running_batch)
        failures = iter([True])
        stock = batch_class.check_decode_mem

        def fails_once(*args: Any, **kwargs: Any) -> bool:
            return not next(failures, False) and stock(*args, **kwargs)

        with patched(batch_class, "check_decode_mem", fails_once):
            while not any(req.retraction_count for req in reqs):
                yield
        times = [(req.retraction_count, len(req.output_ids)) for req in reqs]
        dirty_rings(h)
        with pieces_of(h, pieces):
            results = yield from h.finish(*reqs)
        victim = max(reqs, key=lambda req: req.retraction_count)
        longer = [*victim.origin_input_ids, *victim.output_ids, *reversed(ids[:300])]
        yield from h.settle()
        dirty_rings(h)
        hit = yield from h.generate(longer, 3)
        (alone,) = yield from cold_runs(h, [longer], 3)
        yield from leak_free(h)
    return results, times, pieces, alone, hit


def waits_for_memory(h: Harness, ids: Sequence[int], small: Sequence[int]) -> Steps:
    """A later chunk finds no room for the whole of it, while a small prompt would fit.

    Returns (its result, its cold run, pieces, passes in which it waited).
    """
    pieces: list[Piece] = []
    with cutting_matters():
        (alone,) = yield from cold_runs(h, [ids], 2)
        yield from h.flush()
        waits = iter([True] * 3)
        waited = []
        from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget

        stock = SWAPrefillBudget.available_chunk_tokens

        def short(budget: Any, limit: int) -> int | None:
            if next(waits, False):
                waited.append(limit)
                return limit - 256
            return stock(budget, limit)

        with pieces_of(h, pieces), patched(SWAPrefillBudget, "available_chunk_tokens", short):
            reqs = [h.submit(ids, 2, rid="long"), h.submit(small, 2, rid="small")]
            result, _ = yield from h.finish(*reqs)
        yield from leak_free(h)
    return result, alone, pieces, len(waited)


def exact_fill(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """`together` where SGLang charges the budget by the token and not by the page (gfx95)."""
    from sglang.srt.managers import schedule_policy

    with patched(schedule_policy, "_use_exact_chunk_fill", lambda: True):
        return (yield from together(h, prompts, new))
