"""The host header of a boundary's record: one definition for the writer and for the reader.

`seal` makes a record that leaves the process tell what it is and prove that it is whole; `check` lets
nothing pass that is not exactly the record that the reader asked for. The header of the window record,
all integers little-endian:

* the fixed part (``HOST_FIXED_BYTES``): the fields of `_Fields`, then the header's checksum, then
  zeros;
* one xxh3_64 of its stored bytes a section, by `Section.index`;
* ``KV_MARKS`` values of the KV chain (kv_chain.py), of which a record over P tokens uses
  `mark_pages(P / PAGE_SIZE)`; the rest are zeros;
* zeros up to `RecordLayout.host_header_bytes`; the device checksums; zeros up to
  `RecordLayout.header_bytes`.

The header's checksum is the xxh3_64 of ALL of it, its own field taken as zero. What follows the last
section of a record is alignment that nobody reads, and is not covered.

What comes from storage is not trusted: no length in a record decides what is read, the layout does, and
a length that differs is a reason to refuse. These hashes find damage and mix-ups; they do not keep out
somebody who may write to the storage and wants to deceive.

numpy and xxhash: no SGLang, no torch. Any thread; what it costs is hashing, for which xxhash 4 lets go
of the GIL where a section has more than 64 KiB.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.kv_chain import START, mark_pages
from sglang_bitexact_hicache.layout import (
    C4_POOL,
    HOST_FIXED_BYTES,
    INDEXER_POOL,
    KV_DIGEST_BYTES,
    KV_MARKS,
    POOLS,
    SECTION_HASH_BYTES,
    WINDOW_POOL,
    RecordLayout,
    Section,
)

MAGIC = b"DSV4SWA\0"
"""First bytes of a window record in storage."""

VERSION = 1
"""Version of this format. Raise it with any change of what a header says or covers."""

IDENTITY_BYTES = 16
"""Bytes of the digest of everything that makes two servers' bytes interchangeable."""


class RecordRefused(Exception):
    """What storage gave is not the record that was asked for.

    Attributes:
        reason: a few fixed words: "length", "header checksum", a field's name ("magic", "version",
            "identity", "boundary", "page hash", ...), or "section <pool> layer <layer>".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Seal:
    """What a record that passed `check` says.

    Attributes:
        boundary: P, in tokens.
        kv_chain: the KV chain's value after the pages before P.
        marks: the chain's values at `mark_pages(P / PAGE_SIZE)`; the last is `kv_chain`.
    """

    boundary: int
    kv_chain: bytes
    marks: tuple[bytes, ...]


class _Fields(NamedTuple):
    """The fixed part, in stored order, which is also the order in which the reader compares: first what
    tells another configuration, then what tells another record."""

    magic: bytes
    version: int
    identity: bytes
    boundary: int
    page_hash: bytes
    header_length: int
    sections: int
    marks: int
    window_length: int
    c4_length: int
    indexer_length: int
    kv_chain: bytes


_FIELDS = struct.Struct("<8sQ16sQ32sQQQQQQ16s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = _FIELDS.size
_CHECKSUM_END = _CHECKSUM_AT + _CHECKSUM.size
_PAGE_HASH = re.compile("[0-9a-f]{64}")


def seal(
    records: Mapping[str, np.ndarray],
    layout: RecordLayout,
    *,
    identity: bytes,
    boundary: int,
    page_hash: str,
    marks: Sequence[bytes],
) -> None:
    """Write the host header of a record, in place.

    Args:
        records: pool name -> uint8 ``[record_bytes]``, rows and device checksums already there;
            nothing may write to them meanwhile.
        layout: geometry of the records.
        identity: 16 bytes that differ where two servers' bytes are not interchangeable; the layout's
            digest is a part of it.
        boundary: P in tokens, a multiple of the page size.
        page_hash: storage key of the page that ends at P, 64 lower-case hex digits.
        marks: the KV chain's values at `mark_pages(P / PAGE_SIZE)`.

    Raises:
        ValueError: an argument that is none of this. The records are untouched then.
    """
    fields = _expected(layout, identity, boundary, page_hash, marks[-1] if marks else b"")
    if len(marks) != fields.marks or any(len(mark) != KV_DIGEST_BYTES for mark in marks):
        raise ValueError(
            f"a record at {boundary} keeps {fields.marks} marks of {KV_DIGEST_BYTES} bytes"
        )
    if not _right_length(records, layout):
        raise ValueError("the records are not of the layout's length")
    window = records[WINDOW_POOL]
    window[: layout.host_header_bytes] = 0
    _FIELDS.pack_into(window, 0, *fields)
    hashes = _section_hashes(window, layout)
    for section in _sections(layout):
        hashes[section.index] = _section_hash(records, section)
    _marks(window, layout)[: len(marks)] = [np.frombuffer(mark, np.uint8) for mark in marks]
    # Last: what is interrupted before it is no record.
    _CHECKSUM.pack_into(window, _CHECKSUM_AT, _header_checksum(window, layout))


def check(
    records: Mapping[str, np.ndarray],
    layout: RecordLayout,
    *,
    identity: bytes,
    boundary: int,
    page_hash: str,
) -> Seal:
    """Verify that bytes from storage are the record at `boundary` of these pages, whole.

    Every bit of the header and of the sections is covered. The arguments are those of `seal`; the
    records are only read, and nothing may write to them meanwhile.

    Returns:
        What the record says about the KV it was captured over.

    Raises:
        RecordRefused: anything else than that record, with the reason. A reason that names a field is
            given only where the header's checksum is right: somebody wrote it so.
        ValueError: `identity`, `boundary` or `page_hash` are none.
    """
    wanted = _expected(layout, identity, boundary, page_hash, START)
    if not _right_length(records, layout):
        raise RecordRefused("length")
    window = records[WINDOW_POOL]
    if _CHECKSUM.unpack_from(window, _CHECKSUM_AT)[0] != _header_checksum(window, layout):
        raise RecordRefused("header checksum")
    found = _Fields._make(_FIELDS.unpack_from(window))
    marks = tuple(mark.tobytes() for mark in _marks(window, layout)[: wanted.marks])
    wanted = wanted._replace(kv_chain=marks[-1])
    for name in _Fields._fields:
        if getattr(found, name) != getattr(wanted, name):
            raise RecordRefused(name.replace("_", " "))
    hashes = _section_hashes(window, layout)
    for section in _sections(layout):
        if hashes[section.index] != _section_hash(records, section):
            raise RecordRefused(f"section {section.pool} layer {section.layer}")
    return Seal(boundary, found.kv_chain, marks)


def _expected(
    layout: RecordLayout, identity: bytes, boundary: int, page_hash: str, kv_chain: bytes
) -> _Fields:
    """The fixed part of that record (ValueError if there is no such record)."""
    if len(identity) != IDENTITY_BYTES:
        raise ValueError(f"an identity has {IDENTITY_BYTES} bytes, got {identity!r}")
    if boundary <= 0 or boundary % PAGE_SIZE:
        raise ValueError(f"{boundary} is not a page boundary (multiple of {PAGE_SIZE})")
    if not _PAGE_HASH.fullmatch(page_hash):
        raise ValueError(f"not a page's key (64 hex digits): {page_hash!r}")
    return _Fields(
        magic=MAGIC,
        version=VERSION,
        identity=identity,
        boundary=boundary,
        page_hash=bytes.fromhex(page_hash),
        header_length=layout.header_bytes,
        sections=layout.num_sections,
        marks=len(mark_pages(boundary // PAGE_SIZE)),
        window_length=layout.record_bytes(WINDOW_POOL),
        c4_length=layout.record_bytes(C4_POOL),
        indexer_length=layout.record_bytes(INDEXER_POOL),
        kv_chain=kv_chain,
    )


def _right_length(records: Mapping[str, np.ndarray], layout: RecordLayout) -> bool:
    return all(
        records[pool].dtype == np.uint8 and records[pool].shape == (layout.record_bytes(pool),)
        for pool in POOLS
    )


@functools.lru_cache(maxsize=4)
def _sections(layout: RecordLayout) -> tuple[Section, ...]:
    """All sections, kept: making them takes as long as hashing a third of them."""
    return tuple(section for pool in POOLS for section in layout.sections(pool))


def _section_hash(records: Mapping[str, np.ndarray], section: Section) -> int:
    """xxh3_64 of a section's bytes, where they are."""
    rows = records[section.pool][section.offset : section.offset + section.nbytes]
    return xxhash.xxh3_64_intdigest(rows)


def _section_hashes(window: np.ndarray, layout: RecordLayout) -> np.ndarray:
    """The stored hashes: ``[sections]``, a view."""
    end = HOST_FIXED_BYTES + SECTION_HASH_BYTES * layout.num_sections
    return window[HOST_FIXED_BYTES:end].view("<u8")


def _marks(window: np.ndarray, layout: RecordLayout) -> np.ndarray:
    """The stored marks: uint8 ``[KV_MARKS, KV_DIGEST_BYTES]``, a view."""
    start = HOST_FIXED_BYTES + SECTION_HASH_BYTES * layout.num_sections
    end = start + KV_DIGEST_BYTES * KV_MARKS
    return window[start:end].reshape(KV_MARKS, KV_DIGEST_BYTES)


def _header_checksum(window: np.ndarray, layout: RecordLayout) -> int:
    """xxh3_64 of the whole header, the checksum's own field taken as zero."""
    hasher = xxhash.xxh3_64(window[:_CHECKSUM_AT])
    hasher.update(bytes(_CHECKSUM.size))
    hasher.update(window[_CHECKSUM_END : layout.header_bytes])
    return hasher.intdigest()
