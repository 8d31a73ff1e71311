"""A seeded random walk over the real tree, every hit byte-compared, every match against an oracle.

Two oracles answer every match before the cache does:

* by bytes, knowing nothing of lineages: the deepest boundary whose KV bytes, read from the pools
  along the copies that the hit would use, have the digest of some truth that the store holds. The
  gate may stop earlier, never later, and never at a boundary that this oracle refuses;
* by identity: the deepest page, looked at one by one. The gate must be equal to it, in both sets.

BITEXACT_FUZZ_SEEDS and BITEXACT_FUZZ_STEPS make it longer (60 and 3000 for a thorough run).
"""

from __future__ import annotations

import os
import random
from array import array

import broken_rules
import pytest
import torch
from bitexact_fixtures import (
    PAGE,
    cpu_hicache,
    defer_device_to_host,
    make_cache,
    make_server_args,
)
from tree_driver import TreeDriver, Violation, digest

from sglang_bitexact_hicache.lineage import ROOT, UNKNOWN

SEEDS = int(os.environ.get("BITEXACT_FUZZ_SEEDS", "6"))
MOST_OUTPUT = 300
STEPS = int(os.environ.get("BITEXACT_FUZZ_STEPS", "400"))


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache():
        yield


class Fuzz:
    """One seed's walk. Small pools, few prompts that share pages, everything at random. `is_eagle`: with
    pairs of tokens for keys."""

    def __init__(self, seed: int, is_eagle: bool = False) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        # A small host pool and few truth slots are what makes eviction happen on every tier.
        ratio, slots = pick([1.2, 2.0]), pick([6, 20, 60])
        stack = make_cache(
            make_server_args(hicache_ratio=ratio),
            pages=pick([28, 40]),
            slots=slots,
            rows=8,
            is_eagle=is_eagle,
        )
        self.pages = stack.allocator.size_full // PAGE
        chance = pick([0.2, 0.6, 1.0])
        keep = lambda _pages: self.random.random() < chance  # noqa: E731
        self.driver = TreeDriver(stack, keep, seed, cuts=True)
        self.cache = stack.cache
        self.deferred = pick([False, True])
        if self.deferred:
            defer_device_to_host(self.cache)
        self.prompts = self._make_prompts()
        self.hog = None
        self.exact_by_bytes = self.stopped_earlier = 0

    def _make_prompts(self) -> list[array]:
        rnd = self.random
        pages = [
            [array("q", rnd.choices(range(1000), k=PAGE)) for _ in range(2)] for _ in range(11)
        ]
        prompts = []
        for _ in range(6):
            prompt = array("q")
            for level in range(rnd.randrange(1, 11)):
                prompt += pages[level][rnd.randrange(2 if level in (2, 5) else 1)]
            prompts.append(prompt)
        return prompts

    # ---- steps

    def step(self) -> None:
        driver, rnd = self.driver, self.random
        name, action = self._choose()
        driver.stats[name] += 1
        action()
        if rnd.random() < 0.5 and not driver.loads_queued:
            driver.settle()
        driver.check()

    def _choose(self):
        rnd, driver = self.random, self.driver
        weighted = [
            (25, "admit", self.admit),
            (10, "evict device", lambda: driver.evict_device(rnd.choice([2, 4, 8, 99]))),
            (2, "evict host", lambda: driver.evict_host(rnd.randrange(1, 5))),
            (4, "cool", self.cool),
            (1 if self.hog is None else 8, "hog", self.hog_host),
            (2, "storage", self.storage),
            (3, "forget", self.forget),
            (0.4, "flush", self.flush),
        ]
        if driver.running:
            weighted += [(30, "advance", self.advance), (12, "finish", self.finish)]
            weighted += [(3, "drop", lambda: driver.drop(rnd.choice(driver.running)))]
        weights = [w for w, _, _ in weighted]
        return rnd.choices([(name, action) for _, name, action in weighted], weights)[0]

    def prompt(self) -> array:
        rnd = self.random
        tail = rnd.choice([0, 1, 5, 100, 255, 256])
        return rnd.choice(self.prompts) + array("q", rnd.choices(range(2000, 2003), k=tail))

    def admit(self) -> None:
        driver, rnd = self.driver, self.random
        for _ in range(rnd.choice([1, 1, 2, 3])):
            prompt = self.prompt()
            needed = [self.most_pages(len(r.origin_input_ids)) for r in driver.running]
            if len(needed) == 7 or sum(needed) + self.most_pages(len(prompt)) > self.pages:
                return
            self.compare_match(prompt)
            between = (
                (lambda: driver.evict_device(rnd.randrange(1, 6)))
                if rnd.random() < 0.3
                else (lambda: None)
            )
            driver.admit(
                prompt,
                between=between,
                decline=rnd.random() < 0.15,
                flush=rnd.random() < 0.3,
            )

    def advance(self) -> None:
        driver, rnd = self.driver, self.random
        driver.flush_loads()
        req = rnd.choice(driver.running)
        done, total = driver.computed[req], len(req.origin_input_ids)
        if done < total:
            end = min(total, (done // PAGE + rnd.choice([1, 2, 3, 9])) * PAGE)
            if rnd.random() < 0.8:  # else another request has the place of the unfinished one
                end = driver.chunk_end(req, done, end)
            driver.forward(req, end)
            if end == total and rnd.random() < 0.5:
                self.in_flight_step(req)
            else:
                driver.checkpoint(req)
        else:
            count = min(rnd.choice([1, 30, 256]), total + MOST_OUTPUT - done)
            if count > 0:
                req.output_ids.extend(rnd.choices(range(3000, 3002), k=count))
                req.refresh_fill_ids()
                driver.forward(req, done + count)

    def in_flight_step(self, req) -> None:
        """Overlap schedule: the first decode step is launched before the prefill's checkpoint."""
        driver = self.driver
        end = driver.computed[req]
        req.output_ids.append(3000)
        req.refresh_fill_ids()
        driver.forward(req, end + 1)
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        req.extend_end = end
        checkpoint_kv_cache(req, self.cache)
        driver.stats["in flight"] += 1

    def finish(self) -> None:
        self.driver.finish(self.random.choice(self.driver.running))

    def cool(self) -> None:
        """Everything finishes, is backed up where there is room, and leaves the device."""
        driver = self.driver
        driver.flush_loads()
        for req in list(driver.running):
            driver.finish(req)
        driver.settle()
        driver.evict_device()

    def hog_host(self) -> None:
        """Let backups fail for want of host memory, and recover."""
        pool = self.driver.stack.host_pool
        if self.hog is not None:
            pool.free(self.hog)
            self.hog = None
        elif pool.available_size():
            self.hog = pool.alloc(pool.available_size())

    def storage(self) -> None:
        """Host pages of unknown origin below a node that is backed up."""
        driver, rnd = self.driver, self.random
        pool = driver.stack.host_pool
        count = rnd.randrange(1, 4)
        if pool.available_size() < count * PAGE:
            return
        prompt = rnd.choice(self.prompts)
        ends = [0]
        for _node, position in self.driver.walk(prompt):
            ends.append(position)
        first = rnd.choice(ends)
        count = min(count, driver.key_pages(prompt) - first)
        if count > 0:
            driver.insert_from_storage(prompt, first, [driver.stamp() for _ in range(count)])

    def forget(self) -> None:
        """Truth goes while its page stays, as a capture that needs the slot makes it."""
        in_use = {self.cache.copies.of(r.last_node).dev for r in self.driver.running}
        keep = {copy.last_id for copy in in_use if copy is not None}
        self.driver.forget_truth(lambda x: x in keep or self.random.random() < 0.8)

    def flush(self) -> None:
        driver = self.driver
        driver.flush_loads()
        for req in list(driver.running):
            driver.drop(req)
        driver.settle()
        if self.hog is not None:
            self.hog_host()
        self.cache.reset()
        driver.stack.allocator.clear()

    # ---- helpers

    @staticmethod
    def most_pages(prompt_tokens: int) -> int:
        """Pages of a row at its longest, shared ones included."""
        return -(-(prompt_tokens + MOST_OUTPUT) // PAGE)

    # ---- oracles

    def compare_match(self, prompt: array) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        expected = [self.by_identity(prompt, device_only) for device_only in (False, True)]
        bound = None
        if not self.driver.loads_queued:
            bound = [self.by_bytes(prompt, device_only) for device_only in (False, True)]
        key = RadixKey(prompt, limit=len(prompt) - 1)
        result = self.cache.match_prefix(MatchPrefixParams(key=key))
        device = result.device_prefix_len // PAGE
        got = [device + result.host_hit_length // PAGE, device]
        if got != expected:
            raise Violation(f"gate {got}, identity oracle {expected}")
        if bound is not None:
            for pages, exact in zip(got, bound, strict=True):
                if pages and pages not in exact:
                    raise Violation(f"gate {pages}, bytes are exact at {exact} only")
                self.exact_by_bytes += pages == max(exact, default=0)
                self.stopped_earlier += pages < max(exact, default=0)

    def residence(self, prompt: array, device_only: bool):
        """(node, pages of it that the prompt covers, from host) down the prompt."""
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        shorter = prompt[:-1]
        key = self.driver.key(shorter, 0, self.driver.key_pages(shorter))
        node, position = self.cache.tree_core.root_node, 0
        while position < len(key):
            node = node.children.get(key.child_key_at(position, PAGE))
            if node is None:
                return
            data = node.component_data[ComponentType.FULL]
            host = data.value is None
            if host and (device_only or data.host_value is None):
                return
            matched = node.key.match_at(key, position, page_size=PAGE)
            yield node, matched // PAGE, host
            if matched < len(node.key):
                return
            position += matched

    def by_identity(self, prompt: array, device_only: bool) -> int:
        page = best = 0
        previous = ROOT
        for node, pages, host in self.residence(prompt, device_only):
            known = self.cache.copies.of(node.id)
            copy = known.host if host else known.dev
            for i in range(pages):
                if copy.ids[i] == UNKNOWN or copy.parents[i] != previous:
                    return best
                previous = copy.ids[i]
                page += 1
                if previous in self.cache.store:
                    best = page
        return best

    def by_bytes(self, prompt: array, device_only: bool) -> set[int]:
        store = self.cache.store
        slots = store.slots.least_recent_first()
        held = set().union(*(self.driver.true_of[slot] for slot in slots))
        stamps: list[int] = []
        for node, pages, host in self.residence(prompt, device_only):
            stamps += self.driver.node_stamps(node, host=host)[:pages]
        return {n for n in range(1, len(stamps) + 1) if bytes(digest(stamps[:n]).tolist()) in held}

    # ---- the whole walk

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.driver.flush_loads()
        if self.hog is not None:
            self.hog_host()
        self.check_lineages_have_one_content()
        self.driver.check_no_leak()

    def check_lineages_have_one_content(self) -> None:
        """One lineage, one byte pattern, wherever it lies."""
        self.driver.settle()
        seen: dict[int, int] = {}
        for node_id, known in self.cache.copies.items():
            node = self.cache.tree_core.node_by_id(node_id)
            for copy, host in ((known.dev, False), (known.host, True)):
                if copy is None:
                    continue
                for lineage, stamp in zip(
                    copy.ids, self.driver.node_stamps(node, host=host), strict=True
                ):
                    if lineage != UNKNOWN and seen.setdefault(lineage, stamp) != stamp:
                        raise Violation(f"lineage {lineage} has two contents")


@pytest.fixture(scope="module")
def walks():
    """The walks of all seeds, run once."""
    made = []
    for seed in range(SEEDS):
        fuzz = Fuzz(seed, is_eagle=seed % 3 == 2)
        fuzz.run(STEPS)
        made.append(fuzz)
    return made


def test_no_hit_pairs_bytes_of_different_computations(walks):
    total = sum((w.driver.stats for w in walks), start=type(walks[0].driver.stats)())
    # A walk that never hits proves nothing: what it must have met, in proportion to its length.
    steps = SEEDS * STEPS
    assert total["hits"] > steps / 20
    assert total["loaded"] > steps / 100
    assert total["published"] > steps / 10
    gates = [w.cache.gate_counters for w in walks]
    assert sum(g.healed for g in gates) > steps / 400
    assert sum(g.loaded_for_healing for g in gates) > steps / 400
    assert sum(g.rehung_pages for g in gates)
    for met in ("declined", "in flight", "dropped", "storage", "evict host", "forget"):
        assert total[met], met


def test_the_gate_is_as_deep_as_bytes_allow_almost_always(walks):
    """It stops earlier only where a step in flight read pages that the tree replaced (rare)."""
    exact = sum(w.exact_by_bytes for w in walks)
    earlier = sum(w.stopped_earlier for w in walks)
    assert exact > 20 * earlier


CONTROLS = (
    "no chain",
    "old identity on unevict",
    "newcomer's identity on overlap",
    "mended chain, old identity",
    "truth moved after another forward",
)


@pytest.mark.parametrize("broken", CONTROLS)
def test_control_a_broken_rule_is_found(monkeypatch, broken):
    from sglang_bitexact_hicache import components, tree

    if broken == "no chain":
        # Through the oracle too, which would otherwise find the difference first.
        monkeypatch.setattr(Fuzz, "compare_match", lambda self, prompt: None)

        def step(self, copy, pages):
            self._pages += pages
            found = copy is not None and copy.last_id in self._truth
            self.best = self._pages if found else self.best
            return found

        monkeypatch.setattr(tree.Walk, "step", step)
        monkeypatch.setattr(
            tree, "chain_end", lambda copies: [ROOT, *(c.last_id for c in copies)][-1]
        )
    elif broken == "old identity on unevict":
        right = tree.BxCache.device_rows_from_insert

        def keep_old(self, node, params, start):
            old = self.copies.of(node.id).host
            right(self, node, params, start)
            if old is not None:
                self.copies.set_device(node.id, old)

        monkeypatch.setattr(tree.BxCache, "device_rows_from_insert", keep_old)
    elif broken == "mended chain, old identity":
        broken_rules.mended_pages_keep_their_truth(monkeypatch.setattr)
    elif broken == "truth moved after another forward":
        broken_rules.truth_moves_after_another_forward(monkeypatch.setattr)
    else:

        def relabel(
            self, node, prefix_len, total_prefix_len, value_slice, params, result, cache_actions
        ):
            inserting = self.cache._insert_of
            if inserting is not None and params.prev_prefix_len < total_prefix_len + prefix_len:
                pages = self.cache.pages_of(node)
                copy = inserting[1].take(total_prefix_len // PAGE, pages)
                if UNKNOWN not in copy.ids:
                    self.cache.copies.set_device(node.id, copy)
            return prefix_len

        monkeypatch.setattr(components.BxSWA, "update_component_on_insert_overlap", relabel)
    with pytest.raises(Violation, match=r"is not what truth saw|are exact at|two contents"):
        for seed in range(12):
            Fuzz(seed).run(STEPS)


def test_digest_tells_contents_apart():
    assert torch.equal(digest([1, 2]), digest([1, 2]))
    assert not torch.equal(digest([1, 2]), digest([2, 1]))
