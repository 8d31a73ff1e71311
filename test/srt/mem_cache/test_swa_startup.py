"""Startup: arguments, the gate, refusals and sizing, on SGLang's own argument resolution.

Nothing is mocked but what a test says it mocks: the records are real, and so are the resolution
pipeline that runs our step, the pools, and the two server processes at the end.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attachment
import pytest
from attachment import hooks_undone
from hypothesis import given
from hypothesis import strategies as st
from startup_fixtures import (
    ENGAGING_ARGS,
    ENGAGING_ENV,
    OTHER_MODEL_CONFIG,
    build_context,
    environment,
    our_log,
    parse,
    publish,
    resolve,
    write_config,
    write_model,
)

from sglang_bitexact_hicache import (
    arguments,
    attach,
    engagement,
    factory,
    options,
    refusals,
    seam_checks,
    settings,
    sizing,
)
from sglang_bitexact_hicache.options import Options
from sglang_bitexact_hicache.runtime import check_rings
from sglang_bitexact_hicache.seam import When

ALIGNED = "--hicache-swa-offload-aligned-prefill"
CHUNK = ("--chunked-prefill-size", "512")
EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)


@pytest.fixture(scope="module", autouse=True)
def _hooks():
    """The hooks of a process that loaded plugins with the flag on."""
    with hooks_undone():
        arguments.environment_fields()
        attach.install(When.ALWAYS, When.FLAG)
        yield


@pytest.fixture(autouse=True)
def _engaging_environment():
    """Each test starts where the feature engages."""
    with environment(
        **ENGAGING_ENV,
        SGLANG_SWA_DBG_CHECKSUM=None,
        SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE=None,
        SGLANG_HICACHE_SWA_OFFLOAD_TAIL_SLOTS=None,
        SGLANG_SWA_HICACHE_STATE_STAGING_PAGES=None,
    ):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A DeepSeek-V4 model directory."""
    return write_model(tmp_path_factory.mktemp("models") / "dsv4")


# ---- arguments


def test_help_of_the_server_shows_the_arguments():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--help"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shown = " ".join(done.stdout.split())
    for setting in settings.SETTINGS:
        if setting.argument is not None:
            # Its name, what its value is called, its help.
            value = attachment.metavar(setting.argument)
            assert f"{setting.argument.name}{value and ' '}{value} {words(setting)}" in shown


def words(setting: settings.Setting) -> str:
    """The first words of its help."""
    return " ".join(setting.argument.help.split()[:6])


@pytest.mark.parametrize(
    ("args", "stride", "tail"),
    [
        ((), 1, None),
        (("--hicache-swa-offload-page-stride", "4"), 4, None),
        (("--hicache-swa-offload-page-stride=3",), 3, None),
        (("--hicache-swa-offload-tail-slots", "0"), 1, 0),
    ],
)
def test_values_reach_the_record_and_other_processes(model, args, stride, tail):
    server_args = resolve(model, args)
    for record in (server_args, pickle.loads(pickle.dumps(server_args))):
        read = Options.of(record)
        assert (read.stride, read.tail_slots, read.checksum) == (stride, tail, False)


@pytest.mark.parametrize(
    ("args", "value", "expected"),
    [((), None, False), ((), "0", False), ((), "1", True), ((ALIGNED,), None, True)],
)
def test_aligned_prefill_is_asked_for_by_argument_or_environment(model, args, value, expected):
    with environment(SGLANG_HICACHE_SWA_OFFLOAD_ALIGNED_PREFILL=value):
        server_args = resolve(model, (*CHUNK, *args))
        assert Options.of(pickle.loads(pickle.dumps(server_args))).aligned_prefill is expected


@pytest.mark.parametrize("chunk", ["0", "-1"])
def test_aligned_prefill_needs_chunks(model, chunk):
    with pytest.raises(
        ValueError, match="--chunked-prefill-size: must be a positive multiple of 256"
    ):
        resolve(model, (ALIGNED, "--chunked-prefill-size", chunk))


def test_a_stride_that_is_no_number_is_an_argument_error(model, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(model, ("--hicache-swa-offload-page-stride", "often"))
    assert stop.value.code != 0
    assert "--hicache-swa-offload-page-stride" in capsys.readouterr().err


def test_environment_mirrors_serve_engine_users(model):
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path=str(model))
    assert Options.of(server_args) == Options()
    with environment(
        SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE="8",
        SGLANG_HICACHE_SWA_OFFLOAD_TAIL_SLOTS="5",
        SGLANG_SWA_HICACHE_STATE_STAGING_PAGES="7",
        SGLANG_SWA_DBG_CHECKSUM="1",
    ):
        assert Options.of(server_args) == Options(
            stride=8, tail_slots=5, row_limit=7, checksum=True
        )


def test_the_command_line_wins_over_the_environment(model):
    with environment(SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE="8"):
        assert Options.of(parse(model)).stride == 8
        assert Options.of(parse(model, ("--hicache-swa-offload-page-stride", "2"))).stride == 2


@pytest.mark.parametrize(
    "name", ["SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE", "SGLANG_SWA_HICACHE_STATE_STAGING_PAGES"]
)
def test_a_number_in_the_environment_that_is_none_is_refused(model, name):
    with (
        environment(**{name: "4 pages"}),
        pytest.raises(ValueError, match=f"{name} must be an integer, got '4 pages'"),
    ):
        resolve(model)


def test_environment_fields_join_sglangs_own():
    from sglang.srt.environ import EnvField, envs

    allowed = EnvField._allow_set_name
    arguments.environment_fields()
    assert EnvField._allow_set_name == allowed
    assert envs.SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE.get() is True
    assert envs.SGLANG_SWA_DBG_CHECKSUM.get() is False
    assert envs.SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE.get() == 1


def test_a_parser_older_than_the_plugin_still_makes_a_record():
    import argparse

    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs.from_cli_args(argparse.Namespace(model_path="dummy"))
    assert Options.of(server_args).stride == 1


# ---- the gate


def test_it_engages_and_the_launcher_reads_free_memory_once(model):
    with mock.patch.object(factory, "free_host_memory", return_value=123) as read:
        server_args = resolve(model)
    assert engagement.engaged(server_args)
    assert read.call_count == 1
    record = pickle.loads(pickle.dumps(server_args))
    assert Options.of(record).available_dram == 123
    assert engagement.settle(record)


def _without_hicache() -> tuple[str, ...]:
    return tuple(arg for arg in ENGAGING_ARGS if arg != "--enable-hierarchical-cache")


NOT_ENGAGED: dict[str, tuple[dict[str, str], tuple[str, ...], dict[str, Any] | None, str]] = {
    "not HIP": (
        {"SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP": "0"},
        ENGAGING_ARGS,
        None,
        "not ROCm/HIP",
    ),
    "another backend": (
        {"SGLANG_HACK_FLASHMLA_BACKEND": "auto"},
        ENGAGING_ARGS,
        None,
        "SGLANG_HACK_FLASHMLA_BACKEND",
    ),
    "HiCache off": ({}, _without_hicache(), None, "--enable-hierarchical-cache"),
    "another model": (
        {},
        (*ENGAGING_ARGS, "--attention-backend", "torch_native"),
        OTHER_MODEL_CONFIG,
        "not DeepSeek-V4",
    ),
}


@pytest.mark.parametrize("case", NOT_ENGAGED)
def test_not_engaged_warns_once_and_says_why(case, model, tmp_path):
    env, base, config, reason = NOT_ENGAGED[case]
    path = model if config is None else write_config(tmp_path / "other", config)
    # Refusals are not for a server without the feature: these two would be refused.
    args = ("--hicache-swa-offload-page-stride", "0", "--hicache-write-policy", "write_back")
    with environment(**env), our_log() as messages:
        server_args = resolve(path, args, base)
        record = pickle.loads(pickle.dumps(server_args))
        verdict = engagement.settle(record, lambda: pytest.fail("the launcher said no"))
    assert not verdict
    assert verdict.flag
    assert len(verdict.reasons) == 1
    assert reason in verdict.reasons[0]
    assert len(messages) == 1, messages
    assert messages[0].startswith("WARNING SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE=1 has no effect")
    assert reason in messages[0]


def test_flag_off_says_nothing_and_leaves_nothing(model):
    with environment(SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE="0"):
        with our_log() as messages:
            server_args = resolve(model, ("--hicache-swa-offload-page-stride", "0"))
        assert not engagement.engaged(server_args)
    assert messages == []
    assert not [name for name in vars(server_args) if "bitexact" in name]


def test_every_condition_that_does_not_hold_is_named(model):
    with environment(
        SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP="0", SGLANG_HACK_FLASHMLA_BACKEND="auto"
    ):
        reasons = engagement.engaged(resolve(model, (), _without_hicache())).reasons
    assert len(reasons) == 3


# ---- flags that cannot be read


@pytest.mark.parametrize("name", settings.BOOLEAN_FLAGS)
def test_a_flag_that_is_not_a_boolean_is_refused_in_the_launcher(name, model):
    with (
        environment(**{**ENGAGING_ENV, name: "maybe"}),
        pytest.raises(ValueError, match=f"{name} must be 0 or 1, got 'maybe'"),
    ):
        factory.resolve_hicache(None, lambda server_args: None)


@pytest.mark.parametrize("value", ["1", "true", "0", "no"])
def test_a_flag_that_is_a_boolean_is_read(value):
    with environment(**{settings.ENV_FLAG: value}):
        assert options.env_problem(settings.ENV_FLAG) is None


# ---- refusals

Case = tuple[tuple[str, ...], dict[str, str], dict[str, Any], dict[str, Any]]


def _case(
    *args: str,
    env: dict[str, str] | None = None,
    declared: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Case:
    return args, env or {}, declared or {}, config or {}


# Through the command line where SGLang itself lets the value come as far as our step; where it
# refuses earlier on this machine, the value is declared on a resolved record, as a resolution step
# declares it, and the table is asked about that record.
CASES: dict[str, Case] = {
    "stride": _case("--hicache-swa-offload-page-stride", "0"),
    "tail_slots": _case("--hicache-swa-offload-tail-slots", "-1"),
    "reuse_points": _case("--hicache-swa-offload-reuse-points", "grid,maybe"),
    "row_limit": _case(env={"SGLANG_SWA_HICACHE_STATE_STAGING_PAGES": "1"}),
    "aligned_chunk": _case(ALIGNED, "--chunked-prefill-size", "1000"),
    "aligned_mixed_chunk": _case(ALIGNED, *CHUNK, "--enable-mixed-chunk"),
    "aligned_dynamic_chunking": _case(ALIGNED, *CHUNK, "--enable-dynamic-chunking"),
    "aligned_encoder_replay": _case(
        *(ALIGNED, *CHUNK), declared={"enable_encoder_swa_bounded_replay": True}
    ),
    "aligned_schedule_policy": _case(
        *(ALIGNED, *CHUNK, "--schedule-policy", "shortest-prefill-first")
    ),
    "write_policy": _case("--hicache-write-policy", "write_back"),
    "hicache_size": _case("--hicache-size", "10"),
    "host_memory_mode": _case(declared={"hicache_host_memory_mode": "buffer_only"}),
    "page_size": _case("--page-size", "128"),
    "window": _case(config={"sliding_window": 64}),
    "ratios": _case(config={"compress_ratios": [0, 128, 128, 0]}),
    "hybrid_swa": _case("--disable-hybrid-swa-memory"),
    "radix_cache": _case("--disable-radix-cache"),
    "radix_cache_backend": _case("--radix-cache-backend", "mine"),
    "session_radix_cache": _case("--enable-session-radix-cache"),
    "streaming_session": _case("--enable-streaming-session"),
    "lmcache": _case("--enable-lmcache"),
    "flexkv": _case("--enable-flexkv"),
    "external_linker": _case(declared={"enable_unified_cache_external_linker": True}),
    "hisparse": _case("--enable-hisparse"),
    "unified_memory": _case("--enable-unified-memory"),
    "page_major": _case("--enable-page-major-kv-layout"),
    "kv_sharding": _case("--enable-kv-cache-sharding"),
    "prefill_only": _case(declared={"prefill_only_disable_kv_cache": True}),
    "embedding": _case(declared={"is_embedding": True}),
    "prefill_graph": _case("--cuda-graph-backend-prefill", "breakable"),
    "prefill_cp": _case(declared={"enable_prefill_cp": True}),
    "attn_cp": _case("--attn-cp-size", "2"),
    "dcp": _case(declared={"dcp_size": 2}),
    "two_batch_overlap": _case("--enable-two-batch-overlap"),
    "pdmux": _case("--enable-pdmux"),
    "disaggregation": _case("--disaggregation-mode", "prefill"),
    "decoupled_spec": _case("--decoupled-spec-role", "verifier"),
    "adaptive_speculation": _case("--speculative-adaptive"),
    "dllm": _case("--dllm-algorithm", "LowConfidence"),
    "online_compress": _case(env={"SGLANG_OPT_USE_ONLINE_COMPRESS": "1"}),
    "narrow_states": _case(env={"SGLANG_DSV4_COMPRESS_STATE_DTYPE": "bf16"}),
    "speculation": _case("--speculative-algorithm", "DSPARK"),
    "speculation_topk": _case(*EAGLE, declared={"speculative_eagle_topk": 2}),
    "speculation_layers": _case(*EAGLE, declared={"enable_multi_layer_eagle": True}),
    "speculation_tokens": _case(
        *EAGLE, "--speculative-num-steps", "13", "--speculative-num-draft-tokens", "14"
    ),
    "speculation_store": _case(*EAGLE, env={"SGLANG_OPT_FUSED_QK_NORM_ROPE_VERIFY": "0"}),
    "speculation_groups": _case(
        *EAGLE, "--tp-size", "4", "--dp-size", "2", "--enable-dp-attention"
    ),
    "speculation_prefill_coordination": _case(
        *EAGLE, env={"SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION": "1"}
    ),
    "speculation_mixed_chunk": _case(*EAGLE, declared={"enable_mixed_chunk": True}),
    "speculation_aligned": _case(*EAGLE, ALIGNED, *CHUNK),
    "pp": _case("--pp-size", "2"),
    "storage_backend": _case("--hicache-storage-backend", "mooncake"),
    "served_model_name": _case(
        "--served-model-name", "m" * 130, "--hicache-storage-backend", "file"
    ),
}


def test_every_rule_has_a_case():
    assert [rule.name for rule in refusals.RULES] == list(CASES)


def test_the_most_tokens_of_a_round_are_those_that_the_rings_hold():
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import get_compress_state_ring_size

    most = refusals.MOST_ROUND_TOKENS
    assert get_compress_state_ring_size(4, most) == refusals.SPECULATIVE_STATE_RING
    states = SimpleNamespace(ring_size=128 + most, state_ring_size=refusals.SPECULATIVE_STATE_RING)
    check_rings(states, most)
    with pytest.raises(ValueError, match="--speculative-num-draft-tokens"):
        check_rings(states, most + 1)


def test_every_message_starts_with_the_flag_to_change():
    for rule in refusals.RULES:
        assert rule.message().startswith(f"{rule.flag}: ")
        assert rule.flag.startswith(("--", "SGLANG_"))


@pytest.mark.parametrize("name", CASES)
def test_refused_in_the_launcher(name, model, tmp_path):
    from sglang.srt.arg_groups.overrides import declare_resolution

    args, env, declared, config = CASES[name]
    rule = next(rule for rule in refusals.RULES if rule.name == name)
    path = write_model(tmp_path / "model", **config) if config else model
    with (
        environment(**env),
        mock.patch.object(factory, "carry_available_dram") as reached_the_end,
        pytest.raises(ValueError) as error,
    ):
        server_args = resolve(path, args)
        if declared:
            reached_the_end.reset_mock()
            declare_resolution(server_args, "test", **declared)
            refusals.check(refusals.Startup.of_record(server_args))
    assert not reached_the_end.called
    lines = str(error.value).splitlines()[1:]
    (line,) = (line for line in lines if line.startswith(f"  {rule.message()}"))
    if rule.got is not None:
        assert line.endswith(f", got {args[-1]!r}"), "what was typed is repeated"
    assert len(lines) == 1, error.value


def test_all_that_is_wrong_is_said_at_once(model):
    with pytest.raises(ValueError) as error:
        resolve(model, (*CASES["stride"][0], *CASES["write_policy"][0], *CASES["pp"][0]))
    text = str(error.value)
    for flag in ("--hicache-swa-offload-page-stride", "--hicache-write-policy", "--pp-size"):
        assert f"\n  {flag}: " in text
    assert "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE" in text


@pytest.mark.parametrize(
    "args",
    [
        ("--hicache-io-backend", "kernel", "--hicache-mem-layout", "layer_first"),
        ("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
        ("--enable-mixed-chunk",),
        ("--chunked-prefill-size", "512"),
        ("--disable-overlap-schedule",),
        ("--hicache-swa-offload-page-stride", "16"),
        ("--tp-size", "2"),
        ("--dp-size", "2"),
        ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        ("--tp-size", "4", "--attn-dp-size", "2"),
        ("--tp-size", "2", "--hicache-storage-backend", "file"),
        EAGLE,
        (*EAGLE, "--hicache-storage-backend", "file"),
        (*EAGLE, "--tp-size", "2"),
        (*EAGLE, "--dp-size", "2"),
        (*EAGLE, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        (*EAGLE, "--tp-size", "2", "--attn-dp-size", "2"),
    ],
)
def test_what_is_free_to_choose_is_not_refused(args, model):
    assert engagement.settle(resolve(model, args))


def test_fp8_rows_with_a_draft_are_not_refused(model):
    with environment(SGLANG_DSV4_UNIFIED_KV_FP8="1"):
        assert engagement.settle(resolve(model, EAGLE))


def test_beam_search_is_answered_by_sglang_itself(model):
    # It is asked for per request, so no startup rule can see it; this is what is relied upon.
    from sglang.srt.beam_search.coordinator import BeamCoordinator
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    publish(resolve(model))
    coordinator = BeamCoordinator(
        model_config=None,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        dllm_enabled=False,
        max_req_len=1024,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        tree_cache=None,
        future_map=None,
    )
    req = Req("r", "", [1, 2, 3], SamplingParams(beam_width=2))
    assert coordinator.validate_and_init(req, None) == (
        "Beam search currently requires --page-size 1."
    )


# ---- refusals and sizing in a scheduler, before anything is pinned


@pytest.fixture
def _cpu():
    from bitexact_fixtures import cpu_hicache

    with cpu_hicache():
        yield


def _refused_in_scheduler(server_args: Any, **context: Any) -> str:
    """The error that building the cache ends with; fails if SGLang got as far as building it."""
    from sglang.srt.mem_cache import memory_pool_host, registry
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    publish(server_args)
    ctx = build_context(server_args, **context)
    with (
        mock.patch.object(memory_pool_host.LogicalHostPool, "__init__") as host_pool,
        mock.patch.object(UnifiedRadixCache, "__init__") as cache,
        pytest.raises(ValueError) as error,
    ):
        registry.create_tree_cache(ctx)
    assert not host_pool.called
    assert not cache.called
    return str(error.value)


@pytest.mark.usefixtures("_cpu")
def test_too_little_host_memory_is_refused_before_anything_is_pinned(model):
    # 8 device pages at ratio 2, 4 rows: 16 slots on the grid, which is all of it, and 8 off it.
    with mock.patch.object(factory, "free_host_memory", return_value=100_000):
        server_args = resolve(model)
    text = _refused_in_scheduler(server_args)
    assert "--hicache-swa-offload-page-stride" in text
    assert "16 slots on the grid (stride 1) and 8 off it" in text
    assert "0.9 of 0.00 GB free" in text


@pytest.mark.usefixtures("_cpu")
def test_a_value_that_changed_after_the_launcher_looked_is_refused(model):
    from sglang.srt.arg_groups.overrides import declare_resolution

    server_args = resolve(model)
    declare_resolution(server_args, "a later step", hicache_write_policy="write_back")
    assert "--hicache-write-policy" in _refused_in_scheduler(server_args)


@pytest.mark.usefixtures("_cpu")
def test_the_pools_that_were_built_are_judged_too(model):
    from bitexact_fixtures import make_kv_pool

    server_args = resolve(model)
    publish(server_args)
    pool = make_kv_pool(pages=8, rows=4, layers=(0, 128))
    assert "compress_ratios" in _refused_in_scheduler(server_args, pool=pool)


@pytest.mark.usefixtures("_cpu")
def test_another_plugins_cache_class_is_refused(model):
    from sglang.srt.mem_cache import registry
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    server_args = resolve(model)
    publish(server_args)
    with pytest.raises(ValueError, match="cache class"):
        registry.create_unified_radix_cache(
            build_context(server_args), cache_class=UnifiedRadixCache
        )


@pytest.mark.usefixtures("_cpu")
def test_engaged_builds_our_cache_with_the_byte_side(model):
    from sglang.srt.mem_cache import registry

    server_args = resolve(model, ("--hicache-swa-offload-page-stride", "2"))
    publish(server_args)
    with environment(SGLANG_SWA_DBG_CHECKSUM="1"), our_log() as messages:
        cache = registry.create_tree_cache(build_context(server_args))
        options_seen = factory.plan_pools(build_context(server_args))
    from sglang_bitexact_hicache.runtime import TruthRuntime
    from sglang_bitexact_hicache.tree import BxCache

    assert type(cache) is BxCache
    assert isinstance(cache.truth_runtime, TruthRuntime)
    assert not cache.tree_core.has_swa_host_pool
    assert (options_seen.stride, options_seen.checksum) == (2, True)
    assert (options_seen.sizing.grid_slots, options_seen.sizing.tail_slots) == (8, 9)
    # 1.5 times the pool is less than the 33 of a context of 16,384 tokens.
    assert options_seen.sizing.row_limit == 25
    (message,) = messages
    assert message.startswith("INFO bit-exact HiCache: 17 windows of ")
    assert "a request holds at most 25" in message
    staging = cache.truth_runtime.staging_bytes
    assert staging > 0
    assert f"device staging {staging / 1e9:.3f} GB a rank; on this host 1 rank(s)" in message
    assert message.endswith("checks on")
    assert cache.store.capacity == 17
    seam_checks.require_live(*(when for when in When if when is not When.SPECULATING))
    with pytest.raises(ValueError, match="_resolve_spec_v2_tokens"):
        seam_checks.require_live(When.SPECULATING)


@pytest.mark.usefixtures("_cpu")
@pytest.mark.parametrize(("stride", "spacing"), [("1", 2), ("2", 2), ("3", 6)])
def test_aligned_prefill_sizes_the_grid_for_what_it_can_reuse(model, stride, spacing):
    server_args = resolve(model, (ALIGNED, *CHUNK, "--hicache-swa-offload-page-stride", stride))
    publish(server_args)
    options_seen = factory.plan_pools(build_context(server_args))
    assert options_seen.stride == spacing
    assert options_seen.sizing.grid_slots == -(-16 // spacing)
    assert factory.aligned_rules(server_args, options_seen).chunk == 512
    assert factory.aligned_rules(server_args, Options()) is None


# ---- sizing


def test_default_size():
    planned = sizing.size(
        full_host_pages=1001, stride=10, request_rows=64, slot_bytes=1000, context_length=32_768
    )
    assert planned.grid_slots == 101
    assert planned.tail_slots == 2 * 64 + 900 // 6
    assert planned.nbytes == (101 + 278) * 1000
    assert planned.row_limit == 14


@given(
    pages=st.integers(0, 10**7),
    stride=st.integers(1, 10**4),
    rows=st.integers(0, 4096),
    slot=st.integers(256, 10**8),
    tail=st.none() | st.integers(0, 10**6),
)
def test_the_grid_always_has_a_slot_for_each_of_its_pages(pages, stride, rows, slot, tail):
    planned = sizing.size(
        full_host_pages=pages,
        stride=stride,
        request_rows=rows,
        slot_bytes=slot,
        context_length=4096,
        tail_slots=tail,
    )
    grid = sum(1 for _ in range(stride, pages + 1, stride)) if pages < 10**5 else pages // stride
    assert grid <= planned.grid_slots <= grid + 1
    off_grid = pages - planned.grid_slots
    assert planned.tail_slots == (2 * rows + off_grid // 6 if tail is None else tail)
    assert planned.nbytes == planned.slots * slot


@given(
    slots=st.integers(1, 10**6),
    slot=st.integers(256, 10**8),
    dram=st.integers(0, 10**13),
    ranks=st.integers(1, 16),
)
def test_refused_exactly_above_the_share_of_a_rank(slots, slot, dram, ranks):
    planned = sizing.Sizing(slots, 0, slot, 2)

    def ask() -> None:
        sizing.check(planned, stride=1, available_dram=dram, ranks=ranks)

    if slots * slot * ranks * 10 > dram * 9:
        with pytest.raises(ValueError, match="--hicache-swa-offload-page-stride"):
            ask()
    else:
        ask()


def test_a_larger_stride_is_what_the_message_says_it_is():
    def nbytes(stride: int) -> int:
        return sizing.size(
            full_host_pages=5000,
            stride=stride,
            request_rows=8,
            slot_bytes=10**6,
            context_length=4096,
        ).nbytes

    sizes = [nbytes(stride) for stride in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_warns_with_the_numbers_above_16_gb():
    with our_log() as messages:
        sizing.check(sizing.Sizing(160, 0, 10**8, 2), stride=4, available_dram=10**12, ranks=1)
        assert messages == []
        sizing.check(sizing.Sizing(161, 0, 10**8, 2), stride=4, available_dram=10**12, ranks=1)
    (message,) = messages
    assert message.startswith("WARNING ")
    for number in ("161 slots", "stride 4", "100000000 bytes", "16.10 GB"):
        assert number in message


def test_a_host_of_2_tb_refuses_what_a_host_of_3_tb_warns_of():
    # Eight ranks with 32,768 host pages at stride 1, and the window of DeepSeek-V4-Pro: 299 GB each.
    planned = sizing.size(
        full_host_pages=32_768,
        stride=1,
        request_rows=128,
        slot_bytes=9_054_720,
        context_length=1_048_576,
        tail_slots=256,
    )
    assert round(planned.nbytes / 1e9) == 299
    with our_log() as messages:
        sizing.check(planned, stride=1, available_dram=3 * 10**12, ranks=8)
    (message,) = messages
    assert message.startswith("WARNING ")
    assert "299.02 GB of pinned host memory a rank" in message
    with our_log() as messages, pytest.raises(ValueError) as error:
        sizing.check(planned, stride=1, available_dram=2 * 10**12, ranks=8)
    assert messages == []
    text = str(error.value)
    assert "Raise --hicache-swa-offload-page-stride" in text
    assert "8 rank(s) on this host may take 225.00 GB each (0.9 of 2000.00 GB free)" in text
    assert "--max-total-tokens" not in text


@pytest.mark.parametrize(
    ("context", "stride", "slots", "limit"),
    [
        (16_384, 1, 10**6, 65),
        (16_385, 1, 10**6, 66),
        (16_384, 8, 10**6, 9),
        # What is above 200,000 tokens does not count.
        (200_000, 1, 10**6, 783),
        (1_048_576, 1, 10**6, 783),
        # No more than 1.5 times the pool, but always the newest two boundaries.
        (200_000, 1, 101, 151),
        (200_000, 1, 1, 2),
        (1, 10**4, 10**6, 2),
    ],
)
def test_the_most_slots_of_one_request(context, stride, slots, limit):
    assert sizing.row_limit(context, stride, slots) == limit
    # What the user asked for is taken as it is.
    assert sizing.row_limit(context, stride, slots, 64) == 64


@pytest.mark.usefixtures("_cpu")
def test_the_environment_sets_the_most_slots_of_one_request(model):
    server_args = resolve(model)
    publish(server_args)
    with environment(SGLANG_SWA_HICACHE_STATE_STAGING_PAGES="3"):
        assert factory.plan_pools(build_context(server_args)).sizing.row_limit == 3


def test_the_startup_line_has_the_sizes_of_a_rank_and_of_the_host():
    line = sizing.startup_line(
        sizing.Sizing(1000, 24, 10**7, 783),
        stride=2,
        ranks=8,
        staging_bytes=240_000_000,
        layout="abc",
        checked=False,
    )
    assert "\n" not in line
    for part in (
        "1024 windows of 10000000 bytes",
        "1000 on the grid of stride 2, 24 off it",
        "at most 783",
        "10.240 GB a rank",
        "device staging 0.240 GB a rank",
        "8 rank(s), 81.920 GB of host memory and 1.920 GB of device staging",
        "layout abc, checks off",
    ):
        assert part in line


def test_ranks_share_the_memory_of_a_host():
    planned = sizing.Sizing(10, 0, 10**9, 2)
    sizing.check(planned, stride=1, available_dram=24 * 10**9, ranks=2)
    with pytest.raises(ValueError, match=r"3 rank\(s\)"):
        sizing.check(planned, stride=1, available_dram=24 * 10**9, ranks=3)


def test_pools_without_a_slot_are_refused():
    with pytest.raises(ValueError, match="--hicache-ratio"):
        sizing.check(sizing.Sizing(0, 0, 1, 2), stride=1, available_dram=10**9, ranks=1)


# ---- the whole server: one clear error, exit status not 0


def _start(*args: str) -> subprocess.CompletedProcess[str]:
    launch = pytest.importorskip("dsv4_reference_platform.launch")
    return subprocess.run(
        launch.server_argv(launch.free_port(), args),
        env=launch.server_env({**ENGAGING_ENV, "PYTHONWARNINGS": "ignore"}),
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_server_with_bad_input_ends_in_the_launcher():
    done = _start("--hicache-swa-offload-page-stride", "0")
    assert done.returncode not in (0, None)
    assert "ValueError: SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE=1 cannot run" in done.stderr
    assert "--hicache-swa-offload-page-stride: must be at least 1 page" in done.stderr
    # No scheduler was started, so nothing was pinned.
    assert "Load weight begin" not in done.stdout + done.stderr


def test_a_server_whose_pools_do_not_fit_ends_too():
    done = _start("--hicache-swa-offload-tail-slots", "100000000")
    assert done.returncode not in (0, None)
    output = done.stdout + done.stderr
    assert "ValueError: the bit-exact SWA pools do not fit in host memory" in output
    assert "--hicache-swa-offload-page-stride" in output
    # SGLang's host pools come after the check.
    assert "Attached hybrid pool stack" not in output
