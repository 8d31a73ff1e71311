"""Seam handlers around and inside a forward (see seam_table.py for their targets).

The running forward is a module-level value that exists only inside the AROUND of
`forward_batch_generation`: warm-up and graph capture run outside it and are ignored. With EAGLE the
scope is that of the worker of both models: a prefill's capture ends after the draft's forward over the
same positions, and a round's begins after its draft extend. The target's forward inside it opens none of
its own. All hooks of a forward run on the scheduler thread, inside that scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bitexact_hicache.runtime import ActiveForward, TruthRuntime
from sglang_bitexact_hicache.tree import runtime_of

_running: tuple[TruthRuntime, ActiveForward] | None = None
_inside = False


def around_forward_batch_generation(
    original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TpModelWorker.forward_batch_generation, and EAGLEWorkerV2's: the scope of one forward, on
    its stream."""
    global _running, _inside
    runtime = None if batch is None or _inside else runtime_of(batch)
    if runtime is None:
        return original(worker, batch, *args, **kwargs)
    with runtime.forward(batch) as active:
        _running = None if active is None else (runtime, active)
        _inside = True
        try:
            return original(worker, batch, *args, **kwargs)
        finally:
            _running = None
            _inside = False


def before_forward_unified_kv(backend: Any, **kwargs: Any) -> None:
    """BEFORE DeepseekV4HipRadixBackend._forward_unified_kv: the layer's whole-chunk K is in hand and
    the ring is still the old one."""
    if _running is None:
        return
    runtime, active = _running
    metadata = kwargs["core_attn_metadata"].unified
    layer = kwargs["layer"].layer_id
    if backend.is_draft_worker:
        layer += runtime.view.draft_base
    runtime.gather_window(active, layer, kwargs["kv"], kwargs.get("k_rope"), metadata)


def before_compress(backend: Any, **kwargs: Any) -> None:
    """BEFORE CompressorBackendMixin._forward_compress_all_in_one: the compressor's whole-chunk input
    is in hand and its state ring is still the old one."""
    if _running is None:
        return
    runtime, active = _running
    metadata = backend.forward_metadata.core_metadata.unified
    runtime.gather_state(active, kwargs["kv_score_buffer"], kwargs["kv_score_input"], metadata)


def around_resolve_spec_tokens(
    original: Callable[..., Any], processor: Any, result: Any, batch: Any
) -> Any:
    """AROUND SchedulerBatchResultProcessor._resolve_spec_v2_tokens: the host learns what a round
    accepted.

    Requests that are finished or retracted by now do not move, and have nothing in flight any more.
    """
    # The batch here is a copy without its cache.
    runtime = runtime_of(processor)
    if runtime is None:
        return original(processor, result, batch)
    before = [req.kv.kv_committed_len for req in batch.reqs]
    tokens = original(processor, result, batch)
    for req, length in zip(batch.reqs, before, strict=True):
        runtime.settle(req, batch.forward_iter, length, req.kv.kv_committed_len)
    return tokens
