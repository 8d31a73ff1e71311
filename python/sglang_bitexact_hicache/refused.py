"""RefusedKeys: what storage holds and must not be asked for again.

What was read from storage and found wrong would be found, read and refused at the next query too, for
ever. So the reader notes the key here and the query asks before it counts on it. Two kinds: a bad
record costs its own boundary; a bad page of KV costs every boundary at or behind it.

A bound keeps the memory: the key that was noted or met longest ago is forgotten first, which costs one
more read of it. Thread-safe: the IO threads note, the thread that queries asks.

Pure Python: no SGLang, no torch.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import NamedTuple


class _Refusal(NamedTuple):
    """Before which times of the clock the record at the page's end is refused, and the page itself."""

    record_until: float = -math.inf
    page_until: float = -math.inf


class RefusedKeys:
    """Keys refused; see the module's docstring.

    Args:
        capacity: keys that are remembered.
        clock: monotonic seconds.
    """

    def __init__(self, capacity: int = 65_536, clock: Callable[[], float] = time.monotonic) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._capacity = capacity
        self._clock = clock
        self._lock = Lock()
        # Longest not noted or met first.
        self._refusals: OrderedDict[str, _Refusal] = OrderedDict()

    def refuse_record(self, page_hash: str, *, seconds: float | None = None) -> None:
        """The record at the boundary where this page ends is bad or cannot be read: for so many
        seconds, None: until it is forgiven.

        Of two refusals of a record the longer holds. ValueError if `seconds` is not positive.
        """
        until = self._until(seconds)
        with self._lock:
            old = self._get(page_hash)
            self._put(page_hash, old._replace(record_until=max(old.record_until, until)))

    def refuse_page(self, page_hash: str, *, seconds: float | None = None) -> None:
        """This page's KV is bad or cannot be read: as with a record."""
        until = self._until(seconds)
        with self._lock:
            old = self._get(page_hash)
            self._put(page_hash, old._replace(page_until=max(old.page_until, until)))

    def refuses_page(self, page_hash: str) -> bool:
        """Whether this page's KV is refused now."""
        with self._lock:
            return self._get(page_hash).page_until > self._clock()

    def usable(self, hashes: Sequence[str], boundaries: Iterable[int]) -> list[int]:
        """Those of `boundaries` that nothing here speaks against, ascending.

        Args:
            hashes: the keys of a prompt's pages, from the first.
            boundaries: counts of pages: b uses the pages ``hashes[:b]`` and the record of
                ``hashes[b - 1]``.

        Raises:
            ValueError: a boundary that those pages do not have.
        """
        asked = sorted(set(boundaries))
        if asked and not 1 <= asked[0] <= asked[-1] <= len(hashes):
            raise ValueError(f"boundaries {asked} are not all among {len(hashes)} pages")
        deepest = asked[-1] if asked else 0
        now = self._clock()
        bad_records = set()
        with self._lock:
            for i, key in enumerate(hashes[:deepest]):
                refusal = self._refusals.get(key)
                if refusal is None:
                    continue
                if refusal.page_until > now:
                    self._refusals.move_to_end(key)
                    deepest = i
                    break
                if refusal.record_until <= now:
                    del self._refusals[key]
                    continue
                self._refusals.move_to_end(key)
                bad_records.add(i + 1)
        return [b for b in asked if b <= deepest and b not in bad_records]

    def forgive(self, page_hash: str) -> None:
        """Page and record with this key have just been written anew."""
        with self._lock:
            self._refusals.pop(page_hash, None)

    def clear(self) -> None:
        """Forget every refusal."""
        with self._lock:
            self._refusals.clear()

    def __len__(self) -> int:
        """Keys remembered; one whose time is over counts until a query meets it."""
        with self._lock:
            return len(self._refusals)

    def _until(self, seconds: float | None) -> float:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"a key is refused for more than no time, got {seconds}")
        return math.inf if seconds is None else self._clock() + seconds

    def _get(self, key: str) -> _Refusal:
        return self._refusals.get(key, _Refusal())

    def _put(self, key: str, refusal: _Refusal) -> None:
        self._refusals[key] = refusal
        self._refusals.move_to_end(key)
        if len(self._refusals) > self._capacity:
            self._refusals.popitem(last=False)
