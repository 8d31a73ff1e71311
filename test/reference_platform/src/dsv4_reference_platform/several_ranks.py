"""Several ranks on a CPU, with the shapes that they have on a GPU, over gloo.

What SGLang has for tensor parallelism and for data parallel attention on an accelerator, where it would
take another way on a CPU (pads heads, raises their number) or none that works on this platform (pinned
memory, collectives that it registers with torch for the accelerator only). A part of ``install``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


def install(rebind: Callable[[str, Callable[..., Any]], None]) -> None:
    """Install them in this process; ``rebind``: of install.py."""
    rebind(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", _leave_config_alone
    )
    rebind("sglang.srt.models.deepseek_v4.MqaAttentionBase._kernel_num_heads", _local_heads)
    # Data parallel attention: rows are gathered by plain copies, and nothing is pinned on the way.
    # Only these two modules' view of the device changes.
    attention = importlib.import_module("sglang.srt.layers.dp_attention")
    attention.memcpy_func = attention.memcpy_cpu
    importlib.import_module("sglang.srt.model_executor.forward_batch_info")._is_cpu = True
    backend = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend_hip_radix")
    backend.DeepseekV4HipRadixBackend.get_cpu_graph_seq_len_fill_value = _least_length
    # SGLang registers its collectives with torch for the accelerator's backend only.
    parallel = "sglang.srt.distributed.parallel_state"
    rebind(f"{parallel}.GroupCoordinator.all_reduce", _coordinated_all_reduce)
    rebind(f"{parallel}.inplace_all_reduce", _all_reduce)
    rebind(f"{parallel}.reg_all_gather_into_tensor", _all_gather_into_tensor)
    rebind(f"{parallel}.reg_reduce_scatter_tensor", _reduce_scatter_tensor)


def _sum(tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    """The sum over the ranks, in place, added in the order of the ranks.

    gloo's own adds in an order that depends on where an element lies in the tensor, so that a token's
    bits would depend on who shares the batch. (Of two ranks there is one order.)
    """
    ranks = torch.distributed.get_world_size(group)
    if ranks <= 2:
        torch.distributed.all_reduce(tensor, group=group)
        return
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    torch.distributed.all_gather(parts, tensor, group=group)
    tensor.copy_(parts[0])
    for part in parts[1:]:
        tensor += part


def _coordinated_all_reduce(group: Any, input_: torch.Tensor) -> torch.Tensor:
    """Stands for ``GroupCoordinator.all_reduce``."""
    if group.world_size > 1:
        _sum(input_, group.device_group)
    return input_


def _all_reduce(tensor: torch.Tensor, group_name: str) -> None:
    """Stands for ``inplace_all_reduce``: the sum over a group's ranks, in place."""
    _sum(tensor, _group(group_name))


def _all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """Stands for ``reg_all_gather_into_tensor``: the ranks' inputs, one after the other."""
    torch.distributed.all_gather_into_tensor(output, input, group=_group(group_name))


def _reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """Stands for ``reg_reduce_scatter_tensor``: this rank's part of the sum of the inputs."""
    total = input.clone()
    _all_reduce(total, group_name)
    rank = torch.distributed.get_rank(_group(group_name))
    output.copy_(total.view(-1, *output.shape)[rank])


def _group(name: str) -> torch.distributed.ProcessGroup:
    """A group of ranks by SGLang's name for it."""
    state = importlib.import_module("sglang.srt.distributed.parallel_state")
    return state._groups[name]().device_group


def _least_length(backend: Any) -> int:
    """The length of a padded row: as on a GPU. The backend has no answer for a CPU."""
    return backend.get_cuda_graph_seq_len_fill_value()


def _leave_config_alone(model_config: Any, *_how: Any) -> Any:
    """Stands for ``adjust_config_with_unaligned_cpu_tp``, which gives DeepSeek-V4's one KV head to each
    rank by raising their number; its KV is replicated."""
    return model_config


def _local_heads(layer: Any, num_tokens: int) -> int:
    """Stands for ``_kernel_num_heads``, which pads a rank's query heads to the 64 of the GPU kernels.
    Heads do not see each other, and here each would cost its full price."""
    return layer.n_local_heads
