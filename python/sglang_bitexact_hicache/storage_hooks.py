"""Seam handlers around SGLang's storage (see seam_table.py for their targets): its backend is made
strict, names are ours, and what was written under other weights is left alone.

Scheduler thread only.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from sglang_bitexact_hicache import storage
from sglang_bitexact_hicache.storage import TruthStorage

logger = logging.getLogger(__name__)

_active: TruthStorage | None = None


def activate(planned: TruthStorage | None) -> None:
    """The storage of the cache that this process is building. One a process, as PoolName is one."""
    global _active
    _active = planned


def around_create_backend(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND StorageBackendFactory.create_backend: SGLang's backend, made strict.

    Raises:
        ValueError: the directory of the file backend is none; SGLang would fail to write each page.
    """
    try:
        backend = original(*args, **kwargs)
    except FileExistsError:
        # Of data parallel ranks each makes the directory, and another one was first.
        backend = original(*args, **kwargs)
    if _active is None:
        return backend
    path = getattr(backend, "file_path", None)
    if path is not None:
        try:
            # Of tensor parallel ranks the first one makes it, now or in a moment.
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR (or file_storage_path): {path} is no "
                f"directory ({error})"
            ) from error
    return _active.guard(backend)


def after_storage_model_name(result: str | None, *_args: Any) -> str | None:
    """AFTER cache_controller.storage_model_name: KV of this identity has keys of its own."""
    return None if _active is None else _active.names.tagged(result)


def after_generate_storage_config(result: Any, *_args: Any, **_kwargs: Any) -> Any:
    """AFTER HiCacheController._generate_storage_config: where several ranks hold the same KV, each has
    keys of its own and writes its own bytes.

    SGLang lets the first one write for all, which is right only if their KV is equal to the last bit.
    """
    if _active is None or result.tp_size == 1:
        return None
    return dataclasses.replace(result, is_mla_model=False)


def after_weights_changed(_result: None, *_args: Any, **_kwargs: Any) -> None:
    """AFTER SchedulerWeightUpdaterManager.record_weight_version_after_update: SGLang has loaded weights,
    whatever their version is called."""
    if _active is not None:
        _active.weights_changed()


def after_begin_weight_update(result: Any, *_args: Any) -> None:
    """AFTER SchedulerWeightUpdaterManager.begin_weight_update: from now on somebody may write into the
    weights without SGLang's loading them."""
    if _active is not None and result.success:
        _active.weights_changed()


def before_weight_version_change(scheduler: Any, new_version: str | None) -> None:
    """BEFORE Scheduler.record_weight_version_change: an operator says that the weights are other ones."""
    from sglang.srt.runtime_context import get_serving

    if _active is not None and new_version not in (None, get_serving().weight_version):
        _active.weights_changed()


def around_flush_cache(original: Any, scheduler: Any, *args: Any, **options: Any) -> bool:
    """AROUND Scheduler.flush_cache: not while a call of the storage backend hangs.

    SGLang stops its storage threads for a flush, waits 10 s for them, and then raises, which ends the
    scheduler. A call that somebody gave up waiting for does not keep it from flushing.
    """
    if _active is not None and not _active.may_flush():
        logger.warning(
            "bit-exact HiCache: cache not flushed, a call of the storage backend has not returned "
            "for %g s (on this rank or another)",
            storage.HANGS_SECONDS,
        )
        return False
    return original(scheduler, *args, **options)
