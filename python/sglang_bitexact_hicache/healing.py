"""Healing: what a checkpoint makes reachable again, and why that is sound. Pure rules over copies.

A request that follows a cached path beyond its deepest truth computes pages that the tree already
holds. At its checkpoint stock keeps the tree's pages, frees the request's, and makes the request's
row read the tree's from then on. Two things would be lost: what the request adds below was computed
over pages that are gone, so its chain is broken; and the truth that it captured for the kept pages
belongs to pages that are gone.

Both are given back at the checkpoint, without looking at a byte:

H1. *The chain.* Pages whose parent is not the page before them in the tree get fresh identities,
    chained onto the path as it is now (`rehang`). A fresh identity has no truth, so nothing becomes
    a hit by this alone; it only says "these are the bytes that are here, after those". Whatever the
    request computes from now on reads exactly this path, and hangs on it.
H2. *The truth of the last page.* Where the checkpoint ends at the last token that the request has
    launched, the request itself continues from the tree's pages with the window and state that its
    forward left. So that truth, paired with the tree's pages, is the state of a real request: a hit
    there equals that request, continued from right after the checkpoint (claim 2). It moves to the
    identity that the page has in the tree (TruthStore.move). Only on a path that hangs together: an
    identity has one parent, that one has one, and so on to the root, so there the truth belongs to
    one row of pages for ever. Behind a page of unknown identity it could meet other pages later.

Truth of pages before the last one is not moved: the request never stood there with the tree's pages
in its row, so such a pairing would be nobody's state (the claim-2 test finds it). Nor is any truth
moved once another forward of the request has been launched: that one read the request's own pages.

A page with UNKNOWN identity is never given one here: bytes that this process did not compute pair
with no truth (storage proves them by their own means).

Scheduler thread only. O(nodes) a checkpoint; nothing in the ordinary case, where all chains hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sglang_bitexact_hicache.lineage import ROOT, UNKNOWN, Copy, NodeCopies


def rehang(
    path: Iterable[NodeCopies], mint: Callable[[], int]
) -> Iterator[tuple[int, NodeCopies, int]]:
    """The nodes of a path (root first, all on the device) whose device chain has to be mended.

    Yields (position in the path, the node's copies from now on, pages that got a fresh identity). A
    host copy that is the same identity as the device copy, under a parent where both agree too,
    follows it: it holds the same bytes. Any other host copy is left alone, with a chain of its own.
    Stops at the first page whose identity is unknown.
    """
    previous: int = ROOT
    previous_host: int | None = ROOT
    for position, (dev, host) in enumerate(path):
        if dev is None or previous == UNKNOWN:
            return
        hangs = dev.first_parent == previous
        if not (hangs and dev.whole):
            kept = dev.intact if hangs else 0
            if UNKNOWN in dev.ids[kept:]:
                return
            same_bytes = host is dev and previous_host == previous
            fresh = _chained(dev, kept, previous, mint)
            yield position, NodeCopies(fresh, fresh if same_bytes else host), len(dev) - kept
            if same_bytes:
                host = fresh
            dev = fresh
        previous = dev.last_id
        previous_host = None if host is None else host.last_id


def _chained(copy: Copy, kept: int, previous: int, mint: Callable[[], int]) -> Copy:
    """The copy with fresh ids from page `kept` on, every page hanging on the one before it."""
    ids = (*copy.ids[:kept], *(mint() for _ in range(len(copy) - kept)))
    return Copy(ids, (previous, *ids[:-1]))
