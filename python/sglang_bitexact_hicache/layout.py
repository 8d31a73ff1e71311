"""RecordLayout: what a captured boundary looks like in memory, the single source of geometry.

Capture, restore, storage, sizing, checksums and the layout digest all read offsets from here, so the
writer and the reader cannot disagree. Pure Python: no SGLang, no torch. Any thread.

A boundary is three records that share one slot, one behind the other, each contiguous, layer-major,
rows in POSITION order:

* ``swa_window``: a header, then for every layer 128 ring rows (with fp8 rows two planes of them, nope
  and then rope);
* ``c4_state``: for every ratio-4 layer 4 rows of compressor overlap state;
* ``c4_indexer_state``: for every ratio-4 layer 4 rows of indexer overlap state.

So a storage page is one pointer into a slot, and a slot moves between host and device with one copy.

The header of the window record starts with ``RecordLayout.host_header_bytes`` that only the host
writes (the storage part, record.py: what the record is, a hash of each section, marks of the KV
chain), followed by one 8-byte device checksum per section, which the capture writes on the device
together with the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_bitexact_hicache.constants import C4_RATIO, STATE_ROWS, WINDOW

HOST_FIXED_BYTES = 256
"""First part of the header bytes that the host alone writes: the fields of record.py, and room."""

SECTION_HASH_BYTES = 8
"""The hash of one section's stored bytes in that header, a little-endian xxh3_64."""

KV_MARKS = 64
"""Most pages at which a record keeps the value of the KV chain (kv_chain.py)."""

KV_DIGEST_BYTES = 16
"""The digest of a page of KV, and a value of the KV chain."""

LAYOUT_VERSION = 4
"""Of what a record holds, and of the checksums in it."""

CHECKSUM_BYTES = 8
"""One section's device checksum, a little-endian int64."""

ALIGNMENT = 256
"""Each record starts and each header ends at a multiple of this."""

WINDOW_POOL = "swa_window"
C4_POOL = "c4_state"
INDEXER_POOL = "c4_indexer_state"
POOLS = (WINDOW_POOL, C4_POOL, INDEXER_POOL)
"""The three pools, primary first: it alone allocates and frees, the others share its slots."""


def _align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Section:
    """One layer's rows inside one record, or one plane of them.

    `offset` is in bytes from the start of the record; rows are `rows` times `row_bytes`, in position
    order; `index` numbers the section among all of the record's checksums; `plane` is 1 for the rope
    rows of an fp8 window, else 0.
    """

    pool: str
    layer: int
    offset: int
    rows: int
    row_bytes: int
    index: int
    plane: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the section's rows."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class RecordLayout:
    """Geometry of the records of one pipeline stage.

    Attributes:
        layers: absolute ids of the stage's layers, ascending.
        ratios: compression ratio of each of those layers (0, 4 or 128).
        window_row_bytes: bytes of one ring row (bf16: head_dim * 2; fp8: of its nope plane).
        c4_row_bytes, indexer_row_bytes: bytes of one state row (both kv and score halves).
        window_dtype, state_dtype: names of the dtypes, part of the identity.
        rope_row_bytes: bytes of one row of the window's rope plane; 0 where a window has one plane.
        draft_layers: how many of the layers, the last ones, are a draft's (of ratio 0, numbered behind
            the target's), which keeps a ring of its own for the same rows.

    The ring size is NOT part of it: host bytes are in position order, so servers with different
    rings share records.
    """

    layers: tuple[int, ...]
    ratios: tuple[int, ...]
    window_row_bytes: int
    c4_row_bytes: int
    indexer_row_bytes: int
    window_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    rope_row_bytes: int = 0
    draft_layers: int = 0

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.ratios):
            raise ValueError("a record layout needs one ratio for each of its layers")
        if any(b <= a for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise ValueError(f"layers must be ascending: {self.layers}")
        if not 0 <= self.draft_layers < len(self.layers):
            raise ValueError(
                f"{self.draft_layers} of {len(self.layers)} layers cannot be a draft's"
            )
        if any(self.ratios[len(self.ratios) - self.draft_layers :]):
            raise ValueError(f"a draft's layers keep a window only, got ratios {self.ratios}")
        for name in ("window_row_bytes", "c4_row_bytes", "indexer_row_bytes"):
            n = getattr(self, name)
            # Checksums are taken over 4-byte words.
            if n <= 0 or n % 4:
                raise ValueError(f"{name} must be a positive multiple of 4, got {n}")
        if self.rope_row_bytes < 0 or self.rope_row_bytes % 4:
            raise ValueError(f"rope_row_bytes must be a multiple of 4, got {self.rope_row_bytes}")

    @cached_property
    def c4_layers(self) -> tuple[int, ...]:
        """Absolute ids of the layers that keep C4 and indexer state."""
        return tuple(
            layer
            for layer, ratio in zip(self.layers, self.ratios, strict=True)
            if ratio == C4_RATIO
        )

    @cached_property
    def num_sections(self) -> int:
        """Sections, and so checksums, of one boundary over all three records."""
        return len(self.layers) * len(self.window_planes) + 2 * len(self.c4_layers)

    @cached_property
    def window_planes(self) -> tuple[int, ...]:
        """Bytes of a window row in each of its planes."""
        return (self.window_row_bytes, *filter(None, [self.rope_row_bytes]))

    @cached_property
    def host_header_bytes(self) -> int:
        """Header bytes that the host alone writes; the device copy of a record starts after them."""
        hashes = SECTION_HASH_BYTES * self.num_sections
        return _align(HOST_FIXED_BYTES + hashes + KV_DIGEST_BYTES * KV_MARKS)

    @cached_property
    def header_bytes(self) -> int:
        """Bytes before the first row of the window record."""
        return _align(self.host_header_bytes + CHECKSUM_BYTES * self.num_sections)

    def record_bytes(self, pool: str) -> int:
        """Bytes of one slot of a pool, a multiple of the alignment (0 if the stage has no such rows)."""
        if pool == WINDOW_POOL:
            return _align(self.header_bytes + len(self.layers) * WINDOW * sum(self.window_planes))
        return _align(len(self.c4_layers) * STATE_ROWS * sum(self._planes(pool)))

    @cached_property
    def slot_bytes(self) -> int:
        """Host bytes of one boundary over all three pools."""
        return sum(self.record_bytes(pool) for pool in POOLS)

    @cached_property
    def device_bytes(self) -> int:
        """Bytes of a slot that move between host and device: all but the header that the host owns."""
        return self.slot_bytes - self.host_header_bytes

    def record_offset(self, pool: str) -> int:
        """Where a pool's record starts in a slot, in bytes."""
        return sum(self.record_bytes(before) for before in POOLS[: POOLS.index(pool)])

    def device_offset(self, section: Section) -> int:
        """Where a section starts in the part of a slot that moves, in bytes."""
        return self.record_offset(section.pool) + section.offset - self.host_header_bytes

    def sections(self, pool: str) -> tuple[Section, ...]:
        """The sections of a pool's record, in layer order."""
        return tuple(self._sections(pool))

    def _sections(self, pool: str) -> Iterator[Section]:
        window = pool == WINDOW_POOL
        layers: Sequence[int] = self.layers if window else self.c4_layers
        rows = WINDOW if window else STATE_ROWS
        offset = self.header_bytes if window else 0
        windows = len(self.layers) * len(self.window_planes)
        index = {WINDOW_POOL: 0, C4_POOL: windows, INDEXER_POOL: windows + len(self.c4_layers)}[
            pool
        ]
        for layer in layers:
            for plane, row_bytes in enumerate(self._planes(pool)):
                yield Section(pool, layer, offset, rows, row_bytes, index, plane)
                offset += rows * row_bytes
                index += 1

    def _planes(self, pool: str) -> tuple[int, ...]:
        return {
            WINDOW_POOL: self.window_planes,
            C4_POOL: (self.c4_row_bytes,),
            INDEXER_POOL: (self.indexer_row_bytes,),
        }[pool]

    def digest(self) -> str:
        """16 hex digits that differ whenever two layouts' bytes are not interchangeable."""
        text = repr(
            (
                LAYOUT_VERSION,
                self.layers,
                self.ratios,
                self.window_row_bytes,
                self.c4_row_bytes,
                self.indexer_row_bytes,
                self.window_dtype,
                self.state_dtype,
                self.rope_row_bytes,
                WINDOW,
                STATE_ROWS,
                *(("draft", self.draft_layers) if self.draft_layers else ()),
            )
        )
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
