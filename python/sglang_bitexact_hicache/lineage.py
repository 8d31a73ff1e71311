"""Which computation a page's bytes come from: ids, copies of nodes, rows of requests.

A *lineage* is a fresh integer for one page of one request, minted when the forward that completes
the page is launched. Two pages with the same lineage hold the same bytes, whatever tier they lie in.
With each id goes its *parent*: the lineage of the page before it in the row of the request that
computed it, that is, the page it really attended to. A run of pages hangs together when each page's
parent is the id of the page before it; only such a run is what one request computed, or continued
from.

Identity is attached to the copies that a radix-tree node has (device, host), never to physical page
numbers: those are device tensors, and reading one would synchronise the scheduler with the device.

0 (UNKNOWN) is no identity: bytes from a path that we do not follow. 1 (ROOT) is the parent of every
first page. Neither is counted. Only equality of ids matters, so ranks need not agree on them.

Pure Python. Scheduler thread only. Ids, not bytes: this module never touches memory of a pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

UNKNOWN = 0
ROOT = 1


class LineageError(RuntimeError):
    """Identity bookkeeping contradicts itself: a bug of ours."""


class Lineages:
    """Mints ids and counts who refers to them; `on_death(id)` is called when nobody does any more.

    References come from node copies (one per page that carries the id) and from rows of running
    requests. A fresh id is dead until it is held.
    """

    def __init__(self, on_death: Callable[[int], None] | None = None) -> None:
        self._next = ROOT + 1
        self._refs: dict[int, int] = {}
        self._on_death = on_death

    def mint(self) -> int:
        """A new id, never used before and never again."""
        fresh = self._next
        self._next += 1
        return fresh

    def hold(self, ids: Iterable[int]) -> None:
        """One more reference to each id; UNKNOWN is skipped."""
        refs = self._refs
        for lineage in ids:
            if lineage != UNKNOWN:
                refs[lineage] = refs.get(lineage, 0) + 1

    def release(self, ids: Iterable[int]) -> None:
        """One reference less to each id; UNKNOWN is skipped. The last one reports the death.

        Raises LineageError for an id that nobody holds.
        """
        refs = self._refs
        for lineage in ids:
            if lineage == UNKNOWN:
                continue
            left = refs.get(lineage, 0) - 1
            if left > 0:
                refs[lineage] = left
            elif left == 0:
                del refs[lineage]
                if self._on_death is not None:
                    self._on_death(lineage)
            else:
                raise LineageError(f"lineage {lineage} released more often than held")

    def alive(self, lineage: int) -> bool:
        """Whether a node copy or a running row refers to the id."""
        return lineage in self._refs

    def references(self) -> dict[int, int]:
        """A copy of the reference counts, for integrity checks."""
        return dict(self._refs)

    def reset(self) -> None:
        """Forget every reference without reporting deaths (a flush). Ids are still never reused."""
        self._refs.clear()


class Copy:
    """Identity of one copy (device or host) of a node's pages. Immutable, so copies are shared.

    `ids[i]` and `parents[i]` belong to the node's page i. Cached: `first_parent`, `last_id`, and
    `intact`, the number of leading pages that hang together.
    """

    __slots__ = ("first_parent", "ids", "intact", "last_id", "parents")

    def __init__(self, ids: tuple[int, ...], parents: tuple[int, ...]) -> None:
        if not ids or len(ids) != len(parents):
            raise LineageError(f"{len(ids)} ids and {len(parents)} parents are not a copy")
        self.ids = ids
        self.parents = parents
        self.first_parent = parents[0]
        self.last_id = ids[-1]
        self.intact = _leading_chain(ids, parents)

    @classmethod
    def unknown(cls, pages: int) -> Copy:
        """A copy of `pages` pages without identity: never a hit."""
        blank = (UNKNOWN,) * pages
        return cls(blank, blank)

    @property
    def whole(self) -> bool:
        """Whether all pages hang together."""
        return self.intact == len(self.ids)

    def cut(self, pages: int) -> tuple[Copy, Copy]:
        """The identity of the first `pages` pages and of the rest (a node split)."""
        return (
            Copy(self.ids[:pages], self.parents[:pages]),
            Copy(self.ids[pages:], self.parents[pages:]),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Copy(ids={self.ids}, parents={self.parents}, intact={self.intact})"


def _leading_chain(ids: tuple[int, ...], parents: tuple[int, ...]) -> int:
    if ids[0] == UNKNOWN:
        return 0
    for page in range(1, len(ids)):
        if ids[page] == UNKNOWN or parents[page] != ids[page - 1]:
            return page
    return len(ids)


class NodeCopies(NamedTuple):
    """The identities of a node's copies; None where the node has no such copy."""

    dev: Copy | None
    host: Copy | None


_NO_COPIES = NodeCopies(None, None)


class CopyTable:
    """node id -> NodeCopies. A node without any copy has no entry.

    Every method that changes an entry changes the reference counts with it; the new identity is
    counted before the old one is released, because the two often share ids.
    """

    def __init__(self, lineages: Lineages) -> None:
        self._lineages = lineages
        self._nodes: dict[int, NodeCopies] = {}

    def of(self, node_id: int) -> NodeCopies:
        """The node's copies; both None for a node that is not in the table."""
        return self._nodes.get(node_id, _NO_COPIES)

    def set_device(self, node_id: int, copy: Copy | None) -> None:
        """The node's device rows are now these pages; None: the node left the device."""
        old = self.of(node_id)
        self._store(node_id, NodeCopies(copy, old.host))
        self._count(copy, old.dev)

    def set_host(self, node_id: int, copy: Copy | None) -> None:
        """The node's host rows are now these pages; None: the node left the host."""
        old = self.of(node_id)
        self._store(node_id, NodeCopies(old.dev, copy))
        self._count(copy, old.host)

    def relabel(self, node_id: int, copies: NodeCopies) -> None:
        """The node's copies have these identities from now on; the bytes stay (healing.py)."""
        self.set_device(node_id, copies.dev)
        self.set_host(node_id, copies.host)

    def backed_up(self, node_id: int, pages: int) -> None:
        """The host rows are copied from the device rows: the same identity."""
        self.set_host(node_id, self.of(node_id).dev or Copy.unknown(pages))

    def loaded_back(self, node_id: int, pages: int) -> None:
        """The device rows are copied from the host rows: the same identity."""
        self.set_device(node_id, self.of(node_id).host or Copy.unknown(pages))

    def split(self, parent_id: int, child_id: int, pages: int) -> None:
        """`child` gave its first `pages` pages to the new node `parent`. Counts do not change."""
        halves = [(None, None) if copy is None else copy.cut(pages) for copy in self.of(child_id)]
        self._store(parent_id, NodeCopies(halves[0][0], halves[1][0]))
        self._store(child_id, NodeCopies(halves[0][1], halves[1][1]))

    def clear(self) -> None:
        """Forget every entry. The caller resets the reference counts (a flush)."""
        self._nodes.clear()

    def items(self) -> Iterator[tuple[int, NodeCopies]]:
        """Every node that has a copy."""
        return iter(self._nodes.items())

    def __len__(self) -> int:
        return len(self._nodes)

    def count_references(self) -> Counter[int]:
        """The references that the entries should have, for integrity checks."""
        held: Counter[int] = Counter()
        for copies in self._nodes.values():
            for copy in copies:
                if copy is not None:
                    held.update(lineage for lineage in copy.ids if lineage != UNKNOWN)
        return held

    def _store(self, node_id: int, copies: NodeCopies) -> None:
        if copies == _NO_COPIES:
            self._nodes.pop(node_id, None)
        else:
            self._nodes[node_id] = copies

    def _count(self, new: Copy | None, old: Copy | None) -> None:
        if new is old:
            return
        if new is not None:
            self._lineages.hold(new.ids)
        if old is not None:
            self._lineages.release(old.ids)


class Row:
    """Identity of the pages that a running request computed itself.

    Pages [0, base) are the tree's; `tail` is the lineage of page base - 1 (ROOT when base is 0,
    UNKNOWN when the tree does not know). `ids` / `parents` are of the request's own complete pages,
    from page `base` on. A partial page has no id.
    """

    __slots__ = ("_lineages", "base", "ids", "parents", "tail")

    def __init__(self, lineages: Lineages, tail: int, base: int) -> None:
        self._lineages = lineages
        self.tail = tail
        self.base = base
        self.ids: list[int] = []
        self.parents: list[int] = []

    @property
    def pages(self) -> int:
        """Complete pages of the row, the tree's included."""
        return self.base + len(self.ids)

    def upto(self, pages: int) -> None:
        """The forward that completes page `pages` - 1 is launched: mint what is missing.

        The parent is the id before it in the row at this moment, because that is what the forward
        reads, whatever a later checkpoint makes of the row.
        """
        while self.pages < pages:
            parent = self.ids[-1] if self.ids else self.tail
            fresh = self._lineages.mint()
            self._lineages.hold((fresh,))
            self.ids.append(fresh)
            self.parents.append(parent)

    def id_of(self, pages: int) -> int:
        """The id of the page that ends at boundary `pages`; UNKNOWN if it is not the row's own."""
        own = pages - 1 - self.base
        return self.ids[own] if 0 <= own < len(self.ids) else UNKNOWN

    def take(self, first: int, pages: int) -> Copy:
        """Identity of pages [first, first + pages), for a node that adopts them.

        Pages that are not the row's own get UNKNOWN.
        """
        own = [page - self.base for page in range(first, first + pages)]
        known = [0 <= page < len(self.ids) for page in own]
        return Copy(
            tuple(self.ids[p] if ok else UNKNOWN for p, ok in zip(own, known, strict=True)),
            tuple(self.parents[p] if ok else UNKNOWN for p, ok in zip(own, known, strict=True)),
        )

    def rebase(self, tail: int, base: int) -> None:
        """A checkpoint: the row now reads the tree's pages [0, base), the last of which is `tail`.

        Ids of the row's own pages below `base` are dropped: the tree holds those it adopted, the
        others (deduplicated pages) die. Pages after it that were launched before the checkpoint read
        the row as it was: where their parent is not `tail` they get fresh identities that hang on it,
        and their truth dies (healing.py, H1).
        """
        if base < self.base:
            raise LineageError(f"row went back from page {self.base} to {base}")
        gone = self.ids[: base - self.base]
        del self.ids[: len(gone)]
        del self.parents[: len(gone)]
        self.tail = tail
        self.base = base
        if self.ids and self.parents[0] != tail and tail != UNKNOWN:
            gone += self.ids
            self.ids = [self._lineages.mint() for _ in self.ids]
            self.parents = [tail, *self.ids[:-1]]
            self._lineages.hold(self.ids)
        self._lineages.release(gone)

    def close(self) -> None:
        """The request let go of its pages. Ids that the tree did not adopt die."""
        gone, self.ids, self.parents = self.ids, [], []
        self._lineages.release(gone)


class RowTable:
    """request -> Row, by identity of the request object. Nothing is stored on the request.

    References are strong on purpose: a row lives exactly from the moment its request is given a KV
    row to the moment it gives it back, and a weak table would end rows at a time that depends on
    the garbage collector, so differently on each rank.
    """

    def __init__(self, lineages: Lineages) -> None:
        self._lineages = lineages
        self._rows: dict[int, tuple[object, Row]] = {}

    def open(self, request: object, tail: int, base: int) -> Row:
        """Start the request's row; a row left over from before a retraction is closed first."""
        self.drop(request)
        row = Row(self._lineages, tail, base)
        self._rows[id(request)] = (request, row)
        return row

    def get(self, request: object) -> Row | None:
        """The request's row, or None where none was opened (warm-up, direct inserts)."""
        entry = self._rows.get(id(request))
        return None if entry is None else entry[1]

    def drop(self, request: object) -> None:
        """Close and forget the request's row; does nothing where there is none."""
        entry = self._rows.pop(id(request), None)
        if entry is not None:
            entry[1].close()

    def clear(self) -> None:
        """Forget every row. The caller resets the reference counts (a flush)."""
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def count_references(self) -> Counter[int]:
        """The references that the rows should have, for integrity checks."""
        return Counter(lineage for _, row in self._rows.values() for lineage in row.ids)
