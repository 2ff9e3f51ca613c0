"""Training steps on prompts with images: `run_ranks("support.image_ranks:everything", 2, MODEL, ...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.broker import names
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag, TrainedVision
from paceline.core.training import BatchRow, TrainOrder, TrainResult
from paceline.learner.batch.types import PackedRow
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.step import train_step
from paceline.wire import blob_digest, encode_trajectory, image_of, pack_pixels
from support.image_rows import PROMPTS, image_rows
from support.learner_fakes import POLICY, make_trajectory, run_config
from support.learner_scenarios import numbers

GROUPS = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.0}}
SAMPLES = 3


def build(ranks: Ranks, folder: Path, **sections: Any) -> Learner:
    """A GRPO run of six prompts, two of which have no image, in two mini-batches."""
    actor = {
        "ppo_mini_batch_size": 3,
        "ppo_max_token_len_per_gpu": 160,
        "ratio_audit_freq": 1,
        "optim": {"lr": 1e-3},
    }
    tree: dict[str, Any] = {
        "data": {"train_batch_size": len(PROMPTS), "max_prompt_length": 48, "image_key": "images"},
        "algorithm": GROUPS,
        "rollout": {"n": SAMPLES},
        **sections,
    }
    tree["actor"] = {**actor, **sections.get("actor", {})}
    return Learner.build(run_config(folder, **tree), ranks)


def take_image_step(
    learner: Learner,
    step: int,
    rows: list[PackedRow] | None = None,
    rewards: Sequence[float] | None = None,
) -> TrainResult:
    """A step on made-up responses; rewards are drawn if there are none."""
    packed = image_rows(samples=SAMPLES, seed=step) if rows is None else rows
    rewards = rewards or np.random.default_rng([7, step]).normal(size=len(packed)).tolist()
    order = TrainOrder(
        step=step,
        policy=POLICY,
        rows=tuple(_batch_row(row, step, reward) for row, reward in zip(packed, rewards, strict=True)),
    )
    return train_step(learner, order, lambda wanted: {index: packed[index] for index in wanted})


def _batch_row(row: PackedRow, step: int, reward: float) -> BatchRow:
    prompt, sample = divmod(row.index, SAMPLES)
    return BatchRow(
        trajectory_id=TrajectoryId(step=step, purpose="train", prompt_id=prompt, sample_index=sample),
        blob_key=f"blob:{row.index}",
        blob_digest="0" * 16,
        reward=float(reward),
        num_prompt_tokens=len(row.prompt_token_ids),
        num_response_tokens=len(row.response_token_ids),
        num_sampled_tokens=len(row.response_token_ids),
        num_patches=sum(prod(image.grid) for image in row.images),
    )


def published(rows: list[PackedRow], policy: PolicyTag = POLICY) -> tuple[list[BatchRow], dict[str, bytes]]:
    """The rows as rollout servers and the controller leave them: headers, and blobs by key."""
    headers, blobs = [], dict[str, bytes]()
    for row in rows:
        header = _batch_row(row, 1, 0.5)
        images = tuple(image_of(image.pixels, image.grid) for image in row.images)
        trajectory = make_trajectory(
            header.trajectory_id,
            row.prompt_token_ids,
            row.response_token_ids,
            log_probs=row.response_log_probs,
            policy=policy,
        )
        data = encode_trajectory(replace(trajectory, images=images))
        headers.append(replace(header, blob_digest=blob_digest(data)))
        blobs[header.blob_key] = data
        for image, own in zip(images, row.images, strict=True):
            blobs[names.image(trajectory.run_id, image.hash)] = pack_pixels(own.pixels)
    return headers, blobs


def full_tensors(learner: Learner) -> dict[str, Tensor]:
    """Copies of the policy's parameters; every rank calls it."""
    network: Any = learner.actor.network
    as_fsdp(network).reshard()
    parameters: list[tuple[str, Any]] = list(hugging_face_names(network))
    return {name: parameter.full_tensor().detach().clone() for name, parameter in parameters}


def everything(ranks: Ranks, *models: str) -> list[tuple[list[dict[str, float]], list[bool]]]:
    """The steps and the tower's precision of each model: importing torch takes a process longer than both."""
    return [(steps(ranks, model), tower_in_tf32(ranks, model)) for model in models]


def steps(ranks: Ranks, model: str, vision: TrainedVision = "none") -> list[dict[str, float]]:
    """Two steps, then a sum over the weights; in the second, images lie on one rank only."""
    learner = build(ranks, Path(model), model={"vision": {"train": vision}})
    results = [numbers(take_image_step(learner, 1)), numbers(take_image_step(learner, 2, _one_with_images()))]
    sums = {name: float(tensor.double().abs().sum()) for name, tensor in full_tensors(learner).items()}
    return [*results, sums]


def trained_steps(ranks: Ranks, *models: str) -> list[list[dict[str, float]]]:
    """The steps of each model with a tower that trains."""
    return [steps(ranks, model, "all") for model in models]


def tower_in_tf32(ranks: Ranks, model: str) -> list[bool]:
    """Whether cuDNN may use TF32 in each forward pass of the tower's convolution."""
    from paceline.learner.batch.pack import pack
    from paceline.learner.model.image_states import vision_tower
    from paceline.learner.model.networks import body_of

    network, seen = build(ranks, Path(model)).actor.network, list[bool]()
    tower: Any = vision_tower(body_of(network.lm))
    assert isinstance(tower.patch_embed.proj, torch.nn.Conv3d)
    tower.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    with torch.no_grad():
        network(pack(image_rows(), ranks.device))
    return seen


def _one_with_images() -> list[PackedRow]:
    """Rows of which those of one prompt alone have an image."""
    rows = image_rows(samples=SAMPLES, seed=9)
    return [row if row.index < 2 * SAMPLES else replace(row, images=()) for row in rows]


def on_policy_log_probs(learner: Learner, rows: list[PackedRow]) -> list[PackedRow]:
    """The rows as if the learner's policy had sampled them."""
    from paceline.learner.batch.pack import pack

    with torch.no_grad():
        own = [learner.actor.network(pack([row], learner.ranks.device))[0] for row in rows]
    return [replace(row, response_log_probs=part.numpy()) for row, part in zip(rows, own, strict=True)]
