"""What restores cost, and what computing the tokens again would."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from gpu.bench import AHEAD_MS, DONOR_ROW, Bench, Launched, forward, timed
from gpu.config import PAGE
from gpu.feature import Req
from gpu.timing import Between, Graphed, device_ms, launches, medians, whole

AGAIN_AT = 8 * PAGE
"""Prefix of the tokens that are computed again."""


@dataclass(frozen=True)
class Restored:
    """A batch of restores.

    Attributes:
        count: requests.
        latency: from admission, on an idle device, until the rings are ready on the forward stream.
        scatter: device time of the forward stream's part; what fits the staging at once has landed.
    """

    count: int
    latency: float
    scatter: float


class RestoreBench:
    """Batches of restores, each of another boundary of one donor's chunk."""

    def __init__(self, bench: Bench) -> None:
        self._server = server = bench.server
        self._bench = bench
        self._pages = max(bench.run.restores)
        tokens = self._pages * PAGE
        server.engage(slots=2 * self._pages, chunk_tokens=tokens)
        server.pages = PAGE
        self._donor = server.open("donor", DONOR_ROW, 0, tokens)
        batch = server.extend_batch([self._donor], [tokens])
        prepared = server.prepared(batch)
        forward(batch, lambda: server.stack.run(prepared))
        self._donor.seqlen = tokens
        server.close(self._donor)
        server.runtime.drain()

    def timed(self, count: int) -> Restored:
        """All times of a batch of so many."""
        ms = timed(
            {"latency": lambda: self._latency(count), "scatter": lambda: self._scatter(count)},
            2 * self._bench.run.repeats,
        )
        return Restored(count, **ms)

    def launched(self, count: int) -> Launched:
        """What a batch of so many launches."""
        reqs = self._hits(count)
        batch = self._server.decode_batch(reqs)

        def all_of_it() -> None:
            self._server.runtime.admit(reqs)
            forward(batch, lambda: None)

        found = launches(all_of_it)
        self._gone(reqs)
        return Launched(*found)

    def computed_again(self, count: int) -> tuple[float, float]:
        """(device time, latency) of so many tokens behind a prefix, through the stack alone.

        The one is replayed from a graph, the other launched one by one, from an idle device.
        """
        server = self._server
        server.pages = PAGE
        req = server.open(self._bench.name(), DONOR_ROW, 0, AGAIN_AT + count, admit=False)
        req.seqlen = AGAIN_AT
        prepared = server.prepared(server.extend_batch([req], [count], plugin=False))

        def run() -> None:
            server.stack.run(prepared)

        replay = Graphed(run)
        ms = medians(
            {
                "device": lambda: device_ms(whole(replay), ahead_ms=AHEAD_MS),
                "latency": lambda: device_ms(whole(run), ahead_ms=0),
            },
            self._bench.run.repeats,
        )
        return ms["device"], ms["latency"]

    def _latency(self, count: int) -> float:
        reqs = self._hits(count)
        batch = self._server.decode_batch(reqs)

        def ready(begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
            begin.record()
            self._server.runtime.admit(reqs)
            # The restores are scattered before the forward, and nothing else runs in this one.
            forward(batch, end.record)

        return self._timed(reqs, ready, ahead_ms=0)

    def _scatter(self, count: int) -> float:
        reqs = self._hits(count)
        batch = self._server.decode_batch(reqs)
        self._server.runtime.admit(reqs)

        def ready(begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
            begin.record()
            forward(batch, end.record)

        return self._timed(reqs, ready, ahead_ms=AHEAD_MS)

    def _timed(self, reqs: list[Req], ready: Between, *, ahead_ms: float) -> float:
        taken = device_ms(ready, ahead_ms=ahead_ms)
        self._gone(reqs)
        return taken

    def _hits(self, count: int) -> list[Req]:
        """Requests that resume at different boundaries, in rows 2, 3, ..., not admitted yet."""
        found = []
        for i in range(count):
            boundary = PAGE * (self._pages - i)
            req = Req(
                self._bench.name(),
                SimpleNamespace(req_pool_idx=2 + i),
                range(boundary + 1),
                boundary,
                self._donor.rid,
                seqlen=boundary,
                seed=0,
                slots=self._donor.slots,
            )
            found.append(req)
        return found

    def _gone(self, reqs: list[Req]) -> None:
        for req in reqs:
            self._server.close(req, leave=False)
