"""Which boundaries are worth a host slot, and which slot goes first: policy, apart from mechanism.

Five kinds of reuse point (`Kind`):

* the grid: every `stride`-th page, the memory knob `--hicache-swa-offload-page-stride`;
* the two prompt points, whatever the stride: the last whole page of the prompt, and the page before
  the last token (with bigram keys, before the last two). A repeat of a prompt of exactly N pages can hit
  at most N - 1 pages, because at least one token must be computed; a longer prompt that shares it can
  hit N;
* decode: the newest two pages that a running request completed by decoding. Two, because under the
  overlap schedule (or with a stop string) the newest may belong to a step that is thrown away;
* junctions: the deepest page up to which a prompt followed a cached path whose truth was missing
  there. What one prompt left, others will leave too: a shared system prompt, a document;
* fill: any other page of a prefill, but only into slots that nothing better has a use for. The slots
  are the memory that the stride bought; an empty one helps nobody.

Pure Python. Scheduler thread; functions of token counts only, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum, IntEnum
from typing import NamedTuple

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.geometry import boundaries


class Kind(Enum):
    """Why a boundary is captured; the values are what the command line takes."""

    GRID = "grid"
    PROMPT = "prompt"
    DECODE = "decode"
    JUNCTION = "junction"
    FILL = "fill"


ALL_KINDS = frozenset(Kind)
DEFAULT_KINDS = ALL_KINDS

NEWEST_DECODE = 2
"""Decode boundaries of a running request that are kept even off the grid."""


class Keep(IntEnum):
    """How dearly a slot is held; EVICTION_ORDER says what that means."""

    FILL = 0
    """Captured because there was room; nobody has used it."""
    GRID = 1
    """On the grid; nobody has used it."""
    PASSED = 2
    """Its request, or the one request that used it, has a deeper point: only an edit comes back."""
    POINT = 3
    """Where a conversation would go on: the deepest point that a request left."""
    USED = 4
    """Where prompts are known to part, or what the hits of several requests used."""
    LIVE = 5
    """One of the newest decode pages of a request that still runs."""


EVICTION_ORDER: tuple[tuple[Keep, ...], ...] = (
    (Keep.FILL,),
    (Keep.GRID,),
    (Keep.PASSED, Keep.POINT, Keep.USED),
    (Keep.LIVE,),
)
"""The first group that has a slot to give gives it. Within a group goes the slot that was unused for
longest, in proportion to its worth (the pages that would be computed again without it) and to its class's
WEIGHT: a popular stem is not lost to a crowd of answers, nor a long conversation to short ones."""

WEIGHT: dict[Keep, float] = dict.fromkeys(Keep, 1.0) | {Keep.PASSED: 1 / 8, Keep.USED: 8.0}
"""Chosen by measurement (docs/reuse.md)."""


class ReusePoint(NamedTuple):
    """A boundary (tokens) to capture, and how dearly its slot is held."""

    boundary: int
    keep: Keep


def prompt_points(prompt_len: int, unit: int = PAGE_SIZE, *, key_tokens: int = 1) -> frozenset[int]:
    """The boundaries (tokens) at which the same prompt, or one that extends it, would resume, where
    every multiple of `unit` is one.

    `key_tokens`: that an element of the tree's keys spans. With 2 (bigrams) a page is found by whoever
    shares one token more than it has, so that a repeat, of which the last token is always computed,
    resumes before the last two.
    """
    points = {(prompt_len - key_tokens) // unit * unit, prompt_len // unit * unit}
    return frozenset(p for p in points if p > 0)


def prefill_points(
    start: int,
    end: int,
    prompt_len: int,
    stride: int,
    *,
    junction: int = 0,
    parts: bool = False,
    kinds: Container[Kind] = DEFAULT_KINDS,
    unit: int = PAGE_SIZE,
    key_tokens: int = 1,
) -> list[ReusePoint]:
    """Boundaries to capture of a chunk [start, end) of a prompt of `prompt_len` tokens, ascending.

    Args:
        stride: of the grid, in pages and at least 1 (refused at startup otherwise).
        junction: the request's junction in tokens, 0 for none.
        parts: whether the cached path goes on beyond the junction, without this prompt.
        kinds: the kinds of reuse point that are switched on.
        unit: tokens of which every boundary has to be a multiple: a page, or more (aligned.py).
        key_tokens: that an element of the tree's keys spans (`prompt_points`).
    """
    if stride < 1:
        raise ValueError(f"stride must be at least 1 page, got {stride}")
    wanted: frozenset[int] = frozenset()
    if Kind.PROMPT in kinds:
        wanted = prompt_points(prompt_len, unit, key_tokens=key_tokens)
    points = []
    for boundary in boundaries(start, end):
        if boundary % unit:
            continue
        if Kind.JUNCTION in kinds and boundary == junction:
            points.append(ReusePoint(boundary, Keep.USED if parts else Keep.POINT))
        elif boundary in wanted:
            points.append(ReusePoint(boundary, Keep.POINT))
        elif Kind.GRID in kinds and on_grid(boundary, stride):
            points.append(ReusePoint(boundary, Keep.GRID))
        elif Kind.FILL in kinds:
            points.append(ReusePoint(boundary, Keep.FILL))
    return points


def on_grid(boundary: int, stride: int) -> bool:
    """Whether a boundary (tokens) is one of every `stride` pages."""
    return boundary % (stride * PAGE_SIZE) == 0


def most_wanted(points: list[ReusePoint], room: int) -> list[ReusePoint]:
    """The `room` points that are held most dearly, deepest first among equals; ascending again.

    Deepest, because of two truths on one path the deeper one saves more.
    """
    return sorted(dearest_first(points)[: max(room, 0)])


def dearest_first(points: list[ReusePoint]) -> list[ReusePoint]:
    """The points in the order in which they take slots, so that none waits behind a lesser one of its
    own forward, whose reserved slot nothing can displace."""
    return sorted(points, key=lambda p: (p.keep, p.boundary), reverse=True)
