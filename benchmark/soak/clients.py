"""What clients do, each on a thread of its own: ask, compare, go away."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import demo
from dsv4_reference_platform.launch import Answer, ServerError
from soak.plan import Plan, Request, outcome
from soak.server import PipedServer

CLIENTS = 4


class Clients:
    """They share counts and stop together; `pause` holds them between two requests.

    Attributes:
        done: requests by kind.
        cached: prompt tokens that were reused, by tier.
        mismatches: answers that differ from those of an idle server, in words.
        errors: requests that the server answered with an error, in words.
    """

    def __init__(self, server: PipedServer, plan: Plan, seed: str) -> None:
        self._server = server
        self._plan = plan
        self._seed = seed
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._gate = threading.Condition()
        self._waiting = 0
        self._held = False
        self._threads: list[threading.Thread] = []
        self.done: Counter[str] = Counter()
        self.cached: Counter[str] = Counter()
        self.mismatches: list[str] = []
        self.errors: list[str] = []

    def __enter__(self) -> Clients:
        for number in range(CLIENTS):
            rng = random.Random(f"{self._seed} {number}")
            self._threads.append(
                threading.Thread(target=self._run, args=(rng,), name=f"client {number}")
            )
        for thread in self._threads:
            thread.start()
        return self

    def leave(self) -> None:
        """No more requests; what the running ones come to does not matter."""
        self._over.set()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._gate:
            self._held = False
            self._gate.notify_all()
        for thread in self._threads:
            thread.join()

    def pause(self, work: Callable[[], None]) -> None:
        """Do something while no client asks for anything."""
        with self._gate:
            self._held = True
            self._gate.wait_for(lambda: self._waiting == CLIENTS)
        try:
            work()
        finally:
            with self._gate:
                self._held = False
                self._gate.notify_all()

    def _run(self, rng: random.Random) -> None:
        kinds = {
            self._ask: 6, self._fan_out: 2, self._chat: 4, self._abort: 2, self._time_out: 1,
        }  # fmt: skip
        while not self._over.is_set():
            with self._gate:
                self._waiting += 1
                self._gate.notify_all()
                self._gate.wait_for(lambda: not self._held)
                self._waiting -= 1
            (kind,) = rng.choices(list(kinds), kinds.values())
            try:
                kind(rng)
            except ServerError as error:
                if self._over.is_set():
                    return  # it was killed on purpose
                with self._lock:
                    self.errors.append(str(error).splitlines()[0])
                time.sleep(0.2)

    def _ask(self, rng: random.Random) -> None:
        request = rng.choice(rng.choice(self._plan.families))
        self._compare("single", request, self._server.generate(request.prompt, request.new))

    def _fan_out(self, rng: random.Random) -> None:
        family = rng.choice(self._plan.families)
        longest = max(request.new for request in family)
        for request, answer in zip(
            family, self._server.generate_batch([r.prompt for r in family], longest), strict=True
        ):
            # One request of the server's has one length: of the longer answers the beginning counts.
            self._compare("fan-out", request, _first(answer, request.new))

    def _chat(self, rng: random.Random) -> None:
        for request in rng.choice(self._plan.chats):
            self._compare("chat", request, self._server.generate(request.prompt, request.new))

    def _abort(self, rng: random.Random) -> None:
        """Aborted by name at some moment, by another connection."""
        request = rng.choice(list(self._plan))
        rid = f"aborted-{rng.getrandbits(64):x}"
        abort = threading.Timer(
            rng.uniform(0, 1.5), lambda: self._server.post("/abort_request", {"rid": rid})
        )
        abort.start()
        try:
            answer = self._server.generate(request.prompt, request.new, rid=rid)
        except ServerError:
            # Aborted before it began: an error is the answer that SGLang gives then.
            self._count("abort", 0)
            return
        finally:
            abort.join()
        self._compare("abort", request, answer, whole=False)

    def _time_out(self, rng: random.Random) -> None:
        """The client goes away without a word."""
        request = rng.choice(list(self._plan))
        with contextlib.suppress(ServerError):
            self._server.generate(request.prompt, 60, timeout=rng.uniform(0.05, 1))
        self._count("timeout", 0)

    def _compare(self, kind: str, request: Request, answer: Answer, *, whole: bool = True) -> None:
        if request.wrong(outcome(answer), answer.cached_tokens, whole=whole):
            with self._lock:
                self.mismatches.append(
                    f"{kind}: {len(request.prompt)} tokens, cached {answer.cached_tokens} "
                    f"{answer.cached_tokens_details}: {answer.ids} {answer.logprobs}, not "
                    f"{request.cold} or {request.continued}"
                )
        self._count(kind, answer.cached_tokens, answer.cached_tokens_details)

    def _count(self, kind: str, cached: int, details: dict[str, Any] | None = None) -> None:
        with self._lock:
            self.done[kind] += 1
            for tier in demo.TIERS:
                self.cached[tier] += (details or {}).get(tier) or 0
            self.cached["all"] += cached


def _first(answer: Answer, count: int) -> Answer:
    return answer._replace(ids=answer.ids[:count], logprobs=answer.logprobs[:count])
