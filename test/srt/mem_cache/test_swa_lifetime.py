"""Every way a request can live and die, in any order, on the real tree, pools and controller.

A hypothesis state machine drives a BxCache (through PlannedDriver) as a scheduler does: the real
planner decides the captures (any stride, any kinds, row limits, tiny pools), the clock is fake, KV and
truth are bytes. After each step: stock's sanity check, our integrity check, nobody's mark, lock, row or
reservation without a running request, no device page owned twice; at each forward the bytes that a hit
reads are those that its truth saw (claim 2, tree_driver.py); at the end nothing has leaked.

What the machine met is counted, and the test fails where a situation was never met. Each control breaks
one rule, and must be found in as many runs as the test itself makes.

The same lives each time, unless BITEXACT_LIFETIME_EXAMPLES asks for another number of them (400 is
the default, 5000 take about ten minutes): then new ones.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import broken_rules
import pytest
from bitexact_fixtures import (
    PAGE,
    cpu_hicache,
    defer_device_to_host,
    make_cache,
    make_server_args,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tree_driver import FakeClock, PlannedDriver, Violation

from sglang_bitexact_hicache.lineage import UNKNOWN, LineageError
from sglang_bitexact_hicache.policy import ALL_KINDS, NEWEST_DECODE, Keep, Kind
from sglang_bitexact_hicache.slots import SlotError

DEFAULT_EXAMPLES = 400
EXAMPLES = int(os.environ.get("BITEXACT_LIFETIME_EXAMPLES", DEFAULT_EXAMPLES))
STEPS = 50

DEVICE_PAGES = 30
MOST_PROMPT = 8
"""Pages of a prompt."""
MOST_ANSWER = 5
"""Pages of answers, over all the lives of a request."""
MOST_WAITING = 5

MET = (
    "hit",
    "hit from host memory",
    "hit on a page that decode completed",
    "several admitted at once",
    "a batch of several prefills",
    "chunk cut at a junction",
    "a junction not cut: another has the chunk place",
    "waits for its healer",
    "healed",
    "chain mended",
    "path loaded back for healing",
    "checkpoint before a decode step",
    "checkpoint after a decode step in flight",
    "a page in flight read pages that the tree did not keep",
    "decode boundary",
    "third newest decode page let go",
    "spare decode page let go",
    "point passed",
    "truth used by several",
    "junction where prompts part",
    "mixed batch",
    "decode boundary in a mixed batch",
    "page completed beyond the finish",
    "finished at its prefill",
    "abort waiting",
    "abort before the first forward",
    "abort mid-chunk",
    "abort mid-chunk, checkpointed",
    "abort decoding",
    "output discarded",
    "retracted",
    "retracted with its prefill's result to come",
    "resumed with a hit",
    "resumed after another had its row",
    "preempted",
    "declined load-back",
    "demoted between match and load-back",
    "device eviction",
    "host eviction",
    "host pool full",
    "storage insert",
    "unknown pages in the way",
    "flush with requests that wait",
    "truth evicted",
    "truth evicted while a hit waits",
    "no slot",
    "over the row limit",
    "over the staging",
    "never cached",
)


CLOCK = FakeClock()


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache(), CLOCK:
        yield


@dataclass
class Life:
    """What the scheduler knows of a request besides its Req."""

    answer: int
    """The token that it would answer with, again and again: equal for twins."""
    chunk: int = 0
    """End of the first chunk, planned at admission."""
    launched: bool = False
    """Whether its first chunk was launched (since its last retraction)."""
    unpublished: int | None = None
    """End of the chunk whose result is not processed yet."""
    row: int | None = None
    """The row that it had before a retraction."""
    retracted: bool = False


def prompt_of(pages: int, forks: tuple[bool, bool], tail: int) -> array:
    """Whole pages of one token each, and a tail; two levels have two pages to choose from."""
    ids = array("q")
    for level in range(pages):
        other = (level == 1 and forks[0]) or (level == 3 and forks[1])
        ids.extend([10 + 2 * level + other] * PAGE)
    ids.extend([7] * tail)
    return ids


PROMPTS = st.builds(
    prompt_of,
    st.integers(1, 6),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([0, 1, 255, 255]),
)
WORLD = ("device", "device", "host", "host memory", "storage", "truth", "truth")
ANSWERS = st.sampled_from([8, 9])
KINDS = st.sampled_from(
    [ALL_KINDS, ALL_KINDS - {Kind.FILL}, ALL_KINDS - {Kind.JUNCTION}]
) | st.frozensets(st.sampled_from(Kind), min_size=1)


class Lifetime(RuleBasedStateMachine):
    """See the module's docstring. A rule is what one or more scheduling steps do."""

    def __init__(self, met: Counter[str]) -> None:
        super().__init__()
        self.met = met

    # ---- the world

    @initialize(
        slots=st.sampled_from([2, 3, 12, 40]),
        stride=st.sampled_from([1, 2, 3, 8]),
        kinds=KINDS,
        row_limit=st.sampled_from([None, None, 1, 3]),
        ratio=st.sampled_from([1.1, 2.0]),
        policy=st.sampled_from(["lru", "lfu", "fifo", "tlru", "priority"]),
        deferred=st.booleans(),
    )
    def start(self, slots, stride, kinds, row_limit, ratio, policy, deferred) -> None:
        from sglang.srt.mem_cache.unified_cache.unified_tree_core import get_eviction_strategy

        stack = make_cache(
            make_server_args(hicache_ratio=ratio), pages=DEVICE_PAGES, slots=slots, rows=4
        )
        stack.cache.tree_core.eviction_strategy = get_eviction_strategy(policy, None)
        stack.cache.tree_core.tlru_bookkeeping = policy == "tlru"
        if deferred:
            defer_device_to_host(stack.cache)
        self.driver = PlannedDriver(stack, stride=stride, kinds=kinds, row_limit=row_limit)
        self.cache = stack.cache
        self.row_limit = row_limit
        self.lives: dict[Any, Life] = {}
        self.waiting: list[Any] = []
        self.holder: Any = None  # the one unfinished (chunked) request
        self.past: list[array] = []  # what was asked and answered before
        self.decoded: set[int] = set()  # lineages of pages that decode completed
        self.rows_taken: Counter[int] = Counter()
        self.hog: Any = None
        self.counted: Counter[str] = Counter()

    # ---- arrival and admission

    @precondition(lambda self: len(self.waiting) < MOST_WAITING)
    @rule(
        data=st.data(),
        priority=st.integers(0, 2),
        answer=ANSWERS,
        uncached=st.integers(0, 15),
        copies=st.sampled_from([1, 1, 2]),
    )
    def arrive(self, data, priority, answer, uncached, copies) -> None:
        """One request, or twins. It is matched while it waits, as the scheduler's policy does."""
        prompt = self._prompt(data)
        for _ in range(copies):
            self._arrive(prompt, priority, answer, never_cached=uncached == 0)

    @rule(
        data=st.data(),
        answer=ANSWERS,
        copies=st.sampled_from([1, 2]),
        overlap=st.booleans(),
        waits=st.sampled_from([None, "for its first forward", "decoding"]),
        asks_on=st.booleans(),
    )
    def serve(self, data, answer, copies, overlap, waits, asks_on) -> None:
        """One request, or twins, from arrival to end while all others stand still. The second
        twin's prefill is launched with the first one's, and its result processed after its end,
        perhaps when the first one's pages have left the device. Perhaps another waits with its row
        for all that time, its hit unread or its newest pages decoded, or asks on from each end."""
        driver = self.driver
        self._stash()
        bystander = None
        if waits and self.past:
            bystander = self._arrive(self._prompt(data), 0, answer)
            if self._admit(bystander, data) and waits == "decoding":
                self._decode_two_pages(bystander, data)
        prompt = self._prompt(data)
        reqs = [self._arrive(prompt, 1, answer) for _ in range(copies)]
        reqs = [req for req in reqs if self._admit(req, data)]
        self._prefill_whole(reqs, data)
        for req in reqs:
            last = req is reqs[-1]
            if overlap:
                self._forward([], [(req, driver.computed[req] + 1)])
            self._process(req)
            for _ in range(data.draw(st.integers(0, 3 if last else 1))):
                self._forward([], [(req, (driver.computed[req] // PAGE + 1) * PAGE)])
            self._finish(req, data.draw(st.sampled_from([0, 0, 1, 3])))
            if asks_on and last:
                self._ask_on(answer, data)
            cool = data.draw(st.sampled_from([0, 1, 99] if last else [0, 99]))
            if cool:
                driver.settle()
                self._evict_device(cool)
            if asks_on and cool and last:
                self._ask_on(answer, data)
        if bystander in self._prefilling():
            self._prefill([bystander], False, data)
        elif bystander in driver.running:
            self._forward([], [(bystander, driver.computed[bystander] + 1)])

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(),
        count=st.sampled_from([1, 2, 3]),
        patient=st.booleans(),
        at_once=st.booleans(),
        mixed=st.booleans(),
    )
    def admit(self, data, count, patient, at_once, mixed) -> None:
        """Requests are given rows; their first forward comes at once or later."""
        self._stash()
        admitted = []
        for _ in range(min(count, len(self.waiting))):
            req = data.draw(st.sampled_from(self.waiting))
            if self._admit(req, data, patient=patient):
                admitted.append(req)
        self.met["several admitted at once"] += len(admitted) > 1
        if admitted and at_once:
            self._prefill(admitted, mixed, data)

    # ---- forwards

    @precondition(lambda self: self._prefilling())
    @rule(data=st.data(), mixed=st.booleans(), room=st.sampled_from([None, None, None, 1]))
    def prefill_forward(self, data, mixed, room) -> None:
        """A chunk of one or more requests, and steps of some that decode."""
        self._stash()
        self._prefill(self._drawn(data, self._prefilling()), mixed, data, room)

    @precondition(lambda self: self._decoding())
    @rule(data=st.data())
    def decode_forward(self, data) -> None:
        """A step of some requests, or the last one of several."""
        decodes = [(req, self._step_end(req, data)) for req in self._decodable(data)]
        if decodes:
            self._forward([], decodes)

    @precondition(lambda self: self._unprocessed())
    @rule(data=st.data())
    def process(self, data) -> None:
        """The result of a prefill's last chunk: its checkpoint, a decode step in flight or not."""
        req = data.draw(st.sampled_from(self._unprocessed()))
        self._process(req)

    @rule()
    def next_step(self) -> None:
        """The unfinished request is checkpointed, queued copies start and are acknowledged."""
        self._stash()
        self.driver.settle()

    # ---- ends

    @precondition(lambda self: self._decoding())
    @rule(
        data=st.data(),
        beyond=st.sampled_from([0, 0, 1, 3]),
        discarded=st.sampled_from([False, False, True]),
    )
    def finish(self, data, beyond, discarded) -> None:
        """The answer ends `beyond` tokens before the last one that was computed. Seldom, a check
        has failed, and nothing of the request is cached."""
        req = data.draw(st.sampled_from(self._decoding()))
        if discarded:
            self._end(req)
            self.driver.drop(req)
            self.met["output discarded"] += 1
        else:
            self._finish(req, beyond)

    @precondition(lambda self: self.driver.running or self.waiting)
    @rule(data=st.data())
    def abort(self, data) -> None:
        """At any moment. Stock caches what an aborted request has decoded, as at a finish."""
        req = data.draw(st.sampled_from([*self.driver.running, *self.waiting]))
        self._abort(req)

    @precondition(lambda self: self._decoding())
    @rule(data=st.data())
    def retract(self, data) -> None:
        """For want of KV: back to the queue."""
        self._retract(data.draw(st.sampled_from(self._decoding())))

    @precondition(lambda self: self._decoding() and self.waiting)
    @rule(data=st.data())
    def preempt(self, data) -> None:
        """The most urgent of those that wait takes the place of the least urgent that runs."""
        urgent = max(self.waiting, key=lambda req: req.priority)
        victim = min(self._decoding(), key=lambda req: req.priority)
        if urgent.priority > victim.priority:
            self._retract(victim)
            self._admit(urgent, data)
            self.met["preempted"] += 1

    # ---- the world around them

    @rule(data=st.data(), what=st.sampled_from(WORLD))
    def pools(self, data, what) -> None:
        """Eviction of pages on either tier, and of truths; host memory that is used up; pages from
        storage."""
        if what == "device":
            CLOCK.pass_time(data.draw(st.sampled_from([0.0, 100.0])))
            if data.draw(st.booleans()):
                self.driver.settle()
            self._evict_device(data.draw(st.sampled_from([1, 4, 99])))
        elif what == "host":
            self._evict_host(data.draw(st.integers(1, 6)))
        elif what == "host memory":
            self._fill_or_free_host()
        elif what == "truth":
            self._forget_truth(data)
        elif self.past:
            self._insert_from_storage(data)

    @rule(dice=st.integers(0, 7))
    def update_weights(self, dice) -> None:
        """Generation pauses, what runs is retracted or aborted, and the cache is flushed."""
        if dice:
            return  # seldom, or the pools would never fill
        driver = self.driver
        self._stash()
        for req in self._decoding():
            self._retract(req)
        for req in self._prefilling():
            self._abort(req)
        driver.settle()
        if self.hog is not None:
            self._fill_or_free_host()
        self.cache.reset()
        driver.stack.req_to_token.clear()
        driver.stack.allocator.clear()
        self.decoded.clear()
        self.met["flush with requests that wait"] += bool(self.waiting)

    # ---- always

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.check()
        for req in self.driver.running:
            held = self.cache.row_truths(req)
            if self.row_limit is not None and held > self.row_limit + NEWEST_DECODE:
                raise Violation(f"{req.rid} holds {held} slots before a node owns them")
            if self.driver.kept(req) and req.skip_radix_cache_insert:
                raise Violation(f"{req.rid} is never cached and holds slots")
        self._count_what_happened()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()
            self.nothing_is_left()

    def nothing_is_left(self) -> None:
        """Everything ends, both tiers are emptied, and every page, slot and identity is back."""
        if self.hog is not None:
            self._fill_or_free_host()
        self.driver.check_no_leak()

    # ---- what one request goes through

    def _prompt(self, data: Any) -> array:
        """A new one, or somebody asks on from an earlier answer or from the middle of it."""
        if not self.past or data.draw(st.booleans()):
            return data.draw(PROMPTS)
        pages = data.draw(st.integers(1, MOST_PROMPT) | st.just(MOST_PROMPT))
        said = self._earlier(data)[: pages * PAGE]
        return said + array("q", [6] * data.draw(st.sampled_from([1, 200, 256])))

    def _prefill_whole(self, reqs: list, data: Any) -> None:
        driver = self.driver
        while unfinished := [r for r in reqs if driver.computed[r] < driver.prompt_len[r]]:
            self._prefill(unfinished, False, data)
            self._stash()

    def _decode_two_pages(self, req: Any, data: Any) -> None:
        """And perhaps a token more, behind which the newer page is safe."""
        driver = self.driver
        self._prefill_whole([req], data)
        self._process(req)
        for _ in range(2):
            self._forward([], [(req, (driver.computed[req] // PAGE + 1) * PAGE)])
        if data.draw(st.booleans()):
            self._forward([], [(req, driver.computed[req] + 1)])

    def _ask_on(self, answer: int, data: Any) -> None:
        """A request that knows all of the last one's answer; it goes after its first chunk."""
        req = self._arrive(self.past[-1] + array("q", [6]), 1, answer)
        if self._admit(req, data):
            self._prefill([req], False, data)
        self._abort(req)

    def _earlier(self, data: Any) -> array:
        return self.past[data.draw(st.integers(0, len(self.past) - 1))]

    def _arrive(self, prompt: array, priority: int, answer: int, never_cached: bool = False) -> Any:
        req = self.driver.request(prompt, priority=priority)
        req.skip_radix_cache_insert = never_cached
        self.met["never cached"] += never_cached
        req.init_next_round_input(self.cache)
        self.lives[req] = Life(answer)
        self.waiting.append(req)
        return req

    def _admit(self, req: Any, data: Any, *, patient: bool = False) -> bool:
        """Match, perhaps lose what was matched, load back or not, take a row."""
        driver, life = self.driver, self.lives[req]
        if not driver.stack.req_to_token.available_size() or not self._has_room_for(req):
            return False
        req.init_next_round_input(self.cache)
        junction = self.cache.junction(req)
        if patient and junction is not None and self.cache.healer(junction) not in (None, req):
            self.met["waits for its healer"] += 1
            return False
        decline, demoted = False, 0
        if req.host_hit_length:
            decline = data.draw(st.integers(0, 5)) == 0
            demoted = data.draw(st.sampled_from([0, 0, 1, 4, 99]))
        loads = Counter(driver.stats)

        def between() -> None:
            if demoted:
                before = driver.stack.device_pages_free()
                driver.evict_device(demoted)
                gone = driver.stack.device_pages_free() > before
                self.met["demoted between match and load-back"] += gone

        declined = self.cache.gate_counters.load_backs_declined
        driver.admit(
            req=req,
            decline=decline,
            between=between,
            flush=data.draw(st.booleans()),
            extend_end=lambda req: self._plan_first_chunk(req, data),
        )
        self.waiting.remove(req)
        row = req.kv.req_pool_idx
        self.rows_taken[row] += 1
        self.met["hit from host memory"] += driver.stats["loaded"] > loads["loaded"]
        self.met["declined load-back"] += driver.stats["declined"] > loads["declined"]
        self.met["load-back declined at the second look"] += (
            self.cache.gate_counters.load_backs_declined > declined
        )
        if req.prefix_len:
            lineage, _ = self.cache.final_truth(req)
            self.met["hit on a page that decode completed"] += lineage in self.decoded
            self.met["resumed with a hit"] += life.retracted
        if life.retracted:
            by_others = self.rows_taken[life.row] - (life.row == row)
            self.met["resumed after another had its row"] += by_others > 0
        return True

    def _plan_first_chunk(self, req: Any, data: Any) -> int:
        life = self.lives[req]
        life.chunk = self._chunk(req, req.prefix_len, len(req.full_untruncated_fill_ids), data)
        return life.chunk

    def _chunk(self, req: Any, start: int, total: int, data: Any) -> int:
        """Where a chunk from `start` ends. Only one request at a time may be unfinished."""
        if self.holder not in (None, req):
            junction = self.driver.chunk_end(req, start, total) < total
            self.met["a junction not cut: another has the chunk place"] += junction
            return total
        pages = data.draw(st.sampled_from([1, 1, 2, 9]))
        budget = min(total, (start // PAGE + pages) * PAGE)
        end = self.driver.chunk_end(req, start, budget)
        self.met["chunk cut at a junction"] += end < budget
        self.holder = req if end < total else None
        return end

    def _chunk_end(self, req: Any, data: Any) -> int:
        start, total = self.driver.computed[req], self.driver.prompt_len[req]
        if not self.lives[req].launched:
            return self.lives[req].chunk
        end = self._chunk(req, start, total, data)
        req.extend_end = end
        return end

    def _step_end(self, req: Any, data: Any) -> int:
        """Where a decode step ends: one token on, or the last of several that end no page."""
        start = self.driver.computed[req]
        if self.lives[req].unpublished is not None:
            return start + 1
        to_boundary = (start // PAGE + 1) * PAGE
        return data.draw(st.sampled_from([start + 1, to_boundary, to_boundary]))

    def _prefill(self, reqs: list, mixed: bool, data: Any, room: int | None = None) -> None:
        extends = [(req, self._chunk_end(req, data)) for req in reqs]
        decodes = []
        if mixed:
            decodes = [(req, self._step_end(req, data)) for req in self._decodable(data)]
        self._forward(extends, decodes, room)

    def _forward(self, extends: list, decodes: list = (), room: int | None = None) -> None:
        driver, met = self.driver, self.met
        for req, end in decodes:
            driver.answer_up_to(req, end, self.lives[req].answer)
        hits = driver.stats["hits"]
        captured = driver.launch(extends, decodes, room)
        met["hit"] += driver.stats["hits"] - hits
        met["a batch of several prefills"] += len(extends) > 1
        met["mixed batch"] += bool(extends and decodes)
        for req, end in extends:
            life = self.lives[req]
            life.launched, life.unpublished = True, end
        boundaries = [(req, end) for req, end in decodes if end % PAGE == 0]
        met["decode boundary"] += len(boundaries)
        met["decode boundary in a mixed batch"] += bool(extends and boundaries)
        self.decoded |= {w.lineage for w in captured if w.keep is Keep.LIVE}
        met["over the staging"] += room is not None and len(captured) == room
        met["junction where prompts part"] += any(w.keep is Keep.USED for w in captured)

    def _stash(self) -> None:
        """The unfinished request's last chunk is checkpointed before anything is scheduled."""
        req = self.holder
        if req is not None and self.lives[req].unpublished is not None:
            self._process(req)

    def _process(self, req: Any) -> None:
        life, driver = self.lives[req], self.driver
        end, life.unpublished = life.unpublished, None
        in_flight = driver.computed[req] > end
        completed = self.cache.row_lineage(req, driver.computed[req] // PAGE)
        driver.checkpoint(req, end)
        if end == driver.prompt_len[req]:
            kind = "after a decode step in flight" if in_flight else "before a decode step"
            self.met[f"checkpoint {kind}"] += 1
            if in_flight and driver.computed[req] % PAGE == 0:
                joined = self.cache.row_lineage(req, driver.computed[req] // PAGE) != completed
                self.met["a page in flight read pages that the tree did not keep"] += joined

    def _finish(self, req: Any, beyond: int) -> None:
        driver = self.driver
        computed, asked = driver.computed[req], len(req.origin_input_ids)
        stop = max(computed - beyond, driver.prompt_len[req])
        self.met["finished at its prefill"] += self.lives[req].unpublished is not None
        self.met["page completed beyond the finish"] += stop // PAGE < computed // PAGE
        self._end(req)
        driver.finish(req, through=max(stop - asked, 1) if stop < computed else None)

    def _abort(self, req: Any) -> None:
        driver = self.driver
        if req in self.waiting:
            self.waiting.remove(req)
            self._end(req)
            self.met["abort waiting"] += 1
        elif driver.computed[req] == driver.prompt_len[req]:
            self._finish(req, 0)
            self.met["abort decoding"] += 1
        else:
            life = self.lives[req]
            if life.unpublished is not None:
                self.met["abort mid-chunk"] += 1
            elif life.launched:
                self.met["abort mid-chunk, checkpointed"] += 1
            else:
                self.met["abort before the first forward"] += 1
            self._end(req)
            driver.drop(req)

    def _retract(self, req: Any) -> None:
        life = self.lives[req]
        self.met["retracted"] += 1
        self.met["retracted with its prefill's result to come"] += life.unpublished is not None
        life.launched, life.unpublished, life.retracted = False, None, True
        life.row = req.kv.req_pool_idx
        self.rows_taken[life.row] = 0
        self.driver.drop(req)
        # What its last step sampled is known, its KV is not.
        self.driver.answer_up_to(req, len(req.full_untruncated_fill_ids) + 1, life.answer)
        req.reset_for_retract()
        self.waiting.append(req)

    def _end(self, req: Any) -> None:
        """It will not come back; somebody may ask on from where it was."""
        del self.lives[req]
        if self.holder is req:
            self.holder = None
        self.past = [*self.past[-3:], req.origin_input_ids + req.output_ids]

    # ---- what befalls the pools

    def _evict_device(self, pages: int) -> None:
        before = self.driver.stack.device_pages_free()
        self.driver.evict_device(pages)
        self.met["device eviction"] += self.driver.stack.device_pages_free() > before

    def _evict_host(self, pages: int) -> None:
        """Host-only leaves go, and their truths with them."""
        pool = self.driver.stack.host_pool
        before = pool.available_size()
        self.driver.evict_host(pages)
        self.met["host eviction"] += pool.available_size() > before

    def _fill_or_free_host(self) -> None:
        """Backups fail for want of host memory, until they do not."""
        pool = self.driver.stack.host_pool
        if self.hog is not None:
            pool.free(self.hog)
            self.hog = None
        elif pool.available_size():
            self.hog = pool.alloc(pool.available_size())
            self.met["host pool full"] += 1

    def _forget_truth(self, data: Any) -> None:
        """Some truths go while their pages stay, as captures that need the slots make it."""
        slots = self.cache.store.slots
        evictable = [i for i in slots.least_recent_first() if not slots.is_locked(i)]
        some = data.draw(st.integers(0, 2 ** len(evictable) - 1))
        gone = {slots.owner(slot) for i, slot in enumerate(evictable) if some >> i & 1}
        self.driver.forget_truth(lambda lineage: lineage not in gone)

    def _insert_from_storage(self, data: Any) -> None:
        """Host pages that this process did not compute, below a node that ends on a path."""
        driver = self.driver
        prompt = self._earlier(data)
        ends = [0, *(position for _, position in driver.walk(prompt))]
        first = data.draw(st.sampled_from(ends))
        count = min(data.draw(st.integers(1, 3)), len(prompt) // PAGE - first)
        if count and driver.stack.host_pool.available_size() >= count * PAGE:
            driver.insert_from_storage(prompt, first, [driver.stamp() for _ in range(count)])
            self.met["storage insert"] += 1

    # ---- who is in which part of its life

    def _prefilling(self) -> list[Any]:
        driver = self.driver
        return [r for r in driver.running if driver.computed[r] < driver.prompt_len[r]]

    def _decoding(self) -> list[Any]:
        driver = self.driver
        return [r for r in driver.running if driver.computed[r] >= driver.prompt_len[r]]

    def _unprocessed(self) -> list[Any]:
        return [r for r in self._decoding() if self.lives[r].unpublished is not None]

    def _decodable(self, data: Any) -> list[Any]:
        """Some of those that decode. One step may be launched before the prefill's result."""
        driver = self.driver
        able = [
            r
            for r in self._decoding()
            if self.lives[r].unpublished in (None, driver.computed[r])
            and driver.computed[r] // PAGE < self._most_pages(r) - 1
        ]
        return self._drawn(data, able)

    @staticmethod
    def _drawn(data: Any, reqs: list[Any]) -> list[Any]:
        """One or more of them, in any order."""
        if not reqs:
            return []
        return data.draw(st.lists(st.sampled_from(reqs), min_size=1, max_size=3, unique_by=id))

    @staticmethod
    def _most_pages(req: Any) -> int:
        """Pages of the request's row at its longest."""
        return -(-len(req.origin_input_ids) // PAGE) + MOST_ANSWER

    def _has_room_for(self, req: Any) -> bool:
        """The driver has no scheduler that would retract: rows at their longest must fit."""
        running = sum(self._most_pages(r) for r in self.driver.running)
        return running + self._most_pages(req) <= DEVICE_PAGES

    # ---- what was met

    def _count_what_happened(self) -> None:
        gate, store, counters = (
            self.cache.gate_counters,
            self.cache.store.counters,
            self.driver.counters,
        )
        now = Counter(
            {
                "healed": gate.healed,
                "chain mended": gate.rehung_pages,
                "path loaded back for healing": gate.loaded_for_healing,
                "third newest decode page let go": store.superseded,
                "truth evicted": store.evicted,
                "spare decode page let go": self.driver.planner.spares_released,
                "no slot": counters.capture_no_slot,
                "over the row limit": counters.capture_over_row_limit,
            }
        )
        fresh = now - self.counted
        if self.driver.restores and fresh["truth evicted"]:
            self.met["truth evicted while a hit waits"] += 1
        self.met.update(fresh)
        self.counted = now
        hosts = (copies.host for _, copies in self.cache.copies.items())
        unknown = any(copy is not None and UNKNOWN in copy.ids for copy in hosts)
        self.met["unknown pages in the way"] += unknown
        self._count_how_slots_are_held()

    def _count_how_slots_are_held(self) -> None:
        slots = self.cache.store.slots
        owned = slots.least_recent_first()
        self.met["point passed"] += any(slots.keep(i) is Keep.PASSED for i in owned)
        self.met["truth used by several"] += any(slots.uses(i) > 1 for i in owned)


class BytesOnly(Lifetime):
    """No check but that of the bytes that hits read."""

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        """Off."""

    def nothing_is_left(self) -> None:
        """Off."""


def run(machine: type[Lifetime], examples: int, **options: Any) -> Counter[str]:
    """Run the machine; what it met."""
    met: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: machine(met),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )
    return met


def test_no_order_of_lives_and_deaths_breaks_anything():
    met = run(Lifetime, EXAMPLES, derandomize=EXAMPLES == DEFAULT_EXAMPLES)
    print(f"{EXAMPLES} lives met:", dict(sorted(met.items())))
    assert [situation for situation in MET if not met[situation]] == []


# ---- controls: the machine finds a broken rule


BROKEN_BOOKS = (
    broken_rules.marks_of_finished_requests_stay,
    broken_rules.newest_decode_page_is_let_go,
    broken_rules.truth_of_an_aborted_request_stays,
    broken_rules.row_from_before_a_retraction_is_read_on,
    broken_rules.marks_outlive_a_flush,
)
BROKEN_PAIRINGS = (
    broken_rules.slot_of_a_waiting_hit_is_not_locked,
    broken_rules.interior_truth_moves,
    broken_rules.truth_moves_after_another_forward,
    broken_rules.mended_pages_keep_their_truth,
    broken_rules.truth_without_a_chain,
)


def _name(broken) -> str:
    return broken.__name__.replace("_", " ")


@pytest.mark.parametrize("broken", BROKEN_BOOKS, ids=_name)
def test_control_broken_books_are_found(monkeypatch, broken):
    broken(monkeypatch.setattr)
    with pytest.raises((Violation, LineageError, SlotError)):
        run(Lifetime, EXAMPLES, phases=[Phase.generate], derandomize=True)


@pytest.mark.parametrize("broken", BROKEN_PAIRINGS, ids=_name)
def test_control_a_broken_pairing_is_found_by_its_bytes(monkeypatch, broken):
    """Bytes alone must find it: every other check is off."""
    broken(monkeypatch.setattr)
    with pytest.raises(Violation, match=r"is not what truth saw|no truth at"):
        run(BytesOnly, EXAMPLES, phases=[Phase.generate], derandomize=True)
