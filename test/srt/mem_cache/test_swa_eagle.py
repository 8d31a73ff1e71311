"""EAGLE: a hit equals a cold run, and drafts as one, on a real scheduler with DeepSeek's NextN layer.

As everywhere, an exactness test asserts the cached tokens, the tier, the restores verified on the
device, ids and logprobs, over rings that were scribbled, the draft's included. On top of that the
accepted lengths of its rounds, which the draft's own window decides.

A page that a round completes is tried with each length that a round can commit and at each place where
the page can end in it.

All of it with bf16 rows and with fp8 rows, whose windows have two planes, the draft's too.
"""

from __future__ import annotations

import eagle_scenarios as eagle
import l3_scenarios as l3
import pytest
import scenarios
from matrix import LAYOUTS
from scenarios import PAGE, prompt
from test_swa_l3 import ARGS as STORAGE_ARGS
from test_swa_l3 import assert_clean, directory

from dsv4_reference_platform.launch import EAGLE_ARGS, NEXTN_ARGS

EAGLE = [*NEXTN_ARGS, *EAGLE_ARGS]

OVERLAP = [*EAGLE, "--chunked-prefill-size", "512"]

SERIAL = [
    *EAGLE,
    *("--chunked-prefill-size", "256", "--disable-overlap-schedule"),
    # Few boundaries, so that a stem is there to be healed.
    *("--hicache-swa-offload-page-stride", "3"),
    *("--hicache-swa-offload-reuse-points", "grid,prompt,decode,junction"),
]

COMPLETING = [(below, accepted) for accepted in range(1, 5) for below in range(1, accepted + 1)]
"""How a round of four tokens can complete a page: it starts so far below the end and commits so many."""

PLANES = {"bf16": ["window"], "fp8": ["window", "rope"]}
"""Of a window, by the layout of rows; the name is that of scenarios.broken_restore."""

AROUND_A_PAGE = [PAGE + offset for offset in (-2, -1, 0, 1, 2)]


def running(scheduler_process, name: str, args: list[str], expected: tuple[str, ...] = (), **env):
    with scheduler_process(f"eagle-{name}", args, **env) as process:
        yield process
        log = process.log()
    assert_clean(
        "\n".join(line for line in log.splitlines() if not any(x in line for x in expected))
    )


@pytest.fixture(scope="module", params=LAYOUTS)
def rows(request):
    """The name of a layout of rows."""
    return request.param


@pytest.fixture(scope="module")
def overlap(scheduler_process, rows):
    # The controls break something on purpose.
    expected = ("MISMATCH", "restored bytes")
    yield from running(scheduler_process, "overlap", OVERLAP, expected, **LAYOUTS[rows])


@pytest.fixture(scope="module")
def serial(scheduler_process, rows):
    yield from running(scheduler_process, "serial", SERIAL, **LAYOUTS[rows])


@pytest.fixture(scope="module")
def process(request, rows):
    """By the name of a configuration."""
    return request.getfixturevalue(request.param)


both = pytest.mark.parametrize("process", ["overlap", "serial"], indirect=True)


@pytest.fixture(scope="module")
def storing(scheduler_process, rows, tmp_path_factory):
    env = {**directory(tmp_path_factory.mktemp("eagle") / "store"), **LAYOUTS[rows]}
    yield from running(scheduler_process, "storage", [*EAGLE, *STORAGE_ARGS], **env)


def assert_drafts_alike(first, hit) -> None:
    assert hit.error is None
    assert hit.same_answer(first)
    assert len(set(hit.logprobs)) > 1, "flat logprobs prove nothing"
    assert sum(hit.accepted) > 0, "no round ran"
    assert hit.accepted == first.accepted


def assert_restored(gains, hits: int) -> None:
    assert gains["checks_verified"] == gains["restored"] == hits
    assert gains["checks_failed"] == gains["restore_impossible"] == 0


# ---- pages that prefill completes


def assert_hits(colds, found, expected: list[int], loaded: list[int] | None = None) -> None:
    """`loaded`: tokens that each of them brought back from host memory, all by default."""
    for tier, (results, gains) in found.items():
        assert [r.cached for r in results] == expected, tier
        there = loaded if tier == "host" and loaded is not None else expected
        assert [getattr(r, tier) for r in results] == there, tier
        assert_restored(gains, sum(n > 0 for n in expected))
        for first, hit in zip(colds, results, strict=True):
            assert_drafts_alike(first, hit)


def test_a_repeat_hits_the_last_page_before_its_last_two_tokens(overlap):
    """N tokens are N - 1 pairs, and the last token is computed in any case."""
    prompts = [prompt(10 + length, length) for length in AROUND_A_PAGE]
    colds, found = overlap.run(eagle.hits, prompts, prompts, 6, ["device"])
    assert_hits(colds, {"device": found[0]}, [(n - 2) // PAGE * PAGE for n in AROUND_A_PAGE])


@both
def test_a_fork_hits_the_last_page_before_the_last_token_that_it_shares(process):
    """A page is told by the token behind it as well, of which the draft's last row is made."""
    stems = [prompt(20 + shared, shared) for shared in AROUND_A_PAGE]
    prompts = [[*stem, 3, *prompt(len(stem), 20)] for stem in stems]
    donors = [[*stem, 4, *prompt(len(stem), 20)] for stem in stems]
    colds, found = process.run(eagle.hits, prompts, donors, 6, ["device"])
    assert_hits(colds, {"device": found[0]}, [(n - 1) // PAGE * PAGE for n in AROUND_A_PAGE])


def test_forks_inside_a_chunk_and_at_its_end_from_both_tiers(overlap):
    """Of chunks of 512, page 2 is the end of one, pages 1 and 3 are inside."""
    donor = prompt(30, 3 * PAGE + 20)
    prompts = [[*donor[: pages * PAGE + 1], *prompt(30 + pages, 9)] for pages in (1, 2, 3)]
    tiers = ["host", "device"]
    colds, found = overlap.run(eagle.hits, prompts, [donor], 8, tiers)
    # From host memory each of them loads the page that those before it left there.
    expected = [PAGE, 2 * PAGE, 3 * PAGE]
    assert_hits(colds, dict(zip(tiers, found, strict=True)), expected, [PAGE] * 3)


def test_the_draft_keeps_the_same_window_wherever_chunks_end(overlap, serial):
    """A boundary inside a chunk, and the end of one, where the draft's last row is made of the next token
    of the prompt: the same bytes, of the target and of the draft."""
    ids = prompt(40, PAGE + 30)
    inside, at_end = (process.run(eagle.records, ids) for process in (overlap, serial))
    assert inside.keys() == at_end.keys() == {PAGE}
    assert inside == at_end
    other = overlap.run(eagle.records, [*ids[:PAGE], ids[PAGE] ^ 1, *ids[PAGE + 1 :]])
    assert other[PAGE][0] == inside[PAGE][0], "the target's window knows no token behind it"
    assert other[PAGE][1] != inside[PAGE][1], "the draft's last row does"


def test_siblings_of_an_off_grid_stem_hit_where_they_leave_it(serial):
    """The checkpoint of a chunk that ends at a junction joins the tree there, with pairs as with tokens:
    the second sibling heals the page, the third hits it."""
    stem = prompt(50, PAGE + 40)
    prompts = [[*stem, *prompt(51 + i, 230)] for i in range(3)]
    prompts.append([*prompts[0], 5, 6, 7])
    colds, results, gains = serial.run(scenarios.siblings, prompts, 4, "device")
    assert [r.cached for r in results] == [0, 0, PAGE, 2 * PAGE]
    assert [g["gate_healed"] for g in gains] == [0, 1, 0, 0]
    for first, result, gain in zip(colds, results, gains, strict=True):
        assert_drafts_alike(first, result)
        assert_restored(gain, result.cached > 0)


# ---- pages that rounds complete


def plan(ways: list[tuple[int, int]], seed: int) -> tuple[list[list[int]], list[int]]:
    """Accepted lengths, and prompt lengths, for pages that are completed in these ways; the round before
    commits 1 to 4."""
    before = [1 + (seed + i) % 4 for i in range(len(ways))]
    plans = [[first, accepted] for first, (_, accepted) in zip(before, ways, strict=True)]
    return plans, [PAGE - below - first for first, (below, _) in zip(before, ways, strict=True)]


def assert_goes_on(report, ways, tiers) -> None:
    count = len(ways)
    assert report["completed"] == ways
    assert report["same as without"] == [True] * count, "a forced draft changed an answer"
    first_turns = report["first turns"]
    assert first_turns["decode_captured"] == first_turns["captured"] == count
    assert first_turns["round_captured"] == first_turns["round_discarded"] + count
    placed = report["placed"]
    for tier in tiers:
        restored = report[tier]
        assert_restored(restored["gains"], count)
        for result, writer in zip(restored["results"], placed["results"], strict=True):
            assert result.cached == getattr(result, tier) == PAGE
            assert_drafts_alike(writer, result)
        assert restored["proposed"] == placed["proposed"]
        assert restored["accepted"] == placed["accepted"]


def test_a_page_completed_in_every_way_resumes_as_its_writer_would(overlap, rows):
    """Claim 2: the next turn equals the writer continued from its own rows, put in place by a copy that
    is not ours; with the draft's rows left out it drafts otherwise, and with nothing put there it answers
    otherwise. One kernel packs prefilled and verified fp8 rows alike, which is not so for bf16 rows:
    there the next turn equals its cold run too, and drafts as it does."""
    plans, lengths = plan(COMPLETING, 0)
    # Two more, of which many rounds that may complete the page do not.
    plans += [[1] * 9, [2, 1, 1, 1, 1]]
    lengths += [PAGE - 5, PAGE - 6]
    ways = ["device", "host", "placed", "target", "nothing", "cold"]
    report = overlap.run(eagle.decoded_pages, plans, lengths, 700, 6, ways)
    assert_goes_on(report, [*COMPLETING, (1, 1), (1, 1)], ["device", "host"])
    assert report["first turns"]["round_discarded"] >= len(plans)
    placed, target, nothing, cold = (report[way] for way in ("placed", "target", "nothing", "cold"))
    for result, writer in zip(target["results"], placed["results"], strict=True):
        assert result.same_answer(writer), "a draft changed an answer"
    different = [a != b for a, b in zip(target["proposed"], placed["proposed"], strict=True)]
    # This model's draft looks at its own token first of all, so here and there it says the same.
    assert sum(different) > len(different) // 2, "the control noticed nothing"
    assert target["accepted"] != placed["accepted"]
    for result, writer in zip(nothing["results"], placed["results"], strict=True):
        assert not result.same_answer(writer), "the control noticed nothing"
    as_cold = [
        (a.same_answer(b), *(placed[what][i] == cold[what][i] for what in ("proposed", "accepted")))
        for i, (a, b) in enumerate(zip(placed["results"], cold["results"], strict=True))
    ]
    assert (as_cold == [(True, True, True)] * len(plans)) == (rows == "fp8"), as_cold


def test_pages_without_the_overlap_schedule(serial):
    ways = [(1, 1), (1, 4), (3, 3), (4, 4)]
    plans, lengths = plan(ways, 1)
    report = serial.run(eagle.decoded_pages, plans, lengths, 720, 6, ["device", "placed"])
    assert_goes_on(report, ways, ["device"])


def test_control_a_candidate_that_nobody_compares_with_the_accepted_length(overlap):
    """The first round that might complete the page is taken at its word: a window that is not there yet
    is restored, byte for byte as it was captured."""
    plans, lengths = [[1] * 9, [2, 1, 1, 1, 1]], [PAGE - 5, PAGE - 6]
    ways = ["device", "placed"]
    report = overlap.run(eagle.decoded_pages, plans, lengths, 740, 6, ways, "first")
    assert_restored(report["device"]["gains"], 2)
    for result, writer in zip(
        report["device"]["results"], report["placed"]["results"], strict=True
    ):
        assert result.cached == PAGE
        assert not result.same_answer(writer), "the control noticed nothing"


@pytest.mark.parametrize("how", ["abort", "retract", "flush"])
def test_a_request_that_goes_away_during_a_round_leaves_nothing(overlap, how):
    results, gone, gains = overlap.run(eagle.leaves_with_a_candidate, prompt(60, PAGE - 3), how)
    assert gone["round_captured"] == gone["round_discarded"] > 0
    assert gone["captured"] == 0
    back = gains["round_captured"] - gains["round_discarded"]
    if how == "retract":
        assert [r.error for r in results] == [None, None]
        assert [len(r.ids) for r in results] == [40, 20]
        assert back == gains["decode_captured"] == 1, "it came back and completed its page"
    else:
        assert "Aborted" in results[0].error
        assert back == gains["captured"] == 0


@both
def test_nothing_waits_for_the_device(process):
    noted, ran, gains = process.run(eagle.watched)
    assert noted == []
    assert gains["restored"] == gains["decode_captured"] == 1
    assert min(ran["settle"], ran["after a forward"]) >= 3


# ---- storage


@pytest.mark.parametrize("shared", [0, 1], ids=["repeat", "decoded page"])
def test_a_hit_from_storage_drafts_like_the_cold_run(storing, shared):
    """By the checksums that the records carry, the draft's window included. A page that rounds completed
    is computed again as a prefill by a cold run, which is not the same: there two hits are compared."""
    ids = prompt(70 + shared, PAGE + 9 if not shared else PAGE - 3)
    first = storing.run(l3.populate, ids, 12)
    if shared:
        ids = [*ids, *first.ids, 7]
        first, gains, _ = storing.run(l3.from_storage, ids, 8)
        assert (first.cached, first.storage) == (PAGE, PAGE)
        assert_restored(gains, 1)
    hit, gains, stored = storing.run(l3.from_storage, ids, 12 if not shared else 8)
    assert (hit.cached, hit.storage) == (PAGE, PAGE)
    assert_restored(gains, 1)
    assert stored["records_loaded"] == 1
    assert_drafts_alike(first, hit)


# ---- controls


def test_control_a_flipped_bit_of_the_drafts_window_is_a_mismatch(overlap, rows):
    for plane, _ in enumerate(PLANES[rows]):
        args = (prompt(80, PAGE + 3), 6, True, scenarios.EVERY_RANK, plane)
        _, hit, gains = overlap.run(eagle.broken_draft, *args)
        assert gains["checks_failed"] == 1
        assert gains["checks_verified"] == 0
        assert "differ" in hit.error
        assert hit.ids == []


def test_control_a_flipped_bit_of_the_drafts_window_changes_no_answer(overlap, rows):
    for plane, _ in enumerate(PLANES[rows]):
        args = (prompt(80, PAGE + 3), 6, False, scenarios.EVERY_RANK, plane)
        first, hit, gains = overlap.run(eagle.broken_draft, *args)
        assert gains["restored"] == 1
        assert hit.cached == PAGE
        assert hit.same_answer(first)


@pytest.mark.parametrize("checked", [True, False])
def test_control_a_flipped_bit_of_the_targets_rows(overlap, rows, checked):
    for how in [*PLANES[rows], "state"]:
        args = (prompt(81, PAGE + 3), 6, how, checked)
        first, hit, gains = overlap.run(scenarios.broken_restore, *args)
        assert hit.cached == PAGE
        assert gains["checks_verified"] == 0
        assert gains["checks_failed"] == checked
        assert ("differ" in hit.error) if checked else (hit.logprobs != first.logprobs), how


def test_the_draft_has_the_planes_of_the_target(overlap, rows):
    """The layout is the one that is meant, of the target and of the draft."""
    target, draft = overlap.run(eagle.planes)
    assert target == draft
    assert len(target) == len(PLANES[rows])
