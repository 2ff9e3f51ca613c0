"""Checks that the networks of `algorithm.networks` can score the policy's samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.run import RunConfig
from paceline.core.errors import ModelError
from paceline.data.prompts import load_tokenizer
from paceline.models.facts import family_of


def check_frozen_networks(config: RunConfig) -> str:
    """Compares config.json and tokenizer of every network with the policy's.

    Args:
        config: configuration of the run, with model folders of this machine.

    Returns:
        A line of facts per network; "none" without any.

    Raises:
        ModelError: a folder is not a model folder, or its tokens differ from the policy's.
    """
    networks, model = config.algorithm.networks, config.model
    if not networks:
        return "none"
    tokens = _tokens(model.tokenizer_path or model.path)
    ours = _vocab_size(_config_json(model.path, "model.path"))
    lines = []
    for name, network in networks.items():
        key = f"algorithm.networks.{name}.path"
        tree = _config_json(network.path, key)
        kind, size = tree.get("model_type"), _vocab_size(tree)
        _require_tokens(tokens, _tokens(network.path), f"{key}={network.path}")
        if size < ours:
            raise ModelError(
                f"{key}={network.path} has a vocab_size of {size} and the policy one of {ours}, so it could "
                "not score every sample; take a model whose vocab_size is at least the policy's"
            )
        if config.data.image_key is not None and not family_of(kind).takes_images:
            raise ModelError(
                f"{key}={network.path} ({kind}) takes no images, but data.image_key={config.data.image_key} "
                "supplies some; name a model that does, or leave data.image_key out"
            )
        lines.append(f"{name}: {network.path}, {kind}, {len(tokens)} tokens as the policy's")
    return "\n      ".join(lines)


def _config_json(folder: str, key: str) -> Mapping[str, Any]:
    try:
        tree = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}={folder} is not a model folder (config.json: {error}); name one in the Hugging Face "
            "layout"
        ) from error
    return tree if isinstance(tree, dict) else {}


def _vocab_size(tree: Mapping[str, Any]) -> int:
    return int((tree.get("text_config") or tree).get("vocab_size") or 0)


def _tokens(folder: str) -> Mapping[str, int]:
    return load_tokenizer(folder).get_vocab()


def _require_tokens(ours: Mapping[str, int], theirs: Mapping[str, int], place: str) -> None:
    """Raises ModelError unless each of our tokens has the same id there; extra tokens are allowed."""
    differing = [token for token, number in ours.items() if theirs.get(token) != number]
    if differing:
        first = min(differing, key=ours.__getitem__)
        raise ModelError(
            f"{place} has another tokenizer than the policy: {len(differing)} of {len(ours)} tokens differ "
            f"({first!r} has the id {ours[first]} here and {theirs.get(first, 'none')} there), so it would "
            "score other texts; take a model with the policy's tokenizer, such as one of its family, or "
            "another policy"
        )
