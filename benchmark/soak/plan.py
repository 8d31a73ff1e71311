"""The requests of a seed: prompts of one to four pages that share stems, and conversations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dsv4_reference_platform.launch import Answer, Server

PAGE = 256
FAMILIES, SIBLINGS, CHATS = 6, 4, 6
ANSWER, FOLLOW_UP = 24, 90
"""Tokens of a first answer, which completes a page, and of what is asked then."""

Outcome = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and logprobs of an answer."""


def outcome(answer: Answer) -> Outcome:
    """What must be equal."""
    return tuple(answer.ids), tuple(answer.logprobs)


@dataclass
class Request:
    """A prompt and what it may answer.

    Attributes:
        new: tokens to generate.
        decoded: the boundary that a first answer completed, of a second turn; else 0.
        cold: its answer where nothing was cached.
        continued: the same where the hit includes `decoded`, whose K was decoded: another answer,
            because SGLang decodes K with other rope tables than it prefills.
    """

    prompt: list[int]
    new: int
    decoded: int = 0
    cold: Outcome | None = None
    continued: Outcome | None = None

    def wrong(self, got: Outcome, cached: int, *, whole: bool = True) -> bool:
        """Whether an answer is none of those; where it is not `whole`, not the beginning of one."""
        right = [self.cold]
        if self.decoded and cached >= self.decoded:
            # Or the page was computed again meanwhile, by another second turn.
            right.append(self.continued)
        if whole:
            return got not in right
        return not any(
            all(a[: len(b)] == b for a, b in zip(good, got, strict=True)) for good in right
        )


@dataclass
class Plan:
    """All requests of a seed.

    Attributes:
        families: prompts that share a stem.
        chats: (first turn, second turn) pairs; the second is known once the first was answered.
    """

    families: list[list[Request]]
    chats: list[list[Request]] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The prompts; no answers yet."""
        rng = random.Random(seed)
        families = []
        for _ in range(FAMILIES):
            stem = tokens(rng, rng.randint(1, 2) * PAGE + rng.choice((-3, 0, 1, 100)))
            families.append([
                Request(stem + tokens(rng, rng.randint(20, 2 * PAGE)), rng.randint(2, 8))
                for _ in range(SIBLINGS)
            ])  # fmt: skip
        plan = cls(families)
        for _ in range(CHATS):
            prompt = tokens(rng, rng.randint(1, 3) * PAGE - rng.randint(4, ANSWER - 4))
            plan.chats.append([Request(prompt, ANSWER)])
        return plan

    def answer_all(self, server: Server, seed: int, say: Callable[[str], None]) -> None:
        """Ask an idle server for every answer, on a cache that is empty each time."""
        rng = random.Random(seed + 1)
        for request in (r for family in self.families for r in family):
            request.cold = outcome(_cold(server, request))
        say(f"{FAMILIES * SIBLINGS} prompts answered on an idle server")
        for chat in self.chats:
            (first,) = chat
            first.cold = outcome(_cold(server, first))
            prompt = [*first.prompt, *first.cold[0], *tokens(rng, FOLLOW_UP)]
            decoded = (len(first.prompt) + ANSWER - 1) // PAGE * PAGE
            second = Request(prompt, 6, decoded)
            answer = server.generate(prompt, second.new)
            if answer.cached_tokens != decoded:
                raise RuntimeError(f"the idle server reused {answer.cached_tokens}, not {decoded}")
            second.continued = outcome(answer)
            second.cold = outcome(_cold(server, second))
            chat.append(second)
        say(f"{len(self.chats)} conversations answered on an idle server")
        server.flush_cache()

    def __iter__(self) -> Iterator[Request]:
        for group in (*self.families, *self.chats):
            yield from group


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(3, 250) for _ in range(count)]


def _cold(server: Server, request: Request) -> Answer:
    server.flush_cache()
    answer = server.generate(request.prompt, request.new)
    if answer.cached_tokens:
        raise RuntimeError(f"{answer.cached_tokens} tokens of a cold run were cached")
    return answer
