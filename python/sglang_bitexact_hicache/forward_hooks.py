"""Seam handlers around and inside a forward (see seams.py for their targets).

The running forward is a module-level value that exists only inside the AROUND of
`forward_batch_generation`: warm-up, graph capture and draft forwards run outside it and are ignored.
All hooks of a forward run on the scheduler thread, inside that scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bitexact_hicache.runtime import ActiveForward, TruthRuntime
from sglang_bitexact_hicache.tree import runtime_of

_running: tuple[TruthRuntime, ActiveForward] | None = None


def around_forward_batch_generation(
    original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TpModelWorker.forward_batch_generation: the scope of one forward, on its stream."""
    global _running
    runtime = None if batch is None else runtime_of(batch)
    if runtime is None:
        return original(worker, batch, *args, **kwargs)
    with runtime.forward(batch) as active:
        _running = None if active is None else (runtime, active)
        try:
            return original(worker, batch, *args, **kwargs)
        finally:
            _running = None


def before_forward_unified_kv(backend: Any, **kwargs: Any) -> None:
    """BEFORE DeepseekV4HipRadixBackend._forward_unified_kv: the layer's whole-chunk K is in hand and
    the ring is still the old one."""
    if _running is None or backend.is_draft_worker:
        return
    runtime, active = _running
    metadata = kwargs["core_attn_metadata"].unified
    layer = kwargs["layer"].layer_id
    runtime.gather_window(active, layer, kwargs["kv"], kwargs.get("k_rope"), metadata)


def before_compress(backend: Any, **kwargs: Any) -> None:
    """BEFORE CompressorBackendMixin._forward_compress_all_in_one: the compressor's whole-chunk input
    is in hand and its state ring is still the old one."""
    if _running is None:
        return
    runtime, active = _running
    metadata = backend.forward_metadata.core_metadata.unified
    runtime.gather_state(active, kwargs["kv_score_buffer"], kwargs["kv_score_input"], metadata)
