"""Scenarios of data parallel attention: what each rank does by itself while the others go their ways.

As in scenarios.py; a rank that is given nothing to do steps along, idle, until the others are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import eagle_scenarios
import l3_rank_scenarios
import l3_scenarios
import scenarios
from scenarios import PAGE, counters, dirty_rings, leak_free, since
from scheduler_harness import Harness, Steps


def on_each(h: Harness, name: str, per_rank: Sequence[Sequence[Any] | None]) -> Steps:
    """The scenario of this name with each rank's own arguments; None: the rank has nothing to do."""
    args = per_rank[h.rank]
    if args is None:
        return None
    places = (
        globals(),
        *map(vars, (scenarios, l3_rank_scenarios, l3_scenarios, eagle_scenarios)),
    )
    # Of one meaning only: two modules may not use a name for different things.
    (scenario,) = {place[name] for place in places if name in place}
    return (yield from scenario(h, *args))


def one_round(h: Harness, ids: Sequence[int], new: int, rank: int) -> Steps:
    """A request that one rank gets, over dirty rings: its result there, counter gains on every rank."""
    before = counters(h)
    dirty_rings(h)
    result = (yield from h.generate(ids, new)) if h.rank == rank else None
    yield from h.settle()
    return result, since(h, before)


def finish_rounds(h: Harness) -> Steps:
    """After the last of several rounds."""
    yield from leak_free(h)


def push_to_host(h: Harness) -> Steps:
    """Everything that is cached leaves the device."""
    yield from scenarios.to_host(h)


def answer_beside(h: Harness, ids: Sequence[int], beside: Sequence[Sequence[int]]) -> Steps:
    """A prompt whose answer completes a page, and others decoding beside it; the next turn resumes there.

    Returns (the answer's length in tokens with its prompt, decode captures, the hit, gains of the hit).
    """
    yield from h.flush()
    before = counters(h)
    new = -len(ids) % PAGE + 4
    req = h.submit(ids, new)
    yield from h.finish(req, *(h.submit(other, new) for other in beside))
    captured = since(h, before)["decode_captured"]
    turn = [*ids, *req.output_ids, *scenarios.prompt(len(ids), 40)]
    hit, gains = yield from scenarios.hit_over_dirt(h, turn, 2, "device")
    return captured, hit, gains


# ---- what the forwards of a rank were


def watch_forwards(h: Harness) -> None:
    """From now on: count this rank's forwards, by what they were and by how they were padded."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    seen: Counter[str] = Counter()
    runtime, prepare = h.runtime, ForwardBatch.prepare_mlp_sync_batch
    forward = runtime.forward

    @contextmanager
    def watched(batch: Any) -> Iterator[Any]:
        seen[batch.forward_mode.name] += 1
        with forward(batch) as active:
            seen["captures"] += active is not None
            yield active

    def padded(batch: Any, runner: Any) -> None:
        mode, tokens = batch.forward_mode, len(batch.positions)
        prepare(batch, runner)
        more = len(batch.positions) - tokens
        seen[f"padded {mode.name}"] += more > 0
        seen[f"{mode.name} as {batch.forward_mode.name}"] += mode is not batch.forward_mode

    runtime.forward, ForwardBatch.prepare_mlp_sync_batch = watched, padded
    h.state["watch"] = seen, ForwardBatch, prepare


def forwards_seen(h: Harness) -> Counter[str]:
    """What was counted since `watch_forwards`, which ends."""
    seen, batch_class, prepare = h.state.pop("watch")
    del h.runtime.forward
    batch_class.prepare_mlp_sync_batch = prepare
    return +seen


def pad_to_the_longest(h: Harness, on: bool) -> None:
    """Every rank's rows are padded to the longest rank's, also where prompts are computed, and an idle
    rank computes a made-up prompt: SGLang's MAX_LEN, which it chooses for some of its backends."""
    from sglang.srt.layers.dp_attention import DpPaddingMode

    if on:
        h.state["padding"] = vars(DpPaddingMode)["get_dp_padding_mode"]
        DpPaddingMode.get_dp_padding_mode = classmethod(lambda cls, *_how: cls.MAX_LEN)
    else:
        DpPaddingMode.get_dp_padding_mode = h.state.pop("padding")
