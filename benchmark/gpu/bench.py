"""What the measurements share: a server whose caches hold random rows, and requests for one forward.

Times are in ms. Kernels and copies are counted after everything was timed: launches cost more in a
process that has been profiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

from gpu.config import PAGE, Run
from gpu.feature import Req, Server
from gpu.strict import relaxed
from gpu.timing import medians
from sglang_bitexact_hicache import forward_hooks

AHEAD_MS = 20.0
"""A kernel that outlasts the launching of everything of the feature's in one forward."""

DONOR_ROW = 1


class Launched(NamedTuple):
    """What the feature launched."""

    kernels: int
    copies: int


class Bench:
    """See the module's docstring. Ratio-4 layers select the newest rows: no logits are computed."""

    def __init__(self, server: Server, run: Run) -> None:
        self.server = server
        self.run = run
        self.layers = len(server.shape.ratios)
        self._requests = 0
        server.stack.scored = False
        for layer in range(self.layers):
            server.pool.get_unified_kv(layer).normal_()

    def name(self) -> str:
        """A request's name, never used before."""
        self._requests += 1
        return f"timed {self._requests}"

    @contextmanager
    def request(self, length: int) -> Iterator[Req]:
        """A request for one forward of `length` tokens; what it computed is forgotten with it."""
        self.server.pages = PAGE
        req = self.server.open(self.name(), DONOR_ROW, 0, length)
        try:
            yield req
        finally:
            self.server.close(req, leave=False)


def timed(arms: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Medians of what runs the plugin. Each arm runs once with the checks for waits (strict.py), and
    without them where it is timed: they cost the host as much as what they check."""
    for arm in arms.values():
        arm()
    with relaxed():
        return medians(arms, repeats)


def moved_bytes(server: Server) -> int:
    """Bytes of one boundary that move between host and device."""
    return server.pools.device_part(0).nbytes


def forward(batch: SimpleNamespace, body: Callable[[], object]) -> None:
    """A forward of the batch with `body` in the place of the model, and the outer hook around it."""
    forward_hooks.around_forward_batch_generation(lambda *_: body(), None, batch)
