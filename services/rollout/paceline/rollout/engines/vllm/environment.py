"""Environment variables that vLLM reads on import and when it starts its processes.

All of them are set here, before that. A variable that the user has set keeps its value.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from paceline.config.run import RunConfig

_ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Model folders are local; a look-up on the hub would only wait for a timeout.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The flashinfer sampler cannot return the log-probabilities that were sampled from.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # NVLink multicast memory is scarce where a learner uses the same GPUs' fabric.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    # Else asking torch about GPUs in this process would make a CUDA context that is never used.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # CPU: no warm-up passes at start and no inductor; both cost longer than they save without compilation.
    "VLLM_CPU_CI_ENV": "1",
    # CPU: the learner's ranks run on the same cores when the engine does not. Binding would pin both to one
    # core, and threads that spin while they wait would take the time of those that work.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
}


_ON_CPU = {
    # vLLM compiles two small functions whatever `enforce_eager` says. On a CPU that takes seconds in the
    # first batch, and a C++ compiler, which a machine need not have.
    "TORCHDYNAMO_DISABLE": "1",
}


def prepare(
    config: RunConfig, *, num_cores: int | None = None, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Sets what is not set yet.

    Args:
        config: rollout.threads, rollout.kv_cache_gib and telemetry.log_level enter.
        num_cores: cores of this machine that the process may use; None: ask the system.
        environ: what to write to.
    """
    wanted = _ALWAYS | {
        "VLLM_CPU_KVCACHE_SPACE": str(config.rollout.kv_cache_gib),
        "OMP_NUM_THREADS": str(num_threads(config, num_cores or len(os.sched_getaffinity(0)))),
        "VLLM_LOGGING_LEVEL": {"INFO": "WARNING"}.get(config.telemetry.log_level, config.telemetry.log_level),
    }
    for name, value in wanted.items():
        environ.setdefault(name, value)


def prepare_cpu(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what concerns the engine's processes where vLLM has found no GPU; before they start."""
    for name, value in _ON_CPU.items():
        environ.setdefault(name, value)


def num_threads(config: RunConfig, num_cores: int) -> int:
    """CPU threads of one engine rank: rollout.threads, else the cores shared out over the replicas' ranks."""
    ranks = config.rollout.replicas * config.rollout.tensor_model_parallel_size
    return config.rollout.threads or max(1, num_cores // ranks)
