"""Which boundaries of a prefill are worth a host slot: policy, apart from mechanism.

Two kinds of boundary are kept in this part:

* the grid: every `stride`-th page, the memory knob `--hicache-swa-offload-page-stride`;
* the two prompt points, whatever the stride: the last whole page of the prompt, and the page before
  the last token. A repeat of a prompt of exactly N pages can hit at most N - 1 pages, because at
  least one token must be computed; a longer prompt that shares it can hit N.

Pure Python. Scheduler thread; a function of token counts only, so all ranks agree.
"""

from __future__ import annotations

from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.geometry import boundaries


def prompt_points(prompt_len: int) -> frozenset[int]:
    """The boundaries (tokens) at which the same prompt, or one that extends it, would resume."""
    points = {(prompt_len - 1) // PAGE_SIZE * PAGE_SIZE, prompt_len // PAGE_SIZE * PAGE_SIZE}
    return frozenset(p for p in points if p > 0)


def prefill_boundaries(start: int, end: int, prompt_len: int, stride: int) -> list[int]:
    """Boundaries to capture of a chunk [start, end) of a prompt of `prompt_len` tokens, ascending.

    `stride` is in pages and at least 1 (refused at startup otherwise).
    """
    if stride < 1:
        raise ValueError(f"stride must be at least 1 page, got {stride}")
    points = prompt_points(prompt_len)
    grid = stride * PAGE_SIZE
    return [p for p in boundaries(start, end) if p % grid == 0 or p in points]
