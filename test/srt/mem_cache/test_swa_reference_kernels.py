"""The reference platform's kernels, each against a formula written without them.

Three kinds of check:

* against the meaning: scalar loops or float64 numpy over the whole sequence, from the definition
  of the operation and from the stock CUDA / Triton source;
* against stock: kernels that exist as Triton run interpreted, in one child process (the switch
  must be set before triton is imported), and index and byte kernels must agree exactly;
* invariance: the same token gets the same bits whatever chunk or batch it is computed in. The
  exact comparisons come with a control: an input that matters is changed, and they must fail.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dsv4_reference_platform.kernels import (
    attention,
    compressor,
    elementwise,
    indexer,
    matmul,
    metadata,
    mhc,
    moe,
    norm_rope,
    speculative,
    transfer_kv,
)

torch.set_num_threads(1)

W, HEADS, DIM, TOPK, PAGE = 128, 8, 512, 512, 256
SCALE = DIM**-0.5


def rand(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def angle_table(rope_dim: int = 64, rows: int = 4096) -> torch.Tensor:
    angles = rand(rows, rope_dim // 2, seed=99).double() * 3
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


# -- the stock kernels, interpreted ------------------------------------------------------------


def stock_inputs() -> dict[str, dict]:
    """Inputs of every stock kernel that is run; one dictionary of keyword arguments per case."""
    generator = torch.Generator().manual_seed(1)

    def index(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    lengths = ints(170, 1, 3, 131)
    starts = ints(37, 0, 0, 130)
    counts = lengths - starts
    request = torch.repeat_interleave(torch.arange(4), counts)
    in_chunk = torch.cat([torch.arange(int(n)) for n in counts])
    positions = starts[request] + in_chunk
    tokens = len(positions)
    cases: dict[str, dict] = {}
    prefill = {
        "state_slot": ints(3, 1, 2, 0)[request],
        "positions": positions,
        "chunk_start": starts[request],
        "cu_q": (torch.cumsum(counts, 0) - counts)[request],
        "win": W,
        "swa_pages": 4 * 131,
    }
    for ratio, width in ((0, 0), (4, 128), (128, 64)):
        pages = torch.full((tokens, max(width, 1)), -1, dtype=torch.int32)
        for row in range(tokens):
            seen = (int(positions[row]) + 1) // ratio if ratio else 0
            pages[row, :seen] = index(4000, seen).int()
        for stride in (131,) if ratio else (128, 131):
            cases[f"build_prefill_indices/{ratio}/{stride}"] = {
                **prefill,
                "compress_ratio": ratio,
                "ring_stride": stride,
                "c128_page_indices": pages if ratio == 128 else None,
                "c4_sparse_page_indices": pages if ratio == 4 else None,
            }
    # As a round's draft extend is padded for the other ranks of data parallel attention.
    cases["build_prefill_indices/padded"] = {
        **cases["build_prefill_indices/0/131"],
        "positions": torch.cat([positions, torch.zeros(8, dtype=positions.dtype)]),
    }
    at = ints(0, 5, 126, 127, 128, 700)
    for stride in (128, 131):
        cases[f"build_decode_streams/{stride}"] = {
            "state_slot": ints(2, 0, 1, 5, 4, 3),
            "positions": at,
            "swa_len": (at + 1).clamp(max=W).int(),
            "hca_len": ((at + 1) // 128).int(),
            "csa_len": ((at + 1) // 4).clamp(max=TOPK).int(),
            "hca_page_indices": index(500, 6, 64).int(),
            "csa_width": TOPK,
            "win": W,
            "ring_stride": stride,
            "swa_pages": 6 * stride,
            "csa_page_indices": index(500, 6, TOPK).int(),
        }
    rows = rand(tokens, 64, seed=2).bfloat16()
    for name, final in (("tail", (lengths - 1)[request]), ("all", None)):
        cases[f"store_swa_into_unified/{name}"] = {
            "kv": rows[:3] if final is None else rows,
            "state_slot": prefill["state_slot"][:3] if final is None else prefill["state_slot"],
            "positions": positions[:3] if final is None else positions,
            "unified_kv": torch.zeros(4 * 131 + 9, 64, dtype=torch.bfloat16),
            "win": W,
            "ring_stride": 131,
            "final_pos": final,
        }
    cases["scatter_bf16_into_unified"] = {
        "kv": rows[:5].contiguous(),
        "loc": ints(7, -1, 3, 0, -1),
        "unified_kv": torch.zeros(9, 64, dtype=torch.bfloat16),
    }
    seq_lens = ints(1, 4, 127, 128, 129, 256, 1000).int()
    cases["init_compression_metadata"] = {
        "seq_lens": seq_lens,
        "positions": seq_lens - 1,
        "raw_out_loc": index(5000, 6),
        "page_table": index(50, 7, 4).int(),
        "page_size": PAGE,
    }
    cases["sparse_buffers"] = {
        "c4_topk_lengths_clamp1": ints(1, 1, 600, 512).int(),
        "c4_topk_lengths_raw": ints(0, 1, 600, 512).int(),
        "c1_topk_lengths_clamp1": None,
        "c2_topk_lengths_clamp1": None,
        "index_topk": TOPK,
        "page_index_align": 64,
    }
    cases["page_table_from_req_to_token"] = {
        "req_to_token": index(90000, 5, 2048).int(),
        "req_rows": ints(3, 3, 0),
        "max_seq_len": 1025,
        "page_size": PAGE,
    }
    cases["hash_topk"] = {
        "router_logits": rand(9, 8, seed=3, scale=4),
        "input_ids": index(30, 9),
        "tid2eid": index(8, 30, 2).int(),
        "num_fused_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
    }
    cases["hc_split_sinkhorn"] = {
        "mixes": rand(5, 1, 24, seed=4, scale=2),
        "hc_scale": rand(3, seed=5),
        "hc_base": rand(24, seed=6),
    }
    cases["mhc_combine"] = {
        "x_flat": rand(5, 4 * 96, seed=7),
        "pre": rand(5, 4, seed=8),
        "hc": 4,
        "out_dtype": torch.float32,
    }
    cases["fused_hc_head"] = {
        "x": rand(5, 4, 96, seed=9),
        "hc_fn": rand(4, 4 * 96, seed=10, scale=0.1),
        "hc_scale": rand(1, seed=11),
        "hc_base": rand(4, seed=12),
        "norm_eps": 1e-6,
        "hc_eps": 1e-6,
    }
    cases.update(speculative_inputs(index))
    table = angle_table()
    cases["fused_qk_norm_rope_swa_store"] = {
        "q": rand(5, 2 * DIM, seed=13),
        "kv": rand(5, DIM, seed=14),
        "q_norm_weight": None,
        "kv_norm_weight": 1 + rand(DIM, seed=15, scale=0.1),
        "q_rms_eps": 1e-6,
        "kv_rms_eps": 1e-6,
        "rope_head_dim": 64,
        "cos_cache": table.real[:, None, None].contiguous(),
        "sin_cache": table.imag[:, None, None].contiguous(),
        "positions": ints(0, 1, 77, 4095, 1000),
        "swa_cache": torch.zeros(11, DIM),
        "swa_loc": ints(4, 0, 10, 3, 7).int(),
        "dtype": torch.float32,
        "bf16_store": True,
        "swa_page_size": 1,
    }
    return cases


def speculative_inputs(index) -> dict[str, dict]:
    """Inputs of EAGLE's kernels: three requests, four tokens a round; ``index(high, *shape)`` draws."""
    rows, lengths, nodes = ints(2, 0, 3), ints(130, 1, 255), 4
    table = index(90000, 4, 300).int()
    slots = {"req_pool_indices": rows, "req_to_token": table}
    flat = 3 * nodes
    chain = {
        "retrieve_index": torch.arange(flat).view(3, nodes),
        "retrieve_next_token": ints(1, 2, 3, -1).repeat(3, 1),
        "retrieve_next_sibling": torch.full((3, nodes), -1),
    }
    # Node 0 has the children 2 and, beside it, 1; node 2 has the child 3.
    tree = {
        "retrieve_index": chain["retrieve_index"],
        "retrieve_next_token": ints(2, -1, 3, -1).repeat(3, 1),
        "retrieve_next_sibling": ints(-1, -1, 1, -1).repeat(3, 1),
    }
    results = {
        "predicts": torch.zeros(flat, dtype=torch.int32),
        "accept_index": torch.full((3, nodes), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(3, dtype=torch.int32),
    }
    target = torch.arange(10, 10 + flat).view(3, nodes)
    # Of the three chains the target agrees with all drafts, with one, with none but a later one.
    chains = torch.stack((ints(5, 10, 11, 12), ints(5, 14, 99, 16), ints(5, 99, 19, 20)))
    # Of the three trees, with the path 0 2 3, with the sibling 1, with nothing.
    trees = torch.stack((ints(5, 9, 10, 12), ints(5, 14, 9, 9), ints(5, 9, 9, 9)))
    cases = {
        "get_last_loc_triton": {
            "req_to_token": table,
            "req_pool_indices_tensor": rows,
            "prefix_lens_tensor": ints(130, 0, 256),
        },
        "assign_req_to_token_pool_func": {
            **slots,
            "start_offset": ints(130, 1, 255),
            "end_offset": ints(200, 1, 300),
            "out_cache_loc": index(90000, 70 + 45),
            "batch_size": 3,
        },
        "gather_spec_extras/hidden": {
            "indices": rows,
            "topk_p_buf": rand(4, 1, seed=20),
            "topk_index_buf": index(300, 4, 1),
            "output_tokens_buf": index(300, 4),
            "hidden_states_buf": rand(4, 1500, seed=21).bfloat16(),
        },
        "assign_draft_cache_locs_contiguous_func": {
            **slots,
            "seq_lens": lengths,
            "out_cache_loc": torch.zeros(flat, dtype=torch.int64),
            "topk": 1,
            "num_cols": nodes,
        },
        "assign_draft_cache_locs_contiguous_func/positions": {
            **slots,
            "seq_lens": lengths,
            "out_cache_loc": torch.zeros(flat, dtype=torch.int64),
            "topk": 1,
            "num_cols": nodes,
            "positions": torch.zeros(3, dtype=torch.int64),
        },
        "assign_extend_cache_locs": {
            **slots,
            "start_offset": lengths,
            "end_offset": lengths + ints(3, 5, 4),
            "batch_size": 3,
            "draft_token_num": nodes,
            "device": "cpu",
        },
        "fill_bonus_tokens_func": {
            "accept_tokens": index(300, 3, nodes).int(),
            "accept_lens": ints(1, 4, 2).int(),
            "bonus_tokens": torch.zeros(3, dtype=torch.int32),
            "accept_stride": nodes,
            "batch_size": 3,
        },
        "verify_tree_greedy_func/chain": {
            **results, **chain, "candidates": chains, "target_predict": target
        },
        "verify_tree_greedy_func/tree": {
            **results, **tree, "candidates": trees, "target_predict": target
        },
        "clear_unaccepted_c128_draft_states": {
            "state": rand(4 * 256, 2 * 300, seed=22),
            "req_pool_indices": rows,
            "seq_lens": lengths,
            "accept_lens": ints(1, 4, 3).int(),
            "ring_size": 256,
            "num_draft_tokens": nodes,
        },
        "expand_prefill_causally": {
            "req_pool_indices": rows,
            "seq_lens": lengths + nodes,
            "extend_seq_lens": ints(4, 2, 1),
            "extend_start_loc": None,
            "seq_lens_cpu": None,
            "extend_seq_lens_cpu": None,
            "num_tokens": 7,
            "padded_num_tokens": 9,
        },
    }  # fmt: skip
    for mode, size in ((0, int(lengths.sum()) * nodes + flat * nodes), (1, flat * nodes)):
        cases[f"build_tree_kernel_efficient_func/{mode}"] = {
            "parent_list": ints(-1, 0, 1).repeat(3, 1),
            "top_scores_index": ints(0, 1, 2).repeat(3, 1),
            "seq_lens": lengths,
            "tree_mask": torch.ones(size, dtype=torch.bool),
            "positions": torch.zeros(flat, dtype=torch.int64),
            "retrieve_index": torch.full((3, nodes), -1),
            "retrieve_next_token": torch.full((3, nodes), -1),
            "retrieve_next_sibling": torch.full((3, nodes), -1),
            "topk": 1,
            "spec_steps": nodes - 1,
            "num_verify_tokens": nodes,
            "tree_mask_mode": mode,
        }
    return cases


# Written in place, hence part of the result.
MUTATED = (
    "unified_kv",
    "kv",
    "swa_cache",
    "req_to_token",
    "out_cache_loc",
    "bonus_tokens",
    "predicts",
    "accept_index",
    "accept_token_num",
    "state",
    "tree_mask",
    "positions",
    "retrieve_index",
    "retrieve_next_token",
    "retrieve_next_sibling",
)


def run_case(name: str, kwargs: dict, functions: dict) -> dict:
    """Call one kernel on copies of its inputs; results and written inputs by name."""
    kwargs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    base = name.split("/")[0]
    tail = kwargs.pop("csa_page_indices", None)
    result = functions[base](**kwargs)
    if base == "build_decode_streams":
        functions["fill_compress_tail"](
            indices=result[4],
            indptr=result[5],
            prefix_len=kwargs["swa_len"],
            page_indices=tail,
            valid_len=kwargs["csa_len"],
            swa_pages=kwargs["swa_pages"],
        )
    if base in ("build_decode_streams", "build_prefill_indices"):
        # Stock allocates for the worst case: only the packed part is defined.
        result = [
            part[: int(indptr[-1])] if k % 2 == 0 else part
            for k, (part, indptr) in enumerate(
                zip(result, [r for r in result[1::2] for _ in range(2)], strict=True)
            )
        ]
    if isinstance(result, torch.Tensor):
        result = [result]
    if base == "expand_prefill_causally":
        result = [result.seq_lens_casual, result.req_pool_indices_repeated]
    if isinstance(result, (list, tuple)):
        result = {str(k): part for k, part in enumerate(result) if part is not None}
    return {**(result or {}), **{k: kwargs[k] for k in MUTATED if k in kwargs}}


def stock_extend_cache_locs(
    *, req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
):
    """The Triton kernel; its launcher refuses a CPU, or asks the platform."""
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs

    out = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    tensors = (req_pool_indices, req_to_token, start_offset, end_offset, out)
    assign_extend_cache_locs[(batch_size,)](*tensors, req_to_token.shape[1], 4)
    return out


def stock_build_tree(
    *, top_scores_index, seq_lens, spec_steps, num_verify_tokens, tree_mask_mode, **rest
):
    """The Triton form of the tree builder, which stock launches on an XPU."""
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(
        selected_index=top_scores_index,
        verified_seq_len=seq_lens,
        depth=spec_steps,
        draft_token_num=num_verify_tokens,
        tree_mask_mode=tree_mask_mode,
        **rest,
    )


def stock_verify_tree(**arguments):
    """The Triton form of the greedy verification, which stock launches on an XPU."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(**arguments)
    return [arguments[key] for key in ("predicts", "accept_index", "accept_token_num")]


def stock_expand(*, extend_start_loc, seq_lens_cpu, extend_seq_lens_cpu, **rest):
    """The Triton form, which takes no lengths on the host."""
    from sglang.kernels.ops.attention.dsv4 import attn_metadata_kernels

    return attn_metadata_kernels.expand_prefill_causally_triton(**rest)


def stock_functions() -> dict:
    """The stock kernels by name; needs TRITON_INTERPRET=1 in the environment."""
    from sglang.kernels.ops.attention import fused_qk_norm_rope_store
    from sglang.kernels.ops.attention.dsv4 import attn_glue_hip, metadata_kernel
    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import runtime
    from sglang.kernels.ops.kvcache import dsv4_c128_cleanup, dsv4_unified_kv_store
    from sglang.kernels.ops.layernorm import mhc as stock_mhc
    from sglang.kernels.ops.layernorm import mhc_head
    from sglang.kernels.ops.memory import common
    from sglang.kernels.ops.moe import triton_hash_topk
    from sglang.kernels.ops.speculative import cache_locs, eagle, gather_spec_extras
    from sglang.srt.mem_cache import allocation

    return {
        **{
            kernel.__name__: kernel
            for kernel in (
                common.get_last_loc_triton,
                allocation.assign_req_to_token_pool_func,
                gather_spec_extras.gather_spec_extras,
                cache_locs.assign_draft_cache_locs_contiguous_func,
                eagle.fill_bonus_tokens_func,
                dsv4_c128_cleanup.clear_unaccepted_c128_draft_states,
            )
        },
        "assign_extend_cache_locs": stock_extend_cache_locs,
        "build_tree_kernel_efficient_func": stock_build_tree,
        "verify_tree_greedy_func": stock_verify_tree,
        "expand_prefill_causally": stock_expand,
        "build_prefill_indices": runtime.build_prefill_indices,
        "build_decode_streams": runtime.build_decode_streams,
        "fill_compress_tail": runtime.fill_compress_tail,
        "store_swa_into_unified": dsv4_unified_kv_store.store_swa_into_unified,
        "scatter_bf16_into_unified": dsv4_unified_kv_store.scatter_bf16_into_unified,
        "init_compression_metadata": metadata_kernel.init_compression_metadata,
        "sparse_buffers": attn_glue_hip.sparse_buffers,
        "page_table_from_req_to_token": attn_glue_hip.page_table_from_req_to_token,
        "hash_topk": triton_hash_topk.hash_topk_triton,
        "hc_split_sinkhorn": stock_mhc._hc_split_sinkhorn_triton,
        "mhc_combine": stock_mhc.mhc_combine,
        "fused_hc_head": mhc_head.fused_hc_head,
        "fused_qk_norm_rope_swa_store": fused_qk_norm_rope_store.fused_qk_norm_rope_swa_store,
    }


def stock_attention(case: dict) -> torch.Tensor:
    """The stock prefill attention kernel in fp32 (its wrapper refuses CPU tensors; in bf16 the
    interpreter's dot product is wrong)."""
    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import paged_prefill

    q, pool, kv = case["q"], case["pool"], case["kv"]
    out = torch.empty_like(q)
    paged_prefill._sparse_attn_v4_paged_prefill_kernel[(q.shape[0], 1)](
        q,
        pool,
        case["prefix"],
        case["prefix_ptr"],
        kv,
        case["extend"],
        case["extend_ptr"],
        case["sink"],
        out,
        *q.stride(),
        *pool.stride(),
        *kv.stride(),
        *out.stride(),
        H=q.shape[1],
        D=DIM,
        softmax_scale=SCALE,
        BLOCK_H=16,
        BLOCK_D=DIM,
        BLOCK_K=16,
    )
    return out


def stock_main(source: str, target: str) -> None:
    """What the child process does: run every case on the stock kernels."""
    import conftest  # noqa: F401  (lets SGLang be imported beside a CPU torch)

    cases = torch.load(source, weights_only=False)
    functions = stock_functions()
    results = {name: run_case(name, kwargs, functions) for name, kwargs in cases["cases"].items()}
    results["attention"] = stock_attention(cases["attention"])
    torch.save(results, target)


def attention_case() -> dict:
    """A second chunk of a request with C4 rows, all fp32, as the stock kernel takes it."""
    sequence = Sequence(300, 4, dtype=torch.float32)
    sequence.prefill(200)
    positions = torch.arange(200, 212)
    prefix, prefix_ptr, extend, extend_ptr = sequence.prefill_lists(positions, 200)
    return {
        "q": sequence.q[200:212],
        "pool": sequence.pool,
        "kv": sequence.k[200:212],
        "prefix": prefix,
        "prefix_ptr": prefix_ptr,
        "extend": extend,
        "extend_ptr": extend_ptr,
        "sink": sequence.sink,
    }


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("stock")
    source, target = folder / "in.pt", folder / "out.pt"
    case = attention_case()
    # Copies, because stock needs no note on the order of the rows.
    plain = {name: tensor.clone() for name, tensor in case.items()}
    torch.save({"cases": stock_inputs(), "attention": plain}, source)
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, __file__, str(source), str(target)],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {**torch.load(target, weights_only=False), "attention_case": case}


# Same bytes: they move or count. The rest is arithmetic, fp32 on both sides.
ARITHMETIC = (
    "hash_topk",
    "hc_split_sinkhorn",
    "mhc_combine",
    "fused_hc_head",
    "fused_qk_norm_rope_swa_store",
)


@pytest.mark.parametrize("name", list(stock_inputs()))
def test_agrees_with_the_stock_triton_kernel(name, stock):
    ours_by_name = {
        f.__name__: f
        for module in (attention, metadata, moe, mhc, norm_rope, speculative)
        for f in vars(module).values()
        if callable(f)
    }
    ours = run_case(name, stock_inputs()[name], ours_by_name)
    theirs = stock[name]
    assert ours.keys() == theirs.keys() and ours
    for key, tensor in ours.items():
        assert tensor.shape == theirs[key].shape, key
        if name.split("/")[0] in ARITHMETIC:
            torch.testing.assert_close(tensor, theirs[key], rtol=2e-5, atol=2e-6, msg=key)
        else:
            assert tensor.dtype == theirs[key].dtype, key
            assert torch.equal(tensor, theirs[key]), key


def test_prefill_attention_agrees_with_the_stock_triton_kernel(stock):
    case = stock["attention_case"]
    ours = attention.sparse_attn_v4_paged_prefill(
        case["q"],
        case["pool"],
        case["prefix"],
        case["prefix_ptr"],
        case["kv"],
        case["extend"],
        case["extend_ptr"],
        case["sink"],
        SCALE,
    )
    torch.testing.assert_close(ours, stock["attention"], rtol=2e-5, atol=2e-6)


def test_greedy_verification_of_a_chain_takes_the_longest_agreeing_run():
    """And not one token that agrees behind one that does not."""
    candidates = torch.randint(0, 3, (50, 4), generator=torch.Generator().manual_seed(1))
    target = torch.randint(0, 3, (50, 4), generator=torch.Generator().manual_seed(2))
    case = {
        "predicts": torch.zeros(200, dtype=torch.int32),
        "accept_index": torch.full((50, 4), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(50, dtype=torch.int32),
        "candidates": candidates,
        "target_predict": target,
        "retrieve_index": torch.arange(200).view(50, 4),
        "retrieve_next_token": ints(1, 2, 3, -1).repeat(50, 1),
        "retrieve_next_sibling": torch.full((50, 4), -1),
    }
    predicts, index, accepted = speculative.verify_tree_greedy_func(**case)
    agrees = candidates[:, 1:] == target[:, :-1]
    runs = torch.cumprod(agrees.int(), 1).sum(1)
    assert torch.equal(accepted.long(), runs)
    assert set(runs.tolist()) == {0, 1, 2, 3}
    assert not torch.equal(agrees.sum(1), runs), "the inputs have agreement behind a disagreement"
    on_path = torch.arange(4) <= runs.unsqueeze(1)
    assert torch.equal(index.long(), torch.arange(200).view(50, 4).where(on_path, -1))
    assert torch.equal(predicts.view(50, 4).long(), target.where(on_path, 0))


def test_trees_of_more_than_one_candidate_are_refused():
    kwargs = dict(stock_inputs()["build_tree_kernel_efficient_func/1"], topk=2)
    with pytest.raises(NotImplementedError):
        speculative.build_tree_kernel_efficient_func(**kwargs)


# -- attention ---------------------------------------------------------------------------------


class Sequence:
    """One request: its K by position, its compressed rows by block number, and a pool that holds
    them where `slot` and a random page permutation put them. `blocks_of(p)` is what the indexer
    would select for the query at p."""

    def __init__(
        self,
        length: int,
        ratio: int,
        *,
        slot: int = 1,
        layout: int = 0,
        ring: int = W,
        content: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.ratio, self.slot, self.ring, self.content = ratio, slot, ring, content
        self.k = rand(length, DIM, seed=100 + content).to(dtype)
        self.q = rand(length, HEADS, DIM, seed=200 + content).to(dtype)
        self.blocks = rand(length // 4 + 1, DIM, seed=300 + content).to(dtype)
        self.sink = torch.linspace(-1, 1, HEADS)
        self.swa_pages = 4 * ring
        count = length // ratio if ratio else 0
        room = torch.Generator().manual_seed(layout)
        self.where = torch.randperm(3000, generator=room)[: count + 1]
        self.pool = torch.full((self.swa_pages + 3000, DIM), 7.0).to(dtype)
        self.pool[self.swa_pages + self.where[:count]] = self.blocks[:count]
        self.width = {0: 0, 4: TOPK, 128: 64}[ratio]

    def blocks_of(self, position: int) -> torch.Tensor:
        seen = (position + 1) // self.ratio if self.ratio else 0
        if seen <= self.width:
            return torch.arange(seen)
        taste = torch.rand(seen, generator=torch.Generator().manual_seed(position))
        return taste.topk(self.width).indices.sort().values

    def pages(self, positions: torch.Tensor) -> torch.Tensor | None:
        if self.ratio == 0:
            return None
        out = torch.full((len(positions), self.width), -1, dtype=torch.int32)
        for row, position in enumerate(positions.tolist()):
            chosen = self.where[self.blocks_of(position)]
            out[row, : len(chosen)] = chosen.int()
        return out

    def prefill_lists(self, positions: torch.Tensor, start: int, row: int = 0):
        pages = self.pages(positions)
        return attention.build_prefill_indices(
            compress_ratio=self.ratio,
            state_slot=torch.full_like(positions, self.slot),
            positions=positions,
            chunk_start=torch.full_like(positions, start),
            cu_q=torch.full_like(positions, row),
            win=W,
            ring_stride=self.ring,
            swa_pages=self.swa_pages,
            c128_page_indices=pages if self.ratio == 128 else None,
            c4_sparse_page_indices=pages if self.ratio == 4 else None,
        )

    def store(self, positions: torch.Tensor) -> None:
        attention.store_swa_into_unified(
            kv=self.k[positions],
            state_slot=torch.full_like(positions, self.slot),
            positions=positions,
            unified_kv=self.pool,
            win=W,
            ring_stride=self.ring,
            final_pos=torch.full_like(positions, int(positions[-1])),
        )

    def prefill(self, *chunks: int, start: int = 0) -> torch.Tensor:
        """Attention output of consecutive chunks from `start` on."""
        outputs = []
        for count in chunks:
            positions = torch.arange(start, start + count)
            prefix, prefix_ptr, extend, extend_ptr = self.prefill_lists(positions, start)
            outputs.append(
                attention.sparse_attn_v4_paged_prefill(
                    self.q[positions],
                    self.pool,
                    prefix,
                    prefix_ptr,
                    self.k[positions],
                    extend,
                    extend_ptr,
                    self.sink,
                    SCALE,
                )
            )
            self.store(positions)
            start += count
        return torch.cat(outputs)

    def expected(self, position: int) -> torch.Tensor:
        """Softmax with a sink over the window and the selected blocks, in float64, from the
        definition: no list, no ring, no pool."""
        rows = self.k[max(0, position - W + 1) : position + 1]
        rows = torch.cat((rows, self.blocks[self.blocks_of(position)])).double().numpy()
        query = self.q[position].double().numpy()
        out = np.zeros((HEADS, DIM))
        for head in range(HEADS):
            weights = np.exp(rows @ query[head] * SCALE)
            out[head] = weights @ rows / (weights.sum() + math.exp(float(self.sink[head])))
        return torch.from_numpy(out)


def decode(sequences: list[Sequence], position: int) -> torch.Tensor:
    """One decode step of several requests in one pool (that of the first), at one position."""
    first = sequences[0]
    count = len(sequences)
    positions = torch.full((count,), position)
    window = (positions + 1).clamp(max=W)
    pages = [s.pages(positions[:1]) for s in sequences]
    selected = ints(*[len(s.blocks_of(position)) for s in sequences])
    for s in sequences:
        first.pool[s.slot * first.ring + position % first.ring] = s.k[position]
    ratio = first.ratio
    empty = torch.empty(count, 0, dtype=torch.int32)
    streams = attention.build_decode_streams(
        state_slot=ints(*[s.slot for s in sequences]),
        positions=positions,
        swa_len=window,
        hca_len=selected if ratio == 128 else torch.zeros_like(selected),
        csa_len=selected if ratio == 4 else torch.zeros_like(selected),
        hca_page_indices=torch.cat(pages) if ratio == 128 else empty,
        csa_width=TOPK,
        win=W,
        ring_stride=first.ring,
        swa_pages=first.swa_pages,
    )
    indices, indptr = {0: streams[0:2], 128: streams[2:4], 4: streams[4:6]}[ratio]
    if ratio == 4:
        attention.fill_compress_tail(
            indices=indices,
            indptr=indptr,
            prefix_len=window,
            page_indices=torch.cat(pages),
            valid_len=selected,
            swa_pages=first.swa_pages,
        )
    q = torch.stack([s.q[position] for s in sequences])
    return attention.sparse_attn_v4_paged_decode(q, first.pool, indices, indptr, first.sink, SCALE)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_prefill_attention_is_softmax_over_window_and_blocks(ratio):
    sequence = Sequence(2200, ratio, dtype=torch.float32)
    out = sequence.prefill(700, 1500)
    for position in (0, 2, 3, 126, 127, 128, 511, 699, 700, 701, 827, 828, 2046, 2047, 2051, 2199):
        error = (out[position].double() - sequence.expected(position)).abs().max()
        assert error < 2e-6, (position, error)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_attention_bits_do_not_depend_on_the_chunks(ratio):
    whole = Sequence(700, ratio).prefill(700)
    for chunks, slot, ring in (
        ((256, 256, 188), 2, W),
        ((512, 188), 0, 131),
        ((690, *[1] * 10), 3, W),
        ((1, 63, 64, 1, 127, 444), 1, 131),
    ):
        other = Sequence(700, ratio, slot=slot, layout=slot + 1, ring=ring)
        assert torch.equal(other.prefill(*chunks), whole), (chunks, slot, ring)


def test_attention_bits_do_not_depend_on_the_chunks_where_the_indexer_selects():
    whole = Sequence(2400, 4).prefill(2400)
    other = Sequence(2400, 4, slot=2, layout=5)
    assert torch.equal(other.prefill(512, 512, 512, 513, 1, 350), whole)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_decode_attention_gives_the_bits_of_prefill_alone_and_in_a_batch(ratio):
    # At 2,050 tokens the C4 indexer begins to select.
    for start in (0, 126, 2049) if ratio == 4 else (0, 126, 300):
        steps = 4
        expected = Sequence(start + steps, ratio).prefill(start + steps)[start:]
        alone = Sequence(start + steps, ratio, slot=2, layout=1)
        if start:
            alone.prefill(start)
        batch = [
            Sequence(start + steps, ratio, slot=slot, layout=1, content=content)
            for slot, content in ((3, 1), (1, 0), (0, 2))
        ]
        pool = batch[0].pool
        # All three share one pool: same pages, so give them the same blocks.
        for s in batch:
            s.blocks, s.pool = batch[1].blocks, pool
        pool[batch[0].swa_pages + batch[1].where] = batch[1].blocks[: len(batch[1].where)]
        for s in batch:
            if start:
                s.prefill(start)
        for step in range(steps):
            assert torch.equal(decode([alone], start + step)[0], expected[step])
            assert torch.equal(decode(batch, start + step)[1], expected[step])


def test_attention_of_a_batch_gives_each_request_the_bits_it_has_alone():
    parts = [(1, 0, 0, 150), (3, 1, 140, 260), (0, 2, 5, 6)]
    sequences = [Sequence(300, 4, slot=slot, layout=1, content=c) for slot, c, _, _ in parts]
    pool = sequences[0].pool
    for s in sequences:
        s.blocks, s.pool = sequences[0].blocks, pool
    alone, lists, q, k, row = [], [], [], [], 0
    for s, (_, _, start, stop) in zip(sequences, parts, strict=True):
        if start:
            s.prefill(start)
        positions = torch.arange(start, stop)
        built = s.prefill_lists(positions, start, row)
        q.append(s.q[start:stop])
        k.append(s.k[start:stop])
        row += stop - start
        lists.append((positions, torch.full_like(positions, start), s, built))
    before = pool.clone()
    for s, (_, _, start, stop) in zip(sequences, parts, strict=True):
        alone.append(s.prefill(stop - start, start=start))
    pool.copy_(before)
    positions = torch.cat([p for p, *_ in lists])
    rows = torch.cumsum(ints(*[len(p) for p, *_ in lists]), 0)
    counts = ints(*[len(p) for p, *_ in lists])
    prefix, prefix_ptr, extend, extend_ptr = attention.build_prefill_indices(
        compress_ratio=4,
        state_slot=torch.cat([torch.full_like(p, s.slot) for p, _, s, _ in lists]),
        positions=positions,
        chunk_start=torch.cat([c for _, c, *_ in lists]),
        cu_q=torch.repeat_interleave(rows - counts, counts),
        win=W,
        ring_stride=W,
        swa_pages=sequences[0].swa_pages,
        c128_page_indices=None,
        c4_sparse_page_indices=torch.cat([s.pages(p) for p, _, s, _ in lists]),
    )
    together = attention.sparse_attn_v4_paged_prefill(
        torch.cat(q),
        pool,
        prefix,
        prefix_ptr,
        torch.cat(k),
        extend,
        extend_ptr,
        sequences[0].sink,
        SCALE,
    )
    assert torch.equal(together, torch.cat(alone))


def test_attention_sees_every_row_of_its_window_and_no_other():
    """The control of the exact comparisons above: one ring row is changed."""
    reference = Sequence(400, 4)
    reference.prefill(300)
    before = reference.prefill(100, start=300)
    for position, first_changed, last_changed in ((299, 0, 99), (200, 0, 27), (173, 0, 0)):
        other = Sequence(400, 4)
        other.prefill(300)
        other.pool[other.slot * W + position % W, 5] += 3.0
        after = other.prefill(100, start=300)
        changed = (after != before).flatten(1).any(1).nonzero().squeeze(1)
        assert (int(changed[0]), int(changed[-1])) == (first_changed, last_changed), position
    other = Sequence(400, 4)
    other.prefill(300)
    other.pool[other.slot * W + 172 % W, 5] = float("nan")  # the row that no query reads
    assert torch.equal(other.prefill(100, start=300), before)


def test_attention_refuses_lists_of_unknown_order():
    sequence = Sequence(10, 0)
    prefix, *rest = sequence.prefill_lists(torch.arange(10), 0)
    with pytest.raises(ValueError, match="canonical order"):
        attention.sparse_attn_v4_paged_prefill(
            sequence.q,
            sequence.pool,
            prefix.clone(),
            rest[0],
            sequence.k,
            *rest[1:],
            sequence.sink,
            SCALE,
        )


# -- compressor --------------------------------------------------------------------------------


def make_plan(ratio: int, kind: str, *tensors: torch.Tensor) -> SimpleNamespace:
    """A plan with the indexing and attributes of the stock tuple."""

    class Plan(tuple):
        compress_ratio = ratio
        is_decode = kind == "decode"

    return Plan((ratio, *tensors))


class CompressedRequest:
    """Runs the compressor over a sequence of raw state rows, in any chunks, for one ring slot."""

    def __init__(self, ratio: int, head_dim: int, length: int, ring: int, slot: int, dtype=None):
        self.ratio, self.head_dim, self.ring, self.slot = ratio, head_dim, ring, slot
        width = head_dim * (4 if ratio == 4 else 2)
        self.rows = rand(length, width, seed=17)
        self.ape = rand(8 if ratio == 4 else 128, head_dim, seed=18)
        self.state = torch.full((4 * ring, width), float("nan"), dtype=dtype or torch.float32)
        self.out: list[torch.Tensor] = []

    def prefill(self, *chunks: int, start: int = 0) -> None:
        for count in chunks:
            plan = compressor.plan_compress_prefill(
                ints(self.slot),
                None,
                None,
                ints(start + count),
                ints(count),
                None,
                count,
                self.ratio,
                PAGE,
                self.ring,
                use_req_ring=True,
            )
            self._forward(make_plan(self.ratio, "prefill", *plan), self.rows[start : start + count])
            start += count

    def decode(self, position: int) -> None:
        plan = compressor.plan_compress_decode(
            ints(self.slot), None, None, ints(position + 1), self.ratio, PAGE, self.ring, True
        )
        out = self._forward(
            make_plan(self.ratio, "decode", plan), self.rows[position : position + 1]
        )
        if (position + 1) % self.ratio:
            self.out.pop()
            assert not out.any()

    def _forward(self, plan, rows) -> torch.Tensor:
        out = compressor.compress_forward(
            self.state.view(-1, self.ratio, self.state.shape[1]),
            rows,
            self.ape,
            plan,
            head_dim=self.head_dim,
            compress_ratio=self.ratio,
        )
        self.out.append(out)
        return out

    def result(self) -> torch.Tensor:
        return torch.cat(self.out)

    def expected(self, block: int) -> np.ndarray:
        """Element by element, from the definition, in float64."""
        hd, end = self.head_dim, (block + 1) * self.ratio
        entries = []  # (kv, score + bias) per row, oldest first
        if self.ratio == 4:
            for j in range(8):
                position = end - 8 + j
                if position < 0:
                    continue
                row = self.rows[position].double().numpy()
                half = 0 if j < 4 else 1
                kv = row[half * hd : (half + 1) * hd]
                score = row[(2 + half) * hd : (3 + half) * hd]
                entries.append((kv, score + self.ape[j].double().numpy()))
        else:
            for j in range(128):
                row = self.rows[end - 128 + j].double().numpy()
                entries.append((row[:hd], row[hd:] + self.ape[j].double().numpy()))
        weight = np.exp(np.array([score for _, score in entries]))
        return (weight * np.array([kv for kv, _ in entries])).sum(0) / weight.sum(0)


@pytest.mark.parametrize(
    ("ratio", "head_dim", "ring"), [(4, 512, 8), (4, 128, 16), (128, 512, 128), (128, 512, 256)]
)
def test_compressor_is_a_softmax_over_its_block(ratio, head_dim, ring):
    request = CompressedRequest(ratio, head_dim, 520, ring, slot=2)
    request.prefill(1, 2, 4, 129, 250)
    for position in range(386, 520):
        request.decode(position)
    out = request.result()
    assert len(out) == 520 // ratio
    for block in range(len(out)):
        np.testing.assert_allclose(out[block].numpy(), request.expected(block), rtol=0, atol=5e-6)


@pytest.mark.parametrize(("ratio", "ring"), [(4, 8), (4, 16), (128, 128)])
def test_compressor_bits_do_not_depend_on_the_chunks(ratio, ring):
    whole = CompressedRequest(ratio, 512, 700, ring, slot=1)
    whole.prefill(700)
    for chunks, decoded in (((256, 256, 188), 0), ((3, 253, 1, 1, 442), 0), ((515,), 185)):
        other = CompressedRequest(ratio, 512, 700, ring, slot=3)
        other.prefill(*chunks)
        for position in range(700 - decoded, 700):
            other.decode(position)
        assert torch.equal(other.result(), whole.result()), chunks
        # What a later chunk needs lies in the ring, at the request's own rows.
        for position in range(700 - 700 % ratio - (4 if ratio == 4 else 0), 700):
            mine = other.state[3 * ring + position % ring]
            assert torch.equal(mine, whole.state[ring + position % ring])
            assert torch.equal(mine, other.rows[position])


def test_compressor_reads_the_live_halves_of_the_ring_only():
    """Of the four state rows at a block boundary the overlap halves matter, nothing else."""
    hd = 512
    reference = CompressedRequest(4, hd, 520, 8, slot=1)
    reference.prefill(512)
    snapshot = reference.state.clone()
    reference.out.clear()
    reference.prefill(8, start=512)
    for columns, matters in (((0, hd), True), ((2 * hd, 3 * hd), True), ((hd, 2 * hd), False)):
        other = CompressedRequest(4, hd, 520, 8, slot=1)
        other.state.copy_(snapshot)
        other.state[8 + 511 % 8, columns[0] : columns[1]] += 1.0
        other.prefill(8, start=512)
        assert torch.equal(other.result()[0], reference.result()[0]) != matters, columns
        assert torch.equal(other.result()[1], reference.result()[1])


@pytest.mark.parametrize("use_req_ring", [True, False])
@pytest.mark.parametrize(("ratio", "ring"), [(4, 8), (4, 16), (128, 128), (128, 256)])
def test_prefill_plan_is_the_scalar_loop_of_the_stock_planner(ratio, ring, use_req_ring):
    seq_lens, extend_lens, rids = (700, 5, 256, 131), (188, 5, 1, 131), (2, 0, 3, 1)
    generator = torch.Generator().manual_seed(3)
    req_to_token = torch.randint(0, 5000, (4, 800), generator=generator, dtype=torch.int32)
    full_to_state = torch.randperm(5000, generator=generator)
    total = sum(extend_lens)
    plan_c, plan_w = compressor.plan_compress_prefill(
        ints(*rids),
        req_to_token,
        full_to_state,
        ints(*seq_lens),
        ints(*extend_lens),
        None,
        total,
        ratio,
        PAGE,
        ring,
        use_req_ring,
    )

    def locate(rid: int, position: int) -> int:
        if ratio == 128 or use_req_ring:
            return rid * ring + position % ring
        loc = int(full_to_state[int(req_to_token[rid, position])])
        return loc // PAGE * ring + loc % ring

    window = 8 if ratio == 4 else 128
    pad = ring - window + 2 if ring > window else 0
    events, writes, ragged = [], [], 0
    for batch, (seq_len, extend, rid) in enumerate(zip(seq_lens, extend_lens, rids, strict=True)):
        first_write = min(seq_len // ratio * ratio - (4 if ratio == 4 else 0), seq_len - pad)
        for j in range(extend):
            position = seq_len - extend + j
            if (position + 1) % ratio == 0:
                held = window - min(j + 1, window)
                pages = (-1, batch)
                if held:
                    pages = tuple(
                        locate(rid, p) // ratio for p in (max(position - ratio, 0), position)
                    )
                events.append((position + 1, ragged, held, *pages))
            end_of_page = ratio == 4 and not use_req_ring and position % PAGE >= PAGE - 4
            if position >= first_write or end_of_page:
                writes.append((ragged, locate(rid, position)))
            ragged += 1
    fields = plan_c.numpy().view(np.dtype("<u4,<u2,<u2,<i4,<i4")).reshape(-1)
    assert [tuple(int(v) for v in row) for row in fields] == events
    assert [tuple(row) for row in plan_w.view(torch.int32).tolist()] == writes

    padded_c, padded_w = compressor.plan_compress_prefill(
        ints(*rids),
        req_to_token,
        full_to_state,
        ints(*seq_lens),
        ints(*extend_lens),
        None,
        total + 7,
        ratio,
        PAGE,
        ring,
        use_req_ring,
        use_cuda_graph=True,
    )
    assert padded_c.shape == (total + 7, 16) and padded_w.shape == (total + 7, 8)
    assert torch.equal(padded_c[: len(plan_c)], plan_c)
    assert (padded_c[len(plan_c) :].view(torch.int32)[:, 0] == -1).all()
    with pytest.raises(ValueError, match="announced"):
        compressor.plan_compress_prefill(
            ints(1), None, None, ints(9), ints(4), None, 5, 4, PAGE, 8, True
        )


def test_padded_plan_rows_are_ignored():
    request = CompressedRequest(4, 512, 12, 8, slot=1)
    plan = compressor.plan_compress_prefill(
        ints(1), None, None, ints(12), ints(12), None, 20, 4, PAGE, 8, True, True
    )
    padded = torch.cat((request.rows, request.rows[:8]))
    out = request._forward(make_plan(4, "prefill", *plan), padded)
    plain = CompressedRequest(4, 512, 12, 8, slot=1)
    plain.prefill(12)
    assert torch.equal(out[:3], plain.result())
    torch.testing.assert_close(request.state, plain.state, rtol=0, atol=0, equal_nan=True)


def test_bf16_state_rounds_what_goes_through_the_ring():
    request = CompressedRequest(4, 512, 16, 8, slot=0, dtype=torch.bfloat16)
    request.prefill(8, 8)
    rounded = CompressedRequest(4, 512, 16, 8, slot=0)
    rounded.prefill(8)
    rounded.state.copy_(rounded.state.bfloat16().float())
    rounded.prefill(8, start=8)
    assert torch.equal(request.result(), rounded.result())


def rotated(row: np.ndarray, table: torch.Tensor, position: int) -> np.ndarray:
    """`row` with its last elements rotated pair by pair, complex arithmetic in float64."""
    angles = table[position].to(torch.complex128).numpy()
    tail = row[-2 * len(angles) :]
    turned = (tail[0::2] + 1j * tail[1::2]) * angles
    out = row.copy()
    out[-2 * len(angles) :: 2], out[-2 * len(angles) + 1 :: 2] = turned.real, turned.imag
    return out


def normed(row: np.ndarray, weight: np.ndarray | float = 1.0, eps: float = 1e-6) -> np.ndarray:
    return row / math.sqrt((row**2).mean() + eps) * weight


def hadamard(row: np.ndarray) -> np.ndarray:
    """From the definition: entry (i, j) is the parity of i & j."""
    n = len(row)
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)])
    return signs @ row / math.sqrt(n)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_compressed_rows_are_normed_rotated_and_stored(kind):
    table, weight = angle_table(), 1 + rand(512, seed=21, scale=0.1)
    kv = rand(3, 512, seed=22)
    if kind == "prefill":
        plan = compressor.plan_compress_prefill(
            ints(1), None, None, ints(268), ints(12), None, 12, 4, PAGE, 8, True
        )
        plan = make_plan(4, kind, *plan)
        out_loc = torch.arange(12) * 10
        written = {30: (0, 256), 70: (1, 260), 110: (2, 264)}  # row: (event, first position)
    else:
        plan_d = compressor.plan_compress_decode(
            ints(1, 2, 3), None, None, ints(260, 261, 8), 4, PAGE, 8, True
        )
        plan = make_plan(4, kind, plan_d)
        out_loc = ints(5, 6, 7)
        written = {5: (0, 256), 7: (2, 4)}
    pool = torch.zeros(200, 512, dtype=torch.bfloat16)
    compressor.compress_norm_rope_store(
        kv,
        plan,
        norm_weight=weight,
        norm_eps=1e-6,
        freq_cis=table,
        out_loc=out_loc,
        kvcache=pool.view(torch.uint8),
        page_size=1,
        bf16_store=True,
    )
    assert set(pool.abs().sum(1).nonzero().squeeze(1).tolist()) == set(written)
    for row, (event, position) in written.items():
        expected = rotated(
            normed(kv[event].double().numpy(), weight.double().numpy()), table, position
        )
        np.testing.assert_allclose(pool[row].double().numpy(), expected, rtol=2**-8, atol=1e-6)


def test_indexer_keys_are_transformed_quantised_and_paged():
    table, weight = angle_table(), 1 + rand(128, seed=23, scale=0.1)
    kv = rand(3, 128, seed=24)
    plan = make_plan(
        4,
        "prefill",
        *compressor.plan_compress_prefill(
            ints(1), None, None, ints(268), ints(12), None, 12, 4, PAGE, 8, True
        ),
    )
    pages = torch.zeros(4, 64 * 132, dtype=torch.uint8)
    compressor.compress_norm_rope_store(
        kv,
        plan,
        norm_weight=weight,
        norm_eps=1e-6,
        freq_cis=table,
        out_loc=torch.arange(12) + 60,
        kvcache=pages,
        page_size=64,
    )
    for event, (slot, position) in enumerate(((63, 256), (67, 260), (71, 264))):
        page, offset = divmod(slot, 64)
        expected = hadamard(
            rotated(normed(kv[event].double().numpy(), weight.double().numpy()), table, position)
        )
        raw = pages[page].numpy().tobytes()
        scale = np.frombuffer(raw[8192 + 4 * offset : 8196 + 4 * offset], np.float32)[0]
        assert scale == pytest.approx(np.abs(expected).max() / 448.0, rel=1e-5)
        values = pages[page, 128 * offset : 128 * (offset + 1)].view(torch.float8_e4m3fn)
        np.testing.assert_allclose(
            values.double().numpy() * scale, expected, rtol=2**-4 * 1.01, atol=float(scale) * 2**-9
        )
    assert int((pages != 0).sum()) <= 3 * 132


# -- indexer -----------------------------------------------------------------------------------


def test_indexer_query_is_rotated_transformed_and_quantised():
    table, q, weight = angle_table(), rand(70, 4, 128, seed=31).bfloat16(), rand(70, 4, seed=32)
    positions = torch.arange(70) * 13
    values, weights = indexer.fused_q_indexer_rope_hadamard_quant(q, weight, 0.25, table, positions)
    for token, head in ((0, 0), (1, 3), (64, 2), (69, 1)):
        expected = hadamard(rotated(q[token, head].double().numpy(), table, int(positions[token])))
        scale = np.abs(expected).max() / 448.0
        assert float(weights[token, head, 0]) == pytest.approx(
            float(weight[token, head]) * 0.25 * scale, rel=1e-5
        )
        np.testing.assert_allclose(
            values[token, head].double().numpy() * scale,
            expected,
            rtol=2**-4 * 1.01,
            atol=scale * 2**-9,
        )
    for rows in (slice(0, 1), slice(3, 68), slice(69, 70)):
        part, part_weights = indexer.fused_q_indexer_rope_hadamard_quant(
            q[rows], weight[rows], 0.25, table, positions[rows]
        )
        assert torch.equal(part.view(torch.uint8), values[rows].view(torch.uint8))
        assert torch.equal(part_weights, weights[rows])


def test_hadamard_matches_its_definition():
    rows = rand(5, 128, seed=33)
    out = indexer.hadamard_rows(rows)
    for row, got in zip(rows, out, strict=True):
        np.testing.assert_allclose(got.numpy(), hadamard(row.double().numpy()), atol=1e-5)


def indexer_pool(keys: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Keys in pages of 64, page k at pool page order[k]."""
    pool = torch.zeros(max(order) + 1, 64 * 132, dtype=torch.uint8)
    for number, page in enumerate(order):
        values, scale = indexer.quantize_fp8_rows(keys[64 * number : 64 * (number + 1)])
        pool[page, :8192] = values.view(torch.uint8).reshape(-1)
        pool[page, 8192:] = scale.reshape(-1).view(torch.uint8)
    return pool.view(-1, 64, 1, 132)


def test_indexer_logits_match_the_definition_and_do_not_depend_on_the_batch():
    heads, tokens = 8, 40
    keys = rand(256, 128, seed=34)
    order = [3, 0, 5, 1]
    pool = indexer_pool(keys, order)
    q = indexer.quantize_fp8_rows(rand(tokens, heads, 128, seed=35))[0]
    weight = rand(tokens, heads, seed=36)
    lengths = (torch.arange(tokens) * 6 + 1).int()
    table = torch.tensor(order, dtype=torch.int32).expand(tokens, 4).contiguous()

    def logits(rows: slice, pages: torch.Tensor, width: int, cache=pool) -> torch.Tensor:
        return indexer.fp8_paged_mqa_logits(
            q[rows].unsqueeze(1), cache, weight[rows], lengths[rows], pages, None, width, False
        )

    out = logits(slice(0, tokens), table, 256)
    stored = [indexer.quantize_fp8_rows(keys[j : j + 1]) for j in range(256)]
    for token in (0, 1, 17, 39):
        for j in range(256):
            if j >= int(lengths[token]):
                assert out[token, j] == 0
                continue
            values, scale = stored[j]
            dots = q[token].double() @ values[0].double()
            expected = float((dots.clamp(min=0) * weight[token].double()).sum() * scale[0, 0])
            assert float(out[token, j]) == pytest.approx(expected, rel=1e-4, abs=1e-3)

    for rows, width in ((slice(39, 40), 256), (slice(0, 3), 64), (slice(13, 30), 192)):
        part = logits(rows, table[rows, : width // 64], width)
        assert torch.equal(part, out[rows, :width]), rows
    # Other pages in the pool, same keys: same bits. (Two requests in one batch as well.)
    moved = indexer_pool(keys, [1, 2, 0, 4])
    other = torch.tensor([1, 2, 0, 4], dtype=torch.int32).expand(tokens, 4).contiguous()
    assert torch.equal(logits(slice(0, tokens), other, 256, moved), out)
    both = torch.cat((pool, moved))
    mixed = table.clone()
    mixed[20:] = other[20:] + pool.shape[0]
    assert torch.equal(logits(slice(0, tokens), mixed, 256, both), out)
    moved[1, 0] ^= 0x40  # the control: a high bit of one key
    assert not torch.equal(logits(slice(0, tokens), other, 256, moved), out)


def test_topk_takes_the_best_lower_index_first_and_lists_them_in_order():
    generator = torch.Generator().manual_seed(37)
    k, rows, width = 32, 6, 300
    scores = torch.randint(0, 7, (rows, width), generator=generator).float()  # many ties
    scores[2] = rand(width, seed=38)
    lengths = ints(5, 32, 33, 299, 300, 150).int()
    tables = torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(rows)]).int()
    pages = torch.empty(rows, k, dtype=torch.int32)
    raw = torch.empty(rows, k, dtype=torch.int32)
    indexer.topk_transform_paged(scores, lengths, tables, pages, 64, raw)
    for row in range(rows):
        seen = int(lengths[row])
        best = sorted(range(seen), key=lambda j: (-float(scores[row, j]), j))[:k]
        expected = sorted(best) + [-1] * (k - len(best))
        assert raw[row].tolist() == expected
        assert pages[row].tolist() == [
            -1 if j < 0 else int(tables[row, j // 64]) * 64 + j % 64 for j in expected
        ]
    wider = torch.cat((scores, torch.full((rows, 40), 9.0)), 1)  # columns beyond every length
    again = torch.empty_like(pages)
    indexer.topk_transform_paged(wider[1:], lengths[1:], tables[1:], again[1:], 64)
    assert torch.equal(again[1:], pages[1:])


# -- norm and rope -----------------------------------------------------------------------------


def test_query_is_normed_per_head_and_rotated():
    table, q = angle_table(), rand(70, 3, 512, seed=41)
    positions = torch.arange(70) * 7
    out = torch.empty_like(q)
    norm_rope.fused_q_norm_rope(q, out, 1e-6, table, positions)
    plain = torch.empty_like(q)
    norm_rope.fused_q_norm_rope(q, plain, None, table, positions)
    for token, head in ((0, 0), (63, 2), (64, 1), (69, 2)):
        row = q[token, head].double().numpy()
        at = int(positions[token])
        np.testing.assert_allclose(
            out[token, head].numpy(), rotated(normed(row), table, at), atol=2e-6
        )
        np.testing.assert_allclose(plain[token, head].numpy(), rotated(row, table, at), atol=2e-6)


def test_kv_is_normed_in_bf16_then_rotated():
    table, weight = angle_table(), (1 + rand(512, seed=42, scale=0.1)).bfloat16()
    kv = rand(5, 512, seed=43).bfloat16()
    original = kv.clone()
    positions = ints(0, 1, 300, 4095, 17)
    norm_rope.fused_norm_rope_inplace(kv, weight, 1e-6, table, positions)
    for token in range(5):
        row = normed(original[token].double().numpy(), weight.double().numpy())
        row = torch.from_numpy(row).bfloat16().double().numpy()  # stock keeps the row in bf16
        expected = rotated(row, table, int(positions[token]))
        np.testing.assert_allclose(kv[token].double().numpy(), expected, rtol=2**-7, atol=1e-5)


def test_rope_turns_back_with_inverse():
    table, q, k = angle_table(), rand(5, 3, 64, seed=44), rand(5, 1, 64, seed=45)
    positions = ints(0, 5, 9, 4095, 100)
    full = torch.zeros(5, 3, 512)
    full[..., -64:] = q
    view, turned_k = full[..., -64:], k.clone()
    norm_rope.fused_rope_inplace(view, turned_k, table, positions)
    for token in range(5):
        expected = rotated(q[token, 1].double().numpy(), table, int(positions[token]))
        np.testing.assert_allclose(full[token, 1, -64:].numpy(), expected, atol=2e-6)
        expected = rotated(k[token, 0].double().numpy(), table, int(positions[token]))
        np.testing.assert_allclose(turned_k[token, 0].numpy(), expected, atol=2e-6)
    norm_rope.fused_rope_inplace(view, None, table, positions, inverse=True)
    torch.testing.assert_close(full[..., -64:], q, rtol=0, atol=5e-6)


def test_fused_store_refuses_the_paged_fp8_layout():
    args = {
        "q": rand(1, 512, seed=1),
        "kv": rand(1, 512, seed=2),
        "q_norm_weight": None,
        "kv_norm_weight": None,
        "q_rms_eps": 1e-6,
        "kv_rms_eps": 1e-6,
        "rope_head_dim": 64,
        "cos_cache": torch.zeros(4, 32),
        "sin_cache": torch.zeros(4, 32),
        "positions": ints(0),
    }
    with pytest.raises(NotImplementedError, match="paged fp8"):
        norm_rope.fused_qk_norm_rope_swa_store(
            **args, swa_cache=torch.zeros(2, 584, dtype=torch.uint8), swa_loc=ints(1)
        )


# -- MoE, mHC ----------------------------------------------------------------------------------


def test_gate_chooses_with_the_bias_and_weighs_without():
    logits, bias = rand(20, 8, seed=51, scale=3), rand(8, seed=52)
    logits[3] = 0.0  # all equal: the bias decides
    for scoring in ("sqrtsoftplus", "sigmoid"):
        weights, ids = moe.moe_fused_gate(logits, bias, 3, scoring)
        for token in range(20):
            x = logits[token].double().numpy()
            score = np.sqrt(np.log1p(np.exp(x))) if scoring != "sigmoid" else 1 / (1 + np.exp(-x))
            ranked = sorted(range(8), key=lambda e: (-(score[e] + float(bias[e])), e))[:3]
            assert ids[token].tolist() == ranked
            expected = score[ranked] / score[ranked].sum()
            np.testing.assert_allclose(weights[token].numpy(), expected, rtol=1e-5)
    scaled, _ = moe.biased_topk_impl(
        None,
        logits,
        bias,
        3,
        True,
        "sigmoid",
        routed_scaling_factor=1.5,
        apply_routed_scaling_factor_on_output=True,
    )
    torch.testing.assert_close(scaled, weights * 1.5)


def test_mask_topk_ids_marks_padding():
    ids = torch.arange(8).view(4, 2).int()
    moe.mask_topk_ids(ids, torch.tensor([3]))
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]


def test_swiglu_clamps_the_gate_above_and_the_value_on_both_sides():
    x = rand(3, 20, seed=53, scale=8)
    out = torch.empty(3, 10)
    moe.silu_and_mul_clamp(x, out, 5.0)
    plain = moe.silu_and_mul(x)
    for i in range(3):
        for j in range(10):
            gate, up = float(x[i, j]), float(x[i, 10 + j])
            silu = gate / (1 + math.exp(-gate))
            assert float(plain[i, j]) == pytest.approx(silu * up, rel=1e-4, abs=1e-6)
            gate, up = min(gate, 5.0), max(-5.0, min(up, 5.0))
            expected = gate / (1 + math.exp(-gate)) * up
            assert float(out[i, j]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert not torch.allclose(out, plain)


def test_experts_match_the_definition_and_do_not_depend_on_the_batch():
    tokens, hidden, inner, count = 90, 64, 32, 4
    x = rand(tokens, hidden, seed=54)
    w13, w2 = (
        rand(count, 2 * inner, hidden, seed=55, scale=0.2),
        rand(count, hidden, inner, seed=56, scale=0.2),
    )
    ids = torch.stack([torch.tensor([t % 4, (t + 1 + t // 9) % 4]) for t in range(tokens)]).int()
    ids[7, 1] = -1
    weights = rand(tokens, 2, seed=57).abs()
    out = moe.experts(x, w13, w2, weights, ids, 1.0)
    for token in (0, 7, 33, 89):
        expected = np.zeros(hidden)
        for column in range(2):
            expert = int(ids[token, column])
            if expert < 0:
                continue
            both = w13[expert].double().numpy() @ x[token].double().numpy()
            gate, up = np.minimum(both[:inner], 1.0), np.clip(both[inner:], -1.0, 1.0)
            act = gate / (1 + np.exp(-gate)) * up
            expected += float(weights[token, column]) * (w2[expert].double().numpy() @ act)
        np.testing.assert_allclose(out[token].numpy(), expected, atol=2e-6)
    layer = SimpleNamespace(w13_weight=w13.bfloat16(), w2_weight=w2.bfloat16())
    config = SimpleNamespace(
        activation="silu", apply_router_weight_on_input=False, gemm1_alpha=None, swiglu_limit=1.0
    )
    half = x.bfloat16()
    whole = moe.moe_forward_native(layer, half, (weights, ids, None), config)
    for rows in (slice(0, 1), slice(5, 70), slice(88, 90)):
        part = moe.moe_forward_native(layer, half[rows], (weights[rows], ids[rows], None), config)
        assert torch.equal(part, whole[rows])
    config.activation = "gelu"
    with pytest.raises(NotImplementedError):
        moe.moe_forward_native(layer, half, (weights, ids, None), config)


def test_sinkhorn_balances_rows_and_columns():
    mixes, scale, base = rand(6, 1, 24, seed=61, scale=2), rand(3, seed=62), rand(24, seed=63)
    pre, post, comb = mhc.hc_split_sinkhorn(mixes, scale, base)
    for token in range(6):
        m, b = mixes[token, 0].double().numpy(), base.double().numpy()
        s = scale.double().numpy()
        np.testing.assert_allclose(
            pre[token, 0].numpy(), 1 / (1 + np.exp(-(m[:4] * s[0] + b[:4]))) + 1e-6, rtol=1e-5
        )
        np.testing.assert_allclose(
            post[token, 0].numpy(), 2 / (1 + np.exp(-(m[4:8] * s[1] + b[4:8]))), rtol=1e-5
        )
        c = np.exp((m[8:] * s[2] + b[8:]).reshape(4, 4))
        c = c / c.sum(1, keepdims=True) + 1e-6
        c = c / (c.sum(0, keepdims=True) + 1e-6)
        for _ in range(19):
            c = c / (c.sum(1, keepdims=True) + 1e-6)
            c = c / (c.sum(0, keepdims=True) + 1e-6)
        np.testing.assert_allclose(comb[token, 0].numpy(), c, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(comb[token, 0].sum(0).numpy(), np.ones(4), atol=1e-4)


def test_streams_are_mixed_as_defined():
    x, residual = rand(6, 32, seed=64), rand(6, 4, 32, seed=65)
    post, comb = rand(6, 4, seed=66), rand(6, 4, 4, seed=67)
    out = mhc.hc_post(x, residual, post, comb)
    for token in range(6):
        for i in range(4):
            expected = post[token, i].double() * x[token].double()
            for j in range(4):
                expected = expected + comb[token, j, i].double() * residual[token, j].double()
            torch.testing.assert_close(out[token, i].double(), expected, rtol=1e-5, atol=1e-5)
    fn = rand(24, 128, seed=68)
    mixes = mhc.hc_pre_mixes(residual, fn, 1e-6)
    for token in range(6):
        row = normed(residual[token].flatten().double().numpy())
        np.testing.assert_allclose(mixes[token].numpy(), fn.double().numpy() @ row, atol=1e-4)


# -- invariance of the row-wise kernels ----------------------------------------------------------

TABLE = angle_table()
ROW_WISE = {
    "fused_q_norm_rope": lambda x: _into(
        lambda out, q: norm_rope.fused_q_norm_rope(q, out, 1e-6, TABLE, torch.full((len(q),), 77)),
        x.view(-1, 2, 512).bfloat16(),
    ),
    "fused_norm_rope_inplace": lambda x: _changed(
        lambda kv: norm_rope.fused_norm_rope_inplace(
            kv, torch.ones(512), 1e-6, TABLE, torch.full((len(kv),), 77)
        ),
        x[:, :512].bfloat16(),
    ),
    "hc_split_sinkhorn": lambda x: torch.cat(
        [
            part.flatten(1)
            for part in mhc.hc_split_sinkhorn(
                x[:, None, :24], torch.tensor([0.5, 1.0, 2.0]), torch.linspace(-1, 1, 24)
            )
        ],
        1,
    ),
    "mhc_combine": lambda x: mhc.mhc_combine(x, x[:, :4], 4, torch.bfloat16),
    "fused_hc_head": lambda x: mhc.fused_hc_head(
        x.view(-1, 4, 256).contiguous(),
        rand(4, 1024, seed=71),
        torch.ones(1),
        torch.zeros(4),
        1e-6,
        1e-6,
    ),
    "hc_post": lambda x: mhc.hc_post(
        x[:, :256], x.view(-1, 4, 256), x[:, :4], x[:, :16].reshape(-1, 4, 4)
    ),
    "moe_fused_gate": lambda x: moe.moe_fused_gate(
        x[:, :9], torch.linspace(-1, 1, 9), 3, "sqrtsoftplus"
    )[0],
    "silu_and_mul": moe.silu_and_mul,
    "sigmoid": elementwise.sigmoid,
    "silu": elementwise.silu,
    "softplus": elementwise.softplus,
    "odd_sigmoid": lambda x: elementwise.sigmoid(x[:, :7].contiguous()),
    "odd_softplus": lambda x: elementwise.softplus(x[:, :7].contiguous()),
    "row_tiled_mm": lambda x: matmul.row_tiled_mm(x, rand(1024, 70, seed=72)),
    "row_tiled_linear": lambda x: matmul.row_tiled_linear(
        x.bfloat16(), rand(70, 1024, seed=73).bfloat16(), rand(70, seed=74)
    ),
}


def _into(kernel, x):
    out = torch.empty_like(x)
    kernel(out, x)
    return out.flatten(1)


def _changed(kernel, x):
    x = x.clone()
    kernel(x)
    return x


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_bits_do_not_depend_on_the_batch(name):
    kernel = ROW_WISE[name]
    x = rand(100, 1024, seed=75, scale=3)
    whole = kernel(x)
    for rows in (
        slice(0, 1),
        slice(1, 4),
        slice(7, 8),
        slice(30, 63),
        slice(31, 96),
        slice(99, 100),
    ):
        assert torch.equal(kernel(x[rows].clone()), whole[rows]), rows
    x[50] *= 1.01  # the control
    assert (kernel(x) != whole).flatten(1).any(1).nonzero().squeeze(1).tolist() == [50]


def test_row_tiled_products_match_float64():
    a, b, bias = rand(45, 300, seed=76), rand(300, 20, seed=77), rand(20, seed=78)
    expected = a.double() @ b.double()
    torch.testing.assert_close(matmul.row_tiled_mm(a, b).double(), expected, rtol=0, atol=1e-4)
    batched = matmul.row_tiled_linear(a.view(5, 9, 300), b.t(), bias)
    assert batched.shape == (5, 9, 20)
    torch.testing.assert_close(
        batched.view(45, 20).double(), expected + bias.double(), rtol=0, atol=1e-4
    )
    assert matmul.row_tiled_mm(a[:0], b).shape == (0, 20)
    with pytest.raises(ValueError, match="at least 8"):
        matmul.row_tiled_mm(a, b, tile=4)


# -- host copies -------------------------------------------------------------------------------

LAYERS, ROWS, ITEM = 3, 12, 10


def device_layers() -> list[torch.Tensor]:
    return [
        torch.arange(ROWS * ITEM, dtype=torch.int32).view(ROWS, ITEM).add(1000 * layer)
        for layer in range(LAYERS)
    ]


def addresses(layers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers])


def test_layer_first_copies():
    src, item = device_layers(), ITEM * 4
    dst = [torch.zeros_like(layer) for layer in src]
    src_rows, dst_rows = ints(7, 0, 11), ints(2, 9, 0)
    transfer_kv.transfer_kv_all_layer_mla(
        addresses(src), addresses(dst), src_rows, dst_rows, item, LAYERS
    )
    one = torch.zeros_like(src[0])
    transfer_kv.transfer_kv_per_layer_mla(src[1], one, src_rows, dst_rows, item)
    assert torch.equal(one, dst[1])
    for layer in range(LAYERS):
        expected = torch.zeros_like(src[0])
        for a, b in zip(src_rows.tolist(), dst_rows.tolist(), strict=True):
            expected[b] = src[layer][a]
        assert torch.equal(dst[layer], expected)
    k, v = torch.zeros_like(src[0]), torch.zeros_like(src[0])
    transfer_kv.transfer_kv_per_layer(src[0], k, src[1], v, src_rows, dst_rows, item)
    assert torch.equal(k, dst[0]) and torch.equal(v, dst[1])
    keys = [torch.zeros_like(layer) for layer in src]
    values = [torch.zeros_like(layer) for layer in src]
    transfer_kv.transfer_kv_all_layer(
        addresses(src),
        addresses(keys),
        addresses(src[::-1]),
        addresses(values),
        src_rows,
        dst_rows,
        item,
        LAYERS,
    )
    assert all(torch.equal(a, b) for a, b in zip(keys + values[::-1], dst + dst, strict=True))


def test_page_first_copies_there_and_back():
    src, item = device_layers(), ITEM * 4
    host = torch.zeros(20, LAYERS, ITEM, dtype=torch.int32)
    src_rows, host_rows = ints(7, 0, 11), ints(2, 19, 0)
    transfer_kv.transfer_kv_all_layer_mla_lf_pf(
        addresses(src), host, src_rows, host_rows, item, LAYERS * item, LAYERS
    )
    expected = torch.zeros_like(host)
    for layer in range(LAYERS):
        for a, b in zip(src_rows.tolist(), host_rows.tolist(), strict=True):
            expected[b, layer] = src[layer][a]
    assert torch.equal(host, expected)
    back = [torch.zeros_like(layer) for layer in src]
    for layer in range(LAYERS):
        transfer_kv.transfer_kv_per_layer_mla_pf_lf(
            host, back[layer], host_rows, src_rows, layer, item, LAYERS * item
        )
        assert torch.equal(back[layer][src_rows], src[layer][src_rows])
        assert int(back[layer].ne(0).any(1).sum()) == len(src_rows)
    keys, values = torch.zeros_like(host), torch.zeros_like(host)
    transfer_kv.transfer_kv_all_layer_lf_pf(
        addresses(src),
        keys,
        addresses(src[::-1]),
        values,
        src_rows,
        host_rows,
        item,
        LAYERS * item,
        LAYERS,
    )
    assert torch.equal(keys, expected) and torch.equal(values, expected.flip(1))
    k, v = torch.zeros_like(src[0]), torch.zeros_like(src[0])
    transfer_kv.transfer_kv_per_layer_pf_lf(
        keys, k, values, v, host_rows, src_rows, 2, item, LAYERS * item
    )
    assert torch.equal(k, back[2]) and torch.equal(v, back[0])


def test_direct_copies_move_whole_pages():
    page = 4
    src = device_layers()
    dst = [torch.zeros_like(layer) for layer in src]
    src_rows, dst_rows = ints(8, 9, 10, 11, 0, 1, 2, 3), ints(0, 1, 2, 3, 4, 5, 6, 7)
    transfer_kv.transfer_kv_direct(src, dst, src_rows, dst_rows, page)
    for layer in range(LAYERS):
        assert torch.equal(dst[layer][:8], src[layer][src_rows]) and not dst[layer][8:].any()
    for groups in (1, 2):  # one latent pool, or K and V
        sources = src if groups == 1 else src + [layer + 5 for layer in src]
        hosts = [torch.zeros(6, LAYERS, page, ITEM, dtype=torch.int32) for _ in range(groups)]
        host_rows = torch.cat((torch.arange(20, 24), torch.arange(4, 8)))
        transfer_kv.transfer_kv_all_layer_direct_lf_pf(sources, hosts, src_rows, host_rows, page)
        for group, host in enumerate(hosts):
            for layer in range(LAYERS):
                assert torch.equal(host[5, layer], sources[group * LAYERS + layer][8:12])
                assert torch.equal(host[1, layer], sources[group * LAYERS + layer][0:4])
            assert not host[[0, 2, 3, 4]].any()
        back = [torch.zeros_like(src[0]) for _ in range(groups)]
        transfer_kv.transfer_kv_per_layer_direct_pf_lf(hosts, back, host_rows, src_rows, 2, page)
        for group in range(groups):
            assert torch.equal(back[group][src_rows], sources[group * LAYERS + 2][src_rows])
            assert not back[group][4:8].any()


if __name__ == "__main__":
    stock_main(*sys.argv[1:])
