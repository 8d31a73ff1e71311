"""Ranks: what the ranks that hold the same KV decide together.

With tensor parallelism every rank has the whole latent KV, compressor and state of a request, captures
and restores its own copy, and takes every decision by itself, from host integers that are equal
everywhere. What is not known alike: whether a restore came out right, which is a fact of one rank's
bytes (the debug checks); whether a rank has the truth that it should have, which would be a bug; and
what the IO threads of storage found out (storage.py). There the ranks ask each other and take the worst
answer, because a request that goes on here and ends there leaves ranks with different batches, which
hangs the server.

Every rank must come to a collective, and in the same order. So a call here may depend on what is equal
on all ranks only: the requests of a batch and their prefixes, never on what this rank found out.

Scheduler thread only, as SGLang's own collectives on these groups are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_bitexact_hicache.tree import BxCache

Reduce = Callable[[torch.Tensor, Any], None]
"""All-reduce of a host tensor in place, with a torch.distributed.ReduceOp."""


class Ranks:
    """The ranks of one scheduler's attention group.

    Args:
        reduce: None where there is one rank only.
        note: told of decisions; see `note`.
    """

    def __init__(
        self, reduce: Reduce | None = None, note: Callable[..., None] = lambda *_args: None
    ) -> None:
        self._reduce = reduce
        self._note = note

    @classmethod
    def of(cls, cache: BxCache) -> Ranks:
        """The ranks that SGLang keeps this cache in lockstep with."""
        from sglang.srt.utils import rank_consensus_checker

        several = cache.tp_world_size > 1
        return cls(
            cache._all_reduce_attn_groups if several else None, rank_consensus_checker.assert_same
        )

    def all_of(self, flags: Sequence[bool]) -> list[bool]:
        """Per flag, whether it is set on every rank. As many flags on every rank; none: no call."""
        if self._reduce is None or not flags:
            return list(flags)
        return [bool(flag) for flag in self.least([int(flag) for flag in flags])]

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Per number (64 bits, signed), the least of the ranks'. As many of them on every rank, at least
        one."""
        if self._reduce is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._reduce(tensor, torch.distributed.ReduceOp.MIN)
        return tensor.tolist()

    def require_same(self, numbers: Mapping[str, int]) -> None:
        """Compare numbers (64 bits, signed) with those of the other ranks: the same names in the same
        order on each.

        Raises:
            ValueError: on every rank, with the names of those that are not equal.
        """
        if self._reduce is None or not numbers:
            return
        least = self.least([n for value in numbers.values() for n in (value, ~value)])
        # The least of ~value is the complement of the largest value.
        pairs = zip(numbers.items(), least[::2], least[1::2], strict=True)
        wrong = [f"{name} (here {here})" for (name, here), low, high in pairs if low != ~high]
        if wrong:
            raise ValueError(
                f"bit-exact HiCache: the ranks of this server differ in {', '.join(wrong)}; start all "
                "of them with the same flags and environment"
            )

    def note(self, message: str, *values: Any) -> None:
        """Let SGLang's rank consensus checker (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER) compare a decision,
        `message` formatted with `values`. It ends a server whose ranks decide differently; off, it
        costs a call."""
        self._note(f"bit-exact HiCache: {message}", *values)
