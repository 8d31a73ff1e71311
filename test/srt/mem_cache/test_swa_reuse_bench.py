"""The reuse benchmark: its traces are what they say, and a replay leaves nothing behind."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from tree_driver import TreeDriver

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark"))

from reuse import public, traces
from reuse.replay import GRID_ONLY, HOST_PAGES, STOCK, STRICT, Job, arm_of, slots_of, stack_of
from reuse.scheduler import Replay, tokens_of
from reuse.traces import GENERATORS, PAGE, PAGE_OFFSETS, Segment, Trace, Turn
from reuse.world import quiet_cpu_hicache

SMALL_HOST = 512


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with quiet_cpu_hicache():
        yield


# ---- traces


@pytest.mark.parametrize("name", GENERATORS)
def test_a_trace_is_the_same_each_time_and_larger_than_the_host_pool(name):
    trace = GENERATORS[name]()
    assert trace == GENERATORS[name]()
    assert trace.name == name
    assert trace.distinct_pages > 2 * HOST_PAGES
    assert all(turn.after is None or turn.after < at for at, turn in enumerate(trace.turns))
    assert all(turn.prompt_len > 0 and turn.answer.length >= 2 for turn in trace.turns)


def test_chat_carries_every_answer_on():
    turns = traces.chat().turns
    followups = [turn for turn in turns if turn.after is not None]
    assert len(followups) > len(turns) / 2
    for turn in followups:
        before = turns[turn.after]
        assert turn.prompt[:-1] == (*before.prompt, before.answer)
    assert all(50 <= turn.answer.length <= 2000 for turn in turns)
    # Interleaved: next to nobody's next turn follows directly.
    assert sum(turn.after == at - 1 for at, turn in enumerate(turns)) < len(turns) / 4


def test_fanout_shares_prompts_around_a_page():
    children = Counter(turn.prompt[0] for turn in traces.fanout().turns)
    assert len(children) > 2 * len(PAGE_OFFSETS) and min(children.values()) >= 64
    lengths = [prompt.length for prompt in children]
    assert min(lengths) == 300 and 19_500 < max(lengths) < 20_500
    offsets = {(length + 1) % PAGE - 1 for length in lengths}
    assert set(PAGE_OFFSETS) <= offsets


def test_edits_repeat_a_prompt_or_the_beginning_of_its_last_text():
    turns = traces.edit().turns
    pairs = [(turn, turns[turn.after]) for turn in turns if turn.after is not None]
    regenerated = sum(turn.prompt == before.prompt for turn, before in pairs)
    edited = sum(
        turn.prompt != before.prompt and before.answer not in turn.prompt for turn, before in pairs
    )
    assert regenerated > 100 and edited > 100


def test_agents_come_back_to_where_they_branched():
    turns = traces.agents().turns
    back = sum(
        turn.after is not None and turns[turn.after].answer not in turn.prompt for turn in turns
    )
    assert back > 100


def test_rag_documents_are_popular_by_rank():
    uses = Counter(segment for turn in traces.rag().turns for segment in turn.prompt[1:-1])
    ranked = [times for _, times in uses.most_common()]
    assert ranked[0] > 100 and len(ranked) > 100 and ranked[len(ranked) // 2] < 10


def test_a_public_trace_shares_what_its_block_ids_share(tmp_path):
    file = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]},
        {"timestamp": 5, "input_length": 1024, "output_length": 9, "hash_ids": [0, 2]},
        {"timestamp": 9, "input_length": 200_000, "output_length": 9, "hash_ids": [0] * 400},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = public.load(file).turns
    assert (first.prompt_len, second.prompt_len) == (700, 1024)
    a, b = tokens_of(first.prompt), tokens_of(second.prompt)
    assert a[:512] == b[:512] and a[512] != b[512]
    file.write_text(json.dumps({**records[0], "hash_ids": [0]}) + "\n")
    with pytest.raises(ValueError, match="700 tokens in 1 blocks"):
        public.load(file)


# ---- replay


def run(job, trace):
    stack = stack_of(job)
    return stack, Replay(stack, arm_of(job, stack), trace)


@pytest.mark.parametrize("arm", [STRICT, GRID_ONLY, STOCK])
def test_a_replay_serves_everybody_and_leaks_nothing(arm):
    trace = traces.chat(conversations=40)
    assert trace.distinct_pages > SMALL_HOST
    job = Job("chat", arm, 32, 0.25, SMALL_HOST)
    stack, replay = run(job, trace)
    served = replay.run()
    assert sorted(one.turn for one in served) == list(range(len(trace.turns)))
    assert all(0 <= one.reused <= one.kv < one.prompt for one in served)
    assert all(bool(one.loss) == (one.reused < one.kv) for one in served)
    assert any(one.reused for one in served)
    if arm == STOCK:
        stack.cache.sanity_check()
        return
    assert len(stack.cache.store) <= slots_of(job)
    TreeDriver(stack).check_no_leak()


def test_with_every_boundary_kept_nothing_of_the_kv_match_is_lost():
    trace = traces.chat(conversations=20)
    _, replay = run(Job("chat", STRICT, 1, 1.0, SMALL_HOST), trace)
    served = replay.run()
    assert sum(one.reused for one in served) == sum(one.kv for one in served) > 0
    assert replay.launches.cuts == 0


def test_replays_are_equal():
    trace = traces.rag(requests=60)
    runs = [run(Job("rag", STRICT, 8, 0.5, SMALL_HOST), trace)[1].run() for _ in range(2)]
    assert runs[0] == runs[1]


def test_stock_computes_the_last_window_again():
    prompt = Segment(1, 4 * PAGE)
    for asked, reused in ((127, 3), (128, 4), (129, 4)):
        turns = (
            Turn((prompt,), Segment(2, 2), None),
            Turn((prompt, Segment(3, asked)), Segment(4, 2), 0),
        )
        _, replay = run(Job("two", STOCK, host_pages=SMALL_HOST), Trace("two", turns))
        second = replay.run()[1]
        assert (second.kv, second.reused) == (4 * PAGE, reused * PAGE)
