"""The device checksum of a section: position-dependent, so that moved rows do not pass for right ones.

A section's bytes are read as signed 32-bit words and summed, modulo 2**64, with one odd 32-bit weight per
word position, no two alike. One changed word always changes the sum: the product of a difference below
2**32 and of an odd weight is no multiple of 2**64. Two words swapped, or a window shifted by a row, meet
other weights. Exact in any order of summation, and a kernel computes the weights as it goes (kernels.py):
reading them from a table would be more bytes than the rows.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

LINE = 32
"""Words that share a hash."""
MULTIPLIER = 0x9E3779B1
SECOND_MULTIPLIER = 0x85EBCA77
SHIFT = 15
"""Of a line's hash."""
COLUMN_MULTIPLIER = 0xC2B2AE35
"""What a word's column in its line is multiplied with, before the line's hash is xored to it."""


def weights(words: int) -> np.ndarray:
    """Weights of word positions 0..words-1: int32, odd."""
    word: np.ndarray = np.arange(words, dtype=np.uint32)
    x = (word // np.uint32(LINE) + np.uint32(1)) * np.uint32(MULTIPLIER)
    x = (x ^ (x >> np.uint32(SHIFT))) * np.uint32(SECOND_MULTIPLIER)
    column = word % np.uint32(LINE) * np.uint32(COLUMN_MULTIPLIER)
    return (x ^ (x >> np.uint32(SHIFT)) ^ column | np.uint32(1)).view(np.int32)


@functools.lru_cache(maxsize=16)
def _weights_on(words: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights(words)).to(device).to(torch.int64)


def section_checksums(rows: torch.Tensor) -> torch.Tensor:
    """Checksums of `n` sections, in plain torch.

    Args:
        rows: ``[n, rows, row]`` of any dtype whose rows are whole 4-byte words, in position order.

    Returns:
        int64 ``[n]`` on the same device, queued on the current stream (the first use of a size on a
        device copies its weights there, which synchronises).
    """
    n = rows.shape[0]
    words = rows.contiguous().view(n, -1).view(torch.int32)
    return (words.to(torch.int64) * _weights_on(words.shape[1], rows.device)).sum(dim=1)
