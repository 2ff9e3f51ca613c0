"""Derives vLLM's arguments from the run's configuration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from paceline.config.run import RunConfig
from paceline.core.errors import ModelError
from paceline.engines.vllm import VLLM
from paceline.models.facts import config_tree, family_in, family_of
from paceline.models.model_shape import ModelShape, dense_size
from paceline.rollout.engines.vllm.images import vision
from paceline.rollout.engines.vllm.start import refusals
from paceline.storage.weight_files import is_dequantised
from paceline.weights import corrections

WORKER_EXTENSION = "paceline.rollout.engines.vllm.worker.PacelineWorkerExtension"
"""The class for `AsyncEngineArgs(worker_extension_cls=...)`"""

GRAPHS_ALONE: Final[Mapping[str, object]] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's compilation for small models: none, only full CUDA graphs for decoding."""

_CPU_PREFILL_TOKENS = 4096
# vLLM's block of the KV cache on a CPU, in tokens.
_CPU_BLOCK = 128
# Arguments with which the user sets the size of the KV cache.
_OTHER_CACHE = {"block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override"}


def engine_arguments(
    config: RunConfig,
    *,
    on_cpu: bool,
    load_format: str = "dummy",
    worker_extension: str | None = WORKER_EXTENSION,
) -> dict[str, Any]:
    """Returns the keyword arguments of vLLM's AsyncEngineArgs.

    Weights come only by push, so vLLM loads none. Only tests and benchmarks of the engine pass another
    `load_format` or a `worker_extension` of None.

    Raises:
        ConfigError: as in `refusals.check` and `refusals.check_on_cpu`.
    """
    rollout, model = config.rollout, config.model
    refusals.check(config)
    if on_cpu:
        refusals.check_on_cpu(config)
    arguments: dict[str, Any] = {
        "model": model.path,
        "skip_tokenizer_init": True,
        "load_format": load_format,
        "dtype": model.dtype,
        # Log-probabilities of the distribution that is sampled from, that is, after the temperature.
        "logprobs_mode": "processed_logprobs",
        # With "auto", a model's generation_config.json would silently change the sampling.
        "generation_config": "vllm",
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": config.engine_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "seed": config.trainer.seed,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if overrides := config_overrides(Path(model.path)):
        arguments["hf_overrides"] = overrides
    if vision.has_tower(Path(model.path)):
        arguments |= vision.arguments(on_cpu=on_cpu)
    arguments |= layers_with_states(Path(model.path))
    if config.actor.router_replay:
        arguments[refusals.CHOICES] = True
    if worker_extension is not None:
        arguments["worker_extension_cls"] = worker_extension
    arguments |= llama4_attention(Path(model.path), on_cpu=on_cpu)
    if on_cpu:
        arguments |= _cpu_arguments(config) | latent_attention_on_cpu(Path(model.path)) | cpu_cache(config)
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        arguments["enable_sleep_mode"] = rollout.sleep == "always"
        if not rollout.enforce_eager:
            arguments |= for_host(Path(model.path))
    return arguments | rollout.engine_kwargs


def for_host(folder: Path) -> dict[str, Any]:
    """Returns arguments for small models, whose steps on a GPU wait for the host; {} for others.

    Compiled layers need more of the host's time: with 0.5B a step takes a quarter longer, with 3B as long,
    with 7B a twentieth less, and a start compiles for six seconds or more. A process of its own for the model
    computes while the engine plans the next step: generation takes three quarters of the time with 0.5B, 0.8
    to 0.99 of it with 1.5B and 3B, and as long with 7B (benchmarks/journal/gpus.md).
    """
    tree = _text_config(folder)
    try:
        size = dense_size(int(tree["num_hidden_layers"]), int(tree["hidden_size"]))
    except (ValueError, KeyError, TypeError):
        return {}
    if size >= VLLM.small_below:
        return {}
    return {"compilation_config": dict(GRAPHS_ALONE), "distributed_executor_backend": "mp"}


def latent_attention_on_cpu(folder: Path) -> dict[str, Any]:
    """Returns arguments for models with latent attention (DeepSeek-V2, V3); {} for others.

    vLLM's own rotary kernel for the CPU treats (tokens, heads, size) as one head (seen in 0.32), so queries
    and keys would be wrong; torch's code replaces it. On a CPU with AMX, vLLM would choose an attention
    backend that only supports bfloat16, and an engine in float32 would not start.
    """
    if not _text_config(folder).get("kv_lora_rank"):
        return {}
    return {
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        "attention_backend": "CPU_MLA",
    }


def llama4_attention(folder: Path, *, on_cpu: bool) -> dict[str, Any]:
    """Returns arguments for Llama 4; {} for other models.

    vLLM decides by the length of rows whether queries are scaled by their positions, unless a generation
    configuration says it. A chunk must be a multiple of the KV cache's block.
    """
    tree = config_tree(folder)
    if tree.get("model_type") != "llama4_text":
        return {}
    is_scaled = bool(tree.get("attn_temperature_tuning", True))
    arguments: dict[str, Any] = {"override_generation_config": {"attn_temperature_tuning": is_scaled}}
    if on_cpu and (size := tree.get("attention_chunk_size")):
        arguments["block_size"] = math.gcd(int(size), _CPU_BLOCK)
    return arguments


def layers_with_states(folder: Path) -> dict[str, Any]:
    """Returns arguments for models whose layers have a state for each sequence; {} for others.

    The state is in float32, as in the learner, because rounding it at every token would change log-probs.
    Prefix caching would need the state after the cached tokens, which vLLM keeps only with chunked prompts.
    """
    if not family_in(folder).has_states:
        return {}
    return {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}


def cpu_cache(config: RunConfig) -> dict[str, int]:
    """Bounds the KV cache by the samples' needs; {} if rollout.kv_cache_gib is smaller, or with episodes.

    vLLM fills the cache with zeros at its start, which takes longer than the rest of a small model's start.
    With episodes the cache is not bounded, because it also keeps their earlier turns.
    """
    if config.has_episodes or _OTHER_CACHE & config.rollout.engine_kwargs.keys():
        return {}
    try:
        token_bytes = _cache_bytes_per_token(_text_config(Path(config.model.path)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    # vLLM uses one block itself.
    num_blocks = 1 + config.rollout.max_num_seqs * -(-config.engine_model_len // _CPU_BLOCK)
    fits = num_blocks * _CPU_BLOCK * token_bytes < config.rollout.kv_cache_gib << 30
    return {"num_gpu_blocks_override": num_blocks} if token_bytes and fits else {}


def _cache_bytes_per_token(tree: Mapping[str, Any]) -> int:
    """Returns the bytes of keys and values per token in float32; 0 if layers differ in them."""
    kinds = set(tree.get("layer_types") or ()) - {"full_attention"}
    has_window = bool(tree.get("sliding_window")) and tree.get("use_sliding_window", True)
    is_uniform = family_of(tree["model_type"]).has_uniform_cache
    if kinds or has_window or tree.get("kv_lora_rank") or not is_uniform:
        return 0
    shape = ModelShape.of(tree)
    return 4 * shape.num_layers * shape.cached(num_ranks=1) if shape is not None else 0


def config_overrides(folder: Path) -> dict[str, Any] | Callable[[Any], Any]:
    """Returns overrides of config.json for vLLM; {} for most models.

    They add keys that vLLM needs. For a model that the learner dequantises, they remove the quantisation,
    because weights are pushed as they are trained.
    """
    tree = _text_config(folder)
    try:
        missing = corrections.missing_keys(tree) | _sizes_of_full_attention(tree)
        is_quantised = is_dequantised(folder)
    except (OSError, ValueError, AttributeError, ModelError):
        return {}
    if is_quantised:
        return functools.partial(_without_quantisation, missing)
    return {"text_config": missing} if missing and vision.has_tower(folder) else missing


def _sizes_of_full_attention(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Gemma 4's sizes under the names that vLLM 0.24 reads; {} for other models.

    transformers (seen in 5.17) treats them as sizes of single layers and raises an error for a size of the
    entire model, so vLLM 0.24 would not start. vLLM 0.32 reads the sizes of layers.
    """
    if tree.get("model_type") != "gemma4_text":
        return {}
    sizes = {"head_dim": tree.get("global_head_dim", 512)}
    if num_heads := tree.get("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = num_heads
    if layers := tree.get("per_layer_config"):
        sizes = layers[str(tree["layer_types"].index("full_attention"))]
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    own = {name: sizes[layer] for layer, name in names.items() if layer in sizes}
    return {"allow_global_per_layer_attribute_access": True, **own}


def _without_quantisation(missing: Mapping[str, object], config: Any) -> Any:
    config.get_text_config().update(missing)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    return config


def _text_config(folder: Path) -> Mapping[str, Any]:
    tree = config_tree(folder)
    return tree.get("text_config") or tree


def _cpu_arguments(config: RunConfig) -> dict[str, Any]:
    return {
        # A chunked prompt draws from its generator once per chunk. vLLM corrects that by resetting the
        # generator, which a CPU's generator does not support: without chunks, samples are reproducible.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(
            _CPU_PREFILL_TOKENS, config.engine_model_len, config.rollout.max_num_seqs
        ),
    }
