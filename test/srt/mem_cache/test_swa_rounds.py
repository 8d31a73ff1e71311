"""Which page a speculative round may complete, and whether it did: against an oracle that knows all.

The oracle plays rounds on rings of real size: what each round writes, accepted or not, at which position;
what a capture behind it would find there; and what is true in the end. The host side sees what SGLang's
scheduler sees: with the overlap schedule, a round is launched before the result of the one before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bitexact_hicache.constants import PAGE_SIZE, STATE_ROWS, WINDOW
from sglang_bitexact_hicache.geometry import ring_row, span
from sglang_bitexact_hicache.rounds import RoundError, Rounds, covered

STATE_RING = 16


@dataclass
class Device:
    """One request's rings, row by row: which position lies there, and whether it is the true one.

    The target writes a row for each verified token. The draft writes two rows before, from its own
    guesses, and rows for all verified tokens after: each of those is made of the token behind it.
    """

    tokens: int
    length: int
    window_ring: int
    target: dict[int, tuple[int, bool]] = field(default_factory=dict)
    states: dict[int, tuple[int, bool]] = field(default_factory=dict)
    draft: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position in range(self.length):
            self._write(position, True, True)

    def _write(self, position: int, true: bool, draft_true: bool) -> None:
        self.target[ring_row(0, self.window_ring, position)] = position, true
        self.states[ring_row(0, STATE_RING, position)] = position, true
        self.draft[ring_row(0, self.window_ring, position)] = position, draft_true

    def round(self, accepted: int) -> int:
        """A round that commits `accepted` tokens; where it started."""
        start = self.length
        for position in range(start, start + max(self.tokens - 2, 0)):
            self.draft[ring_row(0, self.window_ring, position)] = position, False
        for position in range(start, start + self.tokens):
            # The token at `position + 1` is the true one if it was accepted, or is the bonus token.
            true = position < start + accepted
            self._write(position, true, true)
        self.length += accepted
        return start

    def holds(self, boundary: int) -> bool:
        """Whether the rings hold all that the boundary needs, and it true."""
        return all(
            rings.get(ring_row(0, size, position)) == (position, True)
            for rings, size, rows in (
                (self.target, self.window_ring, WINDOW),
                (self.draft, self.window_ring, WINDOW),
                (self.states, STATE_RING, STATE_ROWS),
            )
            for position in range(*span(boundary, rows))
        )


def play(
    prompt: int, lengths: list[int], tokens: int, overlap: bool, window_ring: int | None = None
) -> list[tuple[int, bool]]:
    """Rounds of one request that commit these lengths: the boundaries that the host publishes, each with
    whether what was captured is true. Compares every decision with what the device knows."""
    ring = WINDOW + tokens - 1 if window_ring is None else window_ring
    device, rounds = Device(tokens, prompt, ring), Rounds[tuple[int, bool]](tokens)
    committed, published = prompt, []
    results: deque[tuple[int, int, int]] = deque()

    def process() -> None:
        nonlocal committed
        number, start, accepted = results.popleft()
        assert start == committed
        candidate, completed = rounds.settle("req", number, committed, committed + accepted)
        committed += accepted
        inside = [p for p in range(start + 1, start + accepted + 1) if p % PAGE_SIZE == 0]
        assert completed == bool(inside), "the oracle says otherwise"
        if completed:
            assert [candidate[0]] == inside
            published.append(candidate)

    for number, accepted in enumerate(lengths):
        boundary = rounds.launch("req", number, committed)
        start = device.round(accepted)
        results.append((number, start, accepted))
        if boundary is not None:
            rounds.hold("req", (boundary, device.holds(boundary)))
        while len(results) > overlap:
            process()
    while results:
        process()
    assert len(rounds) == 0
    return published


@given(
    prompt=st.integers(WINDOW, 3 * PAGE_SIZE),
    tokens=st.integers(1, STATE_RING - STATE_ROWS + 1),
    overlap=st.booleans(),
    data=st.data(),
)
def test_every_page_is_published_once_and_what_was_captured_is_true(prompt, tokens, overlap, data):
    lengths = data.draw(st.lists(st.integers(1, tokens), min_size=1, max_size=300))
    end = prompt + sum(lengths)
    published = play(prompt, lengths, tokens, overlap)
    passed = [p for p in range(PAGE_SIZE, end + 1, PAGE_SIZE) if p > prompt]
    assert published == [(p, True) for p in passed]


@pytest.mark.parametrize("overlap", [True, False])
def test_every_way_in_which_three_rounds_can_meet_a_page(overlap):
    """Enumerated: from each length near a page's end, all that three rounds of four can commit."""
    for prompt in range(PAGE_SIZE - 13, PAGE_SIZE + 1):
        for code in range(4**3):
            lengths = [1 + code // 4**i % 4 for i in range(3)]
            end = prompt + sum(lengths)
            expected = [(PAGE_SIZE, True)] if prompt < PAGE_SIZE <= end else []
            assert play(prompt, lengths, 4, overlap) == expected, (prompt, lengths)


def test_control_a_ring_that_is_one_row_smaller_loses_a_window():
    truths = [
        true
        for prompt in range(PAGE_SIZE - 8, PAGE_SIZE)
        for _, true in play(prompt, [4, 4, 4], 4, True, window_ring=WINDOW + 2)
    ]
    assert not all(truths)


@pytest.mark.parametrize(
    ("committed", "in_flight", "expected"),
    [
        (255, 0, 256),
        (252, 0, 256),
        (251, 0, None),
        (256, 0, None),
        (254, 1, 256),
        (255, 1, None),
        (248, 1, 256),
        (247, 1, None),
    ],
)
def test_what_a_round_of_four_may_complete(committed, in_flight, expected):
    assert covered(committed, in_flight, 4) == expected


@given(st.integers(0, 2000), st.integers(0, 1), st.integers(1, 128))
def test_what_a_round_may_complete_is_what_some_accepted_lengths_reach(
    committed, in_flight, tokens
):
    starts = range(committed + in_flight, committed + in_flight * tokens + 1)
    reachable = {p for s in starts for p in range(s + 1, s + tokens + 1) if p % PAGE_SIZE == 0}
    assert len(reachable) <= 1
    assert covered(committed, in_flight, tokens) == (reachable.pop() if reachable else None)


# ---- requests that go away


def test_a_request_that_goes_away_gives_back_what_it_had_in_flight():
    rounds = Rounds[str](4)
    for number in (1, 2):
        assert rounds.launch("a", number, 252) == PAGE_SIZE
        rounds.hold("a", f"candidate {number}")
        rounds.launch("b", number, 10)
    assert len(rounds) == 4
    assert rounds.drop("a") == ["candidate 1", "candidate 2"]
    assert rounds.drop("a") == []
    # Its results still come.
    assert rounds.settle("a", 1, 250, 250) == (None, False)
    assert rounds.settle("b", 1, 10, 12) == (None, False)
    assert rounds.drop("b") == []
    assert len(rounds) == 0


def test_a_request_that_came_back_is_not_told_of_its_earlier_rounds():
    rounds = Rounds[str](4)
    rounds.launch("a", 1, 250)
    rounds.hold("a", "before")
    assert rounds.drop("a") == ["before"]
    rounds.launch("a", 5, 254)
    rounds.hold("a", "after")
    assert rounds.settle("a", 1, 254, 254) == (None, False)
    assert rounds.settle("a", 5, 254, 256) == ("after", True)
    assert len(rounds) == 0


def test_a_candidate_that_was_not_captured_is_none():
    rounds = Rounds[str](4)
    assert rounds.launch("a", 1, 254) == PAGE_SIZE
    assert rounds.settle("a", 1, 254, 257) == (None, True)


def test_a_result_out_of_turn_is_an_error():
    rounds = Rounds[str](4)
    rounds.launch("a", 1, 10)
    rounds.launch("a", 2, 10)
    with pytest.raises(RoundError, match="round 2 came before that of 1"):
        rounds.settle("a", 2, 10, 12)


def test_a_flush_forgets_all():
    rounds = Rounds[str](4)
    rounds.launch("a", 1, 10)
    rounds.clear()
    assert len(rounds) == 0
    assert rounds.drop("a") == []


@pytest.mark.parametrize("tokens", [0, 129])
def test_rounds_that_could_complete_two_pages_are_refused(tokens):
    with pytest.raises(ValueError, match="more than one page"):
        Rounds(tokens)
