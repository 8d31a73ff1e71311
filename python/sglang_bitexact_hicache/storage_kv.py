"""Seam: the bytes of compressed KV pages in SGLang's host pools, and their digests.

A page of 256 tokens lies in several host pools (C4, C4 indexer, C128, with fp8 their rope planes),
mirrored under one host index. Its digest (kv_chain.py) goes over all of them, layer by layer, whatever
the host layout is, so servers with different `--hicache-mem-layout` agree.

`HostKv` reads the memory of pages that the caller keeps from being freed or rewritten: IO threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.kv_chain import page_digest
from sglang_bitexact_hicache.lineage import Copy


class KvPage:
    """What is known of one lineage's compressed page: its digest, once somebody has computed it.

    Filled by IO threads, always with the same value, so that a race is harmless.
    """

    __slots__ = ("digest",)

    def __init__(self, digest: bytes | None = None) -> None:
        self.digest = digest


@dataclass(frozen=True)
class HostSpan:
    """The host copy of one tree node, as IO threads need it. Made on the scheduler thread.

    Attributes:
        copy: whose identity it has; the span is good as long as the node has this copy.
        hashes: the storage keys of its pages.
        pages: what is known of each page, shared by all spans with the same lineage.
        rows: host page numbers.
        landed: whether its bytes have arrived from the device.
    """

    copy: Copy
    hashes: list[str]
    pages: list[KvPage]
    rows: list[int]
    landed: bool

    @property
    def hashed(self) -> bool:
        """Whether every page's digest is known."""
        return all(page.digest is not None for page in self.pages)


def read_digests(spans: Iterable[HostSpan], kv: HostKv) -> list[bytes]:
    """The digest of each page of the spans, computed where it is not known yet. IO threads.

    To be remembered only if nobody could free the pages meanwhile.
    """
    return [
        kv.digest(row) if page.digest is None else page.digest
        for span in spans
        for page, row in zip(span.pages, span.rows, strict=True)
    ]


def remember_digests(spans: Iterable[HostSpan], digests: Iterable[bytes]) -> None:
    """These are the digests of the spans' pages."""
    pages = (page for span in spans for page in span.pages)
    for page, digest in zip(pages, digests, strict=True):
        page.digest = digest


def digests_of(spans: Sequence[HostSpan], kv: HostKv) -> list[bytes]:
    """The digest of each page of spans that nobody can free meanwhile, remembered. IO threads."""
    digests = read_digests(spans, kv)
    remember_digests(spans, digests)
    return digests


BLOCK_BYTES = 256 << 10
"""How much of a page is gathered and hashed at a time: more than the 64 KiB up to which xxhash keeps the
interpreter lock, and so little that it is still in the core's cache when it is hashed."""


class HostKv:
    """Digests of host pages. Answers to `DeepSeekV4PagedHostPool.get_data_page`, without its copy.

    Args:
        group: SGLang's HostPoolGroup.
        names: the pools that hold compressed KV (members of PoolName), all of them.
    """

    def __init__(self, group: Any, names: list[Any]) -> None:
        self.names = sorted(names, key=lambda name: name.value)
        # Each array is [pages, bytes]; one a layer, or one for all of them.
        self._pools: dict[str, list[np.ndarray]] = {}
        for name in self.names:
            pool = group.get_pool(name)
            first = pool.layout == "layer_first"
            buffers = pool.kv_buffer if first else [pool.kv_buffer.flatten(1)]
            self._pools[name.value] = [buffer.numpy() for buffer in buffers]
        self._scratch = _Scratch()

    def digest(self, page: int) -> bytes:
        """16 bytes over the page with this host page number (host index // 256)."""
        return page_digest(self._parts(page))

    def nbytes(self, pool: Any = None) -> int:
        """Bytes of one page over all pools, or in one (a member of PoolName)."""
        pools = self._pools.values() if pool is None else [self._pools[pool.value]]
        return sum(map(_page_bytes, pools))

    def _parts(self, page: int) -> Iterator[tuple[str, int, Iterator[np.ndarray]]]:
        for name, buffers in self._pools.items():
            yield name, _page_bytes(buffers), self._blocks(buffers, page)

    def _blocks(self, buffers: list[np.ndarray], page: int) -> Iterator[np.ndarray]:
        """The page of one pool, in as few pieces as may be; a piece is good until the next one.

        Layer by layer xxhash would keep the interpreter lock, and the scheduler thread would wait at
        every operation of its own. One copy through the cache costs less than that (docs/l3.md).
        """
        at_once = BLOCK_BYTES // buffers[0].shape[1]
        if len(buffers) == 1 or at_once < 2:
            yield from (buffer[page] for buffer in buffers)
            return
        for start in range(0, len(buffers), at_once):
            rows = [buffer[page] for buffer in buffers[start : start + at_once]]
            block = self._scratch.buffer[: len(rows) * len(rows[0])]
            np.concatenate(rows, out=block)
            yield block


class _Scratch(threading.local):
    """A block, for each thread."""

    def __init__(self) -> None:
        self.buffer = np.empty(BLOCK_BYTES, np.uint8)


def _page_bytes(buffers: list[np.ndarray]) -> int:
    return sum(buffer[0].nbytes for buffer in buffers)


def host_pages(host_indices: Any) -> list[int]:
    """Host page numbers of whole pages of host token indices (a CPU tensor, so nothing waits)."""
    return (host_indices[::PAGE_SIZE] // PAGE_SIZE).tolist()
