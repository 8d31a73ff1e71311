"""How large the host pools of a server with these flags would be, and what a record of them holds.

A server asks its real device pool (device_view.py). There is none here, so the geometry is worked out
from the model's configuration as SGLang's `DeepSeekV4TokenToKVPool` would; tests hold both equal. What
only a running server knows (how many tokens fit on its device, how many requests run at once) is taken
from the flags that limit it, and named where they are not given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_bitexact_hicache import factory, sizing
from sglang_bitexact_hicache.constants import PAGE_SIZE
from sglang_bitexact_hicache.doctor.report import Finding, Section, State
from sglang_bitexact_hicache.layout import POOLS, RecordLayout
from sglang_bitexact_hicache.options import Options, compress_state_dtype

SAMPLE_TOKENS = 1_000_000
"""Device tokens for which the pools are worked out where the real number is not known."""


STATE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element of the compressor state, by dtype."""


def layout_of(
    model_config: Any, *, fp8: bool, state_dtype: str, draft_layers: int = 0
) -> RecordLayout:
    """The record layout that the device pools of this model imply, on one pipeline stage.

    Args:
        model_config: SGLang's ModelConfig of a DeepSeek-V4 model.
        fp8: whether the rows are fp8 (SGLANG_DSV4_UNIFIED_KV_FP8).
        state_dtype: of the compressor state, a key of STATE_BYTES.
        draft_layers: how many layers a draft adds, behind the model's.
    """
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DSV4_FP8_NOPE_ROW_BYTES

    nope, rope = model_config.qk_nope_head_dim, model_config.qk_rope_head_dim
    ratios = tuple(model_config.compress_ratios)
    # A longer list ends with the next-token-prediction layer, which has a pool of its own.
    ratios = ratios[: model_config.num_hidden_layers]
    # keys and scores, for the two halves of an overlapping window each
    state = 2 * 2 * STATE_BYTES[state_dtype]
    return RecordLayout(
        layers=tuple(range(len(ratios) + draft_layers)),
        ratios=ratios + (0,) * draft_layers,
        window_row_bytes=DSV4_FP8_NOPE_ROW_BYTES if fp8 else 2 * (nope + rope),
        c4_row_bytes=state * (nope + rope),
        indexer_row_bytes=state * model_config.index_head_dim,
        window_dtype="float8_e4m3fn" if fp8 else "bfloat16",
        state_dtype=state_dtype,
        rope_row_bytes=2 * rope if fp8 else 0,
        draft_layers=draft_layers,
    )


def plan(record: Any) -> list[Section]:
    """Layout and pools of one rank. `record`: resolved ServerArgs of DeepSeek-V4 that no rule refuses."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
    from sglang.srt.environ import envs

    fp8 = envs.SGLANG_DSV4_UNIFIED_KV_FP8.get()
    model_config = model_config_of(record)
    state_dtype = compress_state_dtype()
    if state_dtype not in STATE_BYTES:
        detail = f"SGLANG_DSV4_COMPRESS_STATE_DTYPE must be one of {', '.join(STATE_BYTES)}"
        return [Section("layout", _LAYOUT, [Finding("digest", State.PROBLEM, state_dtype, detail)])]
    # Any draft but one NextN layer is refused.
    drafts = int(resolving_view(record).speculative_algorithm is not None)
    layout = layout_of(model_config, fp8=fp8, state_dtype=state_dtype, draft_layers=drafts)
    return [_layout_section(layout, fp8), _pools_section(record, layout, model_config.context_len)]


_LAYOUT = "Layout of a record: where digests are equal, so are the bytes in storage"


def _layout_section(layout: RecordLayout, fp8: bool) -> Section:
    rows = "fp8, where the GPU has it (gfx95); SGLang falls back to bf16 elsewhere" if fp8 else ""
    return Section(
        "layout",
        _LAYOUT,
        [
            Finding("digest", State.OK, layout.digest()),
            Finding("rows", State.OK, layout.window_dtype, rows),
            Finding(
                "layers",
                State.OK,
                len(layout.layers),
                f"of which {len(layout.c4_layers)} of ratio 4"
                + (f", {layout.draft_layers} the draft's" if layout.draft_layers else ""),
            ),
            Finding("slot_bytes", State.OK, layout.slot_bytes),
            *(Finding(f"{p}_bytes", State.OK, layout.record_bytes(p)) for p in POOLS),
        ],
    )


def _pools_section(record: Any, layout: RecordLayout, context_length: int) -> Section:
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(record)
    options = Options.of(record)
    aligned = factory.aligned_rules(record, options)
    if aligned is not None:
        options = dataclasses.replace(options, stride=aligned.spacing(options.stride))

    def sized(tokens: int, rows: int) -> sizing.Sizing:
        # As SGLang does it (_deepseek_v4_num_host_pages).
        return sizing.size(
            full_host_pages=int(-(-tokens // PAGE_SIZE) * cfg.hicache_ratio),
            stride=options.stride,
            request_rows=rows,
            slot_bytes=layout.slot_bytes,
            context_length=context_length,
            tail_slots=options.tail_slots,
            row_limit_override=options.row_limit,
        )

    given = [
        Finding("hicache_ratio", State.OK, cfg.hicache_ratio, "(--hicache-ratio)"),
        Finding("stride", State.OK, options.stride, "pages between two boundaries of the grid"),
        _given("device_tokens", cfg.max_total_tokens, "--max-total-tokens", "fit its device"),
        _given("request_rows", cfg.max_running_requests, "--max-running-requests", "run at once"),
    ]
    title = "Pools in host memory, of one rank"
    tokens, rows = cfg.max_total_tokens, cfg.max_running_requests
    if tokens is None or rows is None:
        sample = sized(SAMPLE_TOKENS, 0)
        detail = f"for every {SAMPLE_TOKENS:,} tokens on the device, request rows not counted"
        value = {"windows": sample.slots, "bytes": sample.nbytes}
        return Section("pools", title, [*given, Finding("sample", State.NOTE, value, detail)])
    # SGLang takes no more requests than half the tokens.
    planned = sized(tokens // PAGE_SIZE * PAGE_SIZE, min(rows, tokens // 2))
    ranks, free = factory.ranks_of_host(record), factory.free_host_memory()
    fits = Finding("memory", State.OK, free, "bytes of host memory are free on this machine")
    try:
        sizing.check(planned, stride=options.stride, available_dram=free, ranks=ranks)
    except ValueError as error:
        fits = Finding("memory", State.PROBLEM, free, str(error))
    return Section(
        "pools",
        title,
        [
            *given,
            Finding(
                "windows", State.OK, planned.slots, "host slots, each for the truth of one boundary"
            ),
            Finding("grid_windows", State.OK, planned.grid_slots),
            Finding("tail_windows", State.OK, planned.tail_slots),
            Finding("row_limit", State.OK, planned.row_limit, "slots that one request may hold"),
            Finding("bytes", State.OK, planned.nbytes, f"{planned.nbytes / 1e9:.3f} GB"),
            Finding(
                "ranks",
                State.OK,
                ranks,
                f"on a host, {ranks * planned.nbytes / 1e9:.3f} GB together",
            ),
            fits,
        ],
    )


def _given(key: str, value: int | None, flag: str, what: str) -> Finding:
    if value is None:
        detail = f"a server finds out how many {what}; give {flag} to plan with a number"
        return Finding(key, State.UNKNOWN, None, detail)
    return Finding(key, State.OK, value, f"({flag}) at most; a server may find that fewer {what}")
