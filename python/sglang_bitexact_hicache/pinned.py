"""Seam: pinned host memory, as SGLang gets it for its own host pools.

Answers to `ALLOC_MEMORY_FUNCS` (mem_cache/pool_host/common.py): the memory is allocated as it is and
then registered with the device (on ROCm with HSA_USERPTR_FOR_PAGED_MEM=0 it is the driver's own), so
that its size is what was asked for: torch's pinned allocator would round it up to a power of two.
Registering pins every page; if that fails, it fails here, at startup. Main thread of a scheduler.
"""

from __future__ import annotations

import torch


def allocate(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Host memory that copies from and to `device` need not wait for: uint8 of that shape.

    A row is never split over two registrations, or one copy would span both. Raises RuntimeError when
    it cannot be had or registered.
    """
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, HostTensorAllocator

    return ALLOC_MEMORY_FUNCS[device.type](
        shape,
        dtype=torch.uint8,
        device="cpu",
        pin_memory=True,
        allocator=HostTensorAllocator(),
        registration_granularity_bytes=shape[1],
    )


def release(memory: torch.Tensor) -> None:
    """Undo the registration: left to the kernel at the end of a process, it takes tens of seconds."""
    from sglang.srt.mem_cache.pool_host import common

    if hasattr(memory, common._CUDA_HOST_REGISTERED_RANGES_ATTR):
        common._cuda_host_unregister(memory)
