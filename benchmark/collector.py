"""What the benchmarks share about timing in Python."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Python's garbage collector runs before, not during."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
