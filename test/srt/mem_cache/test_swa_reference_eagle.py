"""EAGLE on the reference platform: stock servers with DeepSeek's NextN layer, the feature not loaded.

The platform's kernels are invariant, so what a server answers must not depend on whether it drafts:
ids and logprobs with EAGLE are those without, bit for bit, on a cold run, next to others and after a
hit, with a draft that is right now and then and with another one. The controls are in the same
numbers: the other draft's acceptance differs, and that of a draft whose own window is overwritten, and
no answer changes.
"""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("sglang", reason="needs sglang 0.5.23")

from bitexact_fixtures import PAGE, cpu_hicache, make_cache, make_server_args
from matrix import LAYOUTS
from test_swa_reference_platform import PLATFORM_ONLY, cold, prompt

from dsv4_reference_platform.launch import EAGLE_ARGS, NEXTN_ARGS, Answer, Server
from dsv4_reference_platform.poke import Poker

CHUNK = 512
DRAFTS = 3  # a round, see EAGLE_ARGS

CASES = {
    "short": (prompt(1, 60), 24),
    "decode crosses a page": (prompt(11, 235), 40),
    "two chunks": (prompt(4, 700), 24),
}


def answer_of(answer: Answer) -> tuple[list[int], list[float]]:
    """What must not depend on speculation (JSON keeps every bit of a float)."""
    return answer.ids, answer.logprobs


def acceptance(answer: Answer) -> list[int]:
    """Rounds by the number of drafts that were accepted in them."""
    return answer.raw["meta_info"]["spec_correct_drafts_histogram"]


@pytest.fixture(scope="module")
def poker(tmp_path_factory):
    return Poker(tmp_path_factory.mktemp("poke"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory, poker):
    """Without EAGLE; with it; with it, another draft and so few rows that prefixes go to the host. The
    first two with fp8 rows as well."""
    folder = tmp_path_factory.mktemp("eagle")
    rows = ("--max-running-requests", "16")
    fp8 = LAYOUTS["fp8"]
    variants = {
        "plain": (rows, {}),
        "eagle": ((*rows, *EAGLE_ARGS), poker.env),
        "plain, fp8": (rows, fp8),
        "eagle, fp8": ((*rows, *EAGLE_ARGS), fp8),
        "other draft": (
            ("--max-running-requests", "2", *EAGLE_ARGS),
            {"DSV4_REFERENCE_DRAFT_SEED": "another"},
        ),
    }
    started = {
        name: Server(
            ["--chunked-prefill-size", str(CHUNK), *NEXTN_ARGS, *args],
            {**PLATFORM_ONLY, **env},
            log_path=folder / f"{name}.log",
            start_timeout=600,
        )
        for name, (args, env) in variants.items()
    }
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.start, started.values()))
        yield started
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture(scope="module")
def cold_answers(servers) -> dict[str, dict[str, Answer]]:
    """Every case on every server, nothing reused."""
    return {
        name: {case: cold(server, ids, new) for case, (ids, new) in CASES.items()}
        for name, server in servers.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_a_cold_run_answers_as_without_drafts(cold_answers, case):
    plain = answer_of(cold_answers["plain"][case])
    assert len(plain[0]) == CASES[case][1]
    assert answer_of(cold_answers["eagle"][case]) == plain
    assert answer_of(cold_answers["other draft"][case]) == plain
    plain_fp8 = answer_of(cold_answers["plain, fp8"][case])
    assert answer_of(cold_answers["eagle, fp8"][case]) == plain_fp8
    assert plain_fp8[1] != plain[1], "these rows are not fp8"


def test_drafts_are_accepted_now_and_then(cold_answers, capsys):
    """Else the equalities would say little: no draft, or no rejected one, would have been seen."""
    for name in ("eagle", "eagle, fp8", "other draft"):
        for case, answer in cold_answers[name].items():
            meta = answer.raw["meta_info"]
            with capsys.disabled():
                print(
                    f"\n{name}, {case}: {meta['spec_accept_length']:.2f} tokens a round, "
                    f"rounds by accepted drafts {acceptance(answer)}"
                )
    for name in ("eagle", "eagle, fp8"):
        total = [0] * (DRAFTS + 1)
        for answer in cold_answers[name].values():
            for count, rounds in enumerate(acceptance(answer)):
                total[count] += rounds
        assert all(total), "none, some and all drafts of a round accepted, each at least once"


def test_another_draft_is_accepted_otherwise(cold_answers):
    """The control of the equality: the draft does reach the rounds."""
    histograms = [
        [acceptance(cold_answers[name][case]) for case in CASES]
        for name in ("eagle", "other draft")
    ]
    assert histograms[0] != histograms[1]


def test_run_to_run(servers, cold_answers):
    ids, new = CASES["two chunks"]
    again = cold(servers["eagle"], ids, new)
    first = cold_answers["eagle"]["two chunks"]
    assert (answer_of(again), acceptance(again)) == (answer_of(first), acceptance(first))


def test_beside_others(servers, cold_answers):
    """Rounds of three requests that accept different numbers of drafts."""
    servers["eagle"].flush_cache()
    answers = servers["eagle"].generate_batch([ids for ids, _ in CASES.values()], 20)
    for case, answer in zip(CASES, answers, strict=True):
        ids, logprobs = answer_of(cold_answers["plain"][case])
        assert answer_of(answer) == (ids[:20], logprobs[:20])


def test_a_hit_with_the_true_window_is_a_cold_run(servers, cold_answers, poker):
    """The rows of the target that the prefix cache does not keep are carried over by the test.

    The draft's are not, and its acceptance is the cold run's all the same: stock computes the last
    window of a matched prefix again (128 tokens at least), and a row of the draft's ring depends on its
    own token only.
    """
    server, (ids, new) = servers["eagle"], CASES["two chunks"]
    poker.arm(CHUNK, [{"op": "keep"}])
    first = cold(server, ids, new)
    poker.result()
    poker.arm(CHUNK, [{"op": "put"}])
    hit = server.generate(ids, new)
    poker.result()
    assert hit.cached_tokens == CHUNK
    plain = cold_answers["plain"]["two chunks"]
    assert answer_of(first) == answer_of(hit) == answer_of(plain)
    assert acceptance(hit) == acceptance(first)


def test_a_hit_with_the_window_of_another_is_not(servers, cold_answers, poker):
    """The control of the test above."""
    server, (ids, new) = servers["eagle"], CASES["two chunks"]
    cold(server, ids, 1)
    poker.arm(CHUNK, [{"op": "scribble"}])
    hit = server.generate(ids, new)
    poker.result()
    assert hit.cached_tokens == CHUNK
    assert answer_of(hit) != answer_of(cold_answers["plain"]["two chunks"])


def test_a_stale_draft_window_costs_acceptance_only(servers, cold_answers, poker):
    """The draft's ring is overwritten after the first round's drafts. (This model's draft looks at its
    own token first of all, so little is lost; that it is noticed at all is what is looked at.)"""
    server, (ids, new) = servers["eagle"], CASES["decode crosses a page"]
    poker.arm(len(ids), [{"op": "scribble"}], model="draft")
    answer = cold(server, ids, new)
    poker.result()
    fresh = cold_answers["eagle"]["decode crosses a page"]
    assert answer_of(answer) == answer_of(fresh)
    assert acceptance(answer) != acceptance(fresh)


def test_a_host_hit_is_served(servers):
    """Two rows: the second prompt pushes the first one's pages to host memory. What such a hit answers is
    stock's approximation; that it is made and answered is what is looked at."""
    server, (ids, new) = servers["other draft"], CASES["two chunks"]
    cold(server, ids, 1)
    server.generate(prompt(5, 600), 1)
    answer = server.generate(ids, new)
    assert answer.cached_tokens_details["host"] > 0, answer.cached_tokens_details
    assert len(answer.ids) == new
    assert acceptance(answer)


@pytest.mark.parametrize(("length", "plain", "eagle"), [(640, 512, 256), (641, 512, 512)])
def test_a_page_is_found_one_token_later(servers, length, plain, eagle):
    """A key of N tokens has N - 1 bigrams; stock takes the window (128) off the key first."""
    ids = prompt(6, length)
    for name, expected in (("plain", plain), ("eagle", eagle)):
        cold(servers[name], ids, 1)
        assert servers[name].generate(ids, 1).cached_tokens == expected, name


@pytest.fixture(scope="module")
def caches():
    """SGLang's own tree on CPU pools, with tokens and with bigrams for keys."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    with cpu_hicache():
        server_args = make_server_args()
        yield {
            is_eagle: make_cache(server_args, cls=UnifiedRadixCache, is_eagle=is_eagle)
            for is_eagle in (False, True)
        }


@pytest.mark.parametrize("is_eagle", [False, True])
def test_a_page_boundary_of_the_key_is_one_of_the_kv(caches, is_eagle):
    """For every number of tokens that a prompt shares with a cached one: the match ends at a page of
    token positions, whose token slots it returns; with bigrams it needs one shared token beyond."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    stack = caches[is_eagle]
    cached = array("q", prompt(7, 3 * PAGE + 1))
    slots = stack.allocator.full_attn_allocator.alloc(4 * PAGE)[: len(cached)]
    stack.cache.insert(InsertParams(key=RadixKey(cached), value=slots))
    for shared in range(len(cached) + 1):
        tail = array("q", [300] * (PAGE + 1))
        match = stack.cache.match_prefix(MatchPrefixParams(key=RadixKey(cached[:shared] + tail)))
        boundary = max(shared - is_eagle, 0) // PAGE * PAGE
        assert match.device_prefix_len == boundary, shared
        indices = stack.cache.path_device_indices(match.last_device_node)
        assert indices.tolist() == slots[:boundary].tolist(), shared
