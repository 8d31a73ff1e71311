"""The device checksum of a section: position-dependent, so that moved rows do not pass for right ones.

A section's bytes are read as signed 32-bit words and summed with one odd 64-bit weight per word
position, modulo 2**64. One changed word always changes the sum (an odd weight is invertible); two
rows swapped, or a window shifted by a row, meet other weights. Cheap on any device, in any order of
summation, and exact: integer addition does not depend on how a kernel splits the work.
"""

from __future__ import annotations

import functools

import numpy as np
import torch


def _weights(words: int) -> np.ndarray:
    """Odd 64-bit weights of word positions 0..words-1 (the splitmix64 finaliser of the position)."""
    with np.errstate(over="ignore"):
        x = (np.arange(1, words + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@functools.lru_cache(maxsize=16)
def _weights_on(words: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_weights(words).view(np.int64)).to(device)


def section_weights(nbytes: int, device: torch.device) -> torch.Tensor:
    """Weights of a section of `nbytes`: int64 ``[words]`` on the device, where `prepare` put them."""
    return _weights_on(nbytes // 4, device)


def prepare(nbytes: int, device: torch.device) -> None:
    """Put the weights for sections of `nbytes` on the device. At startup: it synchronises, which the
    first checksum of that size would otherwise do, on the forward path."""
    section_weights(nbytes, device)


def section_checksums(rows: torch.Tensor) -> torch.Tensor:
    """Checksums of `n` sections.

    Args:
        rows: ``[n, rows, row]`` of any dtype whose rows are whole 4-byte words, in position order.

    Returns:
        int64 ``[n]`` on the same device, queued on the current stream.
    """
    n = rows.shape[0]
    words = rows.contiguous().view(n, -1).view(torch.int32)
    return (words.to(torch.int64) * _weights_on(words.shape[1], rows.device)).sum(dim=1)
