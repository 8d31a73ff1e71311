"""The plugin's runtime on the stack, driven through its shipped seams.

Shipped: TruthRuntime, DeviceView, TruthHostPools, RecordLayout, the truth store and the rows'
identities, and the three hooks around and inside a forward. The two inner hooks sit on SGLang's
functions, put there by SGLang's own HookRegistry; the outer one, around
`TpModelWorker.forward_batch_generation`, is called with the stack in the place of the model. Stood in
for: the tree (`Tree`), requests and batches, and the allocators of rows and pages (`Server`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from gpu import stock
from gpu.config import PAGE, Shape
from gpu.inputs import Span
from gpu.stack import Forward, Stack
from gpu.strict import guarded, strict
from sglang_bitexact_hicache import forward_hooks, seam_table
from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.lineage import ROOT, UNKNOWN, RowTable
from sglang_bitexact_hicache.policy import DEFAULT_KINDS, Kind
from sglang_bitexact_hicache.runtime import TruthRuntime
from sglang_bitexact_hicache.seam import wrapped_values
from sglang_bitexact_hicache.truth import TruthStore

INNER_HOOKS = (
    "forward_hooks:before_forward_unified_kv",
    "forward_hooks:before_compress",
)


def install_hooks() -> None:
    """Puts the two inner hooks on SGLang's functions, each inside `strict()`. Once a process.

    Raises:
        RuntimeError: SGLang's registry did not apply one (it only logs that).
    """
    for seam in seam_table.SEAMS:
        if seam.handler in INNER_HOOKS:
            HookRegistry.register(seam.target, guarded(seam.load()), HookType(seam.kind.value))
    HookRegistry.apply_hooks()
    for seam in seam_table.SEAMS:
        if seam.handler in INNER_HOOKS:
            found = pkgutil.resolve_name(seam.target)
            if not any(
                getattr(value, "__wrapped__", value) is seam.load()
                for value in wrapped_values(found)
            ):
                raise RuntimeError(f"{seam.target} is not hooked")
    # The outer hook asks a ScheduleBatch for its tree, and the tree for the runtime.
    forward_hooks.runtime_of = lambda batch: batch.runtime


@dataclass(eq=False)
class Req:
    """What TruthRuntime reads of a request.

    Attributes:
        rid, kv: its name; `kv.req_pool_idx` is its row.
        full_untruncated_fill_ids: as long as its prompt.
        prefix_len: tokens of its hit; prefix: the donor's name.
        seqlen: tokens computed so far.
        seed: which random rows it has.
        slots: its token slots, by position: int32, on the device.
    """

    rid: str
    kv: SimpleNamespace
    full_untruncated_fill_ids: range
    prefix_len: int
    prefix: str | None
    seqlen: int
    seed: int
    slots: torch.Tensor
    skip_radix_cache_insert: bool = False
    cached_tokens_storage: int = 0
    cached_tokens_host: int = 0

    @property
    def row(self) -> int:
        """Its request row."""
        return self.kv.req_pool_idx


@dataclass
class Tree:
    """What TruthRuntime asks of BxCache, for prompts that are told apart by their donor's name.

    A request that is closed leaves its pages here, as a checkpoint into the tree does.
    """

    store: TruthStore
    aligned: None = None
    key_tokens: int = 1
    track_junctions: bool = False
    rows: RowTable = field(init=False)
    paths: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = RowTable(self.store.lineages)

    def row_taken(self, req: Req) -> None:
        """See tree.BxCache."""
        base = req.prefix_len // PAGE
        self.rows.open(req, self._end(req), base)

    def junction(self, req: Req) -> None:
        """No prompt leaves a cached path here."""

    def row_launched(self, req: Req, pages: int) -> None:
        """See tree.BxCache."""
        self.rows.get(req).upto(pages)

    def row_lineage(self, req: Req, pages: int) -> int:
        """See tree.BxCache."""
        row = self.rows.get(req)
        return UNKNOWN if row is None else row.id_of(pages)

    def row_truths(self, req: Req) -> int:
        """See tree.BxCache."""
        return sum(lineage in self.store for lineage in self.rows.get(req).ids)

    def final_truth(self, req: Req) -> tuple[int, int] | None:
        """See tree.BxCache."""
        lineage = self._end(req)
        slot = self.store.lookup(lineage)
        return None if slot is None else (lineage, slot)

    def leave(self, req: Req) -> None:
        """The request's own pages stay, under its name, behind those that it came from."""
        row = self.rows.get(req)
        before = self.paths.get(req.prefix, [])[: row.base]
        self.store.lineages.hold(row.ids)
        self.paths[req.rid] = [*before, *row.ids]
        self.rows.drop(req)

    def discard(self, req: Req) -> None:
        """The request's own pages go."""
        self.rows.drop(req)

    def _end(self, req: Req) -> int:
        if not req.prefix_len:
            return ROOT
        return self.paths[req.prefix][req.prefix_len // PAGE - 1]


class Strict:
    """A TruthRuntime whose calls from the scheduler run inside `strict()`."""

    def __init__(self, runtime: TruthRuntime) -> None:
        self._runtime = runtime
        self.admit = guarded(runtime.admit)
        self.forget = guarded(runtime.forget)

    @contextmanager
    def forward(self, batch: Any) -> Iterator[Any]:
        """What is before and after the forward is ours; the forward itself is not."""
        scope = self._runtime.forward(batch)
        with strict():
            active = scope.__enter__()
        try:
            yield active
        except BaseException as error:
            scope.__exit__(type(error), error, error.__traceback__)
            raise
        with strict():
            scope.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class Server:
    """Rows, pages and forwards: what a scheduler does around the plugin, in its order.

    Args:
        shape: the layers.
        rows: request rows, the padding row 0 included.
        tokens: token slots.
        positions: positions that a request can reach.
        device: where all of it is.
    """

    def __init__(
        self, shape: Shape, rows: int, tokens: int, positions: int, device: torch.device
    ) -> None:
        self.device = device
        self.shape = shape
        self.pool = stock.make_pool(shape, rows, tokens, device)
        width = -(-positions // PAGE) * PAGE
        self.req_to_token = torch.zeros(rows, width, dtype=torch.int32, device=device)
        backend = stock.Backend(self.pool, self.req_to_token, shape)
        self.stack = Stack(shape, self.pool, backend, width, scored=True)
        self.view = DeviceView(self.pool)
        self.runtime: Any = None
        self.pages = PAGE
        """First token slot that no request has; page 0 is the padding page."""
        self._limit = tokens

    def engage(
        self,
        *,
        slots: int,
        chunk_tokens: int,
        stride: int = 1,
        kinds: Container[Kind] = DEFAULT_KINDS,
        debug: bool = False,
    ) -> None:
        """A fresh tree, host pools of `slots` records and the runtime over them."""
        self.release()
        pin = self.device.type != "cpu"
        self.tree = Tree(TruthStore(slots))
        self.pools = TruthHostPools(self.view.layout, slots, pin=pin)
        runtime = TruthRuntime(
            self.tree,
            self.view,
            self.pools,
            stride=stride,
            kinds=kinds,
            chunk_tokens=chunk_tokens,
            debug=debug,
            pin=pin,
        )
        self.runtime = Strict(runtime)

    def release(self) -> None:
        """Lets the runtime go, with its memory on both sides."""
        if self.runtime is not None:
            self.runtime.close()
        self.runtime = self.tree = self.pools = None

    # ---- requests

    def open(
        self,
        rid: str,
        row: int,
        seed: int,
        length: int,
        prefix: Req | None = None,
        hit: int = 0,
        *,
        admit: bool = True,
    ) -> Req:
        """A request in that row, admitted: what ScheduleBatch.prepare_for_extend does, then our seam.

        Args:
            length: tokens of the prompt and what follows it.
            prefix, hit: the request whose first `hit` tokens it continues: it reads that one's pages of
                compressed rows, as a hit in the tree does, and has fresh ones behind them.
            admit: tell the runtime; without, nothing is restored (for controls and timings).
        """
        fresh = -(-(length - hit) // PAGE) * PAGE
        if self.pages + fresh > self._limit:
            raise MemoryError(f"{self._limit} token slots are too few")
        slots = torch.arange(self.pages, self.pages + fresh, dtype=torch.int32)
        self.pages += fresh
        at = self.req_to_token[row]
        if hit:
            at[:hit] = prefix.slots[:hit]
        at[hit : hit + fresh] = slots[: at.shape[0] - hit].to(self.device)
        req = Req(
            rid,
            SimpleNamespace(req_pool_idx=row),
            range(length),
            hit,
            None if prefix is None else prefix.rid,
            seqlen=hit,
            seed=seed,
            slots=at.clone(),
        )
        # Stock does this when it allocates the row.
        self.pool.clear_c4_req_states([row])
        if admit:
            self.runtime.admit([req])
        return req

    def close(self, req: Req, *, leave: bool = True) -> None:
        """The request is over: its row is free, its pages stay in the tree if it leaves them."""
        (self.tree.leave if leave else self.tree.discard)(req)
        self.runtime.forget(req)

    # ---- forwards

    def extend_batch(
        self, reqs: Sequence[Req], counts: Sequence[int], *, plugin: bool = True
    ) -> SimpleNamespace:
        """The ScheduleBatch of a prefill of so many tokens each; without `plugin`, one of stock's."""
        return SimpleNamespace(
            reqs=list(reqs),
            forward_mode=ForwardMode.EXTEND,
            prefix_lens=[req.seqlen for req in reqs],
            extend_lens=list(counts),
            decoding_reqs=None,
            seq_lens_cpu=torch.tensor([r.seqlen + n for r, n in zip(reqs, counts, strict=True)]),
            runtime=self.runtime if plugin else None,
        )

    def decode_batch(self, reqs: Sequence[Req], *, plugin: bool = True) -> SimpleNamespace:
        """The ScheduleBatch of a decode step; without `plugin`, one of stock's."""
        return SimpleNamespace(
            reqs=list(reqs),
            forward_mode=ForwardMode.DECODE,
            seq_lens_cpu=torch.tensor([req.seqlen + 1 for req in reqs]),
            runtime=self.runtime if plugin else None,
        )

    def prepared(self, batch: SimpleNamespace) -> Forward:
        """SGLang's metadata of a batch's forward."""
        rows = [req.row for req in batch.reqs]
        if batch.forward_mode.is_decode():
            spans = [Span(req.seed, req.seqlen, 1) for req in batch.reqs]
            return self.stack.decode(rows, spans)
        spans = [
            Span(req.seed, req.seqlen, n)
            for req, n in zip(batch.reqs, batch.extend_lens, strict=True)
        ]
        return self.stack.extend(rows, spans)

    def forward(
        self,
        batch: SimpleNamespace,
        *,
        tamper: Callable[[], None] | None = None,
        record: Callable[[int, str, torch.Tensor], None] | None = None,
    ) -> list[torch.Tensor]:
        """Runs a batch, with the plugin around it where the batch has a runtime; each layer's output.

        `tamper` runs after restores were applied, before the first layer.
        """
        forward = self.prepared(batch)

        def model(_worker: Any, _batch: Any) -> list[torch.Tensor]:
            if tamper is not None:
                tamper()
            return self.stack.run(forward, keep=True, record=record)

        outputs = forward_hooks.around_forward_batch_generation(model, None, batch)
        lengths = batch.seq_lens_cpu.tolist()
        for req, length in zip(batch.reqs, lengths, strict=True):
            req.seqlen = length
        return outputs

    def extend(
        self, req: Req, count: int, *, plugin: bool = True, **options: Any
    ) -> list[torch.Tensor]:
        """A prefill of `count` tokens of one request."""
        return self.forward(self.extend_batch([req], [count], plugin=plugin), **options)

    def decode(self, *reqs: Req, plugin: bool = True, **options: Any) -> list[torch.Tensor]:
        """One decode step."""
        return self.forward(self.decode_batch(reqs, plugin=plugin), **options)
