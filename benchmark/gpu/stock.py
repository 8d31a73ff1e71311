"""SGLang's own pool and attention backend, built without a server, and the kernels compiled at run time.

The backend's methods are stock's: the metadata of a forward (`init_forward_metadata_prefill`,
`make_forward_metadata_from_raw_decode`), the compressors and the attention. It is built without a model
runner, and without the indexer's metadata, which nothing here reads (selection.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from sglang.kernels.ops.attention.dsv4 import compress
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.kernels.ops.attention.dsv4.rope import precompute_freqs_cis
from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4HipRadixBackend
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

from gpu.config import HEAD_DIM, INDEX_DIM, INDEX_PAGE, PAGE, ROPE_DIM, WINDOW, Shape


def make_pool(shape: Shape, rows: int, tokens: int, device: torch.device) -> Any:
    """A DeepSeekV4TokenToKVPool: unified_kv, bf16, fp32 states.

    Args:
        rows: request rows, the padding row 0 included.
        tokens: token slots of the compressed KV.
    """
    layers = len(shape.ratios)
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=rows - 1,
        num_req_slots=rows,
        swa_size=PAGE,
        c4_size=tokens // 4,
        c128_size=tokens // 128,
        c4_state_pool_size=0,
        c128_state_pool_size=0,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.uint8,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=HEAD_DIM - ROPE_DIM,
        qk_rope_head_dim=ROPE_DIM,
        indexer_head_dim=INDEX_DIM,
        layer_num=layers,
        device=str(device),
        enable_memory_saver=False,
        compression_ratios=list(shape.ratios),
        sliding_window=WINDOW,
        start_layer=0,
        end_layer=layers,
    )
    # Paged window locations: unified_kv computes them and reads none.
    pool.register_mapping(torch.zeros(tokens + PAGE, dtype=torch.int64, device=device))
    return pool


class Backend(DeepseekV4HipRadixBackend):
    """Stock's backend over a pool, without a model runner."""

    def __init__(self, pool: Any, req_to_token: torch.Tensor, shape: Shape) -> None:
        # Not the base constructor: it wants a model runner, and sets what these methods do not read.
        self.token_to_kv_pool = pool
        self.req_to_token = req_to_token
        self.device = req_to_token.device
        self.cuda_int32_kwargs = {"device": self.device, "dtype": torch.int32}
        self.softmax_scale = HEAD_DIM**-0.5
        self.page_size = PAGE
        self.index_topk = shape.table_width
        self.MAX_SEQ_LEN_FOR_CAPTURE = req_to_token.shape[1]
        self.is_draft_worker = self.is_dspark = self.encoder_replay = False
        self.need_compress = True
        self.has_c4, self.has_c128 = (ratio in shape.ratios for ratio in (4, 128))
        self.low_ratios = ()
        self.topk = self.speculative_num_steps = 0
        self._selected = shape.selected

    def init_forward_metadata_indexer(self, core: Any, **_: Any) -> None:
        """No logits kernel runs here (selection.py)."""

    def _attach_unified_kv_decode_streams(self, core: Any, *args: Any, **kwargs: Any) -> None:
        # A selection that is narrower than stock's table: smoke runs with short prompts.
        core.c4_sparse_topk_lengths_raw = core.c4_sparse_topk_lengths_raw.clamp(max=self._selected)
        super()._attach_unified_kv_decode_streams(core, *args, **kwargs)


def rope_table(positions: int, device: torch.device) -> torch.Tensor:
    """The compressors' rotary table of DeepSeek-V4: complex64 ``[positions, 32]``."""
    table = precompute_freqs_cis(ROPE_DIM, positions, 65536, 160000, 16, 32, 1)
    return table.to(device)


def compile_kernels() -> int:
    """Compiles the C++ kernels that the stack needs beside each other; how many.

    Their arguments are the ones with which the stack calls them: fp32 scores, states and results.
    """
    fp32 = torch.float32
    builds = [
        (compress._jit_compress_plan_module, ()),
        (compress._jit_compress_module, (HEAD_DIM, fp32, fp32, fp32, 4)),
        (compress._jit_compress_module, (INDEX_DIM, fp32, fp32, fp32, 4)),
        (compress._jit_compress_module, (HEAD_DIM, fp32, fp32, fp32, 128)),
        (
            compress._jit_compress_norm_rope_module,
            (fp32, HEAD_DIM, ROPE_DIM, 1, True, KVLayout.V4, False),
        ),
        (
            compress._jit_compress_norm_rope_module,
            (fp32, INDEX_DIM, ROPE_DIM, INDEX_PAGE, False, KVLayout.V4, False),
        ),
    ]
    with ThreadPoolExecutor(max_workers=len(builds)) as pool:
        for build in [pool.submit(function, *args) for function, args in builds]:
            build.result()
    return len(builds)
