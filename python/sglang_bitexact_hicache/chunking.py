"""Seam handlers on PrefillAdder (see seams.py): where a prefill chunk ends. Scheduler thread.

A chunk is cut at the request's junction (policy.py): its checkpoint then stands exactly where the
prompt leaves the cached path, so that what follows hangs on the tree's pages and the junction gets
its truth (healing.py). It costs one more forward, once for each junction.

SGLang runs one unfinished (chunked) request at a time. A cut makes its request that one; where there
is one already the request runs uncut. A request that would compute the same junction as one that is
on its way there waits for it: it will hit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_bitexact_hicache.tree import BxCache


def chunk_end(cache: BxCache, req: Any, start: int, end: int) -> int:
    """Where a chunk [start, end) of the request is to end: `end`, or its junction if that is inside."""
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
    cut = end if adder.rem_chunk_tokens is None else chunk_end(cache, req, start, end)
    if _is_being_healed(adder, req, start):
        return AddReqResult.OTHER
    unfinished = options["has_chunked_req"] or adder.new_chunked_req is not None
    if admission.is_chunked and unfinished:
        # Stock cannot come here: its unfinished request has used the chunk up. A cut one has not.
        return AddReqResult.OTHER
    if cut == end or unfinished:
        return admission
    return dataclasses.replace(admission, extend_len=cut - start, is_chunked=True, max_new_tokens=0)


def around_add_chunked_req(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """AROUND PrefillAdder.add_chunked_req: the later chunks. Uses the adder's own limit."""
    cache = adder.tree_cache
    if not isinstance(cache, BxCache):
        return original(adder, req)
    start = req.prefix_len
    end = chunk_end(cache, req, start, len(req.full_untruncated_fill_ids))
    before = adder.chunked_req_limit
    if end < len(req.full_untruncated_fill_ids):
        adder.chunked_req_limit = end - start if before is None else min(before, end - start)
    try:
        return original(adder, req)
    finally:
        adder.chunked_req_limit = before


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
