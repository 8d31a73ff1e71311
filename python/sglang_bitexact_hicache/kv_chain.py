"""Identity of compressed KV across processes: a chain over the bytes of its pages.

Lineages (lineage.py) tell computations apart inside one process. What storage holds was written by
others, so there the bytes themselves are the identity: each page has a digest, and the chain's value
after a page covers every byte of that page and of all before it. A record keeps the value at a few
pages (its *marks*); a reader that computes the values over the pages that it has read knows whether
the record was captured over exactly these bytes and, if not, from which page on to distrust them.

Pure Python and xxhash: no SGLang, no torch. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

from sglang_bitexact_hicache.layout import KV_DIGEST_BYTES, KV_MARKS

START = bytes(KV_DIGEST_BYTES)
"""The chain's value before the first page."""


def _length(n: int) -> bytes:
    return n.to_bytes(8, "little")


def page_digest(pool_parts: Iterable[tuple[str, int, Iterable[Any]]]) -> bytes:
    """Digest of one page: 16 bytes, xxh3_128.

    xxhash keeps the interpreter lock for parts of up to 64 KiB: beside a thread that must not wait, give
    it larger ones.

    Args:
        pool_parts: for each KV pool of the page, always in the same order, its name, how many bytes it
            has, and these as contiguous objects with the buffer protocol (numpy arrays, memoryviews).
            They are read where they are, each before the next is asked for. How a pool's bytes are cut
            into parts makes no difference.

    Raises:
        BufferError or ValueError: a part that is not contiguous.
        ValueError: more or fewer bytes than were announced.
    """
    hasher = xxhash.xxh3_128()
    for name, nbytes, parts in pool_parts:
        encoded = name.encode()
        # Both lengths go first: neither a name nor bytes can pass for a part of their neighbour.
        hasher.update(_length(len(encoded)) + encoded + _length(nbytes))
        seen = 0
        for part in parts:
            view = memoryview(part)
            hasher.update(view)
            seen += view.nbytes
        if seen != nbytes:
            raise ValueError(f"{name} has {seen} bytes, not {nbytes}")
    return hasher.digest()


def extend(chain: bytes, digest: bytes) -> bytes:
    """The chain's value after one more page (ValueError unless both are 16 bytes)."""
    if len(chain) != KV_DIGEST_BYTES or len(digest) != KV_DIGEST_BYTES:
        raise ValueError(f"not {KV_DIGEST_BYTES} bytes each: {chain!r}, {digest!r}")
    return xxhash.xxh3_128_digest(chain + digest)


def chain_values(digests: Iterable[bytes], start: bytes = START) -> list[bytes]:
    """The chain's value after each page, given the digests of the pages and the value before them."""
    values = []
    for digest in digests:
        start = extend(start, digest)
        values.append(start)
    return values


def mark_pages(pages: int) -> tuple[int, ...]:
    """At which counts of pages a record over `pages` pages keeps the chain's value.

    Ascending, at most KV_MARKS, the last is `pages`; every page while there is room, evenly spread
    from then on. ValueError if `pages` is not positive.
    """
    if pages < 1:
        raise ValueError(f"a record is over one page at least, got {pages}")
    count = min(pages, KV_MARKS)
    return tuple(pages * (i + 1) // count for i in range(count))


def first_doubtful(marks: Sequence[bytes], values: Sequence[bytes], pages: int) -> int | None:
    """Where the pages that a reader has begin to differ from those a record was captured over.

    Args:
        marks: the record's values at `mark_pages(pages)`.
        values: the chain after each of the `pages` pages, as the reader computed it.
        pages: pages of KV before the record's boundary.

    Returns:
        None if they are the same. Otherwise the number k of pages that are proved good: the first
        difference is in one of the pages [k, next mark), counted from 0, and page k and everything
        after it is to be distrusted.

    Raises:
        ValueError: not one mark for each of `mark_pages(pages)`, or not one value a page.
    """
    at = mark_pages(pages)
    if len(marks) != len(at) or len(values) != pages:
        raise ValueError(
            f"{len(marks)} marks and {len(values)} values do not fit {pages} pages, "
            f"which have {len(at)} marks"
        )
    good = 0
    for mark, page in zip(marks, at, strict=True):
        if mark != values[page - 1]:
            return good
        good = page
    return None
