"""Every place where this package meets SGLang, in one table, and the checks over it.

SGLang's hook registry logs a hook that it cannot apply and goes on. Here a missing hook would mean
wrong answers, so each seam is declared once, below, and compared with SGLang twice:

* against the installed SOURCE (`source_problems`): does the target exist, with the parameters that
  our handler relies on? Reads files and imports nothing of SGLang, so that the launcher can do it
  before anything else happens.
* against what is LIVE in this process (`live_problems`), after `install`.

A problem found in a server is a ValueError that names the seam and the SGLang version.

A seam's handler is imported when the seam is installed, so this module stays light.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SGLANG_VERSION = "0.5.23"
"""The SGLang release that the table was checked against, and the only one that is accepted."""

_PACKAGE = "sglang_bitexact_hicache"


class Kind(enum.Enum):
    """How a seam is attached."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    RESOLUTION = "resolution"
    """A wrapper around a step of argument resolution (`register_resolution_hook`)."""
    SUBCLASS = "subclass"
    """A method of a stock class that a class of ours overrides; nothing is patched."""
    CALL = "call"
    """A function that we call although SGLang does not offer it as an interface."""


class When(enum.Enum):
    """From when on a seam is in place."""

    ALWAYS = "always"
    """In every process that loads plugins, flag on or off: argument handling only."""
    FLAG = "flag on"
    """In every process that loads plugins with the flag on."""
    ENGAGED = "engaged"
    """In a scheduler, once `engaged()` holds."""
    SPECULATING = "with EAGLE"
    """In such a scheduler, where it has a draft."""


HOOKS = (Kind.BEFORE, Kind.AFTER, Kind.AROUND)
"""The kinds that SGLang's HookRegistry applies."""


@dataclass(frozen=True)
class Seam:
    """One row of the table.

    Attributes:
        target: dotted name of the stock function or method, where stock defines it.
        kind: how the handler is attached to it.
        handler: "module:function" or "module:Class.method" in this package; for Kind.CALL the
            function that makes the call.
        why: what it is there for.
        parameters: the target's parameter names, all of them, in order.
        when: from when on it is in place.
        caller: who calls the target on HIP in stock SGLang 0.5.23.
    """

    target: str
    kind: Kind
    handler: str
    why: str
    parameters: tuple[str, ...]
    when: When
    caller: str

    @property
    def attribute(self) -> str:
        """The target's last name."""
        return self.target.rpartition(".")[2]

    def load(self) -> Callable[..., Any]:
        """The handler. Raises ImportError or AttributeError where it is missing."""
        module, _, name = self.handler.partition(":")
        return pkgutil.resolve_name(f"{_PACKAGE}.{module}:{name}")


_TREE = "sglang.srt.mem_cache.unified_cache.components"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"

SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_SERVER_ARGS}.add_cli_args",
        Kind.AFTER,
        "options:after_add_cli_args",
        "the feature's command-line arguments",
        ("parser",),
        When.ALWAYS,
        "server_args.py:680 prepare_server_args",
    ),
    Seam(
        f"{_SERVER_ARGS}.from_cli_args",
        Kind.AFTER,
        "options:after_from_cli_args",
        "their values, on the record that goes to every process",
        ("cls", "args"),
        When.ALWAYS,
        "server_args.py:710 prepare_server_args",
    ),
    Seam(
        "sglang.srt.arg_groups.hicache_hook.handle_hicache",
        Kind.RESOLUTION,
        "factory:resolve_hicache",
        "engagement, seams, refusals and free host memory, in the launcher",
        ("server_args",),
        When.FLAG,
        "arg_groups/pipeline.py:272 run_resolution_pipeline",
    ),
    Seam(
        "sglang.srt.mem_cache.registry.create_unified_radix_cache",
        Kind.AROUND,
        "factory:around_create_unified_radix_cache",
        "our cache class, the sizing guards before anything is pinned, the byte side after",
        ("ctx", "cache_class"),
        When.FLAG,
        "mem_cache/registry.py:146 default_radix_cache_factory",
    ),
    Seam(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler._deepseek_v4_num_host_pages",
        Kind.CALL,
        "factory:plan_pools",
        "pages of the host cache, as the stock strategy will compute them",
        ("params", "kvcache", "page_size", "swa_page_size"),
        When.ENGAGED,
        "mem_cache/hybrid_cache/hybrid_pool_assembler.py:1007 build_deepseek_v4_hicache_stack",
    ),
    Seam(
        "sglang.srt.mem_cache.host_memory.available_host_memory_bytes",
        Kind.CALL,
        "factory:free_host_memory",
        "free host memory as SGLang's own pools see it (control groups counted)",
        ("allow_cgroup_fallback",),
        When.FLAG,
        "mem_cache/pool_host/base.py:105 host_memory_budget_bytes",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        Kind.AROUND,
        "scheduling:around_prepare_for_extend",
        "a request's row and final prefix are known: bind the hit, start its restore",
        ("self",),
        When.ENGAGED,
        "managers/scheduler.py:4357 _get_new_batch_prefill_raw",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission",
        Kind.AROUND,
        "chunking:around_select_prefill_admission",
        "a request's first chunk ends at its junction; who would compute the same one waits",
        (
            "self",
            "req",
            "total_tokens",
            "host_hit_length",
            "swa_host_hit_length",
            "truncation_align_size",
            "has_chunked_req",
        ),
        When.ENGAGED,
        "managers/schedule_policy.py:1432, 1560 add_one_req",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        Kind.AROUND,
        "chunking:around_add_chunked_req",
        "later chunks end at the junction as well",
        ("self", "req"),
        When.ENGAGED,
        "managers/scheduler.py:4184 _get_new_batch_prefill_raw",
    ),
    Seam(
        "sglang.srt.mem_cache.prefill_budget.SWAPrefillBudget.available_chunk_tokens",
        Kind.CALL,
        "chunking:_has_room",
        "with aligned prefill: whether the whole of a later chunk has room, before it is added",
        ("self", "chunk_limit"),
        When.ENGAGED,
        "managers/schedule_policy.py:1144 add_chunked_req",
    ),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        Kind.AROUND,
        "forward_hooks:around_forward_batch_generation",
        "the scope of one forward: restores before, the capture plan during, publication after",
        (
            "self",
            "batch",
            "forward_batch",
            "pp_proxy_tensors",
            "is_verify",
            "skip_attn_backend_init",
            "capture_hidden_mode",
            "return_kv_loc_plan",
        ),
        When.ENGAGED,
        "managers/scheduler.py:4704 (overlap), 4870 run_batch",
    ),
    Seam(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation",
        Kind.AROUND,
        "forward_hooks:around_forward_batch_generation",
        "the same scope over both models: what a round or a prefill leaves in the draft's ring too",
        ("self", "batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
        When.SPECULATING,
        "managers/scheduler.py:4704 (overlap), 4829 run_batch",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._resolve_spec_v2_tokens",
        Kind.AROUND,
        "forward_hooks:around_resolve_spec_tokens",
        "the host learns how many tokens a round accepted: publish the page that it completed",
        ("self", "result", "batch"),
        When.SPECULATING,
        "managers/scheduler_components/batch_result_processor.py:1123 _normalize_decode_outputs",
    ),
    Seam(
        "sglang.srt.layers.attention.deepseek_v4_backend_hip_radix.DeepseekV4HipRadixBackend"
        "._forward_unified_kv",
        Kind.BEFORE,
        "forward_hooks:before_forward_unified_kv",
        "the whole chunk's K is in hand and the ring is still the old one: gather the windows",
        (
            "self",
            "q",
            "kv",
            "layer",
            "forward_batch",
            "compress_ratio",
            "attn_sink",
            "core_attn_metadata",
            "save_kv_cache",
            "q_rope",
            "k_rope",
            "wo_a_quant_freqs",
        ),
        When.ENGAGED,
        "layers/attention/deepseek_v4_backend_hip_radix.py:3303 _forward_attention",
    ),
    Seam(
        "sglang.srt.layers.attention.dsv4.compressor_v2.CompressorBackendMixin"
        "._forward_compress_all_in_one",
        Kind.BEFORE,
        "forward_hooks:before_compress",
        "the compressor's whole-chunk input is in hand: gather the overlap state",
        (
            "self",
            "kv_score_buffer",
            "kv_score_input",
            "ape",
            "head_dim",
            "norm",
            "freqs_cis_cache",
            "kv_cache",
            "is_indexer",
            "rotate",
            "compress_ratio",
            "page_size",
            "out_loc",
            "use_fp4_indexer",
            "bf16_store",
            "kv_scale_cache",
            "rope_cache",
            "kv_layout",
            "fp8_2buff",
            "kv_cache_rope",
        ),
        When.ENGAGED,
        "layers/attention/dsv4/compressor_v2.py:229 forward_unified",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
        "._log_hicache_stats",
        Kind.AFTER,
        "exporter:after_log_hicache_stats",
        "SGLang reports its HiCache metrics: report ours, with the same labels",
        ("self",),
        When.ENGAGED,
        "managers/scheduler_components/metrics_reporter.py:896, 1142, 1531 (only with metrics)",
    ),
    Seam(
        f"{_TREE}.base.TreeComponent.prepare_for_caching_req",
        Kind.SUBCLASS,
        "components:BxFull.prepare_for_caching_req",
        "an insert begins: whose row it is",
        ("self", "req", "insert_params", "token_ids_len", "is_finished"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:1192 checkpoint_into_tree",
    ),
    Seam(
        f"{_TREE}.base.TreeComponent.cleanup_after_caching_req",
        Kind.SUBCLASS,
        "components:BxFull.cleanup_after_caching_req",
        "an insert is over: the row takes the tree's identities",
        ("self", "req", "is_finished", "insert_result", "insert_params"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:1322 checkpoint_into_tree",
    ),
    Seam(
        f"{_TREE}.base.TreeComponent.commit_insert_component_data",
        Kind.SUBCLASS,
        "components:BxFull.commit_insert_component_data",
        "a new leaf takes the inserting row's identities",
        ("self", "node", "is_new_leaf", "params", "result", "cache_actions"),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:1414 _insert_commit_step",
    ),
    Seam(
        f"{_TREE}.full.FullComponent.redistribute_on_node_split",
        Kind.SUBCLASS,
        "components:BxFull.redistribute_on_node_split",
        "a node is cut, and its identities with it",
        ("self", "new_parent", "child"),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:1501 _split_node",
    ),
    Seam(
        f"{_TREE}.full.FullComponent.commit_hicache_transfer",
        Kind.SUBCLASS,
        "components:BxFull.commit_hicache_transfer",
        "backup and load-back copy identity between host and device",
        (
            "self",
            "node",
            "phase",
            "transfers",
            "cache_actions",
            "insert_result",
            "pool_storage_result",
        ),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:2679 commit_backup, 2717 commit_load_back",
    ),
    Seam(
        f"{_TREE}.full.FullComponent.evict_component",
        Kind.SUBCLASS,
        "components:BxFull.evict_component",
        "rows are given up, and their identities with them",
        ("self", "node", "device_frees", "host_frees", "cache_actions", "target"),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:2234 _evict_component_and_detach_lru",
    ),
    Seam(
        f"{_TREE}.swa.SWAComponent.create_match_validator",
        Kind.SUBCLASS,
        "components:BxSWA.create_match_validator",
        "the gate, for the device-only and the host-aware walk",
        ("self", "match_device_only"),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:901 _create_match_validators",
    ),
    Seam(
        f"{_TREE}.swa.SWAComponent.finalize_match_result_in_tree_core",
        Kind.SUBCLASS,
        "components:BxSWA.finalize_match_result_in_tree_core",
        "no SWA host hit and no branching point: neither exists here",
        ("self", "result", "params", "value_chunks", "best_value_len"),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:1055 _match_post_processor",
    ),
    Seam(
        f"{_TREE}.swa.SWAComponent.recover_after_unevict",
        Kind.SUBCLASS,
        "components:BxSWA.recover_after_unevict",
        "a node whose device rows were gone gets the inserting row's, and its identities",
        (
            "self",
            "node",
            "prefix_len",
            "total_prefix_len",
            "params",
            "result",
            "cache_actions",
        ),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:1316 _insert_walk_step",
    ),
    Seam(
        f"{_TREE}.swa.SWAComponent.update_component_on_insert_overlap",
        Kind.SUBCLASS,
        "components:BxSWA.update_component_on_insert_overlap",
        "an insert overlaps a node: the tree keeps its rows",
        (
            "self",
            "node",
            "prefix_len",
            "total_prefix_len",
            "value_slice",
            "params",
            "result",
            "cache_actions",
        ),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:1340 _insert_overlap_step",
    ),
    Seam(
        f"{_TREE}.swa.SWAComponent.prepare_prefetch",
        Kind.SUBCLASS,
        "components:BxSWA.prepare_prefetch",
        "a prefetch brings one record",
        ("self", "node_id", "prefetch_tokens"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:2183 prefetch_from_storage",
    ),
    Seam(
        f"{_TREE}.swa.SWAComponent.alloc_prefetch_staging",
        Kind.SUBCLASS,
        "components:BxSWA.alloc_prefetch_staging",
        "the host slot for that record",
        ("self", "num_tokens"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:2935 _alloc_prefetch_aux_staging",
    ),
    Seam(
        f"{_TREE}.swa.SWAComponent.build_hicache_transfers",
        Kind.SUBCLASS,
        "components:BxSWA.build_hicache_transfers",
        "truth goes to storage with KV and comes from there with it; L2 moves none",
        (
            "self",
            "node",
            "phase",
            "mamba_pool_idx",
            "host_indices",
            "token_ids",
            "prefetch_tokens",
            "staging_tokens",
            "last_hash",
        ),
        When.ENGAGED,
        "mem_cache/unified_cache/unified_tree_core.py:2542 build_storage_backup_spec, 2568",
    ),
    Seam(
        f"{_TREE}.swa.SWAComponent.commit_hicache_transfer",
        Kind.SUBCLASS,
        "components:BxSWA.commit_hicache_transfer",
        "the record of a prefetch becomes truth, or its slot is given back",
        (
            "self",
            "node",
            "phase",
            "transfers",
            "cache_actions",
            "insert_result",
            "pool_storage_result",
        ),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:2494 _handle_prefetch_result",
    ),
    Seam(
        "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
        Kind.AROUND,
        "storage:around_create_backend",
        "SGLang's storage backend behind one that verifies what it gives",
        ("cls", "backend_name", "storage_config", "mem_pool_host", "kwargs"),
        When.ENGAGED,
        "managers/cache_controller.py:614 attach_storage_backend",
    ),
    Seam(
        "sglang.srt.managers.cache_controller.storage_model_name",
        Kind.AFTER,
        "storage:after_storage_model_name",
        "compressed KV of this identity has storage keys of its own",
        ("model_name", "host_pool"),
        When.ENGAGED,
        "managers/cache_controller.py:794 _generate_storage_config",
    ),
    Seam(
        "sglang.srt.managers.cache_controller.HiCacheController._generate_storage_config",
        Kind.AFTER,
        "storage:after_generate_storage_config",
        "ranks that hold the same KV write their own bytes, under keys of their own",
        ("self", "model_name", "storage_backend_extra_config"),
        When.ENGAGED,
        "managers/cache_controller.py:606 attach_storage_backend",
    ),
    Seam(
        f"{_WEIGHTS}.record_weight_version_after_update",
        Kind.AFTER,
        "storage:after_weights_changed",
        "storage is closed once the weights are not the ones that its names say",
        ("self", "weight_version"),
        When.ENGAGED,
        "managers/scheduler_components/weight_updater.py:153, 224, 256, 278 update_weights_from_*",
    ),
    Seam(
        f"{_WEIGHTS}.begin_weight_update",
        Kind.AFTER,
        "storage:after_begin_weight_update",
        "the same, where weights are written from outside",
        ("self", "recv_req"),
        When.ENGAGED,
        "managers/scheduler.py:1863 init_request_dispatcher",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
        Kind.BEFORE,
        "storage:before_weight_version_change",
        "the same, where an operator says so",
        ("self", "new_version"),
        When.ENGAGED,
        "managers/scheduler.py:5633 handle_update_weight_version",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache",
        Kind.AROUND,
        "storage:around_flush_cache",
        "no flush while a call of the storage backend hangs: SGLang would end the scheduler",
        ("self", "empty_cache"),
        When.ENGAGED,
        "managers/scheduler.py:1341 flush_wrapper, 2394 weight_updater",
    ),
    Seam(
        f"{_CONTROLLER}._page_transfer_sidecar",
        Kind.BEFORE,
        "storage_guard:before_page_transfer_sidecar",
        "the KV of a prefetch was read: its record is verified with it",
        ("self", "operation", "kv_completed_pages"),
        When.ENGAGED,
        "mem_cache/hybrid_cache/hybrid_cache_controller.py:1611 _page_transfer_with_stable_layout",
    ),
    Seam(
        f"{_CONTROLLER}._page_backup",
        Kind.AROUND,
        "storage_writer:around_page_backup",
        "records are written after the KV that they belong to, and only over their own",
        ("self", "operation"),
        When.ENGAGED,
        "managers/cache_controller.py:1440 _page_backup_or_log",
    ),
    Seam(
        f"{_CONTROLLER}.allocate_storage_hit",
        Kind.AROUND,
        "storage_guard:around_allocate_storage_hit",
        "all of a storage hit or nothing: a shorter one ends where no record is",
        ("self", "operation", "hit_tokens", "allow_partial", "min_tokens", "evict_host"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:3107 _try_alloc_storage_hit",
    ),
    Seam(
        f"{_CONTROLLER}.write_storage",
        Kind.CALL,
        "storage:TruthStorage._submit_alone",
        "a truth that came after its page's KV went to storage",
        ("self", "host_indices", "token_ids", "hash_value", "prefix_keys", "extra_pools"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:2010 write_backup_storage",
    ),
    Seam(
        f"{_CONTROLLER}.register_host_pool_entry",
        Kind.CALL,
        "storage:TruthStorage._register",
        "the truth pools join the host pools, and the storage backend",
        ("self", "entry"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:599 register_sidecar_pool",
    ),
    Seam(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore.insert_host",
        Kind.SUBCLASS,
        "components:BxTreeCore.insert_host",
        "pages from storage have no identity",
        ("self", "node_id", "key", "host_value", "hash_value"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:2473 _handle_prefetch_result",
    ),
    Seam(
        f"{_CACHE}.swa_reprefill_tail_tokens",
        Kind.SUBCLASS,
        "tree:BxCache.swa_reprefill_tail_tokens",
        "nothing is computed again: the window is restored",
        ("self", "req"),
        When.ENGAGED,
        "mem_cache/common.py:201 _req_radix_key",
    ),
    Seam(
        f"{_CACHE}.checkpoint_into_tree",
        Kind.SUBCLASS,
        "tree:BxCache.checkpoint_into_tree",
        "a checkpoint on the way to a junction joins what the path has in host memory",
        ("self", "req", "up_to", "kwargs"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:1162 checkpoint",
    ),
    Seam(
        f"{_CACHE}.load_back",
        Kind.CALL,
        "tree:BxCache._load_path_back",
        "the same copies as a hit's load-back, started with the request's next batch",
        ("self", "node_id", "mem_quota", "req"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:3607 init_load_back",
    ),
    Seam(
        f"{_CACHE}._all_reduce_attn_groups",
        Kind.CALL,
        "ranks:Ranks.of",
        "what one rank only can know is agreed with the others, as SGLang agrees its own counts",
        ("self", "tensor", "op"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:386 _all_reduce",
    ),
    Seam(
        "sglang.srt.utils.rank_consensus_checker.assert_same",
        Kind.CALL,
        "ranks:Ranks.of",
        "where SGLang's checker is on, it compares our decisions too",
        ("msg_fmt", "args"),
        When.ENGAGED,
        "utils/rank_consensus_checker.py:119 rank_consensus (a decorator of UnifiedRadixCache's methods)",
    ),
    Seam(
        f"{_CACHE}.init_load_back",
        Kind.SUBCLASS,
        "tree:BxCache.init_load_back",
        "declines where the path is no longer what was matched",
        ("self", "params"),
        When.ENGAGED,
        "managers/schedule_policy.py:1517 add_one_req",
    ),
    Seam(
        f"{_CACHE}.on_release",
        Kind.SUBCLASS,
        "tree:BxCache.on_release",
        "a request gives its row back",
        ("self", "req", "checkpointed"),
        When.ENGAGED,
        "mem_cache/common.py:439 release_kv_cache",
    ),
    Seam(
        f"{_CACHE}.write_backup_storage",
        Kind.SUBCLASS,
        "tree:BxCache.write_backup_storage",
        "the truths of a node go to storage with its KV",
        ("self", "node_id"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:1818 _finish_write_through_ack",
    ),
    Seam(
        f"{_CACHE}.prefetch_from_storage",
        Kind.SUBCLASS,
        "tree:BxCache.prefetch_from_storage",
        "nothing is prefetched that could not be proved to follow the prefix in host memory",
        (
            "self",
            "request",
            "last_host_node_id",
            "new_input_tokens",
            "last_hash",
            "prefix_keys",
            "matched_prefix_tokens",
            "extra_key",
            "cache_salt",
            "storage_hit_end",
        ),
        When.ENGAGED,
        "managers/scheduler.py:3380 _prefetch_kvcache",
    ),
    Seam(
        f"{_CACHE}._prefetch_deadline_expired",
        Kind.SUBCLASS,
        "tree:BxCache._prefetch_deadline_expired",
        "a record that hangs does not hold its request longer than KV that hangs",
        ("self", "operation"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:2307 _can_terminate_prefetch",
    ),
    Seam(
        f"{_CACHE}._drain_storage_control_queues_impl",
        Kind.SUBCLASS,
        "tree:BxCache._drain_storage_control_queues_impl",
        "slots of storage writes are unlocked when SGLang takes their acknowledgements",
        (
            "self",
            "n_storage_hit",
            "n_ack_prefetch",
            "n_backup",
            "n_release",
            "extra_release_counts",
            "log_metrics",
        ),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:3321 drain_storage_control_queues, check_hicache_events",
    ),
    Seam(
        f"{_CACHE}.detach_storage_backend",
        Kind.SUBCLASS,
        "tree:BxCache.detach_storage_backend",
        "what was known of the backend's bytes is forgotten",
        ("self",),
        When.ENGAGED,
        "managers/scheduler.py:5498 detach_hicache_storage_wrapped",
    ),
    Seam(
        f"{_CACHE}.attach_storage_backend",
        Kind.SUBCLASS,
        "tree:BxCache.attach_storage_backend",
        "what startup refuses is refused at run time too",
        (
            "self",
            "storage_backend",
            "storage_backend_extra_config_json",
            "served_model_name",
            "hicache_storage_prefetch_policy",
            "hicache_write_policy",
        ),
        When.ENGAGED,
        "managers/scheduler.py:5440 attach_hicache_storage_wrapped",
    ),
    Seam(
        f"{_CACHE}.release_host_resources",
        Kind.SUBCLASS,
        "tree:BxCache.release_host_resources",
        "graceful shutdown: end the copy threads, let the truth pools go",
        ("self",),
        When.ENGAGED,
        "managers/scheduler.py:1967 release_host_resources",
    ),
    Seam(
        f"{_CACHE}._match_tree",
        Kind.SUBCLASS,
        "tree:BxCache._match_tree",
        "the match ends at the deepest page that the gate accepts",
        ("self", "params"),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:617 match_prefix",
    ),
    Seam(
        f"{_CACHE}._reset_full",
        Kind.SUBCLASS,
        "tree:BxCache._reset_full",
        "a flush forgets identities, rows and truths too",
        ("self",),
        When.ENGAGED,
        "mem_cache/unified_radix_cache.py:419 reset",
    ),
)


def sglang_version() -> str:
    """The installed SGLang's version, without a local suffix ("0.5.23+rocm" is "0.5.23").

    Raises:
        ValueError: SGLang is not installed.
    """
    try:
        return importlib.metadata.version("sglang").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("SGLang is not installed") from None


def version_problem() -> str | None:
    """What is wrong with the installed SGLang's version, or None."""
    found = sglang_version()
    if found == SGLANG_VERSION:
        return None
    return f"SGLang {SGLANG_VERSION} is needed, {found} is installed"


# ---- against the installed source


def source_problem(seam: Seam) -> str | None:
    """How SGLang's source differs from what the seam expects, or None. Imports nothing of it."""
    function = _find_function(seam.target)
    if function is None:
        return "missing: SGLang has no such function"
    args = function.args
    found = tuple(
        arg.arg
        for arg in (
            *args.posonlyargs,
            *args.args,
            *filter(None, (args.vararg,)),
            *args.kwonlyargs,
            *filter(None, (args.kwarg,)),
        )
    )
    if found != seam.parameters:
        return f"signature: ({', '.join(found)}) and not ({', '.join(seam.parameters)})"
    return None


def _find_function(target: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    parts = target.split(".")
    spec = importlib.util.find_spec(parts[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    for i, part in enumerate(parts[1:], start=2):
        source = folder / f"{part}.py"
        if source.is_file():
            return _find_in(_parse(source), parts[i:])
        folder = folder / part
    return None


@lru_cache(maxsize=32)
def _parse(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def _find_in(scope: ast.AST, names: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    if not names:
        return None
    for node in ast.iter_child_nodes(scope):
        if getattr(node, "name", None) != names[0]:
            continue
        if len(names) == 1 and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return node
        if isinstance(node, ast.ClassDef):
            return _find_in(node, names[1:])
    return None


# ---- in this process


def register(*when: When) -> None:
    """Registers the hooks of these phases, for `HookRegistry.apply_hooks` to apply. Idempotent.

    While SGLang loads plugins it applies all of them at the end, so that ours must not be applied
    earlier: a plugin that hooks the same target after us would be ignored.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name="bitexact_hicache", dist_name="sglang-bitexact-hicache")
    for seam in SEAMS:
        if seam.when not in when:
            continue
        if seam.kind is Kind.RESOLUTION:
            from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

            if not _is_live(seam):
                register_resolution_hook(seam.attribute)(seam.load())
        elif seam.kind in HOOKS:
            handler, kind = seam.load(), HookType(seam.kind.value)
            if any(hook is handler for _, hook, _ in HookRegistry._hooks.get(seam.target, ())):
                continue
            HookRegistry.register(seam.target, handler, kind, source=source)
            if seam.target in HookRegistry._patched:
                # Another plugin was there first. The registry applies a target only once, and would
                # never look at our hook: wrap what is there now.
                HookRegistry._apply_target(seam.target, [(kind, handler, source)])


def install(*when: When) -> None:
    """Puts the seams of these phases in place in this process. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    register(*when)
    HookRegistry.apply_hooks()


def live_problem(seam: Seam) -> str | None:
    """Why the seam is not in place in this process, or None."""
    try:
        handler = seam.load()
    except (ImportError, AttributeError) as error:
        return f"no handler: {error}"
    if seam.kind is Kind.CALL:
        return None
    if seam.kind is Kind.SUBCLASS:
        return _override_problem(seam, handler)
    return None if _is_live(seam) else "not in place: SGLang did not apply the hook"


def _is_live(seam: Seam) -> bool:
    handler = seam.load()
    if seam.kind is Kind.RESOLUTION:
        from sglang.srt.arg_groups import resolution_hooks

        return handler in resolution_hooks._HOOKS.get(seam.attribute, ())
    try:
        function = pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError):
        return False
    return any(hook is handler for hook in wrapped_values(function))


def _override_problem(seam: Seam, handler: Callable[..., Any]) -> str | None:
    owner = importlib.import_module(f"{_PACKAGE}.{seam.handler.partition(':')[0]}")
    ours = getattr(owner, seam.handler.partition(":")[2].split(".")[0])
    try:
        stock = pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError):
        return "not in place: the stock method cannot be imported"
    overridden = [
        vars(base)[seam.attribute] for base in ours.__mro__ if seam.attribute in vars(base)
    ]
    if overridden[0] is not handler or stock not in overridden[1:]:
        return "not in place: our class does not override the stock method"
    return None


def wrapped_values(function: Any) -> Iterator[Any]:
    """Everything that the wrappers around a function close over, outermost first.

    Follows `__wrapped__`, which HookRegistry's wrappers carry, so a hook is found below another
    plugin's as well.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        for cell in getattr(function, "__closure__", None) or ():
            # A cell that is not filled yet raises.
            with contextlib.suppress(ValueError):
                yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)


# ---- the verdicts


def require_source(seams: Iterable[Seam] = SEAMS) -> None:
    """Refuses an SGLang that is not the one the table was written for.

    Raises:
        ValueError: the version is another one, or a seam's target is missing or has changed; one
            line for each.
    """
    version = version_problem()
    problems = [version] if version else []
    problems += _lines(seams, source_problem)
    _require(problems)


def require_live(*when: When, seams: Iterable[Seam] = SEAMS) -> None:
    """Refuses to go on where a seam of these phases is not in place in this process.

    Raises:
        ValueError: one line for each such seam.
    """
    _require(_lines((seam for seam in seams if seam.when in when), live_problem))


def _lines(seams: Iterable[Seam], problem_of: Callable[[Seam], str | None]) -> list[str]:
    return [
        f"{seam.target} ({seam.kind.value}): {problem}"
        for seam in seams
        if (problem := problem_of(seam)) is not None
    ]


def _require(problems: list[str]) -> None:
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ValueError(
            f"bit-exact HiCache does not fit this SGLang ({sglang_version()}); unset "
            f"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE to start without it:{lines}"
        )
