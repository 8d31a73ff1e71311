"""CPU cost of finding a hit: match, gate and bind, against the two tree cores of stock SGLang.

Three caches hold the same five prompts of 200,000 tokens, put there in chunks of 8,192 as a scheduler
does: BxCache, the stock class on its Python core, the stock class on its Rust core. The same keys are
matched in all of them, in turns, with the garbage collector off; figures are medians.

Strict is match_prefix with both validator sets, then what admission adds: `final_truth`, lock, touch
and unlock. Stock is match_prefix. Three cases:

* node end: every page has truth, so the match ends where the tree's node does;
* first interior match: truth every third page, and the deepest one lies inside a node, so the match
  is repeated with a shorter key and the node is cut: once for each boundary;
* steady: the same keys again.

Stock cuts nodes too, where a key ends inside one: that first match of the Python core is timed as well.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from reuse import world
from reuse.fates import NotingStore
from reuse.replay import CONTEXT
from reuse.scheduler import Replay, StockArm, StrictArm, kv_reach, no_reach, tokens_of
from reuse.traces import PAGE, Segment, Trace, Turn

LENGTHS = (1_024, 10_240, 50_176, 199_424)
"""Tokens that are matched: 1k, 10k, 50k and 200k in whole pages. The coarse boundary before each lies
inside a node: the last page of each chunk is a node of its own (SWAComponent splits it off)."""

PROMPTS = 5
PROMPT_PAGES = CONTEXT // PAGE
REPEATS = 40
COARSE_STRIDE = 3


@dataclass(frozen=True)
class Cost:
    """Medians in milliseconds for one length.

    Attributes:
        tokens: what was matched.
        python, rust: stock.
        python_cut: stock's Python core, the first match of a key that ends inside a node.
        node_end, first_interior, steady: strict, see the module's docstring.
    """

    tokens: int
    python: float
    rust: float
    python_cut: float
    node_end: float
    first_interior: float
    steady: float


def measure() -> list[Cost]:
    """Every length; inside `world.quiet_cpu_hicache`."""
    prompts = [Segment(number, PROMPT_PAGES * PAGE) for number in range(1, PROMPTS + 1)]
    texts = [tokens_of((prompt,)) for prompt in prompts]
    fine, coarse = _strict(prompts), _strict(prompts)
    python, rust = _stock(prompts, "python"), _stock(prompts, "rust")
    python_cut = {tokens: [_cut(python, text[:tokens]) for text in texts] for tokens in LENGTHS}
    # In every tree: the first match of a key cuts the node in which it ends.
    for cache in (fine, coarse, rust):
        for tokens in LENGTHS:
            for text in texts:
                _matcher(cache)(text[:tokens])
    for text in texts:
        _thin_out(coarse, text)
    gc.collect()
    gc.disable()
    try:
        return [
            _measure(tokens, texts, fine, coarse, python, rust, median(python_cut[tokens]))
            for tokens in LENGTHS
        ]
    finally:
        gc.enable()


def _measure(
    tokens: int,
    texts: list[array],
    fine: Any,
    coarse: Any,
    python: Any,
    rust: Any,
    python_cut: float,
) -> Cost:
    keys = [text[:tokens] for text in texts]
    first = [_first_interior(coarse, key) for key in keys]
    arms = {
        "python": _matcher(python),
        "rust": _matcher(rust),
        "node_end": _binder(fine),
        "steady": _binder(coarse),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for turn in range(REPEATS):
        key = keys[turn % len(keys)]
        order.append(order.pop(0))
        for name in order:
            arms[name](key)  # so that each finds its own keys in the processor's caches
            times[name].append(_timed(arms[name], key))
    medians = {name: median(taken) for name, taken in times.items()}
    return Cost(tokens=tokens, python_cut=python_cut, first_interior=median(first), **medians)


def _thin_out(cache: Any, text: array) -> None:
    """Leave truth at every COARSE_STRIDE-th page of a prompt only."""
    page = 0
    for node, pages in kv_reach(cache, text + text[:1]).nodes:
        for lineage in cache.copies.of(node.id).dev.ids[:pages]:
            page += 1
            if page % COARSE_STRIDE:
                cache.store.supersede(lineage)


def _cut(cache: Any, key: array) -> float:
    """Time the first match of a key in a stock tree."""
    kv_reach(cache, key)
    return _timed(_matcher(cache), key)


def _timed(match: Callable[[array], Any], key: array) -> float:
    start = perf_counter()
    match(key)
    return (perf_counter() - start) * 1e3


def _first_interior(cache: Any, key: array) -> float:
    """Time the first match of a key whose deepest truth lies inside a node."""
    kv_reach(cache, key)  # read-only; the other arms find their keys in the caches too
    before = cache.gate_counters.second_walks
    took = _timed(_binder(cache), key)
    if cache.gate_counters.second_walks != before + 1:
        raise RuntimeError("the first match of a key was meant to be repeated inside a node")
    return took


def _matcher(cache: Any) -> Callable[[array], Any]:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return lambda key: cache.match_prefix(MatchPrefixParams(key=RadixKey(key)))


def _binder(cache: Any) -> Callable[[array], int | None]:
    """Match, and what TruthRuntime.admit does with the hit; the lineage of the truth."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    match = _matcher(cache)
    req = Req("timed", "", array("q", (0,)), SamplingParams())

    def bind(key: array) -> int | None:
        result = match(key)
        req.prefix_len, req.last_node = result.device_prefix_len, result.last_device_node
        if req.prefix_len == 0:
            return None
        lineage, slot = cache.final_truth(req)
        cache.store.lock(slot)
        cache.store.touch(lineage)
        cache.store.unlock(slot)
        return lineage

    return bind


def _strict(prompts: list[Segment]) -> Any:
    from sglang_bitexact_hicache.metrics import Counters
    from sglang_bitexact_hicache.planner import CapturePlanner
    from sglang_bitexact_hicache.policy import Kind

    slots = PROMPTS * PROMPT_PAGES
    stack = _build(slots, None)
    stack.cache.attach_truth(NotingStore(slots))
    planner = CapturePlanner(
        stack.cache, stride=1, kinds=frozenset({Kind.GRID}), counters=Counters()
    )
    return _fill(stack, StrictArm(stack.cache, planner, slots, cut=False), prompts)


def _stock(prompts: list[Segment], tree_core: str) -> Any:
    return _fill(_build(None, tree_core), StockArm(), prompts)


def _build(slots: int | None, tree_core: str | None) -> Any:
    pages = (PROMPTS + 1) * (PROMPT_PAGES + 2)
    return world.build(
        device_pages=pages,
        host_pages=2 * pages,
        rows=2,
        context=(PROMPT_PAGES + 2) * PAGE,
        slots=slots,
        tree_core=tree_core,
    )


def _fill(stack: Any, arm: Any, prompts: list[Segment]) -> Any:
    turns = tuple(
        Turn((prompt,), Segment(PROMPTS + prompt.id, 2), prompt.id - 2 if prompt.id > 1 else None)
        for prompt in prompts
    )
    Replay(stack, arm, Trace("prompts", turns), no_reach).run()
    return stack.cache
