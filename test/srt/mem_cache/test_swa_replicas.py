"""Replicas (`--dp-size 2` alone) over HTTP, with EAGLE: each is a server of one rank behind one launcher.

A request's rounds go to one replica after the other until each has hit. Asserted for each: its own cache,
restores verified on the device, ids, logprobs and accepted drafts equal to a cold run. Control: the same
requests with the feature off.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scenarios import PAGE, prompt
from scheduler_harness import FEATURE_ENV, failure_lines

from dsv4_reference_platform.launch import EAGLE_ARGS, NEXTN_ARGS, Answer, Server

RANKS = 2
ARGS = [*NEXTN_ARGS, *EAGLE_ARGS, "--dp-size", str(RANKS), "--chunked-prefill-size", "512"]
NEW = 12

PROMPT = prompt(1, 2 * PAGE + 40)
FORK = [*PROMPT[: PAGE + 1], *prompt(2, 300)]
BETWEEN = prompt(3, 600)
"""Overwrites the rings of a row."""


def acceptance(answer: Answer) -> list[int]:
    """Rounds by the number of drafts that were accepted in them."""
    return answer.raw["meta_info"]["spec_correct_drafts_histogram"]


def told(answer: Answer) -> tuple[Sequence[int], Sequence[float], Sequence[int]]:
    """What a hit and its cold run must have in common."""
    return answer.ids, answer.logprobs, acceptance(answer)


def rounds(server: Server) -> list[dict[str, Answer]]:
    """Of each replica: cold runs and hits."""
    cold_forks = []
    for rank in range(RANKS):
        cold_forks.append(server.generate(FORK, NEW, dp_rank=rank))
    server.flush_cache()
    answers = []
    for rank in range(RANKS):
        names = {"cold": PROMPT, "between": BETWEEN, "hit": PROMPT, "fork": FORK}
        answers.append(
            {name: server.generate(ids, NEW, dp_rank=rank) for name, ids in names.items()}
        )
        answers[-1]["cold fork"] = cold_forks[rank]
    return answers


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    """The answers with the feature, and the log."""
    log = tmp_path_factory.mktemp("replicas") / "on.log"
    with Server(ARGS, FEATURE_ENV, log_path=log, start_timeout=600) as server:
        answers = rounds(server)
        return answers, server.log()


def test_each_replica_has_a_cache_of_its_own(on):
    for answers in on[0]:
        cached = {name: answer.cached_tokens for name, answer in answers.items()}
        assert cached == {
            **{"cold": 0, "between": 0, "cold fork": 0},
            **{"hit": 2 * PAGE, "fork": PAGE},
        }


def test_a_hit_is_the_cold_run_on_each_replica(on):
    for answers in on[0]:
        assert told(answers["hit"]) == told(answers["cold"])
        assert told(answers["fork"]) == told(answers["cold fork"])
        assert sum(acceptance(answers["hit"])) > 0, "no round ran"
        assert len(set(answers["hit"].logprobs)) > 1, "flat logprobs prove nothing"
    # One model.
    assert told(on[0][0]["cold"]) == told(on[0][1]["cold"])


def test_every_restore_was_verified_on_each_replica(on):
    log = on[1]
    assert failure_lines(log) == []
    lines = [line for line in log.splitlines() if "[SWA-DBG] restore verified" in line]
    by_rank = [sum(f" DP{rank}" in line for line in lines) for rank in range(RANKS)]
    assert by_rank == [2] * RANKS, lines


def test_control_without_the_feature_a_hit_is_another_answer(tmp_path):
    with Server(
        ARGS, {"SGLANG_PLUGINS": "dsv4_reference"}, log_path=tmp_path / "off.log", start_timeout=600
    ) as server:
        for answers in rounds(server):
            for name, cold in (("hit", "cold"), ("fork", "cold fork")):
                assert answers[name].cached_tokens > 0
                assert answers[name].logprobs != answers[cold].logprobs
