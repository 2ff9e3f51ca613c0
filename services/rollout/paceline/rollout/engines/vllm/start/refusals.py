"""Arguments of vLLM that `rollout.engine_kwargs` may not set, each with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.models.facts import config_tree, family_in
from paceline.rollout.engines import argument_rules as rules

MIN_TEMPERATURE: Final = 0.01
"""vLLM silently raises smaller temperatures to this value, but the learner would use the given one."""

CPU_BLOCK_STEP: Final = 32
"""Blocks of the KV cache have a multiple of this number of tokens on a CPU."""

CHOICES: Final = "enable_return_routed_experts"
"""The argument with which vLLM returns the choices of experts"""

OWN: Final[rules.Refusals] = {
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
    CHOICES: "Paceline sets it; write actor.router_replay",
    "aux_output_config": "Paceline sets it; write actor.router_replay",
}
"""Arguments that Paceline sets itself"""

_IMAGES: Final = "a server sends each image once, to a cache whose kind and size must not change"

REFUSED: Final[rules.Refusals] = {
    "quantization": rules.QUANTIZED,
    "quantization_config": rules.QUANTIZED,
    "enable_lora": rules.ADAPTERS,
    "default_mm_loras": rules.ADAPTERS,
    "hf_overrides": rules.OTHER_MODEL,
    "hf_config_path": rules.OTHER_MODEL,
    "model_weights": rules.OTHER_MODEL,
    "model_class_overrides": rules.OTHER_MODEL,
    "revision": rules.OTHER_MODEL,
    "code_revision": rules.OTHER_MODEL,
    "runner": rules.GENERATES,
    "convert": rules.GENERATES,
    "speculative_config": rules.DRAFTS,
    "spec_method": rules.DRAFTS,
    "spec_model": rules.DRAFTS,
    "spec_tokens": rules.DRAFTS,
    "diffusion_config": rules.OTHER_POLICY,
    "logits_processors": rules.OTHER_POLICY,
    "watermark_config": rules.OTHER_POLICY,
    "override_generation_config": rules.OTHER_POLICY,
    "kv_sharing_fast_prefill": rules.OTHER_POLICY,
    "kv_transfer_config": rules.STALE_KEYS,
    "ec_transfer_config": rules.STALE_KEYS,
    "kv_offloading_size": rules.STALE_KEYS,
    "data_parallel_rank": rules.RANKS,
    "data_parallel_start_rank": rules.RANKS,
    "data_parallel_size_local": rules.RANKS,
    "data_parallel_address": rules.RANKS,
    "data_parallel_rpc_port": rules.RANKS,
    "data_parallel_hybrid_lb": rules.RANKS,
    "data_parallel_external_lb": rules.RANKS,
    "data_parallel_multi_port_external_lb": rules.RANKS,
    "enable_elastic_ep": rules.RANKS,
    "language_model_only": rules.OTHER_MODEL,
    "mm_encoder_only": rules.GENERATES,
    "mm_device_do_normalize": "pixels are normalised already: vLLM would do it again",
    "video_pruning_rate": rules.OTHER_POLICY,
    "enable_eplb": rules.MOVED_EXPERTS,
    "offload_params": rules.MOVED,
    "cpu_offload_params": rules.MOVED,
    "weight_transfer_config": rules.OTHER_WEIGHTS,
    "enable_fault_tolerance": "vLLM would restart an engine without the weights that were pushed into it",
    "enable_mamba_cache_stochastic_rounding": rules.NOT_REPRODUCIBLE,
}
"""Refused, unless the value leaves the feature off (null, false, 0 or empty)"""

ALLOWED: Final[rules.Allowed] = {
    "kv_cache_dtype": (("auto",), f"with rounded keys and values {rules.OTHER_POLICY}"),
    "mamba_cache_dtype": (("auto", "float32"), f"with a rounded state {rules.OTHER_POLICY}"),
    "mamba_ssm_cache_dtype": (("auto", "float32"), f"with a rounded state {rules.OTHER_POLICY}"),
    "data_parallel_size": ((1,), rules.RANKS),
    "pipeline_parallel_size": ((1,), rules.RANKS),
    "prefill_context_parallel_size": ((1,), rules.RANKS),
    "nnodes": ((1,), rules.RANKS),
    "distributed_executor_backend": (("mp", "uni"), "the engine's processes must be children of the server"),
    "cpu_offload_gb": ((0,), rules.MOVED),
    "offload_backend": (("auto",), rules.MOVED),
    "offload_group_size": ((0,), rules.MOVED),
    "prefix_caching_hash_algo": (
        ("sha256", "sha256_cbor"),
        "other hashes collide: a prompt would be answered with the keys and values of another",
    ),
    "disable_sliding_window": ((False,), rules.OTHER_MODEL),
    "mm_processor_cache_gb": ((0,), _IMAGES),
    "mm_processor_cache_type": (("lru",), _IMAGES),
}
"""Refused, except for these values"""

_NO_CHOICES: Final = "vLLM returns no choices of experts with it, and actor.router_replay needs them"

WITH_CHOICES: Final[rules.Allowed] = {
    "enable_prefix_caching": ((True,), _NO_CHOICES),
    "decode_context_parallel_size": ((1,), _NO_CHOICES),
}
"""Refused with `actor.router_replay`, except for these values"""

ON_CPU: Final[rules.Refusals] = {
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
    allowed = {**ALLOWED, **(WITH_CHOICES if config.actor.router_replay else {})}
    rules.refuse(config, OWN, REFUSED, allowed)


def check_on_cpu(config: RunConfig) -> None:
    """Checks, like `check`, for settings that are refused only on a CPU."""
    model = config.model
    if config.actor.router_replay:
        raise ConfigError(
            "actor.router_replay: vLLM's build for the CPU returns no choices of experts (its second model "
            "runner, which does, needs Triton); leave it out, or sample on GPUs"
        )
    if model.dtype != "bfloat16" and family_in(Path(model.path)).has_states:
        raise ConfigError(
            "vLLM's build for the CPU computes layers with a state only in bfloat16, but model.dtype is "
            f"{model.dtype}; set model.dtype: bfloat16"
        )
    size = config_tree(model.path).get("attention_chunk_size")
    if size and size % CPU_BLOCK_STEP:
        raise ConfigError(
            f"vLLM's build for the CPU divides chunks of attention into blocks of {CPU_BLOCK_STEP} tokens or "
            f"more, but attention_chunk_size of {model.path} is {size}; take a model with a multiple of it"
        )
    rules.refuse(config, {}, ON_CPU, {})
