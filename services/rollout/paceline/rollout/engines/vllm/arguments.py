"""From the run's configuration to vLLM's arguments."""

from __future__ import annotations

from typing import Any

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

WORKER_EXTENSION = "paceline.rollout.engines.vllm.worker.PacelineWorkerExtension"
"""For `AsyncEngineArgs(worker_extension_cls=...)`"""

MIN_TEMPERATURE = 0.01
"""vLLM silently raises smaller temperatures to this; the learner would divide by another number."""

_CPU_PREFILL_TOKENS = 4096


def engine_arguments(
    config: RunConfig,
    *,
    on_cpu: bool,
    load_format: str = "dummy",
    worker_extension: str | None = WORKER_EXTENSION,
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs.

    Weights come by push alone, so vLLM loads none. Only tests and benchmarks of the engine alone pass another
    `load_format` or a `worker_extension` of None.

    Raises:
        ConfigError: rollout.engine_kwargs sets an argument that Paceline relies on, or vLLM would change
            rollout.temperature.
    """
    rollout, model = config.rollout, config.model
    if rollout.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"rollout.temperature={rollout.temperature}: vLLM samples at {MIN_TEMPERATURE} or above, "
            "the learner would divide its logits by another temperature; raise it"
        )
    fixed: dict[str, Any] = {
        "model": model.path,
        "skip_tokenizer_init": True,
        "load_format": load_format,
        "dtype": model.dtype,
        # Log-probabilities of the distribution that was sampled from: after the temperature.
        "logprobs_mode": "processed_logprobs",
        # With "auto", a model's generation_config.json would silently change the sampling.
        "generation_config": "vllm",
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
    }
    if worker_extension is not None:
        fixed["worker_extension_cls"] = worker_extension
    chosen: dict[str, Any] = {
        "max_model_len": config.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "seed": config.trainer.seed,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if on_cpu:
        chosen |= _cpu_arguments(config)
    else:
        chosen["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    clashes = sorted(set(rollout.engine_kwargs) & set(fixed))
    if clashes:
        raise ConfigError(
            f"rollout.engine_kwargs may not set {', '.join(clashes)}: Paceline sets "
            f"{'it' if len(clashes) == 1 else 'them'} itself; take it out"
        )
    return fixed | chosen | rollout.engine_kwargs


def _cpu_arguments(config: RunConfig) -> dict[str, Any]:
    return {
        # A chunked prompt draws from its generator once per chunk. vLLM corrects that by resetting the
        # generator, which a CPU's generator does not support: without chunks, samples are reproducible.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_CPU_PREFILL_TOKENS, config.max_model_len, config.rollout.max_num_seqs),
    }
