"""Counters of what the feature did: plain values, bumped on the scheduler thread only, but for those of
storage (StorageCounters), which IO threads bump too.

Nothing here knows whether anybody reads them; exporter.py hands them to Prometheus.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import asdict, dataclass


class Durations:
    """Durations (seconds) that nobody has read yet.

    Bounded, so that a server without metrics does not collect them forever; the oldest go first.
    SGLang reports after every prefill, long before that.
    """

    KEPT = 4096
    """Durations kept at most."""

    def __init__(self) -> None:
        self._unread: deque[float] = deque(maxlen=self.KEPT)

    def __len__(self) -> int:
        return len(self._unread)

    def add(self, seconds: float) -> None:
        """One duration was measured."""
        self._unread.append(seconds)

    def take(self) -> list[float]:
        """What was added since the last call, oldest first."""
        taken = list(self._unread)
        self._unread.clear()
        return taken


@dataclass
class Counters:
    """What happened since startup (never reset, so that rates can be taken from differences).

    `restore_seconds`, which is no counter, is not part of a snapshot: see docs/metrics.md for what it
    measures.
    """

    captured: int = 0
    """Boundaries whose truth was captured and published."""
    capture_unpublished: int = 0
    """Boundaries captured for a page that died before its truth could be published."""
    capture_no_slot: int = 0
    """Boundaries not captured because every host slot was locked or reserved."""
    capture_over_staging: int = 0
    """Boundaries not captured because one forward held more of them than the device staging."""
    staging_waits: int = 0
    """Times a forward had to wait for an older capture to leave the device staging."""
    capture_over_row_limit: int = 0
    """Boundaries not captured because the request held `row_limit` slots that no node owns yet."""
    decode_captured: int = 0
    """Boundaries captured after a decode step; part of `captured`."""
    round_captured: int = 0
    """Boundaries captured after a speculative round that might complete them; each is published, as part
    of `captured`, or discarded."""
    round_discarded: int = 0
    """Of those, the ones that the round did not complete, or whose request was gone by then."""
    bytes_captured: int = 0
    """Bytes copied from device staging to host slots."""
    recomputed_tokens: int = 0
    """Prompt tokens of admitted requests that the cache holds and that had to be computed again."""
    restored: int = 0
    """Windows and states scattered into a request's rows."""
    bytes_restored: int = 0
    """Bytes copied from host slots to device staging."""
    restore_waves: int = 0
    """Extra waves that batches of more restores than the restore staging needed."""
    restore_dropped: int = 0
    """Restores whose request went away (abort, retract) before its first forward."""
    restore_impossible: int = 0
    """Requests aborted because an admitted prefix had no truth: a bug of ours, never answered."""
    checks_verified: int = 0
    """Restores that SGLANG_SWA_DBG_CHECKSUM verified on the device."""
    checks_failed: int = 0
    """Restores that SGLANG_SWA_DBG_CHECKSUM found different from their capture."""

    def __post_init__(self) -> None:
        self.restore_seconds = Durations()

    def snapshot(self) -> dict[str, int]:
        """A copy as a plain dict, for logs and tests."""
        return asdict(self)


@dataclass
class StorageCounters:
    """What happened between host memory and storage (L3) since startup. `add` from any thread."""

    records_written: int = 0
    """Boundaries whose record went to storage."""
    records_present: int = 0
    """Boundaries not written because storage has a record of them."""
    bytes_written: int = 0
    """Bytes of records that went to storage."""
    write_not_own: int = 0
    """Boundaries not written because storage holds other bytes for a page of their prefix."""
    write_failed: int = 0
    """Boundaries that storage did not take."""
    pages_read_back: int = 0
    """KV pages read back because storage held them before this process knew their bytes."""
    records_read: int = 0
    """Records that a prefetch read."""
    records_loaded: int = 0
    """Records that were verified and whose boundary became a hit."""
    bytes_read: int = 0
    """Bytes of KV and records that prefetches read."""
    bytes_used: int = 0
    """Of those, the bytes that came with a record that became a hit."""
    refused_record: int = 0
    """Records refused for their own bytes: header, checksums."""
    refused_kv: int = 0
    """Records refused because the KV that came with them is of another computation."""
    unreadable: int = 0
    """Prefetches that ended because storage did not give what it had said it holds."""
    unproved: int = 0
    """Verified records not used because host memory holds other pages of the prefix by then."""
    not_asked: int = 0
    """Prefetches not started because the prefix in host memory cannot be proved."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Bump several counters at once."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> dict[str, int]:
        """A copy as a plain dict, for logs and tests."""
        with self._lock:
            return asdict(self)
