"""Sizes SGLang's KV cache by a share of the GPU, as `rollout.gpu_memory_utilization` means it.

SGLang's own `mem_fraction_static` is a share of the memory that was free when the process began, and memory
that other processes take meanwhile (a learner, another engine) counts as its own. Here the budget is a share
of all of the GPU's memory, of which only this process's own use is subtracted:

    cache = share * total - context - reserved after loading - activations and graphs
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from paceline.engines.memory import CONTEXT, GIB
from paceline.engines.sglang import SGLANG


def cache_bytes(share: float, *, total: int, free: int, reserved: int) -> int:
    """Returns the bytes for the KV cache.

    Args:
        share: part of the GPU's memory that the engine may take, context, activations and graphs included.
        total, free, reserved: bytes of the GPU after loading: `reserved` by this process's allocator, and
            `free` to anyone.

    Raises:
        ValueError: nothing is left for the cache, or less is free than the share promises.
    """
    rest = CONTEXT + reserved + SGLANG.rest_bytes
    size = int(share * total) - rest
    if size <= 0:
        raise ValueError(
            f"rollout.gpu_memory_utilization={share:g} is {_gib(share * total)} of the GPU's "
            f"{_gib(total)}; weights, context and activations take {_gib(rest)}, and nothing is left for "
            f"the KV cache: raise it above {rest / total:.3f}, or rollout.tensor_model_parallel_size"
        )
    if size + SGLANG.rest_bytes > free:
        raise ValueError(
            f"{_gib(free)} of the GPU are free, and rollout.gpu_memory_utilization={share:g} wants "
            f"{_gib(size)} for the KV cache beside {_gib(SGLANG.rest_bytes)} for activations: another "
            "process holds the memory; end it or lower the share"
        )
    return size


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def install(share: float) -> None:
    """Makes SGLang size its KV cache by `cache_bytes`, of which the smallest rank's counts; not on a CPU."""
    from sglang.srt.distributed.parallel_state import get_world_group
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    measured = KVCacheConfigurator._profile_available_bytes

    @functools.wraps(measured)
    def by_share(self: Any, pre_model_load_memory: int) -> int:
        if self.device != "cuda":
            return int(measured(self, pre_model_load_memory))
        free, total = torch.cuda.mem_get_info(self.gpu_id)
        reserved = torch.cuda.memory_reserved(self.gpu_id)
        size = torch.tensor(cache_bytes(share, total=total, free=free, reserved=reserved))
        group = get_world_group()
        if group.world_size > 1:
            torch.distributed.all_reduce(size, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return int(size)

    KVCacheConfigurator._profile_available_bytes = by_share
