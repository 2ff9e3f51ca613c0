"""Checks the model, its tokenizer and the frozen networks."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checks.preflight_check import CheckNeed, PreflightCheck
from paceline.checks.service_checks import self_test, with_local_models
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, ModelError
from paceline.core.samples.teacher_top_k import TOP_K_BYTES
from paceline.models.facts import config_tree, family_of
from paceline.models.model_shape import ModelShape, choice_bytes, num_experts_of
from paceline.storage.demo_inputs import how_to_make
from paceline.storage.folder import Folder, is_url
from paceline.storage.hub import is_named
from paceline.storage.models import local_model
from paceline.wire import LIMITS

_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")


def has_chat_template(model: ModelConfig) -> bool:
    """Returns whether the model's tokenizer comes with a chat template; loads no tokenizer."""
    model = local_model(model, "controller")
    folder = Path(model.tokenizer_path or model.path)
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def model_config(config: RunConfig) -> dict[str, Any]:
    """Reads the model's config.json from its folder.

    Raises:
        ModelError: no such folder, no readable config.json, or no weights.
    """
    folder = Path(local_model(config.model, "controller").path)
    if not folder.is_dir():
        remedy = how_to_make(folder) or "set model.path to a folder in the Hugging Face layout"
        raise ModelError(f"model folder {folder} does not exist; {remedy}")
    try:
        tree: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model folder {folder} has no config.json; model.path must name a model") from error
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if config.model.load_format == "auto" and not _has_weights(config.model):
        raise ModelError(
            f"model folder {folder} has no weights (*.safetensors); save them there, or set "
            "model.load_format: random"
        )
    return tree


def _has_weights(model: ModelConfig) -> bool:
    if model.paths.learner is not None:
        return True  # on the learner's hosts
    if is_named(model.path):
        return True  # the learner says if there are none
    if not is_url(model.path):
        return _holds_weights(model.path)
    names = Folder.at(model.path).names()
    return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in _WEIGHTS)


def _holds_weights(folder: str) -> bool:
    return any(any(Path(folder).glob(name)) for name in _WEIGHTS)


def model_line(config: RunConfig) -> str:
    """Reads config.json; states the architecture and the longest sequence."""
    tree = model_config(config)
    text = tree | (tree.get("text_config") or {})  # if there is a vision tower
    longest = text.get("max_position_embeddings")
    if isinstance(longest, int) and config.engine_model_len > longest:
        of_set = config.longest_response > config.data.max_response_length
        response = (
            "the largest max_response_length of data.val_sets" if of_set else "data.max_response_length"
        )
        raise ModelError(
            f"data.max_prompt_length + {response} = {config.engine_model_len} exceed the model's "
            f"max_position_embeddings={longest}; lower them"
        )
    heads, ranks = text.get("num_attention_heads"), config.rollout.tensor_model_parallel_size
    if isinstance(heads, int) and heads % ranks:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={ranks} must divide the model's {heads} attention heads"
        )
    _experts(config, text)
    _room_for_teacher(config)
    _room_for_adapters(config, tree)
    check_critic_of_images(config)
    architecture = ", ".join(tree.get("architectures") or [str(tree.get("model_type"))])
    return f"{config.model.path}: {architecture}, up to {longest} tokens"


def _experts(config: RunConfig, text: Mapping[str, Any]) -> None:
    """Refuses what concerns experts for a model without, and choices of experts that are too large.

    The number of experts has several names in config.json.
    """
    has_experts = any("experts" in key and value for key, value in text.items())
    corrects_scores = family_of(text.get("model_type")).corrects_scores
    config.actor.require_experts(config.model.path, has_experts=has_experts, corrects_scores=corrects_scores)
    config.learner.require_experts(config.model.path, num_experts_of(text))
    if config.actor.router_replay:
        _room_for_choices(config, text)


def _room_for_choices(config: RunConfig, text: Mapping[str, Any]) -> None:
    """Checks that the choices of experts fit into messages and broker."""
    if text.get("num_experts_per_tok") == 1:
        raise ConfigError(
            f"actor.router_replay: {config.model.path} sends each token to one expert; it needs two or more: "
            "leave it out"
        )
    longest = choice_bytes(text) * config.max_model_len
    _room_at_broker(
        config,
        longest,
        "actor.router_replay",
        "choices of experts",
        "data.max_prompt_length or data.max_response_length",
    )


def _room_for_teacher(config: RunConfig) -> None:
    """Checks that a teacher's tokens fit into messages and broker."""
    teacher = config.algorithm.teacher
    if teacher is not None:
        longest = TOP_K_BYTES * teacher.top_k * config.data.max_response_length
        _room_at_broker(
            config,
            longest,
            "algorithm.teacher",
            "likeliest tokens of the teacher",
            "top_k or data.max_response_length",
        )


def _room_at_broker(config: RunConfig, longest: int, key: str, what: str, remedy: str) -> None:
    """Checks that up to `longest` bytes per sample fit into messages and broker."""
    if longest > LIMITS.max_bytes // 2:
        raise ConfigError(
            f"{key}: a sample's {what} take up to {longest >> 20} MiB, allowed are "
            f"{LIMITS.max_bytes >> 21}; lower {remedy}"
        )
    broker, step = config.broker.max_memory_mib, longest * config.data.train_batch_size * config.rollout.n
    if broker is not None and step > (broker << 20) * max(1, config.num_own_stores):
        raise ConfigError(
            f"{key}: a step's {what} take up to {step >> 20} MiB, more than "
            f"broker.max_memory_mib={broker}; raise it"
        )


def _room_for_adapters(config: RunConfig, tree: Mapping[str, Any]) -> None:
    """Checks adapters against layers whose shapes config.json gives; the learner checks all layers."""
    lora, shape = config.model.lora, ModelShape.of(tree)
    if lora is not None and shape is not None:
        for part in shape.matrices(lora.targets):
            lora.require_room(part.name, part.inputs, part.outputs)


def check_critic_of_images(config: RunConfig) -> None:
    """Checks that a critic with a separate folder can take images."""
    folder = config.critic.path
    if config.data.image_key is None or "critic" not in config.needs or not folder or is_named(folder):
        return
    tree = config_tree(folder)
    kind = tree.get("model_type")
    if tree and not family_of(kind).takes_images:  # the self-test says what is wrong with an unreadable one
        raise ModelError(
            f"critic.path={folder} ({kind}) takes no images, but data.image_key={config.data.image_key} "
            "supplies some: leave critic.path out, so that the critic begins as the policy, or name a model "
            "that takes images"
        )


def _tokenizer_line(config: RunConfig) -> str:
    from paceline.data.prompts import load_tokenizer, stop_token_ids

    model = local_model(config.model, "controller")
    folder = model.tokenizer_path or model.path
    tokenizer = load_tokenizer(folder)
    stops = ", ".join(map(str, stop_token_ids(model.path, tokenizer)))
    return f"{folder}: responses end at token {stops}"


def networks_line(config: RunConfig) -> str:
    """Compares the tokenizers of frozen networks with the policy's; lists the networks."""
    from paceline.data.frozen_networks import check_frozen_networks

    for name, network in config.algorithm.networks.items():
        here = is_named(network.path) or is_url(network.path)
        if not here and config.model.load_format == "auto" and not _holds_weights(network.path):
            raise ModelError(
                f"algorithm.networks.{name}.path={network.path} has no weights (*.safetensors); name the "
                "folder of a model, such as one that `paceline export` wrote"
            )
    return check_frozen_networks(with_local_models(config)) if config.algorithm.networks else "none"


def _self_test_line(config: RunConfig, kept: Path) -> str:
    return self_test(config, kept)


CHECKS = (
    PreflightCheck(name="model", run=model_line),
    PreflightCheck(name="frozen networks", run=networks_line),
    PreflightCheck(
        name="self-test",
        run=_self_test_line,
        needs=CheckNeed.SELF_TEST,
        wait="packed log-probs of a small model of this kind against transformers', some 5 s",
    ),
    PreflightCheck(name="tokenizer", run=_tokenizer_line),
)
