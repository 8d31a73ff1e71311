"""A restored request computes what an uninterrupted one computes, bit for bit, in every layer.

For each boundary: a prompt is prefilled (or decoded) up to it and goes on: the reference. Then its truth
lives in host memory only; other requests dirty its row and the row of the request that resumes there. The
resumed request's outputs are compared with the reference's, layer by layer.

Chunk ends and decoded pages are compared with the run that went on. At interior boundaries of a chunk no
run stopped, so there the restored bytes are compared with the rows that the layers computed, position by
position, and the outputs with those over the same bytes put there by plain indexing.

Each control leaves one thing out and must be noticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu.config import PAGE, WINDOW, Scenario
from gpu.feature import Req, Server
from gpu.stack import C4_ROWS, INDEXER_ROWS, WINDOW_ROWS
from sglang_bitexact_hicache.layout import POOLS

Outputs = list[torch.Tensor]

STATE_ROWS = 4

MAIN_ROW, OTHER_ROW, HIT_ROW, SIDE_ROW, PLACED_ROW = 1, 2, 3, 4, 5
DECODE_ROWS = (6, 7)


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        what: in words.
        control: a negative control, which has to differ.
        wrong: layers (or sections of a record) that differ.
        of: layers (or sections) compared.
    """

    what: str
    control: bool
    wrong: int
    of: int

    @property
    def passed(self) -> bool:
        """Nothing differs, or in a control something does."""
        return bool(self.of) and (self.wrong > 0) == self.control


@dataclass(frozen=True)
class Found:
    """All comparisons of one stack, and the bytes of a record that no later step reads."""

    stack: str
    checks: list[Check]
    unread_bytes: int

    @property
    def exact(self) -> bool:
        """Every comparison came out as it has to."""
        return all(check.passed for check in self.checks)


class _Recorded:
    """What a prefill's layers put into rings and states, by position."""

    def __init__(self) -> None:
        self._chunks: defaultdict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)

    def __call__(self, layer: int, kind: str, rows: torch.Tensor) -> None:
        self._chunks[layer, kind].append(rows.clone())

    def at(self, layer: int, kind: str, positions: Sequence[int]) -> torch.Tensor:
        """The rows of those positions."""
        start, found = 0, []
        chunks = self._chunks[layer, kind]
        for chunk in chunks:
            inside = [p - start for p in positions if start <= p < start + chunk.shape[0]]
            found.append(chunk[inside])
            start += chunk.shape[0]
        return torch.cat(found)

    @property
    def keys(self) -> list[tuple[int, str]]:
        """(layer, kind) of everything recorded."""
        return list(self._chunks)


class Exactness:
    """The comparisons over one server, whose runtime must be engaged."""

    def __init__(self, server: Server, scenario: Scenario) -> None:
        self._server = server
        self._scenario = scenario
        self._checks: list[Check] = []
        self._hits = 0

    def run(self) -> Found:
        """All of them."""
        end = self._scenario.end
        main, last, reference, recorded = self._prefilled()
        self._dirty()
        self._chunk_ends(main, last, reference)
        self._controls(main, end, reference)
        unread = self._unread(main, end, reference)
        self._interior(main, recorded)
        self._together(main, reference)
        self._decoded()
        return Found(self._server.shape.name, self._checks, unread)

    # ---- the prompt

    def _prefilled(self) -> tuple[Req, Outputs, Outputs, _Recorded]:
        """The donor, the outputs of its last chunk, those of what follows, and what its layers stored."""
        server, scenario = self._server, self._scenario
        recorded = _Recorded()
        main = server.open("main", MAIN_ROW, 0, scenario.positions)
        for chunk in scenario.chunks:
            last = server.extend(main, chunk, record=recorded)
        reference = server.extend(main, scenario.more)
        server.close(main)
        return main, last, reference, recorded

    def _dirty(self) -> None:
        """Other prompts in the donor's row, and in the rows that hits are restored into."""
        for seed, row in enumerate((MAIN_ROW, HIT_ROW, SIDE_ROW, PLACED_ROW), start=1):
            other = self._server.open(f"other {seed}", row, seed, 4 * PAGE)
            self._server.extend(other, 2 * PAGE + 100 + seed)
            self._server.close(other, leave=False)

    def _resumed(
        self,
        prefix: Req,
        boundary: int,
        tamper: Callable[[Req], None] | None = None,
        *,
        count: int | None = None,
        row: int = HIT_ROW,
        restore: bool = True,
        steps: int = 0,
    ) -> Outputs:
        """A hit at that boundary, in a dirty row, and its continuation: one prefill of `count` tokens, or
        `steps` decode steps; each layer's output.

        `tamper` spoils the request's rings after the restore; without `restore` there is none.
        """
        server = self._server
        pages = server.pages
        self._hits += 1
        reach = boundary + (count or self._scenario.more) + steps
        rid = f"hit {self._hits}"
        req = server.open(rid, row, prefix.seed, reach, prefix, boundary, admit=restore)
        options: dict[str, Any] = {"plugin": restore}
        if tamper is not None:
            options["tamper"] = lambda: tamper(req)
        if steps:
            outputs = server.decode(req, **options)
            for _ in range(steps - 1):
                step = server.decode(req, plugin=restore)
                outputs = [torch.cat(pair) for pair in zip(outputs, step, strict=True)]
        else:
            outputs = server.extend(req, count or self._scenario.more, **options)
        if restore:
            server.close(req, leave=False)
        server.pages = pages
        return outputs

    def _compare(
        self, what: str, found: Outputs, wanted: Outputs, *, control: bool = False
    ) -> bool:
        wrong = sum(not torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        self._checks.append(Check(what, control, wrong, len(found)))
        return wrong == 0

    # ---- the comparisons

    def _chunk_ends(self, main: Req, last: Outputs, reference: Outputs) -> None:
        end, count = self._scenario.end, self._scenario.chunks[-1]
        resumed = self._resumed(main, end)
        self._compare(f"chunk end {end}: resumed = went on", resumed, reference)
        resumed = self._resumed(main, end - count, count=count)
        self._compare(f"chunk end {end - count}: resumed = went on", resumed, last)

    def _controls(self, main: Req, boundary: int, reference: Outputs) -> None:
        rings = self._rings
        c4_layer = self._server.shape.ratios.index(4)

        def cleared(req: Req, kind: str, layer: int, position: int) -> None:
            row = rings(layer, kind).rows(req.row, [position])
            buffer = rings(layer, kind).buffer
            if kind == WINDOW_ROWS:
                buffer[row] = 0
                return
            # As the row's owner finds it where nothing is restored.
            half = buffer.shape[1] // 2
            buffer[row, :half] = 0
            buffer[row, half:] = -torch.inf

        missing = {
            "one C4 state row": (C4_ROWS, c4_layer, boundary - 1),
            "one indexer state row": (INDEXER_ROWS, c4_layer, boundary - 1),
            "one window row": (WINDOW_ROWS, len(self._server.shape.ratios) // 2, boundary - 64),
        }
        found = self._resumed(main, boundary, restore=False)
        self._compare("control: nothing restored", found, reference, control=True)
        for what, (kind, layer, position) in missing.items():
            found = self._resumed(
                main, boundary, lambda req, k=kind, n=layer, p=position: cleared(req, k, n, p)
            )
            self._compare(f"control: without {what}", found, reference, control=True)

    def _unread(self, main: Req, boundary: int, reference: Outputs) -> int:
        """Bytes of a record that no later step reads: their poison changes no output."""
        poisoned = 0

        def poison(req: Req) -> None:
            nonlocal poisoned
            # At a boundary only the overlap quarters, 0 and 2, are read, and no row before P - 127.
            poisoned = self._poison(req, boundary - WINDOW, (1, 3))

        found = self._resumed(main, boundary, poison)
        equal = self._compare("rows that no step reads, poisoned: prefill", found, reference)
        steps = self._scenario.steps
        wanted = self._resumed(main, boundary, steps=steps)
        found = self._resumed(main, boundary, poison, steps=steps)
        equal &= self._compare("rows that no step reads, poisoned: decode", found, wanted)
        found = self._resumed(
            main, boundary, lambda req: self._poison(req, boundary - WINDOW + 1, ())
        )
        self._compare(
            "control: the oldest row that is read, poisoned", found, reference, control=True
        )
        return poisoned if equal else 0

    def _poison(self, req: Req, position: int, quarters: Sequence[int]) -> int:
        """Spoils one window row of every layer, and these quarters of each state row; the bytes of it."""
        nbytes = 0
        for layer, ratio in enumerate(self._server.shape.ratios):
            window = self._rings(layer, WINDOW_ROWS)
            rows = window.rows(req.row, [position])
            window.buffer[rows] = 999.0
            nbytes += window.buffer[rows].nbytes
            for kind in (C4_ROWS, INDEXER_ROWS) if ratio == 4 else ():
                states = self._rings(layer, kind)
                rows = states.rows(req.row, range(req.seqlen - STATE_ROWS, req.seqlen))
                width = states.buffer.shape[1] // 4
                for quarter in quarters:
                    part = slice(quarter * width, (quarter + 1) * width)
                    states.buffer[rows, part] = 999.0
                    nbytes += states.buffer[rows, part].nbytes
        return nbytes

    def _interior(self, main: Req, recorded: _Recorded) -> None:
        differ: list[bool] = []

        def read(req: Req) -> None:
            for layer, kind in recorded.keys:
                ring = self._rings(layer, kind)
                positions = range(req.seqlen - ring.kept, req.seqlen)
                found = ring.buffer[ring.rows(req.row, positions)]
                differ.append(not torch.equal(found, recorded.at(layer, kind, positions)))

        def found(what: str, *, control: bool) -> None:
            self._checks.append(Check(what, control, sum(differ), len(differ)))
            differ.clear()

        for boundary in range(PAGE, self._scenario.end + 1, PAGE):
            self._resumed(main, boundary, read, count=16)
        found("every page's restored rows = the rows computed", control=False)
        self._resumed(main, self._scenario.end, read, count=16, restore=False)
        found("control: the same, nothing restored", control=True)

        for boundary in self._scenario.placed:

            def place(req: Req, boundary: int = boundary) -> None:
                for layer, kind in recorded.keys:
                    ring = self._rings(layer, kind)
                    positions = range(boundary - ring.kept, boundary)
                    rows = ring.rows(req.row, positions)
                    ring.buffer[rows] = recorded.at(layer, kind, positions)

            placed = self._resumed(main, boundary, place, row=PLACED_ROW, restore=False)
            resumed = self._resumed(main, boundary)
            self._compare(f"interior {boundary}: resumed = placed by hand", resumed, placed)

    def _together(self, main: Req, reference: Outputs) -> None:
        """Two hits and a cold prompt in one forward."""
        server, more = self._server, self._scenario.more
        end, inner = self._scenario.end, self._scenario.placed[0]
        alone = self._resumed(main, inner)

        def batch(name: str, *, restore: bool) -> tuple[Outputs, Outputs]:
            first = server.open(f"{name} 1", HIT_ROW, 0, end + more, main, end, admit=restore)
            cold = server.open(f"{name} 2", OTHER_ROW, 5, more, admit=restore)
            second = server.open(f"{name} 3", SIDE_ROW, 0, inner + more, main, inner, admit=restore)
            reqs = [first, cold, second]
            outputs = server.forward(server.extend_batch(reqs, [more] * 3, plugin=restore))
            for req in reqs if restore else ():
                server.close(req, leave=False)
            return [o[:more] for o in outputs], [o[2 * more :] for o in outputs]

        first, second = batch("together", restore=True)
        self._compare("two hits in one batch, first", first, reference)
        self._compare("two hits in one batch, second", second, alone)
        first, _ = batch("apart", restore=False)
        self._compare("control: the same, nothing restored", first, reference, control=True)

    def _decoded(self) -> None:
        """A boundary that two requests decode across; one goes on by prefill, the other by decode."""
        server, scenario = self._server, self._scenario
        end, more, steps = scenario.end, scenario.more, scenario.steps
        reqs = [
            server.open(f"decoding {i}", row, 10, scenario.positions)
            for i, row in enumerate(DECODE_ROWS)
        ]
        for req in reqs:
            for chunk in (*scenario.chunks[:-1], scenario.chunks[-1] - scenario.lead):
                server.extend(req, chunk)
        for _ in range(scenario.lead):
            server.decode(*reqs)
        by_prefill, by_decode = reqs
        extended = server.extend(by_prefill, more)
        outputs = [server.decode(by_decode) for _ in range(steps)]
        stepped = [torch.cat(layer) for layer in zip(*outputs, strict=True)]
        for req in reqs:
            server.close(req)
        self._dirty()
        found = self._resumed(by_prefill, end)
        self._compare(f"decoded page {end}: resumed by prefill = went on", found, extended)
        found = self._resumed(by_decode, end, steps=steps)
        self._compare(f"decoded page {end}: resumed by decode = went on", found, stepped)
        found = self._resumed(by_decode, end, restore=False, steps=steps)
        self._compare("control: decode, nothing restored", found, stepped, control=True)

    # ---- rings, by plain indexing

    def _rings(self, layer: int, kind: str) -> _Ring:
        pool = self._server.pool
        if kind == WINDOW_ROWS:
            return _Ring(pool.get_unified_kv(layer), pool.unified_swa_ring_size, WINDOW)
        pools = {
            C4_ROWS: pool.compress_state_pools,
            INDEXER_ROWS: pool.indexer_compress_state_pools,
        }[kind]
        states = pools[layer]
        return _Ring(states.kv_score_buffer.kv_score, states.ring_size, STATE_ROWS)


@dataclass(frozen=True)
class _Ring:
    """A layer's ring: `buffer` ``[rows, row]``, `size` rows a request, `kept` rows a boundary."""

    buffer: torch.Tensor
    size: int
    kept: int

    def rows(self, row: int, positions: Sequence[int]) -> list[int]:
        """Where a request's positions are."""
        return [row * self.size + position % self.size for position in positions]


def debug_checks(server: Server, scenario: Scenario) -> list[Check]:
    """SGLANG_SWA_DBG_CHECKSUM's checks verify every restore, and notice a record that is not what was
    captured. The server's runtime must be engaged with `debug`."""
    counters = server.runtime.counters
    lead = scenario.lead
    donor = server.open("checked", MAIN_ROW, 20, scenario.positions)
    for chunk in (PAGE * 2, PAGE - lead):
        server.extend(donor, chunk)
    for _ in range(lead):
        server.decode(donor)
    end = donor.seqlen
    server.close(donor)
    boundaries = range(PAGE, end + 1, PAGE)

    def hit(boundary: int) -> None:
        req = server.open(f"check {boundary}", HIT_ROW, 20, boundary + PAGE, donor, boundary)
        server.extend(req, 64)
        server.close(req, leave=False)

    for boundary in boundaries:
        hit(boundary)
    verified, failed = counters.checks_verified, counters.checks_failed
    checks = [
        Check("debug checks: each restore verified", False, len(boundaries) - verified, verified),
        Check("debug checks: none reported", False, failed, len(boundaries)),
    ]
    for pool in POOLS:
        server.runtime.drain()
        lineage = server.tree.paths[donor.rid][end // PAGE - 1]
        section = server.view.layout.sections(pool)[-1]
        record = server.pools.record(pool, server.tree.store.lookup(lineage))
        record[section.offset + 5] ^= 1
        before = counters.checks_failed
        hit(end)
        noticed = counters.checks_failed - before
        record[section.offset + 5] ^= 1
        checks.append(Check(f"control: a flipped bit of {pool}", True, noticed, 1))
    return checks
