"""SGLang on the reference platform with SGLANG_DSV4_UNIFIED_KV_FP8=1, without the feature.

Three stock schedulers (fp8 with chunks of 256 and of 512, bf16): an fp8 answer depends neither on the
chunks nor on the batch nor on the process, and is another than the bf16 answer; every part of a packed
row reaches the logprobs; HiCache brings both pools' rows back as they were.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest

pytest.importorskip("sglang", reason="needs sglang 0.5.23")

import torch
from scenarios import PAGE, prompt, to_host
from scheduler_harness import Harness, SchedulerProcess, Steps

from dsv4_reference_platform.poke import Poker

PLATFORM_ONLY = {"SGLANG_PLUGINS": "dsv4_reference"}
FP8 = {**PLATFORM_ONLY, "SGLANG_DSV4_UNIFIED_KV_FP8": "1"}
PROMPT = prompt(80, 700)
BESIDE = (prompt(81, 333), prompt(82, 515))
NEW = 6


# -- scenarios ---------------------------------------------------------------------------------


def layout(h: Harness) -> list[tuple[str, str]]:
    """Dtypes and widths of each layer's rows in the two pools."""
    rings = h.pool.unified_kv_pool
    return [
        (f"{nope.dtype} {nope.shape[1]}", "" if rope is None else f"{rope.dtype} {rope.shape[1]}")
        for nope, rope in zip(rings.kv_buffer, rings.kv_buffer_rope, strict=True)
    ]


def alone(h: Harness, ids: Sequence[int]) -> Steps:
    """The cold answer of a request alone: ids and logprobs."""
    yield from h.flush()
    result = yield from h.generate(ids, NEW)
    assert result.cached == 0
    return result.ids, result.logprobs


def together(h: Harness, prompts: Sequence[Sequence[int]]) -> Steps:
    """Cold answers of requests that share their batches."""
    yield from h.flush()
    results = yield from h.finish(*[h.submit(ids, NEW) for ids in prompts])
    return [(result.ids, result.logprobs) for result in results]


def compressed_rows(h: Harness, ids: Sequence[int]) -> list[torch.Tensor]:
    """The bytes of every layer's compressed rows of a cached prompt: as they are now, in both pools."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    match = h.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids))))
    found = h.cache.path_device_indices(match.last_device_node)
    pool, rows = h.pool, []
    for layer, ratio in enumerate(pool.compression_ratios):
        if ratio:
            at = pool.unified_swa_pages + found[::ratio] // ratio
            buffers = (pool.get_unified_kv(layer), pool.get_unified_kv_rope(layer))
            rows += [buffer.view(torch.uint8)[at] for buffer in buffers]
    return rows


def hits(h: Harness, ids: Sequence[int]) -> Steps:
    """A device hit, then a host hit after the device's compressed rows were overwritten."""
    yield from h.flush()
    yield from h.generate(ids, NEW)
    yield from h.settle()
    before = compressed_rows(h, ids)
    on_device = yield from h.generate(ids, NEW)
    yield from to_host(h)
    rings = h.pool.unified_kv_pool
    for buffer in (*rings.kv_buffer, *rings.kv_buffer_rope):
        buffer[h.pool.unified_swa_pages :].view(torch.uint8).fill_(0x11)
    from_host = yield from h.generate(ids, NEW)
    yield from h.settle()
    after = compressed_rows(h, ids)
    equal = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    written = [bool((rows != 0x11).any(1).all()) for rows in before]
    yield from h.flush()
    return on_device, from_host, equal, written, [len(rows) for rows in before]


# -- fixtures ----------------------------------------------------------------------------------


def scheduler(tmp_path_factory, name: str, chunk: int, env: dict[str, str]) -> SchedulerProcess:
    log_path = tmp_path_factory.mktemp(name) / "scheduler.log"
    return SchedulerProcess(["--chunked-prefill-size", str(chunk)], env, log_path=log_path)


@pytest.fixture(scope="module")
def chunks_of_256(tmp_path_factory):
    with scheduler(tmp_path_factory, "fp8", 256, FP8) as process:
        yield process


@pytest.fixture(scope="module")
def poker(tmp_path_factory):
    return Poker(tmp_path_factory.mktemp("poke"))


@pytest.fixture(scope="module")
def chunks_of_512(tmp_path_factory, poker):
    """Pools accessible."""
    with scheduler(tmp_path_factory, "fp8-poked", 512, {**FP8, **poker.env}) as process:
        yield process


@pytest.fixture(scope="module")
def reference(chunks_of_256):
    """The prompt alone, chunks of 256."""
    return chunks_of_256.run(alone, PROMPT)


# -- answers -----------------------------------------------------------------------------------


def test_every_layer_has_rows_of_both_pools(chunks_of_256):
    rows = ("torch.float8_e4m3fn 512", "torch.bfloat16 64")
    assert chunks_of_256.run(layout) == [rows] * 6


def test_logprobs_mean_something(reference):
    ids, logprobs = reference
    assert all(math.isfinite(value) for value in logprobs)
    assert len(set(ids)) > 2 and max(logprobs) - min(logprobs) > 0.1


def test_run_to_run(reference, chunks_of_256):
    assert chunks_of_256.run(alone, PROMPT) == reference
    other = [PROMPT[0] ^ 1, *PROMPT[1:]]
    assert chunks_of_256.run(alone, other)[1] != reference[1], "the control"


def test_beside_two_others(reference, chunks_of_256):
    prompts = [BESIDE[0], PROMPT, BESIDE[1]]
    assert chunks_of_256.run(together, prompts)[1] == reference


def test_chunks_of_512_in_another_process(reference, chunks_of_512):
    assert chunks_of_512.run(alone, PROMPT) == reference


def test_chunks_of_512_beside_two_others(reference, chunks_of_512):
    prompts = [BESIDE[0], PROMPT, BESIDE[1]]
    assert chunks_of_512.run(together, prompts)[1] == reference


def test_decoding_is_prefilling(reference, chunks_of_512):
    """One kernel packs prefilled and decoded rows alike, which is not so for bf16 rows."""
    ids, logprobs = reference
    longer = chunks_of_512.run(alone, [*PROMPT, *ids[:3]])
    assert (longer[0][: NEW - 3], longer[1][: NEW - 3]) == (ids[3:], logprobs[3:])


def test_bf16_answers_are_others(reference, tmp_path_factory):
    with scheduler(tmp_path_factory, "bf16", 256, PLATFORM_ONLY) as process:
        assert process.run(layout) == [("torch.bfloat16 512", "")] * 6
        ids, logprobs = process.run(alone, PROMPT)
        longer = process.run(alone, [*PROMPT, *ids[:3]])
    assert logprobs != reference[1]
    # The same model all the same.
    assert ids[0] == reference[0][0]
    assert abs(logprobs[0] - reference[1][0]) < 0.1
    assert longer[1][: NEW - 3] != logprobs[3:], "the control of test_decoding_is_prefilling"


# -- rows --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_chunks(chunks_of_512):
    """520 tokens in two chunks: the last query sees the rows that the first chunk left."""
    return chunks_of_512.run(alone, PROMPT[:520])


def flipped(process: SchedulerProcess, poker: Poker, where: str, layer: int, column: int, bit: int):
    """The cold answer with one bit of a ring row flipped between the chunks."""
    flip = {"op": "flip", "where": where, "layer": layer, "position": 511}
    poker.arm(512, [{**flip, "column": column, "bit": bit}])
    try:
        answer = process.run(alone, PROMPT[:520])
        poker.result()
    finally:
        poker.disarm()
    assert all(math.isfinite(value) for value in answer[1])
    return answer


@pytest.mark.parametrize(
    ("where", "layer", "column", "bit"),
    [
        ("ring", 0, 9, 5),  # a value
        ("ring", 3, 450, 1),  # the first byte of a scale
        ("ring", 4, 451, 1),  # the second
        ("ring_rope", 5, 9, 13),
    ],
)
def test_a_flipped_bit_in_a_ring_row_changes_the_logprobs(
    two_chunks, chunks_of_512, poker, where, layer, column, bit
):
    assert flipped(chunks_of_512, poker, where, layer, column, bit)[1] != two_chunks[1]


def test_a_flipped_bit_behind_the_scales_changes_nothing(two_chunks, chunks_of_512, poker):
    assert flipped(chunks_of_512, poker, "ring", 3, 500, 1) == two_chunks


def test_every_kernel_is_in_place(chunks_of_512, poker):
    poker.arm(0, [{"op": "not_installed"}])
    chunks_of_512.run(alone, PROMPT[:20])
    assert poker.result() == [[]]


# -- HiCache -----------------------------------------------------------------------------------


def test_hits_bring_back_the_rows_of_both_pools(chunks_of_256):
    """By stock's reuse, whose answers are not those of a cold run: only the rows are looked at."""
    on_device, from_host, equal, written, rows = chunks_of_256.run(hits, PROMPT)
    assert (on_device.cached, on_device.device) == (2 * PAGE, 2 * PAGE)
    assert from_host.cached == from_host.host + from_host.device == 2 * PAGE
    assert from_host.host == 2 * PAGE
    assert all(math.isfinite(value) for value in on_device.logprobs + from_host.logprobs)
    assert rows == [128, 128, 4, 4, 128, 128, 4, 4]
    assert all(equal)
    assert all(written), "the control: no row was what the device was overwritten with"
