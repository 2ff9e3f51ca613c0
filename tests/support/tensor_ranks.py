"""Layers of each family whose matrices are divided over ranks, against whole ones; in each of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from paceline.core.errors import ConfigError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import Precision, hugging_face_names, load_policy
from paceline.models.facts import ARCHITECTURES, MODELS_WITH_IMAGES
from support.architectures import tiny_config
from support.learner_fakes import VOCAB_SIZE
from support.mesh_steps import full, remeshed, share

KINDS = tuple(sorted({*ARCHITECTURES} - {*MODELS_WITH_IMAGES}))


def write_configs(folder: Path) -> None:
    """Writes a tiny config.json of each family."""
    for kind in KINDS:
        tiny_config(kind, vocab_size=VOCAB_SIZE).save_pretrained(folder / kind)


def families(ranks: Ranks, folder: str) -> dict[str, Any]:
    """By family: the largest difference from ranks that only share tokens, and what is divided of a layer.

    Or the reason why there is nothing to divide.
    """
    outcomes: dict[str, Any] = {}
    meshes = [remeshed(ranks, mesh) for mesh in ("context 2", "tensor 2")]
    for kind in KINDS:
        try:
            shared, divided = (log_probs_and_gradients(Path(folder, kind), mesh) for mesh in meshes)
        except ConfigError as error:
            outcomes[kind] = str(error)
            continue
        difference = max(share(divided[0][name], shared[0][name]) for name in shared[0])
        outcomes[kind] = [difference, divided[1]]
    return outcomes


def log_probs_and_gradients(
    folder: Path, ranks: Ranks
) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """Of one micro-batch with drawn weights; and the shapes of the second layer's divided parameters."""
    network = load_policy(folder, ranks, Precision(compute=torch.float32), random_seed=3)
    scores = network(pack([row(length) for length in (9, 4, 12)], torch.device("cpu")))
    weights = torch.linspace(-1.0, 2.0, len(scores.log_probs))
    (scores.log_probs * weights).sum().backward()
    results = {"log-probs": scores.log_probs.detach()}
    parts: dict[str, list[int]] = {}
    for name, parameter in hugging_face_names(network):
        if parameter.grad is not None:
            results[name] = full(parameter.grad)
        is_divided = isinstance(parameter, DTensor) and "tensor" in (
            parameter.device_mesh.mesh_dim_names or ()
        )
        if is_divided and ".layers.1." in name and parameter.placements[-1].is_shard():
            parts[name.split(".layers.1.")[1]] = list(parameter.to_local().shape)
    return results, parts


def row(length: int) -> PackedRow:
    """Three tokens of a prompt, and an answer."""
    drawn = np.random.default_rng(length).integers(3, VOCAB_SIZE, 3 + length).astype(np.int32)
    return PackedRow(
        index=0,
        prompt_token_ids=drawn[:3],
        response_token_ids=drawn[3:],
        response_mask=np.ones(length, np.uint8),
        response_log_probs=np.zeros(length, np.float32),
    )
