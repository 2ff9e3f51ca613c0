"""Facts about each family of models, by `model_type` of config.json; docs/models.md lists them.

Facts that config.json states itself (experts, windows, softcaps, a tied head) are not repeated here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_MIXTRAL_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.weight", ".w1.weight"),
    (".down_proj.weight", ".w2.weight"),
    (".up_proj.weight", ".w3.weight"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """Facts about a family that learner, engine, sizing and checks need in addition to its config.json.

    Attributes:
        name: name in messages.
        is_tested: whether the learner trains the family without `model.trust_architecture`.
        takes_images: whether a vision tower turns the prompt's images into states of tokens.
        has_projection_bias: whether the projections to queries, keys and values have a bias.
        has_all_biases: whether the output projection, routers and experts have biases, too.
        has_head_norms: whether queries and keys are normalised per head.
        has_joint_norms: whether queries and keys are normalised over all heads together.
        has_plain_norms: whether the norms of queries and keys, if any, have no weights.
        alternates_windows: whether every second layer has no window in an engine, whatever layer_types says.
        clamps_mlp: whether an MLP clamps both of its halves, and keeps them for the backward pass.
        has_sinks: whether each attention head has a sink: the score of a token without a value.
        joins_experts: whether transformers computes all experts of a layer in one product, for all tokens.
        has_shared_expert: whether layers with experts have one more, for all tokens, of the same width.
        weighs_shared_expert: whether the MLP that all tokens use has a weight per token, like an expert.
        multiplies_logits: whether `logits_scaling` multiplies the logits instead of dividing them.
        corrects_scores: whether routers add a correction to the scores by which they choose experts.
        stored_names: parts of tensor names, as pairs: in transformers' model, in checkpoints.
        stacks_experts: whether checkpoints also store all experts of a layer in one tensor per projection.
        holds_experts_transposed: whether an expert's matrices are (inputs, outputs) in transformers, too.
        transposes_experts: whether checkpoints store an expert's matrices transposed, (inputs, outputs).
        keys_for_engines: keys and values that engines need in config.json but transformers does not write.
        has_layers_of_own_sizes: whether layers differ in kind, or in the sizes of heads, keys or MLPs.
        has_states: whether some layers have a state per sequence, which each token updates.
        has_uniform_cache: whether all layers keep keys and values of every token in an engine.
        has_longer_window_in_engines: whether sliding windows are one token longer in engines than in
            transformers.
    """

    name: str = ""
    is_tested: bool = True
    takes_images: bool = False
    has_projection_bias: bool = False
    has_all_biases: bool = False
    has_head_norms: bool = False
    has_joint_norms: bool = False
    has_plain_norms: bool = False
    alternates_windows: bool = False
    clamps_mlp: bool = False
    has_sinks: bool = False
    joins_experts: bool = False
    has_shared_expert: bool = False
    weighs_shared_expert: bool = False
    multiplies_logits: bool = False
    corrects_scores: bool = False
    stored_names: tuple[tuple[str, str], ...] = ()
    stacks_experts: bool = False
    holds_experts_transposed: bool = False
    transposes_experts: bool = False
    keys_for_engines: tuple[tuple[str, str | float], ...] = ()
    has_layers_of_own_sizes: bool = False
    has_states: bool = False
    has_uniform_cache: bool = False
    has_longer_window_in_engines: bool = False


FAMILIES: Final[Mapping[str, ModelFamily]] = {
    "arcee": ModelFamily(name="Arcee"),
    "cohere": ModelFamily(name="Cohere (Command R)"),
    "cohere2": ModelFamily(name="Cohere 2 (Command R7B)", has_longer_window_in_engines=True),
    "deepseek_v2": ModelFamily(
        name="DeepSeek-V2", keys_for_engines=(("scoring_func", "softmax"), ("moe_layer_freq", 1))
    ),
    "deepseek_v3": ModelFamily(
        name="DeepSeek-V3",
        corrects_scores=True,
        keys_for_engines=(("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("moe_layer_freq", 1)),
    ),
    "ernie4_5": ModelFamily(name="ERNIE 4.5"),
    "exaone4": ModelFamily(name="EXAONE 4"),
    "gemma": ModelFamily(name="Gemma"),
    "gemma2": ModelFamily(name="Gemma 2"),
    "gemma3_text": ModelFamily(name="Gemma 3, text"),
    "gemma4_text": ModelFamily(name="Gemma 4, text", has_layers_of_own_sizes=True),
    "glm": ModelFamily(name="GLM-4-9B"),
    "glm4": ModelFamily(name="GLM-4-0414"),
    "glm4_moe": ModelFamily(name="GLM-4.5, GLM-4.5-Air", corrects_scores=True),
    "gpt_oss": ModelFamily(
        name="GPT-OSS",
        has_projection_bias=True,
        has_all_biases=True,
        alternates_windows=True,
        clamps_mlp=True,
        has_sinks=True,
        stacks_experts=True,
        keys_for_engines=(("swiglu_limit", 7.0),),
    ),
    "glm4_moe_lite": ModelFamily(name="GLM-4.7-Flash", corrects_scores=True),
    "granite": ModelFamily(name="Granite"),
    "helium": ModelFamily(name="Helium"),
    "hunyuan_v1_dense": ModelFamily(name="Hunyuan, dense", keys_for_engines=(("use_qk_norm", True),)),
    "hyperclovax": ModelFamily(name="HyperCLOVA X", is_tested=False, multiplies_logits=True),
    "llama": ModelFamily(name="Llama", has_uniform_cache=True),
    "llama4_text": ModelFamily(
        name="Llama 4, text",
        has_plain_norms=True,
        joins_experts=True,
        has_shared_expert=True,
        holds_experts_transposed=True,
    ),
    "minimax_m2": ModelFamily(
        name="MiniMax-M2",
        has_joint_norms=True,
        corrects_scores=True,
        stored_names=_MIXTRAL_NAMES,
        keys_for_engines=(("scoring_func", "sigmoid"), ("use_routing_bias", True), ("use_qk_norm", True)),
    ),
    "ministral3": ModelFamily(name="Ministral 3"),
    "mistral": ModelFamily(name="Mistral", has_uniform_cache=True),
    "mixtral": ModelFamily(name="Mixtral", has_uniform_cache=True, stored_names=_MIXTRAL_NAMES),
    "olmo": ModelFamily(name="OLMo"),
    "olmoe": ModelFamily(name="OLMoE", has_joint_norms=True),
    "olmo2": ModelFamily(name="OLMo 2", has_joint_norms=True, has_uniform_cache=True),
    "olmo3": ModelFamily(name="OLMo 3", has_joint_norms=True),
    "phi": ModelFamily(name="Phi-1, Phi-2"),
    "phi3": ModelFamily(name="Phi-3, Phi-4", has_uniform_cache=True),
    "qwen2": ModelFamily(name="Qwen 2, Qwen 2.5", has_projection_bias=True, has_uniform_cache=True),
    "qwen2_5_vl": ModelFamily(name="Qwen 2.5 VL", has_projection_bias=True, takes_images=True),
    "qwen2_5_vl_text": ModelFamily(name="Qwen 2.5 VL's decoder", has_projection_bias=True, is_tested=False),
    "qwen2_moe": ModelFamily(
        name="Qwen 2 MoE", has_projection_bias=True, has_uniform_cache=True, weighs_shared_expert=True
    ),
    "qwen3": ModelFamily(name="Qwen 3", has_head_norms=True, has_uniform_cache=True),
    "qwen3_moe": ModelFamily(name="Qwen 3 MoE", has_head_norms=True, has_uniform_cache=True),
    "qwen3_5": ModelFamily(name="Qwen 3.5", takes_images=True, has_layers_of_own_sizes=True, has_states=True),
    "qwen3_5_moe": ModelFamily(
        name="Qwen 3.5 MoE", takes_images=True, has_layers_of_own_sizes=True, has_states=True
    ),
    "qwen3_5_moe_text": ModelFamily(name="Qwen 3.5 MoE, text", has_layers_of_own_sizes=True, has_states=True),
    "qwen3_5_text": ModelFamily(name="Qwen 3.5, text", has_layers_of_own_sizes=True, has_states=True),
    "qwen3_next": ModelFamily(name="Qwen 3 Next", has_layers_of_own_sizes=True, has_states=True),
    "qwen3_vl": ModelFamily(name="Qwen 3 VL", has_head_norms=True, takes_images=True),
    "qwen3_vl_moe": ModelFamily(
        name="Qwen 3 VL MoE", has_head_norms=True, takes_images=True, transposes_experts=True
    ),
    "qwen3_vl_moe_text": ModelFamily(
        name="Qwen 3 VL MoE's decoder",
        is_tested=False,
        has_head_norms=True,
        keys_for_engines=(("norm_topk_prob", True),),
    ),
    "qwen3_vl_text": ModelFamily(name="Qwen 3 VL's decoder", has_head_norms=True, is_tested=False),
    "seed_oss": ModelFamily(name="Seed-OSS"),
    "smollm3": ModelFamily(name="SmolLM3"),
    "starcoder2": ModelFamily(name="StarCoder 2"),
}
"""The families, by `model_type`"""

ARCHITECTURES: Final[Mapping[str, str]] = {
    kind: family.name for kind, family in FAMILIES.items() if family.is_tested
}
"""Names of the families that the learner is tested with, by `model_type`."""

MODELS_WITH_IMAGES: Final = tuple(kind for kind, family in FAMILIES.items() if family.takes_images)
"""The values of `model_type` whose models take images."""

_UNKNOWN = ModelFamily(is_tested=False)


def family_of(model_type: Any) -> ModelFamily:
    """Returns the facts about a `model_type`; those of the plain decoder if it is unknown."""
    return FAMILIES.get(str(model_type), _UNKNOWN)


def family_in(folder: Path) -> ModelFamily:
    """Returns the facts about a folder's language model; those of the plain decoder without config.json."""
    tree = config_tree(folder)
    return family_of((tree.get("text_config") or tree).get("model_type"))


def config_tree(folder: str | Path) -> Mapping[str, Any]:
    """Returns the config.json of a model folder; {} if it is not there, or is not a JSON object."""
    try:
        tree = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}
