"""What the feature refuses at startup: a table of rules, each naming the flag to change.

Evaluated only where `engaged()` holds: in the launcher, at SGLang's `handle_hicache` step of
argument resolution, and again in each scheduler before its cache is built, over the final values and
the real KV pool. Both come before any host memory is pinned.

Beam search has no rule: it is asked for per request, and SGLang answers such a request with an error
under HiCache and under a page size above 1 (`BeamCoordinator.validate_and_init`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_bitexact_hicache.constants import (
    C4_RATIO,
    C128_RATIO,
    PAGE_SIZE,
    STATE_ROWS,
    WINDOW,
)
from sglang_bitexact_hicache.options import Options, compress_state_dtype
from sglang_bitexact_hicache.policy import Kind
from sglang_bitexact_hicache.settings import (
    ALIGNED_ARGUMENT,
    ENV_FLAG,
    ENV_POINTS,
    ENV_ROW_LIMIT,
    ENV_STRIDE,
    ENV_TAIL,
    POINTS_ARGUMENT,
    STRIDE_ARGUMENT,
    TAIL_ARGUMENT,
)
from sglang_bitexact_hicache.sizing import LEAST_ROW_LIMIT

STORAGE_BACKENDS = ("file", "nixl")
"""SGLang's storage backends that this project was tested with."""

RATIOS = frozenset({0, C4_RATIO, C128_RATIO})

SPECULATIVE_STATE_RING = 16
"""Rows that a request has in a C4 compressor's ring with speculative decoding, whatever a round's tokens
(SGLang's `get_compress_state_ring_size`)."""

MOST_ROUND_TOKENS = SPECULATIVE_STATE_RING - STATE_ROWS + 1
"""What runtime.check_rings makes of it."""


@dataclass(frozen=True)
class Startup:
    """What the rules judge.

    Attributes:
        cfg: SGLang's resolved arguments (`resolving_view`); the rules read fields by name.
        options: this feature's own.
        page_size: tokens in a page of the prefix cache.
        asked_page_size: what `--page-size` said, or the page size where it was not given. SGLang
            puts 256 in its place for DeepSeek-V4; here the user is told instead.
        window: the model's sliding window, in tokens.
        ratios: the compression ratios of the model's layers.
        online_compress: whether the C128 compressor runs in its online form.
        narrow_states: whether compressor states are kept in bf16.
        prefill_coordination: whether one rank's rounds may run beside the prompts of another.
        fused_verify: whether a round's rows are stored by the kernel that stores a prefill's.
        hybrid_swa: whether the prefix cache has the components FULL and SWA.
    """

    cfg: Any
    options: Options
    page_size: int
    asked_page_size: int
    window: int
    ratios: frozenset[int]
    online_compress: bool
    narrow_states: bool
    prefill_coordination: bool
    fused_verify: bool
    hybrid_swa: bool

    @classmethod
    def of_record(cls, server_args: Any) -> Startup:
        """From a ServerArgs record, in the launcher."""
        from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
        from sglang.srt.environ import envs

        cfg = resolving_view(server_args)
        hf_config = model_config_of(server_args).hf_config
        return cls(
            cfg=cfg,
            options=Options.of(server_args),
            page_size=cfg.page_size,
            asked_page_size=_asked(server_args.page_size, cfg.page_size),
            window=hf_config.sliding_window,
            ratios=frozenset(hf_config.compress_ratios),
            online_compress=envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get(),
            narrow_states=compress_state_dtype() == "bfloat16",
            prefill_coordination=envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get(),
            fused_verify=envs.SGLANG_OPT_FUSED_QK_NORM_ROPE_VERIFY.get(),
            hybrid_swa=not cfg.disable_hybrid_swa_memory,
        )

    @classmethod
    def of_context(cls, ctx: Any) -> Startup:
        """From a `TreeCacheBuildContext` whose KV pool exists, in a scheduler."""
        from sglang.srt.arg_groups.overrides import resolving_view
        from sglang.srt.environ import envs

        kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
        return cls(
            cfg=resolving_view(ctx.server_args),
            options=Options.of(ctx.server_args),
            page_size=ctx.params.page_size,
            asked_page_size=_asked(ctx.server_args.page_size, ctx.params.page_size),
            window=kvcache.sliding_window,
            ratios=frozenset(kvcache.compression_ratios),
            online_compress=envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get(),
            narrow_states=compress_state_dtype() == "bfloat16",
            prefill_coordination=envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get(),
            fused_verify=envs.SGLANG_OPT_FUSED_QK_NORM_ROPE_VERIFY.get(),
            hybrid_swa=ctx.is_hybrid_swa and not ctx.is_hybrid_ssm,
        )


def _asked(raw: int | None, settled: int) -> int:
    return settled if raw is None else raw


@dataclass(frozen=True)
class Rule:
    """One refusal.

    Attributes:
        name: a short id.
        flag: what the user changes, as it is typed; the message starts with it.
        why: what is wrong with it and what to do.
        refuses: true when the startup must not go on.
        planned: refused only until this project supports it.
        got: what was asked for, where it is worth repeating.
    """

    name: str
    flag: str
    why: str
    refuses: Callable[[Startup], bool]
    planned: bool = False
    got: Callable[[Startup], Any] | None = None

    def message(self, startup: Startup | None = None) -> str:
        """The line that the user reads; `startup`: what was asked for."""
        later = " (not supported yet)" if self.planned else ""
        got = f", got {self.got(startup)!r}" if self.got and startup else ""
        return f"{self.flag}: {self.why}{got}{later}"


def _field(name: str, *allowed: Any) -> Callable[[Startup], bool]:
    """Refuses any resolved value of a ServerArgs field that is not one of `allowed`."""
    return lambda s: getattr(s.cfg, name) not in allowed


def _prefill_graph(s: Startup) -> bool:
    # Unresolved on a record without a model; such a record starts no graph runner.
    graphs = s.cfg.cuda_graph_config
    return graphs is not None and graphs.prefill.backend != "disabled"


def _unknown_kinds(s: Startup) -> bool:
    try:
        return not s.options.kinds
    except ValueError:
        return True


def _name_excess(model_name: str | None, ranks: int) -> int:
    # Not with the module: this one is loaded in every process, with the flag off as well.
    from sglang_bitexact_hicache.storage_names import name_excess

    return name_excess(model_name, ranks)


def _name_too_long(s: Startup) -> bool:
    ranks = s.cfg.tp_size // s.cfg.attn_dp_size
    return (
        s.cfg.hicache_storage_backend is not None
        and _name_excess(s.cfg.served_model_name, ranks) > 0
    )


def _aligned(refuses: Callable[[Startup], bool]) -> Callable[[Startup], bool]:
    """Refuses only where aligned prefill is asked for."""
    return lambda s: s.options.aligned_prefill and refuses(s)


def _speculating(refuses: Callable[[Startup], bool]) -> Callable[[Startup], bool]:
    """Refuses only where there is a draft."""
    return lambda s: s.cfg.speculative_algorithm is not None and refuses(s)


def _no_chunk_of_whole_pages(s: Startup) -> bool:
    chunk = s.cfg.chunked_prefill_size
    return chunk is None or chunk <= 0 or chunk % PAGE_SIZE != 0


RULES: tuple[Rule, ...] = (
    Rule(
        "stride",
        STRIDE_ARGUMENT,
        f"must be at least 1 page (also {ENV_STRIDE})",
        lambda s: s.options.stride < 1,
    ),
    Rule(
        "tail_slots",
        TAIL_ARGUMENT,
        f"must not be negative (also {ENV_TAIL})",
        lambda s: s.options.tail_slots is not None and s.options.tail_slots < 0,
    ),
    Rule(
        "reuse_points",
        POINTS_ARGUMENT,
        f"must be a comma-separated list of {', '.join(k.value for k in Kind)} (also {ENV_POINTS})",
        _unknown_kinds,
        got=lambda s: s.options.reuse_points,
    ),
    Rule(
        "row_limit",
        ENV_ROW_LIMIT,
        f"must be at least {LEAST_ROW_LIMIT} host slots, the newest boundaries of a running request",
        lambda s: s.options.row_limit is not None and s.options.row_limit < LEAST_ROW_LIMIT,
    ),
    Rule(
        "aligned_chunk",
        "--chunked-prefill-size",
        f"must be a positive multiple of {PAGE_SIZE} with {ALIGNED_ARGUMENT}, after SGLang has divided "
        "it by --attn-dp-size",
        _aligned(_no_chunk_of_whole_pages),
    ),
    Rule(
        "aligned_mixed_chunk",
        "--enable-mixed-chunk",
        f"cannot run with {ALIGNED_ARGUMENT}: decoding rows would take part of every chunk",
        _aligned(_field("enable_mixed_chunk", False)),
    ),
    Rule(
        "aligned_dynamic_chunking",
        "--enable-dynamic-chunking",
        f"cannot run with {ALIGNED_ARGUMENT}: the size of a chunk would change as a prompt goes on",
        _aligned(_field("enable_dynamic_chunking", False)),
    ),
    Rule(
        "aligned_encoder_replay",
        "--enable-encoder-swa-bounded-replay",
        f"cannot run with {ALIGNED_ARGUMENT}: replayed rows would take part of every chunk",
        _aligned(_field("enable_encoder_swa_bounded_replay", False)),
    ),
    Rule(
        "aligned_schedule_policy",
        "--schedule-policy",
        f"must not be shortest-prefill-first with {ALIGNED_ARGUMENT}: it shortens a running prompt's "
        "chunks to make room for others",
        _aligned(lambda s: s.cfg.schedule_policy == "shortest-prefill-first"),
    ),
    Rule(
        "write_policy",
        "--hicache-write-policy",
        "must be write_through: what is captured belongs to host pages that exist at once",
        _field("hicache_write_policy", "write_through"),
    ),
    Rule(
        "hicache_size",
        "--hicache-size",
        "SGLang sizes the host pools of DeepSeek-V4 by --hicache-ratio only",
        lambda s: s.cfg.hicache_size > 0,
    ),
    Rule(
        "host_memory_mode",
        "--hicache-host-memory-mode",
        "must be cache: buffer_only keeps no host pages to come back to",
        _field("hicache_host_memory_mode", "cache"),
    ),
    Rule(
        "page_size",
        "--page-size",
        f"must be {PAGE_SIZE}",
        lambda s: (s.page_size, s.asked_page_size) != (PAGE_SIZE, PAGE_SIZE),
    ),
    Rule(
        "window",
        "--model-path",
        f"the model's sliding_window must be {WINDOW}",
        lambda s: s.window != WINDOW,
    ),
    Rule(
        "ratios",
        "--model-path",
        f"the model's compress_ratios must be among {sorted(RATIOS)}, with at least one {C4_RATIO}",
        lambda s: not s.ratios <= RATIOS or C4_RATIO not in s.ratios,
    ),
    Rule(
        "hybrid_swa",
        "--disable-hybrid-swa-memory",
        "the prefix cache needs its sliding-window component",
        lambda s: not s.hybrid_swa,
    ),
    Rule(
        "radix_cache",
        "--disable-radix-cache",
        "there is nothing to reuse without the radix cache",
        _field("disable_radix_cache", False),
    ),
    Rule(
        "radix_cache_backend",
        "--radix-cache-backend",
        "only SGLang's built-in cache is supported",
        _field("radix_cache_backend", None),
    ),
    Rule(
        "session_radix_cache",
        "--enable-session-radix-cache",
        "sessions match prefixes past the gate",
        _field("enable_session_radix_cache", False),
    ),
    Rule(
        "streaming_session",
        "--enable-streaming-session",
        "sessions match prefixes past the gate",
        _field("enable_streaming_session", False),
    ),
    Rule(
        "lmcache",
        "--enable-lmcache",
        "another cache would take the place of HiCache",
        _field("enable_lmcache", False),
    ),
    Rule(
        "flexkv",
        "--enable-flexkv",
        "another cache would take the place of HiCache",
        _field("enable_flexkv", False),
    ),
    Rule(
        "external_linker",
        "--enable-unified-cache-external-linker",
        "a linker brings in prefixes whose window and state are unknown",
        _field("enable_unified_cache_external_linker", False),
    ),
    Rule(
        "hisparse",
        "--enable-hisparse",
        "it moves the compressed KV that a hit would use",
        _field("enable_hisparse", False),
    ),
    Rule(
        "unified_memory",
        "--enable-unified-memory",
        "the KV rows of its pools are not those of unified_kv",
        _field("enable_unified_memory", False),
    ),
    Rule(
        "page_major",
        "--enable-page-major-kv-layout",
        "the KV rows of its pools are not those of unified_kv",
        _field("enable_page_major_kv_layout", False),
    ),
    Rule(
        "kv_sharding",
        "--enable-kv-cache-sharding",
        "a rank would hold only some of a prefix's pages",
        _field("enable_kv_cache_sharding", False),
    ),
    Rule(
        "prefill_only",
        "--prefill-only-disable-kv-cache",
        "there is nothing to reuse without a KV cache",
        _field("prefill_only_disable_kv_cache", False),
    ),
    Rule(
        "embedding",
        "--is-embedding",
        "an embedding forward does not pass the place where a hit is restored",
        _field("is_embedding", False),
    ),
    Rule(
        "prefill_graph",
        "--cuda-graph-backend-prefill",
        "must be disabled: the capture runs inside the prefill forward and a graph would skip it",
        _prefill_graph,
    ),
    Rule(
        "prefill_cp",
        "--enable-prefill-cp",
        "context parallelism splits a prompt's window over ranks",
        _field("enable_prefill_cp", False),
    ),
    Rule(
        "attn_cp",
        "--attn-cp-size",
        "context parallelism splits a prompt's window over ranks",
        _field("attn_cp_size", 1),
    ),
    Rule(
        "dcp",
        "--dcp-size",
        "context parallelism splits a prompt's pages over ranks",
        _field("dcp_size", 1),
    ),
    Rule(
        "two_batch_overlap",
        "--enable-two-batch-overlap",
        "one forward would run as two, with other rows than the batch's",
        _field("enable_two_batch_overlap", False),
    ),
    Rule(
        "pdmux",
        "--enable-pdmux",
        "it splits a prefill over several forwards",
        _field("enable_pdmux", False),
    ),
    Rule(
        "disaggregation",
        "--disaggregation-mode",
        "must be null: prefill and decode would be two servers",
        _field("disaggregation_mode", "null"),
    ),
    Rule(
        "decoupled_spec",
        "--decoupled-spec-role",
        "must be null: drafting would be another server's",
        _field("decoupled_spec_role", "null"),
    ),
    Rule(
        "adaptive_speculation",
        "--speculative-adaptive",
        "the number of draft tokens must not change while the server runs",
        _field("speculative_adaptive", False),
    ),
    Rule(
        "dllm",
        "--dllm-algorithm",
        "a diffusion model rewrites tokens that were already cached",
        _field("dllm_algorithm", None),
    ),
    Rule(
        "online_compress",
        "SGLANG_OPT_USE_ONLINE_COMPRESS",
        "must be unset: it leaves C128 state pending at a page boundary",
        lambda s: s.online_compress,
    ),
    Rule(
        "narrow_states",
        "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
        "must be float32: inside a chunk the compressor reads its inputs unrounded, so a state rounded "
        "to bf16 is not what a cold run would have at an interior boundary",
        lambda s: s.narrow_states,
    ),
    Rule(
        "speculation",
        "--speculative-algorithm",
        "must be EAGLE, or unset: what another draft keeps of a prefix is not restored",
        _field("speculative_algorithm", None, "EAGLE"),
        got=lambda s: s.cfg.speculative_algorithm,
    ),
    Rule(
        "speculation_topk",
        "--speculative-eagle-topk",
        "must be 1: the branches of a tree would share the rows that a window is captured from",
        # Not resolved yet where it was not given: the scheduler asks again.
        _speculating(lambda s: s.cfg.speculative_eagle_topk not in (None, 1)),
    ),
    Rule(
        "speculation_layers",
        "--enable-multi-layer-eagle",
        "must be unset: only a draft of one layer was tried",
        _speculating(_field("enable_multi_layer_eagle", False)),
        planned=True,
    ),
    Rule(
        "speculation_tokens",
        "--speculative-num-draft-tokens",
        f"must be at most {MOST_ROUND_TOKENS}: of the {SPECULATIVE_STATE_RING} rows of a compressor's "
        f"ring, a round must not reach the {STATE_ROWS} before a page's end",
        # Not resolved yet where it was not given: the scheduler asks again, of the rings themselves.
        _speculating(lambda s: (s.cfg.speculative_num_draft_tokens or 0) > MOST_ROUND_TOKENS),
        got=lambda s: str(s.cfg.speculative_num_draft_tokens),
    ),
    Rule(
        "speculation_store",
        "SGLANG_OPT_FUSED_QK_NORM_ROPE_VERIFY",
        "must not be 0 with --speculative-algorithm: fp8 rows need it, and others were not tried "
        "without it",
        _speculating(lambda s: not s.fused_verify),
        planned=True,
    ),
    Rule(
        "speculation_groups",
        "--dp-size",
        "must be 1 or --tp-size with --enable-dp-attention and --speculative-algorithm: attention groups "
        "of several ranks beside each other were not tried with a draft",
        _speculating(lambda s: s.cfg.attn_dp_size not in (1, s.cfg.tp_size)),
        planned=True,
    ),
    Rule(
        "speculation_prefill_coordination",
        "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION",
        "must be unset with --speculative-algorithm: one rank's rounds beside the prompts of another "
        "were not tried",
        _speculating(lambda s: s.prefill_coordination),
        planned=True,
    ),
    Rule(
        "speculation_mixed_chunk",
        "--enable-mixed-chunk",
        "must be unset with --speculative-algorithm: a round would run as part of a prefill",
        _speculating(_field("enable_mixed_chunk", False)),
        planned=True,
    ),
    Rule(
        "speculation_aligned",
        ALIGNED_ARGUMENT,
        "must be unset with --speculative-algorithm: aligned chunks were not tried with a draft",
        _speculating(lambda s: s.options.aligned_prefill),
        planned=True,
    ),
    Rule(
        "pp",
        "--pp-size",
        "must be 1: a stage has the windows of its own layers only, and all stages would have to agree "
        "on a hit",
        _field("pp_size", 1),
        planned=True,
    ),
    Rule(
        "storage_backend",
        "--hicache-storage-backend",
        f"must be one of {', '.join(STORAGE_BACKENDS)}, or unset",
        _field("hicache_storage_backend", None, *STORAGE_BACKENDS),
        got=lambda s: s.cfg.hicache_storage_backend,
    ),
    Rule(
        "served_model_name",
        "--served-model-name",
        "must be shorter (it is the model's path where it is not given): it is part of the name of each "
        "stored page, which would be too long for a file system",
        _name_too_long,
    ),
)
"""Every rule, in the order in which it is reported."""


def refused(startup: Startup) -> list[Rule]:
    """The rules that refuse this startup."""
    return [rule for rule in RULES if rule.refuses(startup)]


def check(startup: Startup) -> None:
    """Refuses a configuration that the feature cannot serve.

    Raises:
        ValueError: one message with a line for each rule that refuses.
    """
    rules = refused(startup)
    if rules:
        lines = "".join(f"\n  {rule.message(startup)}" for rule in rules)
        raise ValueError(
            f"{ENV_FLAG}=1 cannot run with this configuration; change the flags below or unset "
            f"it:{lines}"
        )


def storage_problem(
    storage_backend: str, write_policy: str | None, model_name: str | None, *, ranks: int
) -> str | None:
    """Why a storage backend cannot be attached at run time with this write policy, or None. `ranks`:
    that hold the same KV."""
    if storage_backend not in STORAGE_BACKENDS:
        return f"the storage backend must be one of {', '.join(STORAGE_BACKENDS)}"
    if write_policy not in (None, "write_through"):
        return f"the write policy must stay write_through, got {write_policy!r}"
    excess = _name_excess(model_name, ranks)
    if excess > 0:
        return f"--served-model-name must be shorter by {excess} bytes: it is part of file names"
    return None
