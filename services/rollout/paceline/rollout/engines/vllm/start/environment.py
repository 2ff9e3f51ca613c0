"""Environment variables that vLLM reads on import and when it starts its processes.

All of them are set here before that. A process that imported vLLM before it knew the configuration applies
its values again. A variable that the user has set keeps its value.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

from paceline.config.run import RunConfig
from paceline.engines.vllm import VLLM

_OFFLINE = "HF_HUB_OFFLINE"

_ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Model folders are local; a look-up on the hub would only wait for a timeout.
    _OFFLINE: "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The flashinfer sampler cannot return the log-probabilities that were sampled from.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # The ranks of an engine are on one host, and talk only on loopback.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # NVLink multicast memory is scarce, and a learner on the same host may need it.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    # Without this, asking torch about GPUs creates an unused CUDA context in this process.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # CPU: no warm-up passes at start and no inductor: without compilation they cost more time than they save.
    "VLLM_CPU_CI_ENV": "1",
    # CPU: the learner's ranks run on the same cores while the engine waits. Binding would pin both to one
    # core, and waiting threads that spin would slow down the working ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
}

_FLOAT32 = {
    # GPU: Triton would multiply float32 in TF32, whose 10 bits of mantissa put log-probs 0.05 nats off.
    "TRITON_F32_DEFAULT": "tf32x3",
    # GPU: cuDNN would compute convolutions in TF32; a vision tower begins with one.
    "NVIDIA_TF32_OVERRIDE": "0",
}

_ON_CPU = {
    # vLLM compiles two small functions even with `enforce_eager`. On a CPU that takes seconds in the first
    # batch, and needs a C++ compiler, which not every machine has.
    "TORCHDYNAMO_DISABLE": "1",
    # The engine core forks its workers: see `prefork`.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


def prepare(
    config: RunConfig, *, num_cores: int | None = None, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Sets the variables that are not set yet.

    Args:
        config: gives rollout.threads, rollout.kv_cache_gib and telemetry.log_level.
        num_cores: cores of this machine that the process may use; None: ask the system.
        environ: environment in which to set them.
    """
    variables = _ALWAYS | {
        "VLLM_CPU_KVCACHE_SPACE": str(config.rollout.kv_cache_gib),
        "OMP_NUM_THREADS": str(num_threads(config, num_cores or len(os.sched_getaffinity(0)))),
        "VLLM_LOGGING_LEVEL": {"INFO": "WARNING"}.get(config.telemetry.log_level, config.telemetry.log_level),
    }
    if config.model.dtype == "float32":
        variables |= _FLOAT32
    for name, value in variables.items():
        environ.setdefault(name, value)


def prepare_import(*, on_cpu: bool) -> None:
    """Sets the variables that no configuration changes; call it before an import.

    Access to the hub stays possible, because a server fetches a model that is given by name.
    """
    for name, value in _ALWAYS.items():
        if name != _OFFLINE:
            os.environ.setdefault(name, value)
    if on_cpu:
        prepare_cpu(os.environ)


def apply() -> None:
    """Applies the current variables to a process that has already imported vLLM."""
    import torch
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = os.environ[_OFFLINE] == "1"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    logger, level = logging.getLogger("vllm"), os.environ["VLLM_LOGGING_LEVEL"]
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)


def in_this_process() -> dict[str, str]:
    """Returns the variables of an engine that runs in the calling process."""
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return _ALWAYS | variables | {"VLLM_LOGGING_LEVEL": "ERROR"}


def prepare_cpu(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables of the engine's processes for a machine without a GPU; call it before they start."""
    for name, value in _ON_CPU.items():
        environ.setdefault(name, value)


def batches_draws(config: RunConfig) -> bool:
    """Returns whether this engine draws a batch's tokens at once; see `rollout.sampler`."""
    rollout = config.rollout
    if rollout.sampler == "auto":
        is_alone = rollout.tensor_model_parallel_size == 1 and not VLLM.has_cpu_build
        return is_alone or config.pushes_in_flight
    return rollout.sampler == "batched"


def num_threads(config: RunConfig, num_cores: int) -> int:
    """Returns the CPU threads of an engine rank: rollout.threads, else the cores divided by all ranks."""
    ranks = config.rollout.replicas * config.rollout.tensor_model_parallel_size
    return config.rollout.threads or max(1, num_cores // ranks)
