"""Eight ranks in one process: the real tree, gate, slots, planner and TruthRuntime of each; no model.

Every replica runs the same script of scheduler steps on pools of its own, in a thread of its own, one at
a time: a thread gives its turn away only inside a collective (`Meeting`), which is where ranks wait for
each other. What a real rank may find different is different here: when copies to host memory are
acknowledged, how late the copy lanes are, whether the debug checks like a restore, whether a truth is
found at admission, how much storage answers. What a replica decided is its `trace`; all must be equal.

With a draft, answers grow by speculative rounds: a round is launched before the result of the one before
it is processed, and how many tokens it committed is the script's (SGLang takes the first rank's word for
it). Rounds that cannot complete a page are left out.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from bitexact_fixtures import (
    PAGE,
    CpuStack,
    FakeEvent,
    make_cache,
    make_kv_pool,
    make_server_args,
)
from tree_driver import TreeDriver, Violation, tokens

from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.ranks import Ranks
from sglang_bitexact_hicache.runtime import TruthRuntime

RANKS = 8
MOST_PAGES = 8
"""Pages of a request's row, at most."""

ROUND = 4
"""Tokens that a speculative round verifies, where there is a draft."""

OPERATIONS = (
    *["admit"] * 6, *["advance"] * 14, *["finish"] * 5, *["settle"] * 4, *["evict device"] * 3,
    "drop", "evict host", "hog", "storage", "bad restore", "no truth", "flush",
)  # fmt: skip

Step = tuple[int, int, int, int]
"""An operation by its index, and three numbers that it may use."""


class Meeting:
    """The collectives of `RANKS` threads, and whose turn it is."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(RANKS, action=self._reduce)
        self._values: dict[int, torch.Tensor] = {}
        self._result: torch.Tensor | None = None

    def __enter__(self) -> None:
        self._turn.acquire()

    def __exit__(self, failed: Any, *_exc: object) -> None:
        self._turn.release()
        if failed:
            self._barrier.abort()

    def all_reduce(self, rank: int, tensor: torch.Tensor, _op: Any) -> None:
        """MIN over the ranks, in place."""
        self._values[rank] = tensor.clone()
        self._turn.release()
        try:
            # Ranks that are somewhere else, or at their end, never come.
            self._barrier.wait(timeout=20)
        except threading.BrokenBarrierError:
            raise Violation(f"rank {rank} waits in a collective that others do not reach") from None
        finally:
            self._turn.acquire()
        tensor.copy_(self._result)

    def leave(self) -> None:
        """A rank is done: a collective that somebody still waits in cannot happen any more."""
        if self._barrier.n_waiting:
            self._barrier.abort()

    def _reduce(self) -> None:
        shapes = {tuple(value.shape) for value in self._values.values()}
        if len(shapes) > 1:
            raise Violation(f"ranks meet in different collectives: {shapes}")
        self._result = torch.stack(list(self._values.values())).amin(0)


class Replica(TreeDriver):
    """One rank; see the module's docstring.

    Args:
        stack: its pools, tree and controller.
        rank, meeting: which one it is, among whom.
        drafts: pools of a draft's layers; with any, answers grow by speculative rounds.
    """

    def __init__(
        self, stack: CpuStack, rank: int, meeting: Meeting, drafts: Sequence[Any] = ()
    ) -> None:
        super().__init__(stack, cuts=True)
        self.rank = rank
        self.trace: list[Any] = []
        self.world = random.Random(rank)
        """What this rank only can know: never read by anything that decides."""
        self.lies: set[str] = set()
        """What goes wrong here with the next request that hits."""
        self.meeting = meeting
        self.events: Counter[str] = Counter()
        self._hog: Any = None
        self._drafts = bool(drafts)
        self._results: deque[tuple[int, list[tuple[Any, int]]]] = deque()
        """Rounds in flight: their number, and how many tokens each of its requests commits."""
        self._forwards = 0
        cache = stack.cache
        cache.tp_world_size = RANKS
        cache._all_reduce_attn_groups = lambda tensor, op: meeting.all_reduce(rank, tensor, op)
        view = DeviceView(stack.kv_pool, drafts)
        self.runtime = TruthRuntime(
            cache,
            view,
            TruthHostPools(view.layout, cache.store.capacity),
            stride=2,
            row_limit=6,
            chunk_tokens=2 * PAGE,
            round_tokens=ROUND if drafts else 0,
            debug=False,
            pin=False,
            ranks=Ranks.of(cache),
        )
        self.runtime._checks = self  # note_*, bind_sources, verify, clear: below
        self.runtime._ranks.note = self.note
        cache.truth_runtime = self.runtime
        self._acknowledge_late()
        self._copy_late()

    # ---- what differs between ranks

    def _acknowledge_late(self) -> None:
        """Copies to host memory are done when this rank's world says so."""
        engine, world = self.cache.cache_controller.l2_transfer_engine, self.world
        submit = engine.submit_device_to_host

        class Late(FakeEvent):
            done = False

            def query(self) -> bool:
                self.done = self.done or world.random() < 0.4
                return self.done

        def late(*args: Any, **kwargs: Any) -> Any:
            return submit(*args, **kwargs)._replace(finish_event=Late())

        engine.submit_device_to_host = late

    def _copy_late(self) -> None:
        for lane in (self.runtime._out_lane, self.runtime._in_lane):
            delay, run = self.rank % 3 * 0.0005, lane._run
            lane._run = lambda *args, run=run, delay=delay: (time.sleep(delay), run(*args))

    def verify(self, req: Any, _restore: Any) -> bool:
        """Stands for DebugChecks.verify."""
        right = "bad restore" not in self.lies
        self.lies.discard("bad restore")
        return right

    def note_rings(self, plan: Any) -> None:
        """Stands for DebugChecks.note_rings."""

    def bind_sources(self, plan: Any, slots: Sequence[int]) -> None:
        """Stands for DebugChecks.bind_sources."""

    def clear(self) -> None:
        """Stands for DebugChecks.clear."""

    # ---- the script

    def play(self, script: Sequence[Step]) -> None:
        """All steps, then everything is given back; what happened goes into the trace."""
        for number, (operation, *values) in enumerate(script):
            name = OPERATIONS[operation % len(OPERATIONS)]
            self.note(f"{number} {name}")
            getattr(self, name.replace(" ", "_"))(*values)
            self.note("state", *self.state())
            self.cache.check_integrity()
        self.lies.clear()
        if self._hog is not None:
            self.hog(0, 0, 0)
        for req in list(self.running):
            self.drop(req)
        self._process_results()
        while self.cache.ongoing_write_through:
            self.settle()
        self.runtime.drain()
        assert not self._drafts or len(self.runtime._rounds) == 0
        self.check_no_leak()
        self.note("end", *self.state())

    def note(self, *what: Any) -> None:
        """A decision (also stands for Ranks.note)."""
        self.trace.append(what)

    def state(self) -> tuple[Any, ...]:
        """All that later decisions depend on, as far as it is told by few numbers."""
        store, cache = self.cache.store, self.cache
        slots = tuple(
            (store.slots.state(s).name, store.slots.owner(s), store.slots.is_locked(s))
            for s in range(store.capacity)
        )
        running = tuple((r.rid, self.computed[r], r.prefix_len) for r in self.running)
        counters = {**vars(cache.gate_counters), **vars(store.counters)}
        free = (self.stack.device_pages_free(), self.stack.host_pool.available_size())
        kept = self.runtime.counters.snapshot()
        kept.pop("staging_waits")
        return slots, running, tuple(counters.items()), free, tuple(kept.items())

    def admit(self, *values: int) -> None:  # type: ignore[override]
        """A request comes in, if there is room for it whatever it will need."""
        stem, branch, tail = values
        pages = 1 + stem % 5
        prompt = tokens(pages, (0, 1, 100, 255)[tail % 4], branch_at=stem % 3, branch=branch % 3)
        if (len(self.running) + 1) * MOST_PAGES > self.stack.allocator.size_full // PAGE:
            return
        req = super().admit(
            prompt, extend_end=lambda req: self.chunk_end(req, req.prefix_len, len(prompt))
        )
        with self._lying(req):
            self.runtime.admit([req])
        self.note("admitted", req.rid, req.prefix_len, req.skip_radix_cache_insert)
        self.events["hit"] += req.prefix_len > 0

    def _lying(self, req: Any) -> ExitStack:
        stack = ExitStack()
        if req.prefix_len and "no truth" in self.lies:
            self.lies.discard("no truth")
            right = self.cache.final_truth
            self.cache.final_truth = lambda req: None
            stack.callback(setattr, self.cache, "final_truth", right)
        return stack

    def advance(self, which: int, pages: int, several: int) -> None:
        """One forward: a chunk of a prompt, or the decode steps of a few requests up to a page end; or a
        few rounds of them."""
        if not self.running:
            return
        req = self.running[which % len(self.running)]
        done, total = self.computed[req], len(req.origin_input_ids)
        if done < total:
            end = self.chunk_end(req, done, min(total, (done // PAGE + 1 + pages % 2) * PAGE))
            batch = self._batch("EXTEND", [(req, end)])
            with self.runtime.forward(batch) as active:
                if active is not None:
                    sections = self.runtime.view.layout.num_sections
                    active.capture.gathered.update(range(sections))
                self._compute(req, end)
            rows = [req]
        else:
            rows = [r for r in self.running if self.computed[r] >= len(r.origin_input_ids)]
            rows = [req, *(r for r in rows if r is not req)][: 1 + several % 3]
            if self._drafts:
                dice = random.Random(pages)
                for _ in range(1 + dice.randrange(4)):
                    self._round(rows, dice)
                return
            ends = [(r, (self.computed[r] // PAGE + 1) * PAGE) for r in rows]
            ends = [(r, end) for r, end in ends if end <= MOST_PAGES * PAGE]
            for r, end in ends:
                missing = end - len(r.origin_input_ids) - len(r.output_ids)
                r.output_ids.extend([5000] * missing)
                r.refresh_fill_ids()
            with self.runtime.forward(self._batch("DECODE", ends)):
                for r, end in ends:
                    self._compute(r, end)
        for r in rows:
            if r.skip_radix_cache_insert:
                self.note("discarded", r.rid, r.discard_output_reason is not None)
                self.events["discarded"] += 1
                super().drop(r)
            elif self.computed[r] <= total and r is req:
                self.checkpoint(r)

    def _round(self, rows: Sequence[Any], dice: random.Random) -> None:
        """Launch a round and process the result of the one before it. `dice`: equal on all ranks."""
        committing = []
        for req in rows:
            below, count = 1 + dice.randrange(6), 1 + dice.randrange(ROUND)
            in_flight = any(req is r for _, round_ in self._results for r, _ in round_)
            end = (self.computed[req] // PAGE + 1) * PAGE
            if not in_flight and end - below > self.computed[req] and end < MOST_PAGES * PAGE:
                self._answer(req, end - below)
            # Room for the round in flight and for this one.
            last = self.computed[req] + 2 * ROUND
            if last > MOST_PAGES * PAGE:
                continue
            assert self._grow(req, last)
            req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, last)
            committing.append((req, count))
        if committing:
            self._forwards += 1
            batch = self._batch("DECODE", [(req, self.computed[req]) for req, _ in committing])
            batch.forward_iter = self._forwards
            with self.runtime.forward(batch):
                self._results.append((self._forwards, committing))
        self._process_results(but=1)

    def _answer(self, req: Any, end: int) -> None:
        """Prompt and answer are `end` tokens with KV now, and one without."""
        allocated = req.kv.kv_allocated_len
        self._compute(req, end)
        req.kv.kv_allocated_len = max(allocated, end)
        missing = end + 1 - len(req.origin_input_ids) - len(req.output_ids)
        req.output_ids.extend([5000] * missing)
        req.refresh_fill_ids()

    def _process_results(self, but: int = 0) -> None:
        """Process the results of rounds, `but` the newest, as the result processor does: a request that
        is gone by then does not move."""
        before = self.runtime.counters.snapshot()
        while len(self._results) > but:
            number, committing = self._results.popleft()
            for req, count in committing:
                start = req.kv.kv_committed_len
                if req in self.running:
                    self._answer(req, start + count)
                self.runtime.settle(req, number, start, req.kv.kv_committed_len)
        after = self.runtime.counters.snapshot()
        for name in ("decode_captured", "round_discarded"):
            self.events[name] += after[name] - before[name]

    def _batch(self, mode: str, rows: Sequence[tuple[Any, int]]) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        starts = [self.computed[req] for req, _ in rows]
        return SimpleNamespace(
            forward_mode=ForwardMode[mode],
            reqs=[req for req, _ in rows],
            prefix_lens=starts,
            extend_lens=[end - start for (_, end), start in zip(rows, starts, strict=True)],
            decoding_reqs=None,
            seq_lens_cpu=torch.tensor([end for _, end in rows], dtype=torch.int64),
        )

    def finish(self, which: int, *_: int) -> None:  # type: ignore[override]
        """A request whose prompt is computed ends."""
        done = [r for r in self.running if self.computed[r] >= len(r.origin_input_ids)]
        if done:
            super().finish(done[which % len(done)])

    def drop(self, which: Any, *_: int) -> None:
        """A request is aborted."""
        if isinstance(which, int):
            if not self.running:
                return
            which = self.running[which % len(self.running)]
        super().drop(which)

    def evict_device(self, pages: int = 10**4, *step: int) -> None:
        """Push unlocked nodes off the device."""
        super().evict_device(4 + pages % 30 if step else pages)

    def evict_host(self, pages: int, *step: int) -> None:
        """Drop host-only leaves."""
        super().evict_host(1 + pages % 4 if step else pages)

    def settle(self, *_: int) -> None:
        """A pass of the event loop with nothing to run."""
        super().settle()

    def hog(self, *_: int) -> None:
        """Host memory is full, or no longer."""
        pool = self.stack.host_pool
        if self._hog is not None:
            pool.free(self._hog)
            self._hog = None
        elif pool.available_size():
            self._hog = pool.alloc(pool.available_size())

    def storage(self, stem: int, branch: int, _: int) -> None:
        """Storage brings pages behind a node: what the least of the ranks got, as SGLang agrees."""
        prompt = tokens(5, branch_at=stem % 3, branch=branch % 3)
        ends = [0, *(end for _, end in self.walk(prompt))]
        first = ends[stem % len(ends)]
        got = torch.tensor([self.world.randrange(4)])
        self.cache._all_reduce_attn_groups(got, None)
        count = min(int(got), len(prompt) // PAGE - first)
        if count > 0 and self.stack.host_pool.available_size() >= count * PAGE:
            self.insert_from_storage(prompt, first, [self.stamp() for _ in range(count)])

    def bad_restore(self, rank: int, *_: int) -> None:
        """The next restore goes wrong on one rank."""
        self._lie("bad restore", rank)

    def no_truth(self, rank: int, *_: int) -> None:
        """One rank has no truth for the next request that hits."""
        self._lie("no truth", rank)

    def _lie(self, what: str, rank: int) -> None:
        if self.rank == rank % RANKS:
            self.lies.add(what)

    def flush(self, rarely: int, *_: int) -> None:
        """Now and then everything ends and is forgotten."""
        if rarely % 4:
            return
        for req in list(self.running):
            self.drop(req)
        self._process_results()
        while self.cache.ongoing_write_through:
            self.settle()
        if self._hog is not None:
            self.hog(0, 0, 0)
        self.cache.reset()
        self.stack.allocator.clear()

    def flush_loads(self) -> None:
        """As TreeDriver; what a hit reads is not compared here."""
        self._unchecked.clear()
        super().flush_loads()

    def close(self) -> None:
        """End the lanes' threads."""
        self.runtime._checks = None
        self.runtime.close()
        super().close()


def play(
    script: Sequence[Step], *, slots: int = 10, drafting: bool = False
) -> tuple[list[list[Any]], Counter[str]]:
    """The traces of all ranks, and what they met. `drafting`: with a draft, and pairs for keys.

    Raises:
        Violation: ranks waited for each other in vain, or one of them failed.
    """
    meeting = Meeting()
    # Without it SGLang takes rows that are longer than their KV for a leak.
    speculation = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": ROUND}
    server_args = make_server_args(**(speculation if drafting else {}))
    device = {"pages": 32, "rows": 6}
    replicas = [
        Replica(
            make_cache(server_args, slots=slots, is_eagle=drafting, **device),
            rank,
            meeting,
            [make_kv_pool(layers=(0,), **device)] if drafting else (),
        )
        for rank in range(RANKS)
    ]
    failures: list[BaseException] = []

    def run(replica: Replica) -> None:
        try:
            with meeting:
                replica.play(script)
                meeting.leave()
        except BaseException as error:  # handed to the caller below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    met: Counter[str] = Counter()
    for replica in replicas:
        met += replica.events + replica.stats
        met["evicted"] += replica.cache.store.counters.evicted
        met["captured"] += replica.runtime.counters.captured
        met["no slot"] += replica.runtime.counters.capture_no_slot
        replica.close()
    if failures:
        raise Violation(f"a rank failed: {failures[0]!r}") from failures[0]
    return [replica.trace for replica in replicas], met


def differences(traces: Sequence[Sequence[Any]]) -> list[str]:
    """Where the traces of the ranks part first; empty where they are equal."""
    for number, entries in enumerate(zip(*traces, strict=False)):
        if len(set(entries)) > 1:
            return [f"entry {number}, rank {rank}: {entry}" for rank, entry in enumerate(entries)]
    lengths = {len(trace) for trace in traces}
    return [f"lengths {lengths}"] if len(lengths) > 1 else []


def random_script(seed: int, steps: int) -> list[Step]:
    """Steps from a seed."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(1 << 16) for _ in range(4)) for _ in range(steps)]
