"""The demo's conversation: a second turn that resumes where the first answer completed a page.

SGLang decodes K with other rope tables than it prefills, so such a turn has no cold run to be equal to.
What it must equal is the writer itself, continued (claim 2): the ring and state rows of the first turn's
request are copied aside while it stands at the page, and put into the second turn's row right before
its first forward. That copy is made by the reference platform, by no code of the feature. As a control
the same rows are overwritten with noise instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsv4_reference_platform.launch import Answer, Server
from dsv4_reference_platform.poke import Poker

PAGE = 256
BOUNDARY = 2 * PAGE
"""The page that the first answer completes."""
_QUESTION = "Tell me, before anything else, what a window is. " * 11
_FOLLOW_UP = " And then, what is a ring?"


def ids_of(text: str) -> list[int]:
    """Token ids of a text: the model's tokens are bytes."""
    return [byte + 3 for byte in text.encode()]


@dataclass(frozen=True)
class Turn:
    """One run of the second turn."""

    name: str
    answer: Answer
    checks: dict[str, int]
    seconds: float


def converse(
    server: Server,
    poker: Poker,
    checks: Callable[[str], dict[str, int]],
    dirty: Callable[[int], None],
    push_out: Callable[[], None],
    say: Callable[[str], None],
) -> dict[str, Turn]:
    """Both turns, on a cache that starts empty; the second one four times.

    Returns by name: "turn 2" and "turn 2, host" as the server answers them, "continued" with the
    writer's rows put in place, "scribbled" with noise there. Without the feature no prefix ends at the
    page, so the last two are not asked for: the condition of the copy would never be met.
    """
    server.flush_cache()
    poker.arm(BOUNDARY, [{"op": "keep"}])
    first = server.generate(ids_of(_QUESTION)[: BOUNDARY - 20], 40)
    poker.result()
    prompt = [*ids_of(_QUESTION)[: BOUNDARY - 20], *first.ids, *ids_of(_FOLLOW_UP)]
    say(f"turn 1: {BOUNDARY - 20} tokens, 40 answered")

    def ask(name: str, seed: int) -> Turn:
        dirty(seed)
        before = checks(server.log())
        asked = time.monotonic()
        answer = server.generate(prompt, 8)
        seconds = time.monotonic() - asked
        after = checks(server.log())
        say(f"{name}: cached {answer.cached_tokens}")
        return Turn(name, answer, {key: after[key] - before[key] for key in after}, seconds)

    turns = [ask("turn 2", 41)]
    if turns[0].answer.cached_tokens == BOUNDARY:
        for seed, (name, operation) in enumerate((("continued", "put"), ("scribbled", "scribble"))):
            poker.arm(BOUNDARY, [{"op": operation}])
            turns.append(ask(name, 42 + seed))
            poker.result()
    push_out()
    turns.append(ask("turn 2, host", 44))
    return {turn.name: turn for turn in turns}


def outcome(answer: Answer) -> tuple[Any, Any]:
    """What must be equal: (ids, logprobs)."""
    return tuple(answer.ids), tuple(answer.logprobs)
