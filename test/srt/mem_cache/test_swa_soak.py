"""Everything at once on one server for two minutes (`make soak`), and that the soak would notice.

The controls need no server: a stand-in gives the answers, one of them wrong in one bit; a server that
holds more than it did; a soak that showed nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs sglang 0.5.23")

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark"))

from dsv4_reference_platform.launch import Answer
from soak.clients import Clients
from soak.plan import Plan, Request
from soak.report import Found
from soak.server import MIB, Held


def test_two_minutes_of_everything_at_once():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "soak", "--minutes", "2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    found = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", last)}
    assert list(found) == ["requests", "restores_verified", "mismatches", "faults", "leaks"]
    assert found["mismatches"] == found["leaks"] == 0
    assert found["requests"] > 20
    assert found["restores_verified"] > 10
    assert found["faults"] > 5
    # Every kind of request and of fault is in the table.
    for kind in ("single", "fan-out", "chat", "abort", "timeout"):
        assert re.search(rf"requests: {kind} +\|", done.stdout), kind
    assert re.search(r"reused tokens: storage +\| +[1-9]", done.stdout)


class StandIn:
    """A server that knows every answer, and gives one of them wrong."""

    def __init__(self, plan: Plan, lie: Request | None) -> None:
        self._plan = list(plan)
        self._lie = lie

    def generate(self, prompt: list[int], new: int, **_: object) -> Answer:
        time.sleep(0.001)
        request = next(r for r in self._plan if r.prompt == prompt)
        ids, logprobs = request.cold
        if request is self._lie:
            logprobs = (*logprobs[:-1], math.nextafter(logprobs[-1], 0.0))
        return Answer(list(ids), list(logprobs), [], [], 0, {}, {})

    def generate_batch(self, prompts: list[list[int]], new: int) -> list[Answer]:
        return [self.generate(prompt, new) for prompt in prompts]

    def post(self, *_: object, **__: object) -> dict[str, object]:
        return {}


@pytest.fixture
def plan() -> Iterator[Plan]:
    """Answered by nobody: any answers will do. No conversations."""
    plan = dataclasses.replace(Plan.of(3), chats=[])
    for number, request in enumerate(plan):
        request.cold = (
            tuple(range(request.new)),
            tuple(-1 / (number + i + 1) for i in range(request.new)),
        )
    plan.chats = [[Request([9] * 30, 1, cold=((1,), (-1.0,)))] * 2]
    return plan


@pytest.mark.parametrize("lies", [False, True])
def test_a_wrong_last_bit_of_one_request_is_a_mismatch(plan, lies):
    liar = plan.families[0][1]
    clients = Clients(StandIn(plan, liar if lies else None), plan, "1")
    with clients:
        deadline = time.monotonic() + 120
        while not clients.mismatches and clients.done["single"] < 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not clients.errors
    assert bool(clients.mismatches) is lies
    assert all(str(len(liar.prompt)) in line for line in clients.mismatches)


HELD = Held(threads=90, files=200, resident=4000 * MIB, slots=0)


@pytest.mark.parametrize(
    ("after", "leak"),
    [
        (HELD, None),
        (dataclasses.replace(HELD, threads=91), "threads 90 -> 91"),
        (dataclasses.replace(HELD, files=209), "open files"),
        (dataclasses.replace(HELD, resident=4300 * MIB), "MiB 4000 -> 4300"),
        (dataclasses.replace(HELD, slots=1), "1 host slots"),
    ],
)
def test_what_is_left_is_a_leak(after, leak):
    found = after.leaks(HELD)
    assert len(found) == (leak is not None)
    assert leak is None or leak in found[0]


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        (Found(verified=1), True),
        (Found(verified=0), False),
        (Found(verified=1, wrong=["an answer"]), False),
        (Found(verified=1, leaks=["a thread"]), False),
    ],
)
def test_it_passes_only_where_something_was_shown_and_nothing_is_wrong(found, ok):
    assert found.ok is ok
