"""Which storage backends of SGLang are replaced by ours, by name. Imports none of them.

A backend's module is imported when the backend is created, as SGLang does with its own: what it needs
(the nixl package) has to be there only on servers that ask for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def register_backends() -> None:
    """Let `--hicache-storage-backend nixl` mean BxHiCacheNixl in this process.

    Before the cache is built, which creates the backend. May be called again.
    """
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    with _warnings_dropped(StorageBackendFactory.__module__):
        StorageBackendFactory.register_backend(
            "nixl", "sglang_bitexact_hicache.storage_nixl", "BxHiCacheNixl"
        )


@contextmanager
def _warnings_dropped(logger_name: str) -> Iterator[None]:
    # SGLang warns of a name that is taken, and offers no way to ask.
    def drop(record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING

    logger = logging.getLogger(logger_name)
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
