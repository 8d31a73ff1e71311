"""Scenarios of EAGLE, run inside a scheduler process (scheduler_harness.py).

Several requests run at once wherever their answers do not depend on it (the reference platform's kernels
are invariant), because a round of many costs little more than a round of one.

How many drafts a round accepts is the scenario's choice where it matters: the draft's proposals are
replaced by the tokens that the target is known to answer, so many of them as are to be accepted, and by
others. Nothing else of a round is touched; the target verifies what it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from scenarios import (
    AWAY,
    EVERY_RANK,
    PAGE,
    counters,
    dirty_rings,
    fails_once,
    leak_free,
    patched,
    prompt,
    since,
    skipping,
    slot_rows,
)
from scheduler_harness import Harness, Result, Steps
from sync_watch import SyncWatch

from dsv4_reference_platform.kernels.two_pool import PAYLOAD_BYTES
from sglang_bitexact_hicache.layout import WINDOW_POOL
from sglang_bitexact_hicache.rounds import Rounds

TOKENS = 4
"""That a round verifies."""


class Drafting:
    """The rounds of a scheduler: what the draft proposed, what was accepted, and which rows a round left
    that completed a page, all by bookkeeping of its own.

    Args:
        h: the harness.
        answers: by request, its prompt and the answer that it will give; who is not in it drafts freely.
        plans: by request, the accepted lengths of its rounds; after those, all.
    """

    def __init__(
        self,
        h: Harness,
        answers: Mapping[str, Sequence[int]] | None = None,
        plans: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._h = h
        self._answers = answers or {}
        self._plans = {rid: list(plan) for rid, plan in (plans or {}).items()}
        self._after: dict[tuple[str, int], dict[tuple[str, int], torch.Tensor]] = {}
        self.proposed: dict[str, list[list[int]]] = {}
        """By request: the drafts of each of its rounds, as the draft proposed them."""
        self.accepted: dict[str, list[int]] = {}
        """By request: how many tokens each of its rounds committed."""
        self.completed: dict[tuple[str, int], tuple[int, int]] = {}
        """By request and boundary: how far below it the round started that completed it, and how many
        tokens that committed."""
        self.rows: dict[tuple[str, int], dict[tuple[str, int], torch.Tensor]] = {}
        """By request and boundary: every ring row of the request, whole, right after that round."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this holds."""
        worker = type(self._h.scheduler.model_worker)
        drafter = type(self._h.scheduler.model_worker.draft_worker)
        processor = type(self._h.scheduler.batch_result_processor)
        forward, resolve = worker.forward_batch_generation, processor._resolve_spec_v2_tokens
        draft = drafter.draft

        def drafted(drafter: Any, batch: Any, **options: Any) -> Any:
            starts = batch.seq_lens.tolist()
            verify = draft(drafter, batch, **options)
            for req, start, tokens in zip(
                batch.reqs, starts, verify.draft_token.view(-1, TOKENS), strict=True
            ):
                self.proposed.setdefault(req.rid, []).append(tokens[1:].tolist())
                if req.rid in self._answers:
                    self._replace(req.rid, start, tokens)
            return verify

        def forwarded(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            round_of = batch.reqs if batch.forward_mode.is_decode() else ()
            result = forward(worker, batch, *args, **kwargs)
            for req in round_of:
                known = req.kv.kv_committed_len
                # Whatever is in flight: two rounds at most.
                if (known + 2 * TOKENS) // PAGE > known // PAGE:
                    rows = slot_rows(self._h.runtime.view, req.kv.req_pool_idx)
                    self._after[req.rid, batch.forward_iter] = rows
            return result

        def resolved(processor: Any, result: Any, batch: Any) -> Any:
            before = [req.kv.kv_committed_len for req in batch.reqs]
            tokens = resolve(processor, result, batch)
            for req, start in zip(batch.reqs, before, strict=True):
                end = req.kv.kv_committed_len
                if end > start:
                    self.accepted.setdefault(req.rid, []).append(end - start)
                    boundary = end // PAGE * PAGE
                    if start < boundary:
                        self.completed[req.rid, boundary] = boundary - start, end - start
                        rows = self._after[req.rid, batch.forward_iter]
                        self.rows[req.rid, boundary] = rows
            return tokens

        with (
            patched(drafter, "draft", drafted),
            patched(worker, "forward_batch_generation", forwarded),
            patched(processor, "_resolve_spec_v2_tokens", resolved),
        ):
            yield

    def _replace(self, rid: str, start: int, tokens: torch.Tensor) -> None:
        plan = self._plans.get(rid)
        accept = plan.pop(0) if plan else TOKENS
        known = self._answers[rid][start + 1 : start + TOKENS]
        for i, token in enumerate(known, 1):
            tokens[i] = token if i < accept else 3 + (token + 1) % 200


def at_once(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """All prompts in one batch, as far as chunks allow; their Results."""
    results = yield from h.finish(*[h.submit(ids, new) for ids in prompts])
    return results


def hits(
    h: Harness,
    prompts: Sequence[Sequence[int]],
    donors: Sequence[Sequence[int]],
    new: int,
    tiers: Sequence[str],
) -> Steps:
    """Prompts after donors have filled the cache, over dirty rings, once from each tier: (their cold
    runs, and for each tier their results and the counter gains)."""
    colds = []
    # Those that begin alike would find each other's pages.
    alike = len({tuple(ids[:PAGE]) for ids in prompts}) < len(prompts)
    for batch in [[ids] for ids in prompts] if alike else [prompts]:
        yield from h.flush()
        colds += yield from at_once(h, batch, new)
    yield from h.flush()
    yield from at_once(h, donors, 2)
    found = []
    for tier in tiers:
        yield from AWAY[tier](h)
        dirty_rings(h)
        before = counters(h)
        results = yield from at_once(h, prompts, new)
        found.append((results, since(h, before)))
    yield from leak_free(h)
    return colds, found


def decoded_pages(
    h: Harness,
    plans: Sequence[Sequence[int]],
    lengths: Sequence[int],
    seed: int,
    new: int,
    ways: Sequence[str],
    commit: str = "",
    ranks: Container[int] = EVERY_RANK,
) -> Steps:
    """Answers that complete their first page in the way that is asked for, and a second turn for each,
    which resumes there.

    The writers' rows are copied aside, whole, after the round that completes the page. The second turns
    run over dirty rings, from the same cached KV.

    Args:
        plans: for each request the accepted lengths of its rounds.
        lengths: of their prompts.
        ways: of the second turns. Restored, from the device or from host memory ("device", "host"); with
            the copied rows put into their row instead ("placed"); as that, with the draft's rows left as
            they were ("target"); with nothing put there ("nothing"); with nothing cached ("cold"), the
            last one, each alone.
        commit: how the decision about candidates is broken; "first": the first candidate of a boundary is
            published, whatever was accepted.
        ranks: on which it is broken.

    Returns a dict: the way in which each page was completed, whether the answers are those without any
    forced draft, results, drafts and accepted lengths for each of the ways, counter gains of the first
    turns and of the two restored ones.
    """
    prompts = [prompt(seed + i, length) for i, length in enumerate(lengths)]
    answer = PAGE + 6
    yield from h.flush()
    free = yield from h.finish(*[h.submit(ids, answer + TOKENS - len(ids)) for ids in prompts])
    yield from h.flush()
    rids = [f"writer{i}" for i in range(len(prompts))]
    known = {rid: [*ids, *r.ids] for rid, ids, r in zip(rids, prompts, free, strict=True)}
    first = Drafting(h, known, dict(zip(rids, plans, strict=True)))
    before = counters(h)
    broken = commit == "first" and h.rank in ranks
    settle = first_candidate_wins if broken else Rounds.settle
    with first.watched(), patched(Rounds, "settle", settle):
        reqs = [
            h.submit(ids, answer - len(ids), rid=rid)
            for rid, ids in zip(rids, prompts, strict=True)
        ]
        yield from h.finish(*reqs)
    yield from h.settle()
    report: dict[str, Any] = {
        "completed": [first.completed[rid, PAGE] for rid in rids],
        "accepted": [first.accepted[rid] for rid in rids],
        "same as without": [
            list(req.output_ids) == r.ids[: len(req.output_ids)]
            for req, r in zip(reqs, free, strict=True)
        ],
        "first turns": since(h, before),
    }
    turns = [[*req.origin_input_ids, *req.output_ids, *prompt(i, 9)] for i, req in enumerate(reqs)]
    runtime = h.runtime
    begin, writer_of = runtime._begin_restore, {}

    def begun(req: Any, *truth: Any) -> Any:
        writer_of[req.kv.req_pool_idx] = rids[int(req.rid.rpartition("-")[2])]
        return begin(req, *truth)

    def putting(draft: bool) -> Any:
        def put(restores: Sequence[Any]) -> None:
            for restore in restores:
                runtime._restore.drop(restore)
                rows_of = first.rows[writer_of[restore.row], restore.boundary]
                for (pool, i), rows in rows_of.items():
                    ring = runtime.view.rings[pool][i]
                    if draft or ring.section.layer < runtime.view.draft_base:
                        at = restore.row * ring.size
                        ring.buffer[at : at + ring.size] = rows

        return put

    appliers = {
        "device": runtime._restore.apply,
        "host": runtime._restore.apply,
        "placed": putting(draft=True),
        "target": putting(draft=False),
        "nothing": skipping(runtime._restore),
    }
    for way in ways:
        if way == "cold":
            report[way] = yield from _one_by_one(h, turns, new)
            continue
        apply = appliers[way]
        yield from AWAY["host" if way == "host" else "device"](h)
        dirty_rings(h)
        before = counters(h)
        second = Drafting(h)
        checks = runtime._checks if way in AWAY else None
        with (
            second.watched(),
            patched(runtime._restore, "apply", apply),
            patched(runtime, "_checks", checks),
            patched(runtime, "_begin_restore", begun),
        ):
            again = [h.submit(ids, new, rid=f"{way}-{i}") for i, ids in enumerate(turns)]
            results = yield from h.finish(*again)
        report[way] = {
            "results": results,
            "proposed": [second.proposed[req.rid] for req in again],
            "accepted": [second.accepted[req.rid] for req in again],
            "gains": since(h, before),
        }
    yield from leak_free(h)
    return report


def _one_by_one(h: Harness, prompts: Sequence[Sequence[int]], new: int) -> Steps:
    """Each prompt with nothing cached: their results, and what their rounds drafted and accepted."""
    report: dict[str, Any] = {"results": [], "proposed": [], "accepted": []}
    for i, ids in enumerate(prompts):
        yield from h.flush()
        rounds = Drafting(h)
        with rounds.watched():
            report["results"] += yield from h.finish(h.submit(ids, new, rid=f"cold-{i}"))
        report["proposed"].append(rounds.proposed[f"cold-{i}"])
        report["accepted"].append(rounds.accepted[f"cold-{i}"])
    return report


def first_candidate_wins(
    rounds: Rounds, request: Any, number: int, before: int, after: int
) -> tuple[Any, bool]:
    """Stands for `Rounds.settle`: whatever was captured is taken for complete."""
    queue = rounds._in_flight.get(request)
    if not queue or queue[0].number != number:
        return None, False
    done = queue.popleft()
    if not queue:
        del rounds._in_flight[request]
    return done.candidate, True


def planes(h: Harness) -> Steps:
    """Of the target's first layer and of the draft's: the planes of its window, each as dtype and bytes
    of a row."""
    yield
    view = h.runtime.view
    return tuple(
        [(str(ring.buffer.dtype), ring.section.row_bytes) for ring in view.window_rings(layer)]
        for layer in (0, view.draft_base)
    )


def records(h: Harness, ids: Sequence[int]) -> Steps:
    """Digests of the record of each boundary of a prompt that ran alone: of the target's windows and
    states, and of the draft's windows. The bytes of fp8 rows that no kernel writes are left out."""
    yield from h.flush()
    runtime = h.runtime
    found: dict[int, tuple[str, str]] = {}
    finish = runtime._finish_capture

    def finished(plan: Any, captures: Sequence[Any]) -> None:
        finish(plan, captures)
        runtime.drain()
        for source, wanted in captures:
            parts = [b"", b""]
            for rings in runtime.view.rings.values():
                for ring in rings:
                    section = ring.section
                    record = runtime.pools.record(section.pool, wanted.slot)
                    rows = record[section.offset : section.offset + section.nbytes]
                    if ring.buffer.dtype == torch.uint8:
                        rows = rows.view(section.rows, -1)[:, :PAYLOAD_BYTES].contiguous()
                    parts[section.layer >= runtime.view.draft_base] += bytes(rows.numpy())
            assert all(parts)
            found[source.boundary] = tuple(hashlib.sha256(part).hexdigest() for part in parts)

    with patched(runtime, "_finish_capture", finished):
        yield from h.generate(ids, 1)
    yield from leak_free(h)
    return found


# ---- requests that go away


def leaves_with_a_candidate(h: Harness, ids: Sequence[int], how: str) -> Steps:
    """A request goes away while a round of it is in flight that may complete its first page: aborted,
    retracted (it comes back), or its cache flushed after it was aborted.

    Returns (its Result, counter gains until it was gone, and at its end).
    """
    yield from h.flush()
    runtime = h.runtime
    reqs = []
    if how == "retract":
        # Never the last one that runs, and of two the one that has fewer tokens.
        reqs.append(h.submit(prompt(99, 20), 40))
        while len(reqs[0].output_ids) < 12:
            yield
    before = counters(h)
    req = h.submit(ids, 20)
    reqs.append(req)
    while not any(r.candidate is not None for r in runtime._rounds._in_flight.get(req, ())):
        yield
    batch_class = type(h.scheduler.running_batch)
    if how == "retract":
        with patched(batch_class, "check_decode_mem", fails_once(batch_class.check_decode_mem)):
            while not any(r.retraction_count for r in reqs):
                yield
        assert req.retraction_count == 1, "it was the other one"
    else:
        h.abort(req)
        while req.kv.holds_kv:
            yield
    assert req not in runtime._rounds._in_flight
    gone = since(h, before)
    results: list[Result] = yield from h.finish(*reqs)
    if how == "flush":
        yield from h.flush()
    gains = since(h, before)
    yield from leak_free(h)
    return results, gone, gains


def watched(h: Harness) -> Steps:
    """A prompt, its hit, and a page completed by a round, under the watch of sync_watch.py: (calls noted,
    how often each part ran, counter gains)."""
    yield from h.flush()
    runtime = h.runtime
    before, watch = counters(h), SyncWatch(runtime)
    ids = prompt(90, PAGE + 5)
    # The checks read the device: they are for tests.
    with patched(runtime, "_checks", None), watch.on():
        yield from h.generate(ids, 2)
        yield from h.generate(ids, 2)
        yield from h.generate(prompt(91, PAGE - 3), 8)
        yield from h.settle()
    gains = since(h, before)
    yield from leak_free(h)
    return watch.noted, dict(watch.watched), gains


# ---- controls


def broken_draft(
    h: Harness,
    ids: Sequence[int],
    new: int,
    checked: bool,
    ranks: Container[int] = EVERY_RANK,
    plane: int = 0,
) -> Steps:
    """A repeat after one bit of a draft's window, in one plane of it, was flipped in host memory, on some
    ranks: (cold, hit, gains)."""
    yield from h.flush()
    first = yield from h.generate(ids, new)
    yield from h.settle()
    runtime = h.runtime
    draft = runtime.view.window_rings(runtime.view.draft_base)[plane]
    last = draft.section.offset + draft.section.nbytes - draft.section.row_bytes
    for slot in range(runtime.pools.slots) if h.rank in ranks else ():
        runtime.pools.record(WINDOW_POOL, slot)[last + 1] ^= 0x08
    dirty_rings(h)
    before = counters(h)
    with nullcontext() if checked else patched(runtime, "_checks", None):
        hit = yield from h.generate(ids, new)
    gains = since(h, before)
    yield from leak_free(h)
    return first, hit, gains
