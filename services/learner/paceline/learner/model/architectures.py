"""Adapts models to the learner, and refuses those that it cannot train."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from paceline.core.errors import ConfigError, ModelError
from paceline.models.facts import ARCHITECTURES, family_of

log = logging.getLogger(__name__)

_ROPE_BY_LENGTH = ("longrope", "dynamic")
"""Kinds of rotary embedding whose frequencies depend on the longest sequence of a forward pass."""


def require_known(config: Any, *, trust_architecture: bool) -> None:
    """Refuses an architecture that is not in the table, unless it is trusted.

    Raises:
        ModelError: the architecture is refused.
    """
    if getattr(config.get_text_config(), "enable_moe_block", False):
        raise ModelError(
            f"{config.model_type} with experts (enable_moe_block) has a router that Paceline does not know; "
            "take a model of this kind without experts, or another one of docs/models.md"
        )
    kinds = ("sliding_attention", "full_attention")
    if family_of(config.model_type).alternates_windows and any(
        kind != kinds[layer % 2] for layer, kind in enumerate(config.layer_types)
    ):
        raise ModelError(
            f"layer_types of this {config.model_type} do not alternate between {kinds[0]} and {kinds[1]}, "
            "as engines assume, so the engine's log-probs would differ; take a model where they do"
        )
    if config.model_type == "llama4":
        raise ModelError(
            "llama4 takes images, too, and Paceline trains only its text model; write that to a folder of "
            "its own with transformers' AutoModelForCausalLM (from_pretrained, then save_pretrained), with "
            "the tokenizer's files, and set model.path to it"
        )
    if config.model_type == "llama4_text":
        _require_layers_of_engines(config)
    if config.model_type in ARCHITECTURES or trust_architecture:
        return
    raise ModelError(
        f"model_type {config.model_type!r} is not among the architectures that Paceline is tested with "
        "(docs/models.md); use one of those, or set model.trust_architecture: true: it is then "
        "accepted if its self-test passes"
    )


def _require_layers_of_engines(config: Any) -> None:
    """Refuses a Llama 4 that engines would compute in another way, as they do not read all its settings.

    Raises:
        ModelError: names the setting.
    """
    step, num_layers = config.interleave_moe_layer_step, config.num_hidden_layers
    wrong = {
        "num_experts_per_tok": config.num_experts_per_tok != 1,
        "attention_bias": config.attention_bias,
        "moe_layers": list(config.moe_layers) != [*range(num_layers)[step - 1 :: step]],
        "layer_types": [kind == "chunked_attention" for kind in config.layer_types]
        != [bool(rotates) for rotates in config.no_rope_layers],
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ModelError(
            f"{config.model_type} with {name}={getattr(config, name)}: engines take it for granted that a "
            "token has one expert, that projections have no bias, that experts are in every "
            "interleave_moe_layer_step-th layer and chunks in those with rotary embedding, so the engine's "
            "log-probs would differ; take a model of which this is true, like the published ones"
        )


def require_text_alone(config: Any) -> None:
    """Refuses a model with a vision tower if transformers has no reward model of its kind.

    Raises:
        ModelError: transformers has no such reward model.
    """
    if family_of(config.model_type).takes_images:
        raise ModelError(
            f"{config.model_type} takes images, too, and transformers has no reward model of this kind; take "
            "a model that only takes text (docs/models.md)"
        )


def model_class(config: Any) -> Any:
    """Returns transformers' class for a model of this kind, a body with a language-model head."""
    return AutoModelForImageTextToText if family_of(config.model_type).takes_images else AutoModelForCausalLM


def require_length(config: Any, longest: int) -> None:
    """Refuses rows whose length makes log-probs depend on neighbours, or differ from the engine's.

    Args:
        longest: prompt and response tokens of the longest row of the run.

    Raises:
        ModelError: names the longest allowed length.
    """
    text = config.get_text_config()
    if family_of(config.model_type).has_longer_window_in_engines and longest > text.sliding_window:
        raise ModelError(
            f"{config.model_type} attends to a window of {text.sliding_window} tokens, which engines count "
            "in another way than transformers, so engine and learner differ in longer rows; lower "
            f"data.max_prompt_length + data.max_response_length, now {longest}, to {text.sliding_window}, or "
            "use another model"
        )
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    parts: list[dict[str, Any]] = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for parameters in parts:
        kind = parameters.get("rope_type")
        if kind not in _ROPE_BY_LENGTH:
            continue
        original: int = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        if longest > original:
            raise ModelError(
                f"{config.model_type} with {kind} rotary embeddings changes its frequencies where a row of "
                f"the micro-batch has more than {original} tokens, so a row's log-probs depend on the rows "
                f"beside it; lower data.max_prompt_length + data.max_response_length, now {longest}, to "
                f"{original}, or use another model"
            )


def without_dropout(config: Any) -> Any:
    """Sets every dropout of the configuration to 0: with dropout, two forward passes would differ."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            is_dropout = "dropout" in name or name.endswith(("pdrop", "jitter_noise"))
            if is_dropout and isinstance(value, int | float) and not isinstance(value, bool) and value:
                log.info("%s=%g of the model's config.json is set to 0", name, value)
                setattr(part, name, 0.0)
    return config


def require_layers(lm: nn.Module) -> None:
    """Refuses layers that the learner cannot train correctly.

    Layers that pass a state from token to token ignore the boundaries of packed sequences. Checkpoint tensors
    that are not parameters would be neither loaded nor pushed.

    Raises:
        ModelError: names the layer.
    """
    parameters = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    known = {*recurrent_layers(lm)}
    for module in lm.modules():
        if module not in known and any(isinstance(child, nn.Conv1d) for child in module.children()):
            raise ModelError(
                f"{type(lm).__name__} has recurrent or convolution layers ({type(module).__name__}); over "
                "packed sequences they would mix the tokens of neighbours, so such a model cannot be "
                "trained; use one of the architectures of docs/models.md"
            )
    others = sorted(lm.state_dict().keys() - parameters)
    if others:
        raise ModelError(
            f"{type(lm).__name__} keeps {len(others)} tensors in its checkpoint that are no parameters "
            f"({others[0]}); the learner would neither load nor push them; use one of the architectures of "
            "docs/models.md"
        )


def recurrent_layers(lm: nn.Module) -> list[nn.Module]:
    """Returns the stateful layers that the learner can run: Gated DeltaNets."""
    return [module for module in lm.modules() if type(module).__name__.endswith("GatedDeltaNet")]


def stacks_of(module: nn.Module) -> list[str]:
    """Returns the parameters of a module that stack the matrices of a layer's experts; none for others."""
    if not type(module).__name__.endswith("Experts"):
        return []
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]


def require_shared_tokens(config: Any, num_ranks: int) -> None:
    """Refuses a model if `num_ranks` ranks cannot share the tokens of its rows.

    Raises:
        ConfigError: the ranks cannot share the tokens.
    """
    heads = config.get_text_config().num_attention_heads
    if heads % num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks cannot share the {heads} attention heads of this model evenly; set "
            f"learner.context_parallel (or tensor_parallel) to a divisor of {heads}"
        )
    if family_of(config.model_type).has_states:
        raise ConfigError(
            f"ranks cannot share the tokens of rows of {config.model_type}, whose layers hand a state from "
            "token to token; set learner.context_parallel: 1"
        )
    if family_of(config.model_type).has_layers_of_own_sizes:
        raise ConfigError(
            f"ranks cannot share the tokens of rows of {config.model_type}, whose layers have heads of "
            "several sizes; set learner.context_parallel: 1"
        )


class UncompilableError(ConfigError):
    """The layers of a model have no compiled form."""


def require_compilable(config: Any) -> None:
    """Refuses to compile layers that share keys and values with later layers, or pass a state along tokens.

    Shared keys and values bypass the results of a graph. States are computed per sequence, and sequences
    differ in length.

    Raises:
        UncompilableError: the layers cannot be compiled.
    """
    if getattr(config.get_text_config(), "num_kv_shared_layers", 0):
        raise UncompilableError(
            f"layers of {config.model_type} share keys and values, which compiled layers do not; set "
            "actor.compile: false"
        )
    if family_of(config.model_type).has_states:
        raise UncompilableError(
            f"layers of {config.model_type} hand a state from token to token, which compiled layers do not; "
            "set actor.compile: false"
        )


def logit_scale(config: Any) -> float:
    """Returns the factor of the logits after the head; 1 for most models."""
    text = config.get_text_config()
    factor, divisor = getattr(text, "logit_scale", None), getattr(text, "logits_scaling", None)
    if factor is not None:
        return float(factor)
    if divisor is None:
        return 1.0
    return float(divisor) if family_of(text.model_type).multiplies_logits else 1.0 / float(divisor)


def logit_softcap(config: Any) -> float | None:
    """Returns the bound c of logits that become c tanh(logits / c); None for most models."""
    cap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return None if cap is None else float(cap)
