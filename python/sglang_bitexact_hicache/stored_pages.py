"""StoredPages: what this process knows about the bytes under the keys of KV pages in storage.

A page's key names its tokens, not its bytes, and whoever wrote it last decides these. A process that
has written or read a page knows the digest of its bytes (kv_chain.py) and need not read it again to
continue a chain. Knowing nothing is always safe.

Bounded: the key that was learned or asked for longest ago is forgotten first. Thread-safe.

Pure Python: no SGLang, no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from sglang_bitexact_hicache.layout import KV_DIGEST_BYTES


class StoredPages:
    """Digests by page key; see the module's docstring. `capacity`: keys that are remembered."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._capacity = capacity
        self._lock = Lock()
        # Longest not learned or asked for first.
        self._digests: OrderedDict[str, bytes] = OrderedDict()

    def learn(self, page_hash: str, digest: bytes) -> None:
        """Storage holds bytes of this digest under the key, whatever was known before (ValueError
        unless it is 16 bytes)."""
        if len(digest) != KV_DIGEST_BYTES:
            raise ValueError(f"a digest has {KV_DIGEST_BYTES} bytes, got {digest!r}")
        with self._lock:
            self._digests[page_hash] = digest
            self._digests.move_to_end(page_hash)
            if len(self._digests) > self._capacity:
                self._digests.popitem(last=False)

    def digest(self, page_hash: str) -> bytes | None:
        """The digest of the bytes under the key, None if it is not known."""
        with self._lock:
            digest = self._digests.get(page_hash)
            if digest is not None:
                self._digests.move_to_end(page_hash)
            return digest

    def forget(self, page_hash: str) -> None:
        """Nothing is known about the key any more."""
        with self._lock:
            self._digests.pop(page_hash, None)

    def clear(self) -> None:
        """Nothing is known about any key any more."""
        with self._lock:
            self._digests.clear()

    def __len__(self) -> int:
        """Keys that something is known about."""
        with self._lock:
            return len(self._digests)
