"""Request streams with fixed seeds, shaped like real use.

A prompt is a tuple of `Segment`s: runs of tokens that are equal exactly when their ids are. That is
all a prefix cache can see of a text, so a trace needs no text. An answer is a segment too; a later
turn that carries the conversation on has it in its prompt.

Who asks when: conversations arrive at random, and each waits a heavy-tailed time before its next
turn (people read, tools run). So conversations interleave, some come back at once and some after
the cache has seen many others. Times give the order only; a turn is never sent before the answer
that it builds on (`Turn.after`).

Every generator takes its own seeded generator, so adding a trace changes no other.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

PAGE = 256
PAGE_OFFSETS = (-1, 0, 1, 127, 128, 129)
"""Where a shared prefix ends relative to a page: both sides of it, and of half of it (the window)."""


class Segment(NamedTuple):
    """`length` tokens that no segment of another id has. The shorter of two with one id is a prefix."""

    id: int
    length: int


class Turn(NamedTuple):
    """One request. `after` is the index of the turn whose answer it builds on, None for a first."""

    prompt: tuple[Segment, ...]
    answer: Segment
    after: int | None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return sum(segment.length for segment in self.prompt)


@dataclass(frozen=True)
class Trace:
    """A named stream of requests, in the order in which they are sent."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens over all turns."""
        return sum(turn.prompt_len for turn in self.turns)

    @property
    def distinct_pages(self) -> int:
        """Pages of KV that a cache without a limit would hold at the end, to within partial pages."""
        seen: set[tuple[tuple[Segment, ...], Segment]] = set()
        tokens = 0
        for turn in self.turns:
            path = (*turn.prompt, turn.answer)
            for i, segment in enumerate(path):
                if (path[:i], segment) not in seen:
                    seen.add((path[:i], segment))
                    tokens += segment.length
        return tokens // PAGE


# ---- building blocks

Step = tuple[tuple[Segment, ...], Segment]
"""Prompt and answer of one turn of a conversation."""


class _Writer:
    """Random lengths and fresh segments of one trace."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = count(1)

    def text(self, length: int) -> Segment:
        """A new text."""
        return Segment(next(self._ids), length)

    def about(self, median: int, low: int, high: int, sigma: float = 0.8) -> int:
        """A log-normal length within bounds: most texts are short, a few are long."""
        drawn = self.random.lognormvariate(0, sigma) * median
        return max(low, min(high, round(drawn)))

    def answer(self) -> Segment:
        """An answer of 50 to 2,000 tokens, median 350."""
        return self.text(self.about(350, 50, 2000))

    def question(self) -> Segment:
        """What a person types: a sentence or two, and in one of seven a pasted document."""
        if self.random.random() < 0.15:
            return self.text(self.about(2500, 800, 10_000))
        return self.text(self.about(80, 10, 600))

    def system(self, low: float, high: float, turn: int) -> Segment:
        """A system prompt that ends around a page: k * 256 + one of PAGE_OFFSETS, by turns."""
        pages = round(self.random.uniform(low, high) / PAGE)
        return self.text(max(300, pages * PAGE + PAGE_OFFSETS[turn % len(PAGE_OFFSETS)]))


def _interleave(
    rng: random.Random,
    conversations: Iterable[Iterable[Step]],
    arrival_gap: float,
    pause: float,
) -> tuple[Turn, ...]:
    """Order the steps of conversations that arrive `arrival_gap` apart on average.

    `pause` is the median of the log-normal time between a conversation's turns, in the same unit.
    """
    queue: list[tuple[float, int, Iterator[Step], int | None]] = []
    now = 0.0
    for number, steps in enumerate(conversations):
        now += rng.expovariate(1 / arrival_gap)
        queue.append((now, number, iter(steps), None))
    heapq.heapify(queue)
    turns: list[Turn] = []
    while queue:
        now, number, steps, previous = heapq.heappop(queue)
        step = next(steps, None)
        if step is None:
            continue
        turns.append(Turn(*step, previous))
        again = now + pause * rng.lognormvariate(0, 1.2)
        heapq.heappush(queue, (again, number, steps, len(turns) - 1))
    return tuple(turns)


# ---- the traces


def chat(conversations: int = 260, seed: int = 11) -> Trace:
    """Multi-turn chat: each prompt is the last one, its answer and something new.

    Four products with a system prompt each (300 to 3,000 tokens), 2 to 16 turns (mean 6). A turn
    resumes where the answer before it ended, which is nowhere near a coarse grid.
    """
    w = _Writer(seed)
    systems = [w.system(300, 3000, i) for i in range(4)]

    def conversation() -> Iterator[Step]:
        history: tuple[Segment, ...] = (w.random.choice(systems),)
        for _ in range(min(16, 2 + int(w.random.expovariate(1 / 4)))):
            history += (w.question(),)
            answer = w.answer()
            yield history, answer
            history += (answer,)

    starts = (conversation() for _ in range(conversations))
    return Trace("chat", _interleave(w.random, starts, 1.0, 12.0))


def fanout(prompts: int = 18, children: int = 72, seed: int = 12) -> Trace:
    """A system prompt of 300 to 20,000 tokens shared by `children` single-turn requests.

    What a batch job, an evaluation or a product with one prompt looks like. The shared part ends at
    k * 256 + {-1, 0, 1, 127, 128, 129}, each of them by turns. Six prompts are live at a time.
    """
    w = _Writer(seed)
    lengths = [300 * (20_000 / 300) ** (i / (prompts - 1)) for i in range(prompts)]
    w.random.shuffle(lengths)
    shared = [w.system(length, length, i) for i, length in enumerate(lengths)]

    def child(system: Segment) -> Iterator[Step]:
        yield (system, w.text(w.about(400, 30, 3000))), w.answer()

    order = [system for system in shared for _ in range(children)]
    # Shuffled within a sliding neighbourhood: a few prompts at a time, each over a while.
    near = [(i + w.random.uniform(0, 6 * children), system) for i, system in enumerate(order)]
    starts = (child(system) for _, system in sorted(near))
    return Trace("fan-out", _interleave(w.random, starts, 1.0, 1.0))


def edit(conversations: int = 200, seed: int = 13) -> Trace:
    """Chat where the last turn is sent again: regenerated (same prompt) or edited (another question).

    Of every two turns one is repeated up to three times, and the conversation goes on from one of
    the answers. A regeneration wants the prompt's own end; an edit, the end of the turn before.
    """
    w = _Writer(seed)
    systems = [w.system(300, 3000, i) for i in range(4)]

    def conversation() -> Iterator[Step]:
        history: tuple[Segment, ...] = (w.random.choice(systems),)
        for _ in range(min(10, 2 + int(w.random.expovariate(1 / 2)))):
            question = (w.question(),)
            again = w.random.randint(1, 3) if w.random.random() < 0.5 else 0
            for attempt in range(1 + again):
                if attempt and w.random.random() < 0.5:
                    # An edit keeps the beginning of what was typed.
                    first = question[0]
                    kept = Segment(first.id, w.random.randint(1, first.length))
                    question = (kept, w.text(w.about(80, 10, 600)))
                answer = w.answer()
                yield (*history, *question), answer
            history += (*question, answer)

    starts = (conversation() for _ in range(conversations))
    return Trace("edit", _interleave(w.random, starts, 1.0, 8.0))


def agents(tasks: int = 75, seed: int = 14) -> Trace:
    """Agent loops: call, tool result, call; now and then branches that are tried and come back from.

    Three agents with a system prompt and tool schemas (4,000 to 12,000 tokens). A step appends a
    call (50 to 400 tokens) and a tool result (50 to 6,000). One step in six opens two or three
    branches from the same history, two to five steps each; the loop then goes on from where they
    left it, with a summary. Tools run fast, so a loop's steps are close together.
    """
    w = _Writer(seed)
    systems = [w.system(4000, 12_000, i) for i in range(3)]

    def call() -> Segment:
        return w.text(w.about(120, 50, 400))

    def result() -> Segment:
        return w.text(w.about(500, 50, 6000, 1.1))

    def task() -> Iterator[Step]:
        history = (w.random.choice(systems), w.text(w.about(200, 50, 800)))
        for _ in range(w.random.randint(4, 16)):
            if w.random.random() < 1 / 6:
                for _ in range(w.random.randint(2, 3)):
                    branch = (*history, w.text(w.about(60, 20, 200)))
                    for _ in range(w.random.randint(2, 5)):
                        said = call()
                        yield branch, said
                        branch += (said, result())
                history += (w.text(w.about(400, 200, 800)),)
            said = call()
            yield history, said
            history += (said, result())

    starts = (task() for _ in range(tasks))
    return Trace("agents", _interleave(w.random, starts, 1.0, 0.5))


def rag(requests: int = 1100, documents: int = 400, seed: int = 15) -> Trace:
    """Questions over shared documents: a system prompt, two documents, a question.

    400 documents of 300 to 8,000 tokens, popular by Zipf's law (exponent 1), put in the order of a
    retriever that ranks the more popular one first three times in four. What a question shares with
    the cache ends after the system prompt, after the first document, or after the second.
    """
    w = _Writer(seed)
    systems = [w.system(600, 2000, i) for i in range(2)]
    library = [w.text(w.about(1500, 300, 8000)) for _ in range(documents)]
    popularity = [1 / rank for rank in range(1, documents + 1)]

    def question() -> Iterator[Step]:
        first, second = sorted(w.random.choices(range(documents), popularity, k=2))
        if w.random.random() < 0.25:
            first, second = second, first
        picked = [library[first]] if first == second else [library[first], library[second]]
        asked = w.text(w.about(60, 10, 300))
        yield (w.random.choice(systems), *picked, asked), w.text(w.about(250, 50, 800))

    starts = (question() for _ in range(requests))
    return Trace("rag", _interleave(w.random, starts, 1.0, 1.0))


GENERATORS: dict[str, Callable[[], Trace]] = {
    "chat": chat,
    "fan-out": fanout,
    "edit": edit,
    "agents": agents,
    "rag": rag,
}
"""Every trace by name, at the size that `make bench-reuse` replays."""
