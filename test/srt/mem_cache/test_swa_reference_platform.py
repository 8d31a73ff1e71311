"""The reference platform as a test bed: its logits mean something, and its bits are stable.

Three stock servers with the request's flags, one per chunk size and HiCache copy path; nothing
but the platform plugin is loaded. What other tests build on: logits are finite and spread, a
token's bits depend neither on chunking nor on the batch nor on the process, and the pools that
the feature restores (window, C4 state, C4-indexer state) each matter to the next logprobs.
"""

from __future__ import annotations

import math
import random
import socket
import statistics

import pytest

pytest.importorskip("sglang", reason="needs sglang 0.5.23")

from dsv4_reference_platform.launch import Answer, Server, held_port
from dsv4_reference_platform.poke import Poker

VOCABULARY = 320
PLATFORM_ONLY = {"SGLANG_PLUGINS": "dsv4_reference"}


def prompt(seed: int, length: int) -> list[int]:
    """``length`` random byte tokens."""
    source = random.Random(seed)
    return [source.randrange(3, 259) for _ in range(length)]


def bits(answer: Answer) -> tuple[list[int], list[float], list[float]]:
    """What must be equal when two runs are: ids and logprobs (JSON keeps every bit of a float)."""
    return answer.ids, answer.logprobs, answer.prompt_logprobs


def start(chunk: int, tmp_path_factory, env=None, args=()) -> Server:
    log = tmp_path_factory.mktemp(f"chunk{chunk}") / "server.log"
    server = Server(
        ["--chunked-prefill-size", str(chunk), *args],
        {**PLATFORM_ONLY, **(env or {})},
        log_path=log,
        start_timeout=600,
    )
    return server.start()


@pytest.fixture(scope="module")
def one_chunk(tmp_path_factory):
    """Chunks of 2,560 tokens; direct copies, layer_first."""
    server = start(2560, tmp_path_factory)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def poker(tmp_path_factory):
    return Poker(tmp_path_factory.mktemp("poke"))


@pytest.fixture(scope="module")
def chunks_of_512(tmp_path_factory, poker):
    """Chunks of 512 tokens, pools accessible; direct copies, page_first_direct."""
    server = start(512, tmp_path_factory, poker.env, ["--hicache-mem-layout", "page_first_direct"])
    yield server
    server.stop()


@pytest.fixture(scope="module")
def chunks_of_256(tmp_path_factory):
    """Chunks of 256 tokens; kernel copies, layer_first."""
    server = start(256, tmp_path_factory, args=["--hicache-io-backend", "kernel"])
    yield server
    server.stop()


def cold(server: Server, ids: list[int], new_tokens: int = 4, **options) -> Answer:
    """A run that can reuse nothing."""
    server.flush_cache()
    answer = server.generate(ids, new_tokens, **options)
    assert answer.cached_tokens == 0
    return answer


@pytest.fixture(scope="module")
def reference(one_chunk) -> Answer:
    """700 tokens, one chunk, alone: what every other run is compared with."""
    return cold(one_chunk, prompt(1, 700), prompt_logprobs=True)


def test_a_held_port_is_for_who_reuses_its_address():
    with held_port() as held, socket.socket() as other, socket.socket() as server:
        where = held.getsockname()
        with pytest.raises(OSError, match="in use"):
            other.bind(where)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen()
        socket.create_connection(where).close()


def test_text_completion_takes_one_token_per_byte(one_chunk):
    text = "Bytes: h\u00e9!\n"
    reply = one_chunk.complete(text, max_tokens=5)
    assert reply["usage"]["prompt_tokens"] == len(text.encode())
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["choices"][0]["text"]


def test_logits_are_finite_and_spread(reference, one_chunk):
    logprobs = reference.prompt_logprobs
    assert len(logprobs) == 699
    assert all(math.isfinite(value) for value in logprobs)
    # Flat logits would put every token at -ln(vocabulary).
    assert statistics.pstdev(logprobs) > 0.5
    assert max(logprobs) - min(logprobs) > 3
    answer = cold(one_chunk, prompt(2, 300), 12, top_logprobs=20)
    assert len(set(answer.ids)) > 4
    for step in answer.top_logprobs:
        values = [value for value, _ in step]
        assert all(math.isfinite(value) for value in values)
        assert values[0] > -math.log(VOCABULARY) + 1
        assert values[0] - values[-1] > 0.5


def test_different_prompts_give_different_logprobs(reference, one_chunk):
    other = prompt(1, 700)
    other[0] = 3 + (other[0] - 2) % 256
    assert cold(one_chunk, other).logprobs != reference.logprobs


def test_run_to_run(reference, one_chunk):
    assert bits(cold(one_chunk, prompt(1, 700), prompt_logprobs=True)) == bits(reference)


def test_beside_two_others(reference, one_chunk):
    one_chunk.flush_cache()
    answers = one_chunk.generate_batch([prompt(3, 333), prompt(1, 700), prompt(4, 515)], 4)
    assert (answers[1].ids, answers[1].logprobs) == (reference.ids, reference.logprobs)


@pytest.mark.parametrize("chunks", ["chunks_of_512", "chunks_of_256"])
def test_chunk_size_and_process(reference, chunks, request):
    """Another chunk size in another process: chunking, restart and two servers in one."""
    server = request.getfixturevalue(chunks)
    assert bits(cold(server, prompt(1, 700), prompt_logprobs=True)) == bits(reference)


@pytest.mark.parametrize("chunks", ["chunks_of_512", "chunks_of_256"])
def test_chunked_beside_two_others(reference, chunks, request):
    server = request.getfixturevalue(chunks)
    server.flush_cache()
    answers = server.generate_batch([prompt(3, 333), prompt(1, 700), prompt(4, 515)], 4)
    assert (answers[1].ids, answers[1].logprobs) == (reference.ids, reference.logprobs)


def test_long_prompt_is_fast_and_invariant(one_chunk, chunks_of_512, capsys):
    """2,700 tokens: above 2,048 the indexer selects, so its bits must be stable as well."""
    one_chunk.flush_cache()
    cpu = one_chunk.cpu_seconds()
    answer = one_chunk.generate(prompt(5, 2560), 1)
    cpu = one_chunk.cpu_seconds() - cpu
    with capsys.disabled():
        wall = answer.raw["meta_info"]["e2e_latency"]
        print(f"\n2,560-token prefill: {wall:.1f} s wall, {cpu:.1f} s CPU")
    # 15 s on two cores; CPU time, because other jobs may share them.
    assert cpu <= 30
    long = cold(one_chunk, prompt(6, 2700), 6)
    assert bits(cold(chunks_of_512, prompt(6, 2700), 6)) == bits(long)


def test_every_kernel_is_in_place(chunks_of_512, poker):
    poker.arm(0, [{"op": "not_installed"}])
    cold(chunks_of_512, prompt(7, 20), 1)
    assert poker.result() == [[]]


def poked(server: Server, poker: Poker, ids: list[int], prefix: int, operations) -> Answer:
    """A cold run in which ``operations`` are carried out before the chunk at ``prefix``."""
    poker.arm(prefix, operations)
    try:
        answer = cold(server, ids)
        poker.result()
    finally:
        poker.disarm()
    assert all(math.isfinite(value) for value in answer.logprobs)
    return answer


@pytest.fixture(scope="module")
def two_chunks(chunks_of_512) -> Answer:
    """520 tokens in two chunks: the last query sees what the first chunk left behind."""
    return cold(chunks_of_512, prompt(8, 520))


def test_reading_a_row_changes_nothing(two_chunks, chunks_of_512, poker):
    """The control of the tests below: the same poke without the change."""
    operation = {"op": "read", "where": "ring", "layer": 1, "position": 511}
    answer = poked(chunks_of_512, poker, prompt(8, 520), 512, [operation])
    assert bits(answer) == bits(two_chunks)


@pytest.mark.parametrize("layer", range(6))
def test_a_flipped_bit_in_a_ring_row_changes_the_logprobs(two_chunks, chunks_of_512, poker, layer):
    flip = {"op": "flip", "where": "ring", "layer": layer, "position": 511, "column": 9, "bit": 13}
    answer = poked(chunks_of_512, poker, prompt(8, 520), 512, [flip])
    assert answer.logprobs != two_chunks.logprobs


@pytest.mark.parametrize("layer", [1, 3])
def test_a_flipped_bit_in_the_live_half_of_a_c4_state_row(two_chunks, chunks_of_512, poker, layer):
    """Column 9 of 4 x 512 lies in the overlap half of kv, which the block at 512 reads."""
    flip = {
        "op": "flip",
        "where": "c4_state",
        "layer": layer,
        "position": 511,
        "column": 9,
        "bit": 29,
    }
    answer = poked(chunks_of_512, poker, prompt(8, 520), 512, [flip])
    assert answer.logprobs != two_chunks.logprobs


@pytest.mark.parametrize("layer", [1, 3])
def test_an_overwritten_indexer_state_row_changes_the_selection(chunks_of_512, poker, layer):
    """Above 2,048 tokens. An indexer key reaches the logits only through what is selected, so
    other logprobs mean another selected set."""
    ids = prompt(9, 2568)
    unharmed = cold(chunks_of_512, ids)
    overwrite = [
        # Overlap half of kv, and of the scores high enough to outweigh the block's other rows.
        {"op": "fill", "where": "indexer_state", "layer": layer, "position": 2559, "value": 3.0,
         "columns": [0, 128]},
        {"op": "fill", "where": "indexer_state", "layer": layer, "position": 2559, "value": 50.0,
         "columns": [256, 384]},
    ]  # fmt: skip
    answer = poked(chunks_of_512, poker, ids, 2560, overwrite)
    assert answer.logprobs != unharmed.logprobs
