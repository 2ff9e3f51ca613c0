"""Arguments of vLLM that `rollout.engine_kwargs` may not set, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.models.facts import family_in

MIN_TEMPERATURE: Final = 0.01
"""vLLM silently raises smaller temperatures to this value, but the learner would use the given one."""

Refusals = Mapping[str, str]
"""Argument -> why it is refused"""

OWN: Final[Refusals] = {
    "model": "Paceline sets it; write model.path",
    "skip_tokenizer_init": "Paceline sets it: token ids go in and come out",
    "load_format": "Paceline sets it: weights come only by push",
    "dtype": "Paceline sets it; write model.dtype",
    "logprobs_mode": "Paceline sets it: the loss needs the log-probabilities of what was sampled from",
    "generation_config": "Paceline sets it: a model's own defaults would silently change the sampling",
    "worker_extension_cls": "Paceline sets it: the push runs in it",
    "worker_cls": "the push is mixed into vLLM's own worker",
    "seed": "Paceline sets it; write trainer.seed",
    "tensor_parallel_size": "Paceline sets it; write rollout.tensor_model_parallel_size",
    "max_model_len": "Paceline sets it; write data.max_prompt_length and data.max_response_length",
    "max_num_seqs": "Paceline sets it; write rollout.max_num_seqs, which also limits the prompts taken",
    "enforce_eager": "Paceline sets it; write rollout.enforce_eager",
    "gpu_memory_utilization": "Paceline sets it; write rollout.gpu_memory_utilization",
    "enable_sleep_mode": "Paceline sets it; write rollout.sleep",
}
"""Arguments that Paceline sets itself"""

_OTHER_MODEL: Final = "the engine would run another model than the learner trains"
_OTHER_POLICY: Final = (
    "samples would be drawn from another distribution than the one that the learner computes"
)
_STALE_KEYS: Final = "keys and values of older weights would outlive the reset of the prefix cache"
_RANKS: Final = "a server's ranks are its tensor-parallel ranks; write rollout.replicas for more servers"
_MOVED: Final = "parameters would not stay where a push writes them"
_IMAGES: Final = "a server sends each image once, to a cache whose kind and size must not change"
_NOT_REPRODUCIBLE: Final = "the same request would not give the same sample again"

REFUSED: Final[Refusals] = {
    "quantization": "weights are pushed as they are trained, into parameters that are not quantized",
    "quantization_config": "weights are pushed as they are trained, into parameters that are not quantized",
    "enable_lora": "adapters are no part of a push: what is sampled from would not be what is trained",
    "default_mm_loras": "adapters are no part of a push: what is sampled from would not be what is trained",
    "hf_overrides": _OTHER_MODEL,
    "hf_config_path": _OTHER_MODEL,
    "model_weights": _OTHER_MODEL,
    "model_class_overrides": _OTHER_MODEL,
    "revision": _OTHER_MODEL,
    "code_revision": _OTHER_MODEL,
    "runner": "a rollout server generates",
    "convert": "a rollout server generates",
    "speculative_config": "a draft model is no part of a push, and a sample would depend on what it proposes",
    "spec_method": "a draft model is no part of a push, and a sample would depend on what it proposes",
    "spec_model": "a draft model is no part of a push, and a sample would depend on what it proposes",
    "spec_tokens": "a draft model is no part of a push, and a sample would depend on what it proposes",
    "diffusion_config": _OTHER_POLICY,
    "logits_processors": _OTHER_POLICY,
    "watermark_config": _OTHER_POLICY,
    "override_generation_config": _OTHER_POLICY,
    "kv_sharing_fast_prefill": _OTHER_POLICY,
    "kv_transfer_config": _STALE_KEYS,
    "ec_transfer_config": _STALE_KEYS,
    "kv_offloading_size": _STALE_KEYS,
    "data_parallel_rank": _RANKS,
    "data_parallel_start_rank": _RANKS,
    "data_parallel_size_local": _RANKS,
    "data_parallel_address": _RANKS,
    "data_parallel_rpc_port": _RANKS,
    "data_parallel_hybrid_lb": _RANKS,
    "data_parallel_external_lb": _RANKS,
    "data_parallel_multi_port_external_lb": _RANKS,
    "enable_elastic_ep": _RANKS,
    "language_model_only": _OTHER_MODEL,
    "mm_encoder_only": "a rollout server generates",
    "mm_device_do_normalize": "pixels are normalised already: vLLM would do it again",
    "video_pruning_rate": _OTHER_POLICY,
    "enable_eplb": "experts would move between ranks, away from where a push loads them",
    "offload_params": _MOVED,
    "cpu_offload_params": _MOVED,
    "weight_transfer_config": "weights come only over Paceline's own weight group",
    "enable_fault_tolerance": "vLLM would restart an engine without the weights that were pushed into it",
    "enable_mamba_cache_stochastic_rounding": _NOT_REPRODUCIBLE,
}
"""Refused, unless the value leaves the feature off (null, false, 0 or empty)"""

ALLOWED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "kv_cache_dtype": (("auto",), f"with rounded keys and values {_OTHER_POLICY}"),
    "mamba_cache_dtype": (("auto", "float32"), f"with a rounded state {_OTHER_POLICY}"),
    "mamba_ssm_cache_dtype": (("auto", "float32"), f"with a rounded state {_OTHER_POLICY}"),
    "data_parallel_size": ((1,), _RANKS),
    "pipeline_parallel_size": ((1,), _RANKS),
    "prefill_context_parallel_size": ((1,), _RANKS),
    "nnodes": ((1,), _RANKS),
    "distributed_executor_backend": (("mp", "uni"), "the engine's processes must be children of the server"),
    "cpu_offload_gb": ((0,), _MOVED),
    "offload_backend": (("auto",), _MOVED),
    "offload_group_size": ((0,), _MOVED),
    "prefix_caching_hash_algo": (
        ("sha256", "sha256_cbor"),
        "other hashes collide: a prompt would be answered with the keys and values of another",
    ),
    "disable_sliding_window": ((False,), _OTHER_MODEL),
    "mm_processor_cache_gb": ((0,), _IMAGES),
    "mm_processor_cache_type": (("lru",), _IMAGES),
}
"""Refused, except for these values"""

ON_CPU: Final[Refusals] = {
    "enable_chunked_prefill": "on a CPU a chunked prompt's samples are not reproducible",
}
"""Refused only on a CPU, unless false"""


def check(config: RunConfig) -> None:
    """Checks `rollout.*` for settings that must not reach vLLM; imports nothing of vLLM.

    Raises:
        ConfigError: rollout.engine_kwargs sets an argument that breaks exactness, the push or the service, or
            vLLM would change rollout.temperature.
    """
    temperature = config.rollout.temperature
    if temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"rollout.temperature={temperature}: vLLM samples at {MIN_TEMPERATURE} or above, "
            "but the learner would divide its logits by the smaller value; raise it"
        )
    _refuse(config, {name: _reason(name, value) for name, value in config.rollout.engine_kwargs.items()})


def check_on_cpu(config: RunConfig) -> None:
    """Checks, like `check`, for settings that are refused only on a CPU."""
    kwargs, model = config.rollout.engine_kwargs, config.model
    if model.dtype != "bfloat16" and family_in(Path(model.path)).has_states:
        raise ConfigError(
            "vLLM's build for the CPU computes layers with a state only in bfloat16, but model.dtype is "
            f"{model.dtype}; set model.dtype: bfloat16"
        )
    _refuse(config, {name: reason for name, reason in ON_CPU.items() if kwargs.get(name)})


def _refuse(config: RunConfig, reasons: Mapping[str, str | None]) -> None:
    kwargs = config.rollout.engine_kwargs
    lines = [f"{name}={kwargs[name]!r}: {reason}" for name, reason in sorted(reasons.items()) if reason]
    if lines:
        raise ConfigError(f"rollout.engine_kwargs may not set {'; '.join(lines)}. Remove it")


def _reason(name: str, value: object) -> str | None:
    """Says why the argument may not have this value; None if it may."""
    if name in OWN:
        return OWN[name]
    if name in ALLOWED:
        allowed, reason = ALLOWED[name]
        if value in allowed:
            return None
        return f"{reason} (allowed: {', '.join(map(str, allowed))})"
    return REFUSED.get(name) if value else None
