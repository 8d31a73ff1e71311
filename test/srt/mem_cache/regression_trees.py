"""SGLang's prefix caches over other models' KV pools, driven at random, and everything written
down.

Real: the registry that builds the cache, the pools and allocators, the host pools and the
controller of HiCache, Req, and the functions that a scheduler calls (match, lock, load-back,
allocation, checkpoint, release, sliding windows). Written here: in which order requests come, grow,
end and are thrown away, and the KV bytes, which are different at each write. Choices depend on the
seed and on SGLang's answers only, so two processes that run the same SGLang write the same
transcript. Knows nothing of the plugin.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from regression_caches import ROWS, SHAPES, Shape, build, digest


def transcript(name: str, seed: int, operations: int) -> dict[str, Any]:
    """Runs `operations` random operations on the cache called `name`.

    Returns:
        "operations": one line each, with its answer and the sizes after it; "counts": how often each kind
        happened and how much was reused, for the reader to see that there was something to compare.
    """
    shape = SHAPES[name]
    with _enough_memory(), _no_log():
        driver = Driver(shape, random.Random(f"{name} {seed}"))
        for _ in range(operations):
            driver.step()
        driver.end()
    return {"operations": driver.lines, "counts": dict(sorted(driver.counts.items()))}


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
    """SGLang refuses host pools where the machine has little memory left; how much it has just now is not
    part of what is compared."""
    from sglang.srt.mem_cache import memory_pool_host
    from sglang.srt.mem_cache.pool_host import base

    def budget(*_args: Any, **_kwargs: Any) -> int:
        return 1 << 34

    with (
        mock.patch.object(memory_pool_host, "host_memory_budget_bytes", budget),
        mock.patch.object(base, "host_memory_budget_bytes", budget),
    ):
        yield


@contextlib.contextmanager
def _no_log() -> Iterator[None]:
    """Nothing is said of allocations that fail, which is one of the answers."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class Driver:
    """Requests on one cache, as a scheduler has them, one operation a step."""

    def __init__(self, shape: Shape, choice: random.Random) -> None:
        self.shape = shape
        self.choice = choice
        self.stack = build(shape)
        self.cache = self.stack.cache
        self.running: list[Any] = []
        self.prompts: list[array] = []
        self.locks: list[Any] = []
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self._stamp = 0

    def step(self) -> None:
        """One operation, and what it did."""
        kinds: dict[Callable[[], str], int] = {
            self.admit: 8, self.prefill: 10, self.decode: 8, self.finish: 6, self.drop: 1,
            self.evict: 2, self.touch: 1, self.hold: 2, self.let_go: 2, self.settle: 3, self.flush: 1,
        }  # fmt: skip
        kind = self.choice.choices(list(kinds), list(kinds.values()))[0]
        self.note(kind.__name__, kind())

    def end(self) -> None:
        """Ends what runs, empties the cache, and takes the same sizes as after anything else."""
        while self.running:
            self.note("finish", self.finish())
        while self.locks:
            self.note("let_go", self.let_go())
        self.note("settle", self.settle())
        if self.shape.core is not None:  # RadixCache has no such check
            self.cache.sanity_check()
        self.note("evict", self.evict(10**6))
        if self.shape.hicache is not None:
            # SGLang's hook for the end of the process would keep the pools till then.
            atexit.unregister(self.cache.shutdown)

    def note(self, kind: str, answer: str) -> None:
        """Writes an operation down, with all sizes and now and then the whole tree."""
        line = f"{kind}: {answer} | {self.sizes()}"
        if len(self.lines) % 8 == 0:
            line += f" | {self.tree()}"
        self.lines.append(line)
        self.counts[kind if answer else f"{kind}: nothing to do"] += 1

    # ---- operations; each returns its answer, empty where there was nothing to do

    def admit(self) -> str:
        """A new request: match, load back, give it a row."""
        if len(self.running) == ROWS:
            return ""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.allocation import ensure_mamba_capacity
        from sglang.srt.mem_cache.common import evict_from_tree_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        prompt = self.prompt()
        cache = self.cache
        req = Req(f"r{len(self.lines)}", "", array("q", prompt), SamplingParams())
        req.priority = self.choice.randrange(3)
        req.init_next_round_input(cache)
        answer = f"matched {self.match(req)}"
        if not ensure_mamba_capacity(self.stack.req_to_token, [req], cache):
            self.give_back_state(req)
            return f"{answer}, no state slot"
        anchor = cache.lock(req.last_node)
        if req.host_hit_length or req.swa_host_hit_length or req.mamba_host_hit_length:
            answer += f", loaded {self.load_back(req)}"
        req.lock = cache.lock(req.last_node)
        cache.unlock(anchor)
        first = min(self.choice.randint(1, 3 * self.shape.unit), len(prompt) - req.prefix_len)
        # A row without tokens is not a state that SGLang knows: its scheduler asks for room first.
        evict_from_tree_cache(cache, first + self.shape.page)
        if self.stack.allocator.available_size() < first + self.shape.page:
            cache.unlock(req.lock)
            self.give_back_state(req)
            return f"{answer}, no room for {first}"
        self.stack.req_to_token.alloc([req])
        row = self.row(req)
        path = cache.path_device_indices(req.last_node)
        row[: req.prefix_len] = path[: req.prefix_len].to(row.dtype)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.prefix_len
        self.running.append(req)
        if req.prefix_len:
            self.counts["reused tokens"] += req.prefix_len
            answer += f", reads {self.stack.kv_digest(row[: req.prefix_len])}"
        return f"{answer}, {self.compute(req, first)}"

    def prefill(self) -> str:
        """A chunk of somebody's prompt, and the checkpoint after it."""
        req = self.one(lambda r: r.kv.kv_committed_len < len(r.origin_input_ids))
        if req is None:
            return ""
        return self.compute(req, self.choice.randint(1, 3 * self.shape.unit))

    def decode(self) -> str:
        """A few tokens of somebody's answer."""
        req = self.one(lambda r: r.kv.kv_committed_len >= len(r.origin_input_ids))
        if req is None:
            return ""
        answer = []
        room = len(self.row(req)) - req.kv.kv_committed_len
        for _ in range(min(self.choice.randint(1, self.shape.unit), room)):
            req.output_ids.append(self.choice.randrange(5))
            if self.cache.supports_swa():
                self.cache.evict_sliding_windows(req, req.seqlen - 1)
            grown = self.grow(req, req.kv.kv_committed_len + 1)
            if grown:
                req.output_ids.pop()
                answer.append(grown)
                break
        return f"{req.rid} at {req.kv.kv_committed_len} {''.join(answer)}"

    def finish(self) -> str:
        """Somebody's answer is complete: what can be kept goes to the tree."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        req = self.one()
        if req is None:
            return ""
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        return self.release(req, checkpoint=True)

    def drop(self) -> str:
        """Somebody is aborted or retracted: nothing is kept."""
        req = self.one()
        return "" if req is None else self.release(req, checkpoint=False)

    def evict(self, tokens: int | None = None) -> str:
        """Tokens, windows or states are asked back."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        tokens = tokens or self.choice.randint(1, 6 * self.shape.unit)
        kind = "num_tokens" if tokens >= 10**6 else self.choice.choice(self.stack.evictable)
        if kind == "host":
            return f"host {self.cache.evict_host(tokens)}"
        done = self.cache.evict(EvictParams(**{kind: tokens if kind != "mamba_num" else 2}))
        self.counts["evicted"] += done.num_tokens_evicted
        return (
            f"{kind} {tokens}: {done.num_tokens_evicted} {done.swa_num_tokens_evicted} "
            f"{done.mamba_num_evicted}"
        )

    def touch(self) -> str:
        """A waiting request's prefix is marked as wanted."""
        prompt = self.prompt()
        self.cache.touch_prefix(self.key(prompt))
        return f"{len(prompt)}"

    def hold(self) -> str:
        """A prefix is matched and locked, and the lock is kept."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(self.prompt())))
        self.locks.append(self.cache.lock(found.last_device_node))
        return f"{found.device_prefix_len} + {found.host_hit_length} of {found.full_kv_hit_length}"

    def let_go(self) -> str:
        """Such a lock is given back."""
        if not self.locks:
            return ""
        self.cache.unlock(self.locks.pop(self.choice.randrange(len(self.locks))))
        return "unlocked"

    def settle(self) -> str:
        """What a scheduler does for the host tier between two batches."""
        if self.shape.hicache is None:
            return ""
        cache = self.cache
        cache.ready_to_load_host_cache()
        cache.flush_pending_backups()
        cache.check_hicache_events()
        return (
            f"{len(cache.ongoing_write_through)} writes, {len(cache.ongoing_load_back)} loads left"
        )

    def flush(self) -> str:
        """The cache is emptied, which happens only where nobody runs."""
        if self.running or self.locks or self.choice.random() < 0.7:
            return ""
        self.settle()
        self.cache.reset()
        self.stack.req_to_token.clear()
        self.stack.allocator.clear()
        return "empty"

    # ---- parts of them

    def compute(self, req: Any, tokens: int) -> str:
        """The next tokens of the prompt, and the checkpoint."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        end = min(req.kv.kv_committed_len + tokens, len(req.origin_input_ids))
        grown = self.grow(req, end)
        if grown:
            if self.choice.random() < 0.3:
                return f"{grown}; {self.release(req, checkpoint=False)}"
            return grown
        req.refresh_fill_ids()
        req.extend_end = end
        if self.shape.pools == "all-swa":
            req.kv.swa_evict_floor = end
        checkpoint_kv_cache(req, self.cache)
        return f"{req.rid} at {end}, in the tree {req.kv.cache_protected_len}"

    def grow(self, req: Any, end: int) -> str:
        """Rows for the tokens up to `end`, written with new bytes; says so where there are none."""
        from sglang.srt.mem_cache.allocation import (
            alloc_paged_token_slots_extend,
            alloc_token_slots,
        )

        start, row = req.kv.kv_committed_len, self.row(req)
        with _captured():
            try:
                if self.shape.page == 1:
                    fresh = alloc_token_slots(self.cache, end - start)
                else:
                    last = int(row[start - 1]) if start else -1
                    fresh = alloc_paged_token_slots_extend(
                        self.cache,
                        *(torch.tensor([start]),) * 2,
                        *(torch.tensor([end]),) * 2,
                        torch.tensor([last]),
                        end - start,
                    )
            except RuntimeError as error:
                if "out of memory" not in str(error).lower():
                    raise
                self.counts["out of memory"] += 1
                return f"{req.rid}: out of memory at {start}"
        row[start:end] = fresh.to(row.dtype)
        self._stamp += 1
        self.stack.write_kv(row[start:end], self._stamp, req)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        return ""

    def load_back(self, req: Any) -> str:
        """The host part of the hit comes to the device."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        cache = self.cache
        pinned = cache.inc_host_lock_ref(req.best_match_node).to_dec_params()
        loaded, req.last_node = cache.init_load_back(
            InitLoadBackParams(
                best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
            )
        )
        cache.dec_host_lock_ref(req.best_match_node, pinned)
        cache.ready_to_load_host_cache()
        req.prefix_len += loaded
        req.kv.cache_protected_len = req.prefix_len
        self.counts["loaded back"] += loaded
        return str(loaded)

    def release(self, req: Any, *, checkpoint: bool) -> str:
        """The row is given back."""
        from sglang.srt.mem_cache.common import release_kv_cache

        owned = req.kv.kv_committed_len
        release_kv_cache(req, self.cache, checkpoint=checkpoint)
        self.running.remove(req)
        return f"{req.rid} with {owned}"

    def give_back_state(self, req: Any) -> None:
        """A request that is not admitted does not keep the state that its match copied."""
        from sglang.srt.mem_cache.common import release_kv_cache

        if req.kv.holds_mamba:
            release_kv_cache(req, self.cache, checkpoint=False)

    def one(self, fits: Callable[[Any], bool] = lambda _req: True) -> Any:
        """Some request that fits, None where there is none."""
        fitting = [req for req in self.running if fits(req)]
        return self.choice.choice(fitting) if fitting else None

    def prompt(self) -> array:
        """A prompt that most often begins as an earlier one."""
        unit, ids = self.shape.unit, array("q")
        if self.prompts and self.choice.random() < 0.85:
            earlier = self.choice.choice(self.prompts)
            cut = len(earlier)
            if self.choice.random() < 0.6:
                cut = self.choice.randrange(cut + 1)
            ids = earlier[:cut]
        room = 10 * unit - len(ids)
        ids = ids + array(
            "q", (self.choice.randrange(5) for _ in range(self.choice.randint(1, max(room, 2))))
        )
        self.prompts = [*self.prompts[-11:], ids]
        return ids

    def key(self, prompt: array) -> Any:
        """A prompt as the tree's key."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", prompt))

    def row(self, req: Any) -> torch.Tensor:
        """Its row of token slots."""
        return self.stack.req_to_token.req_to_token[req.kv.req_pool_idx]

    @staticmethod
    def match(req: Any) -> str:
        """What a match said."""
        return (
            f"{req.prefix_len} + {req.host_hit_length} of {len(req.origin_input_ids)}, "
            f"swa {req.swa_host_hit_length} {req.swa_branching_seqlen}, "
            f"mamba {req.mamba_host_hit_length} {req.mamba_branching_seqlen}, "
            f"nodes {_node(req.last_node)} {_node(req.last_host_node)} {_node(req.best_match_node)}"
        )

    # ---- what can be seen

    def sizes(self) -> str:
        """Sizes of the tree and of every pool."""
        cache, allocator = self.cache, self.stack.allocator
        said = [cache.evictable_size(), cache.protected_size(), cache.total_size()]
        if cache.supports_swa():
            said += [
                cache.swa_evictable_size(), cache.swa_protected_size(),
                cache.full_evictable_size(), cache.full_protected_size(),
                allocator.full_available_size(), allocator.swa_available_size(),
            ]  # fmt: skip
        if cache.supports_mamba():
            said += [cache.mamba_evictable_size(), cache.mamba_protected_size()]
            said.append(self.stack.req_to_token.mamba_allocator.available_size())
        said += [allocator.available_size(), self.stack.req_to_token.available_size()]
        if cache.cache_controller is not None:
            said.append(cache.cache_controller.mem_pool_host.available_size())
        return " ".join(str(one) for one in said)

    def tree(self) -> str:
        """The nodes with their locks, and the rows and bytes that they hold."""
        with _captured() as printed:
            self.cache.pretty_print()
        # RadixCache cannot flatten nothing.
        held = self.cache.evictable_size() + self.cache.protected_size()
        rows = self.cache.all_values_flatten() if held else []
        owned = torch.sort(torch.as_tensor(rows, dtype=torch.int64)).values
        rows_digest = digest(owned.numpy().tobytes())
        return f"{digest(_sorted(printed[0]))} {rows_digest} {self.stack.kv_digest(owned)}"


def _node(node: Any) -> Any:
    return getattr(node, "id", node)


def _sorted(printed: str) -> str:
    """An indented tree with the children of each node sorted: the Rust core's have no fixed order."""
    path: list[tuple[int, str]] = []
    nodes = []
    for line in printed.splitlines():
        indent = len(line) - len(line.lstrip())
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, line))
        nodes.append([line for _, line in path])
    return "\n".join(node[-1] for node in sorted(nodes))


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What is written to stdout meanwhile, by whatever; it is in the list afterwards."""
    printed: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield printed
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            printed.append(file.read().decode())


# ---- the stack
