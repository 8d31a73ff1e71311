"""The model's shape, what a token of it costs, and the sizes of a run.

The numbers of DeepSeek-V4-Pro are those of its public config.json (`num_hidden_layers` 61,
`compress_ratios`, `num_attention_heads` 128, `head_dim` 512, `qk_rope_head_dim` 64, `index_head_dim` 128,
`index_n_heads` 64, `index_topk` 1024, `sliding_window` 128, `hidden_size` 7168, `q_lora_rank` 1536,
`o_lora_rank` 1024, `o_groups` 16, `moe_intermediate_size` 3072, `num_experts_per_tok` 6,
`n_shared_experts` 1, `n_routed_experts` 384) and the shapes of its published weights. Its list of 62
ratios ends with the 0 of the next-token-prediction layer, which is a model and a pool of its own in
SGLang: the 61 layers have ratios 128, 128, then 4 and 128 in turn, so none is window-only. Layers of
ratio 0 are checked in a second, small stack: the first layers of DeepSeek-V4-Flash.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 256
WINDOW = 128
HEAD_DIM = 512
ROPE_DIM = 64
INDEX_DIM = 128
INDEX_PAGE = PAGE // 4
"""Rows of a page in the indexer's K cache."""


@dataclass(frozen=True)
class Shape:
    """The layers of one rank.

    Attributes:
        name: for tables.
        ratios: compression ratio of each layer.
        heads: query heads of this rank.
        selected: compressed rows that a ratio-4 layer attends to, at most.
        table_width: columns of stock's table of them (512 or 1024).
    """

    name: str
    ratios: tuple[int, ...]
    heads: int
    selected: int
    table_width: int

    def first(self, layers: int) -> Shape:
        """Its first layers only, for a smoke run."""
        return Shape(f"{self.name}, {layers} layers", self.ratios[:layers], *self._rest)

    @property
    def _rest(self) -> tuple[int, int, int]:
        return self.heads, self.selected, self.table_width


RANKS = 8
"""Tensor-parallel ranks of the real model's stated time; heads are split, K and states are not."""

PRO = Shape("DeepSeek-V4-Pro", (128, 128) + (4, 128) * 29 + (4,), 128 // RANKS, 1024, 1024)
FLASH_START = Shape("first layers of DeepSeek-V4-Flash", (0, 0, 4, 128), 64 // RANKS, 512, 512)


@dataclass(frozen=True)
class Scenario:
    """Lengths of the exactness prompts, in tokens.

    The last chunk's end is a page boundary, and has more compressed rows before it than the indexer
    selects: otherwise a wrong row of the indexer would change nothing.

    Attributes:
        chunks: chunks of the prompt.
        more: tokens of each continuation by prefill.
        lead: tokens before the last boundary at which the decoding request's prompt ends.
        steps: decode steps after the boundary.
        placed: interior boundaries whose continuation is compared with independently placed bytes.
    """

    chunks: tuple[int, ...]
    more: int
    lead: int
    steps: int
    placed: tuple[int, ...]

    @property
    def end(self) -> int:
        """Tokens of the whole prompt."""
        return sum(self.chunks)

    @property
    def positions(self) -> int:
        """Positions that any request of the scenario can reach."""
        return self.end + max(self.more, self.steps) + PAGE


PRO_SCENARIO = Scenario((2048, 2048, 512), 256, 6, 12, (256, 2304, 4352))
FLASH_SCENARIO = Scenario((1024, 1024, 512), 256, 6, 12, (768, 2304))


@dataclass(frozen=True)
class Run:
    """Sizes of the measurements.

    Attributes:
        chunk: tokens of the measured prefill chunk.
        batch: requests of the measured decode step.
        context: tokens that each of them has.
        restores: sizes of the batches of restores.
        repeats: of each timing.
        layers: first layers only, for a smoke run.
    """

    chunk: int = 8192
    batch: int = 64
    context: int = 4 * PAGE
    restores: tuple[int, ...] = (1, 8, 32)
    repeats: int = 15
    layers: int | None = None

    @property
    def rows(self) -> int:
        """Request rows of the pool, the padding row 0 included."""
        return max(self.batch, max(self.restores)) + 8

    @property
    def positions(self) -> int:
        """Positions that any request can reach."""
        return max(self.chunk, max(self.restores) * PAGE, PRO_SCENARIO.positions) + PAGE

    @property
    def tokens(self) -> int:
        """Token slots of the pool: every request's, and what the exactness prompts need."""
        each = (self.context + 2 * PAGE) * self.batch
        return -(-(each + 4 * self.chunk + 16 * PRO_SCENARIO.positions) // PAGE) * PAGE


REQUEST_TOKENS_PER_SECOND = 8000
"""Prefill speed at which a copy of the captured bytes has to be hidden (one rank)."""

EFFICIENCY = 0.5
"""Share of the measured matrix product rate that the real model is assumed to reach."""


def active_parameters() -> float:
    """Parameters of DeepSeek-V4-Pro that a token passes, from the shapes of its weights."""
    hidden, heads, q_rank, o_rank, groups = 7168, 128, 1536, 1024, 16
    attention = hidden * q_rank + q_rank * heads * HEAD_DIM + hidden * HEAD_DIM
    attention += heads * HEAD_DIM * o_rank + groups * o_rank * hidden
    experts = (6 + 1) * 3 * hidden * 3072 + hidden * 384
    # kv and gate, twice as wide where the compressor overlaps; the indexer's q and weights.
    c4 = 4 * hidden * HEAD_DIM + 4 * hidden * INDEX_DIM + q_rank * 64 * INDEX_DIM + hidden * 64
    c128 = 2 * hidden * HEAD_DIM
    layers, c4_layers = len(PRO.ratios), PRO.ratios.count(4)
    c128_layers = PRO.ratios.count(128)
    head = 129280 * hidden
    return layers * (attention + experts) + c4_layers * c4 + c128_layers * c128 + head


def prefill_flops(start: int, end: int) -> float:
    """Floating point operations of DeepSeek-V4-Pro for the tokens [start, end) of a prompt, all ranks."""
    tokens = end - start
    middle = (start + end) / 2
    # Mean over the chunk of min(selected, position / 4): exact for a linear ramp that is cut off.
    selected = sum(min(PRO.selected, p // 4) for p in range(start, end)) / tokens
    keys = PRO.ratios.count(4) * (WINDOW + selected) + PRO.ratios.count(128) * (
        WINDOW + middle / 128
    )
    attention = keys * 128 * 2 * 2 * HEAD_DIM
    indexer = PRO.ratios.count(4) * (middle / 4) * 64 * 2 * INDEX_DIM
    return tokens * (2 * active_parameters() + attention + indexer)


def prefill_seconds(start: int, end: int, flops_per_second: float) -> float:
    """Time of that on `RANKS` devices of this matrix product rate, at `EFFICIENCY`."""
    return prefill_flops(start, end) / (RANKS * EFFICIENCY * flops_per_second)
