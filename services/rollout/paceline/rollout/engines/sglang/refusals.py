"""Settings that SGLang cannot run with, each with its reason; imports nothing of SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.models.facts import config_tree, family_in, family_of
from paceline.rollout.engines import argument_rules as rules

OWN: Final[rules.Refusals] = {
    "model_path": "Paceline sets it; write model.path",
    "tokenizer_path": "token ids go in and come out",
    "skip_tokenizer_init": "Paceline sets it: token ids go in and come out",
    "load_format": "Paceline sets it: weights come only by push",
    "dtype": "Paceline sets it; write model.dtype",
    "sampling_backend": "Paceline sets it: its own backend draws by seed and position",
    "sampling_defaults": "Paceline sets it: a model's own defaults would silently change the sampling",
    "tp_size": "Paceline sets it; write rollout.tensor_model_parallel_size",
    "context_length": "Paceline sets it; write data.max_prompt_length and data.max_response_length",
    "max_running_requests": "Paceline sets it; write rollout.max_num_seqs, which limits prompts, too",
    "random_seed": "Paceline sets it; write trainer.seed",
    "mem_fraction_static": "Paceline sets it; write rollout.gpu_memory_utilization, a share of the whole GPU",
    "enable_memory_saver": "Paceline sets it; write rollout.sleep",
    "device": "Paceline sets it: a GPU if there is one",
    "base_gpu_id": "Paceline sets it; write rollout.devices",
    "nccl_port": "Paceline sets it",
}
"""Arguments that Paceline sets itself"""


REFUSED: Final[rules.Refusals] = {
    **dict.fromkeys(
        (
            "quantization",
            "quantization_param_path",
            "modelopt_quant",
            "quantize_and_serve",
            "rl_quant_profile",
            "torchao_config",
        ),
        rules.QUANTIZED,
    ),
    **dict.fromkeys(("enable_lora", "lora_paths"), rules.ADAPTERS),
    **dict.fromkeys(
        (
            "speculative_algorithm",
            "speculative_draft_model_path",
            "enable_multi_layer_eagle",
            "decoupled_spec_role",
        ),
        rules.DRAFTS,
    ),
    **dict.fromkeys(("json_model_override_args", "revision", "enable_multimodal"), rules.OTHER_MODEL),
    **dict.fromkeys(
        (
            "enable_custom_logit_processor",
            "preferred_sampling_params",
            "dllm_algorithm",
            "enable_mis",
            "rl_on_policy_target",
            "allow_auto_truncate",
        ),
        rules.OTHER_POLICY,
    ),
    **dict.fromkeys(
        (
            "enable_hierarchical_cache",
            "hicache_storage_backend",
            "enable_hisparse",
            "enable_lmcache",
            "enable_flexkv",
            "enable_streaming_session",
            "enable_session_radix_cache",
        ),
        rules.STALE_KEYS,
    ),
    **dict.fromkeys(
        (
            "enable_dp_attention",
            "enable_prefill_cp",
            "enable_prefill_context_parallel",
            "enable_dsa_prefill_context_parallel",
            "elastic_ep_backend",
            "dist_init_addr",
            "use_ray",
        ),
        rules.RANKS,
    ),
    **dict.fromkeys(
        ("enable_eplb", "ep_num_redundant_experts", "enable_elastic_expert_backup", "kt_weight_path"),
        rules.MOVED_EXPERTS,
    ),
    "enable_weights_cpu_backup": rules.MOVED,
    **dict.fromkeys(
        (
            "custom_weight_loader",
            "checkpoint_engine_wait_weights_before_ready",
            "remote_instance_weight_loader_seed_instance_ip",
            "delete_ckpt_after_loading",
        ),
        rules.OTHER_WEIGHTS,
    ),
    **dict.fromkeys(("is_embedding", "encoder_only", "prefill_only_disable_kv_cache"), rules.GENERATES),
    "language_only": rules.OTHER_MODEL,
    "forward_hooks": rules.OTHER_POLICY,
    "enable_mamba_cache_stochastic_rounding": rules.NOT_REPRODUCIBLE,
    "enable_pdmux": rules.GENERATES,
}
"""Refused, unless the value leaves the feature off (null, false, 0 or empty)"""

ALLOWED: Final[rules.Allowed] = {
    "kv_cache_dtype": (("auto",), f"with rounded keys and values {rules.OTHER_POLICY}"),
    "disaggregation_mode": (("null",), "a rollout server both reads prompts and draws"),
    "dp_size": ((1,), rules.RANKS),
    "pp_size": ((1,), rules.RANKS),
    "ep_size": ((1,), rules.RANKS),
    "dcp_size": ((1,), rules.RANKS),
    "attn_cp_size": ((1,), rules.RANKS),
    "moe_dp_size": ((1,), rules.RANKS),
    "nnodes": ((1,), rules.RANKS),
    "cpu_offload_gb": ((0,), rules.MOVED),
    "offload_group_size": ((-1,), rules.MOVED),
    "init_expert_location": (("trivial",), rules.MOVED),
    "model_impl": (("auto", "sglang"), "the push is traced through SGLang's own models"),
}
"""Refused, except for these values"""

UNSUITED: Final = {
    "cohere2": "whose sliding windows SGLang's attention does not prepare",
    "gemma4_text": "whose sizes of heads SGLang reads only for models with images",
    "glm": "whose matrices SGLang, without a model of its own for them, cannot split",
    "gpt_oss": "whose experts SGLang's loader writes in parts only, so that a push cannot fill them",
    "hunyuan_v1_dense": "whose normed queries SGLang's attention gives back in another shape",
    "llama4_text": "whose experts, queries and keys SGLang loads only into the model with images",
    "olmo3": "whose rotary parameters SGLang does not keep from config.json",
    "phi": "whose head has a bias, which SGLang leaves out",
}
"""Values of `model_type` that SGLang 0.5.16 does not start with or computes wrong, and why"""
_STATES: Final = "whose layers have a state for each sequence"


def check(config: RunConfig) -> None:
    """Checks the configuration for settings that SGLang, or its integration here, does not support.

    Raises:
        ConfigError: rollout.engine_kwargs sets an argument that breaks exactness, the push or the service; or
            the run needs a feature of another engine.
    """
    if lacking := _lacking(config):
        raise ConfigError(f"rollout.name: sglang does not go with {'; nor with '.join(lacking)}")
    rules.refuse(config, OWN, REFUSED, ALLOWED)


def _lacking(config: RunConfig) -> list[str]:
    """Names each part of the configuration that needs another engine, and what to change."""
    folder = Path(config.model.path)
    rollout, family, tree = config.rollout, family_in(folder), config_tree(folder)
    other = "or another rollout.name"
    lacking = []
    if rollout.sampler == "engine":
        lacking.append(
            "rollout.sampler: engine, because SGLang's own sampler does not honour every seed: write auto, "
            f"{other}"
        )
    if rollout.in_flight != "wait":
        lacking.append(
            f"rollout.in_flight: {rollout.in_flight}, because it does not tell which weights drew which "
            f"token: write wait, {other}"
        )
    if config.actor.router_replay:
        lacking.append(
            f"actor.router_replay, because its choices of experts are not read: leave it out, {other}"
        )
    if config.data.image_key is not None or family_of(tree.get("model_type")).takes_images:
        lacking.append(f"prompts with images: leave out data.image_key and take a text model, {other}")
    window, longest = _window(tree), config.engine_model_len
    if window and window < longest:
        lacking.append(
            f"the sliding window of {window} tokens, which SGLang leaves out or makes a token too short: "
            f"limit data.max_prompt_length + data.max_response_length, now {longest}, to {window}, {other}"
        )
    why = _STATES if family.has_states else UNSUITED.get(str(tree.get("model_type")))
    if why:
        lacking.append(f"{family.name or 'this model'}, {why}: take another model, {other}")
    return lacking


def _window(tree: Mapping[str, Any]) -> int:
    """Returns the length in tokens of the sliding windows that the learner's model has; 0 for none.

    Of some models, SGLang 0.5.16 leaves the windows out. Of the others, a drawn token does not see the oldest
    token of its window with SGLang's Triton kernels (`update_sliding_window_buffer`).
    """
    if not tree.get("use_sliding_window", True):
        return 0
    kinds = tree.get("layer_types")
    if kinds and "sliding_attention" not in kinds:
        return 0
    return int(tree.get("sliding_window") or 0)
