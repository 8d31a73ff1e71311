"""Seam handlers on PrefillAdder (see seam_table.py): where a prefill chunk ends. Scheduler thread.

A chunk is cut at the request's junction (policy.py): its checkpoint then stands exactly where the
prompt leaves the cached path, so that what follows hangs on the tree's pages and the junction gets
its truth (healing.py). It costs one more forward, once for each junction.

SGLang runs one unfinished (chunked) request at a time. A cut makes its request that one; where there
is one already the request runs uncut. A request that would compute the same junction as one that is
on its way there waits for it: it will hit.

With aligned prefill (aligned.py) chunks end at multiples of the chunk size or at the prompt's end, and
nowhere else. A chunk for which the round has no room waits for the next one. So a whole chunk is
always alone in its forward: it takes the budget of a round to the last token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_bitexact_hicache.tree import BxCache


def chunk_end(cache: BxCache, req: Any, start: int, end: int) -> int:
    """Where a chunk [start, end) of the request is to end: `end`, or its junction if that is inside.

    With aligned prefill junctions are multiples of the chunk size too, so the rule covers them.
    """
    if cache.aligned is not None:
        return min(end, cache.aligned.chunk_end(start, len(req.full_untruncated_fill_ids)))
    junction = cache.junction(req)
    return junction.tokens if junction is not None and start < junction.tokens < end else end


def around_select_prefill_admission(
    original: Callable[..., Any], adder: Any, req: Any, **options: Any
) -> Any:
    """AROUND PrefillAdder._select_prefill_admission: the first chunk of a request."""
    admission = original(adder, req, **options)
    cache = adder.tree_cache
    if not isinstance(cache, BxCache) or isinstance(admission, AddReqResult):
        return admission
    start = admission.prefix_len
    end = start + admission.extend_len
    if _is_being_healed(adder, req, start):
        return AddReqResult.OTHER
    unfinished = options["has_chunked_req"] or adder.new_chunked_req is not None
    if cache.aligned is not None:
        # An unfinished request that is not in this batch waits for room: nobody may pass it, and
        # SGLang counts every batch that is formed meanwhile as a chunk of it.
        whole = end == chunk_end(cache, req, start, len(req.full_untruncated_fill_ids))
        return admission if whole and not unfinished else AddReqResult.OTHER
    if admission.is_chunked and unfinished:
        # Stock cannot come here: its unfinished request has used the chunk up. A cut one has not.
        return AddReqResult.OTHER
    cut = end if adder.rem_chunk_tokens is None else chunk_end(cache, req, start, end)
    if cut == end or unfinished:
        return admission
    cache.gate_counters.chunks_cut += 1
    return dataclasses.replace(admission, extend_len=cut - start, is_chunked=True, max_new_tokens=0)


def around_add_chunked_req(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """AROUND PrefillAdder.add_chunked_req: the later chunks. Uses the adder's own limit."""
    cache = adder.tree_cache
    if not isinstance(cache, BxCache):
        return original(adder, req)
    start, total = req.prefix_len, len(req.full_untruncated_fill_ids)
    end = chunk_end(cache, req, start, total)
    if cache.aligned is not None and not _has_room(adder, end - start):
        return req
    before = adder.chunked_req_limit
    if end < total:
        adder.chunked_req_limit = end - start if before is None else min(before, end - start)
    try:
        outcome = original(adder, req)
    finally:
        adder.chunked_req_limit = before
    at_junction = cache.aligned is None and end < total and req.extend_end == end
    cache.gate_counters.chunks_cut += at_junction
    return outcome


def _has_room(adder: Any, tokens: int) -> bool:
    """Whether add_chunked_req would take so many tokens. Running requests give way to a chunk that
    waits: they finish or are retracted, and it was admitted with room for its whole prompt."""
    room = adder.memory_budget.available_chunk_tokens(adder.rem_chunk_tokens)
    return room is not None and tokens <= room


def _is_being_healed(adder: Any, req: Any, start: int) -> bool:
    cache = adder.tree_cache
    junction = cache.junction(req)
    if junction is None or junction.tokens <= start:
        return False
    if cache.healer(junction) not in (None, req):
        return True
    chosen = adder.new_chunked_req
    same = None if chosen is None else cache.junction(chosen)
    return same is not None and same.node == junction.node
