"""Which page boundary a round of speculative decoding may complete, and whether it did.

A round that starts at the committed length s verifies the tokens at s to s + tokens - 1 and commits 1
to `tokens` of them. After it, and only until the next one, a request's rings hold all that a boundary P
with s < P <= s + tokens needs; P is committed if P <= s + the accepted length. Neither s nor the accepted
length is known to the host when the round is launched: under the overlap schedule the round before is
still in flight. So whatever the round *may* complete is captured behind it as a candidate, and what
becomes of the candidate is decided when the round's result has come:

* committed, if the round started below P and reached it;
* discarded, if it started at P or beyond (an earlier round had completed P), or did not reach P (a later
  one that covers P writes those rows again and brings its own candidate).

Exactly one round completes P, since lengths only grow: of a boundary one candidate at most is committed.

Pure Python: host integers only. Scheduler thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_bitexact_hicache.constants import PAGE_SIZE

Candidate = TypeVar("Candidate")


class RoundError(RuntimeError):
    """A round's result that is not the next one of its request: a bug of ours."""


def covered(committed: int, in_flight: int, tokens: int) -> int | None:
    """The one page boundary that the next round of a request may complete, or None.

    Args:
        committed: the committed length that the host knows.
        in_flight: rounds of the request that were launched and whose results are not in `committed`.
        tokens: the most that a round commits; it commits one at least.
    """
    first = committed + in_flight + 1
    last = committed + (in_flight + 1) * tokens
    boundary = -(-first // PAGE_SIZE) * PAGE_SIZE
    return boundary if boundary <= last else None


@dataclass
class _Round(Generic[Candidate]):
    """A round in flight: when it was launched, what it may complete and what was captured of that."""

    number: int
    boundary: int | None
    candidate: Candidate | None = None


class Rounds(Generic[Candidate]):
    """The rounds in flight of every request.

    Args:
        tokens: that a round verifies, and so the most that it commits.

    Raises:
        ValueError: so many that a round could complete two boundaries.
    """

    def __init__(self, tokens: int) -> None:
        # Two rounds: the one that is launched and the one in flight.
        if not 1 <= 2 * tokens <= PAGE_SIZE:
            raise ValueError(f"a round of {tokens} tokens may complete more than one page")
        self.tokens = tokens
        self._in_flight: dict[Hashable, deque[_Round[Candidate]]] = {}

    def launch(self, request: Hashable, number: int, committed: int) -> int | None:
        """A round of the request is launched; the boundary that it may complete.

        `number` grows with every forward; `committed` is the length that the host knows now.
        """
        rounds = self._in_flight.setdefault(request, deque())
        boundary = covered(committed, len(rounds), self.tokens)
        rounds.append(_Round(number, boundary))
        return boundary

    def hold(self, request: Hashable, candidate: Candidate) -> None:
        """What was captured of the boundary of the request's last round."""
        self._in_flight[request][-1].candidate = candidate

    def settle(
        self, request: Hashable, number: int, before: int, after: int
    ) -> tuple[Candidate | None, bool]:
        """The result of a round: the request's committed length was `before` and is `after`.

        Returns its candidate, if it had one, and whether the round completed the candidate's boundary.
        Whatever a request had in flight when it was dropped is not asked about again; its late results
        give (None, False).

        Raises:
            RoundError: an older round of the request is still in flight.
        """
        rounds = self._in_flight.get(request)
        if not rounds or rounds[0].number > number:
            return None, False
        done = rounds.popleft()
        if not rounds:
            del self._in_flight[request]
        if done.number != number:
            raise RoundError(f"the result of round {number} came before that of {done.number}")
        if done.boundary is None:
            return None, False
        return done.candidate, before < done.boundary <= after

    def drop(self, request: Hashable) -> list[Candidate]:
        """The request is gone: the candidates that its rounds in flight had."""
        rounds = self._in_flight.pop(request, ())
        return [r.candidate for r in rounds if r.candidate is not None]

    def clear(self) -> None:
        """A flush. The caller forgets the candidates."""
        self._in_flight.clear()

    def __len__(self) -> int:
        """Rounds in flight."""
        return sum(map(len, self._in_flight.values()))
