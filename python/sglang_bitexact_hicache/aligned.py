"""Aligned prefill, as pure rules over token counts: where chunks end, and what of them is kept.

With this option a prompt is computed in the chunks [0, C), [C, 2C), ... whatever was reused of it and
whoever else is served, C being the chunk size; only the last chunk is shorter. So a hit at a multiple
of C leaves the same chunks to compute as a cold run has, and a kernel whose bits depend on where a
chunk begins and ends gives both the same.

That holds only if the cache gives out nothing else. What lies after a prompt's last multiple of C
was computed in a chunk that ended where that prompt ended; a longer prompt would read those pages
in the place of its own. So they never enter the tree, and neither do decoded pages. docs/design.md
has the argument.

Pure Python. Scheduler thread; functions of token counts only, so all ranks agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_bitexact_hicache.constants import PAGE_SIZE


@dataclass(frozen=True)
class AlignedPrefill:
    """The rules for one chunk size.

    Args:
        chunk: tokens of a whole chunk, a multiple of the page (refused at startup otherwise).
    """

    chunk: int

    def __post_init__(self) -> None:
        if self.chunk <= 0 or self.chunk % PAGE_SIZE:
            raise ValueError(f"{self.chunk} tokens are not a whole number of pages")

    def chunk_end(self, start: int, length: int) -> int:
        """Where the chunk that begins at `start` ends, of a prompt of `length` tokens."""
        return min(length, self.whole(start) + self.chunk)

    def whole(self, tokens: int) -> int:
        """The part of `tokens` prefilled ones that the cache may keep, and so the deepest hit."""
        return tokens - tokens % self.chunk

    def spacing(self, stride: int) -> int:
        """Pages between two boundaries that are both reusable and on a grid of `stride` pages."""
        return math.lcm(stride, self.chunk // PAGE_SIZE)
