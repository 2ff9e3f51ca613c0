"""Checkpoints: every rank writes its shards (torch.distributed.checkpoint), rank 0 writes the manifest last.

    folder/__R_N.distcp, .metadata    networks, optimizers, random state; any number of ranks can load them
    folder/manifest.json              commits the checkpoint: without it the folder is none

torch's metadata file is a pickle: load checkpoints of your own runs only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from paceline.core.errors import CheckpointError
from paceline.learner.distributed.collectives import agree, attempt
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.train.learner import Learner
from paceline.learner.train.optimizer import Trainable
from paceline.service.process import write_atomically

MANIFEST = "manifest.json"
SCHEMA = 1
POLICY = "actor"
"""Name of the policy's tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        kl: state of the KL controller.
        controller_state: the controller's own JSON.
        histories: the guard's running medians; empty in checkpoints older than the guard.
    """

    step: int
    world_size: int
    model_path: str
    has_critic: bool
    kl: Mapping[str, float]
    controller_state: Any
    histories: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_json(self) -> str:
        """The file's text."""
        learner = {
            "version": self.step,
            "world_size": self.world_size,
            "model_path": self.model_path,
            "has_critic": self.has_critic,
            "kl": dict(self.kl),
            "guard_histories": dict(self.histories),
            "torch": torch.__version__,
        }
        tree = {
            "schema": SCHEMA,
            "step": self.step,
            "learner": learner,
            "controller_state": self.controller_state,
        }
        return json.dumps(tree, indent=1, sort_keys=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder.

        Raises:
            CheckpointError: the folder has none, or one that this version cannot read.
        """
        path = folder / MANIFEST
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(
                f"{folder} is no complete checkpoint ({MANIFEST}: {error.strerror}); name one with a manifest"
            ) from error
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path} is not JSON: {error}; use another checkpoint") from error
        if tree.get("schema") != SCHEMA:
            raise CheckpointError(f"{path} has schema {tree.get('schema')!r}, this version reads {SCHEMA}")
        try:
            learner = tree["learner"]
            return cls(
                step=int(tree["step"]),
                world_size=int(learner["world_size"]),
                model_path=str(learner["model_path"]),
                has_critic=bool(learner["has_critic"]),
                kl=dict(learner["kl"]),
                controller_state=tree["controller_state"],
                histories=dict(learner.get("guard_histories", {})),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} lacks what a manifest has: {error!r}") from error


def save(learner: Learner, folder: Path, *, step: int, controller_state: bytes) -> None:
    """Writes a checkpoint; every rank calls it. A folder that already holds this step stays as it is.

    Raises: CommandError: of CheckpointError: the step is not the learner's, or writing failed; the learner
        has not changed.
    """
    ranks = learner.ranks
    manifest = attempt(ranks, lambda: _prepare(learner, folder, step, controller_state))
    if manifest is None:
        return
    attempt(ranks, lambda: _write_shards(learner, folder))
    if ranks.rank == 0:
        write_atomically(folder / MANIFEST, manifest.to_json())
    agree(ranks, None)


def _prepare(learner: Learner, folder: Path, step: int, controller_state: bytes) -> Manifest | None:
    """The manifest to write into the empty folder; None where the folder already holds this step."""
    try:
        state = json.loads(controller_state or b"null")
    except ValueError as error:
        raise CheckpointError(f"the controller's state is not JSON: {error}") from error
    if step != learner.version:
        raise CheckpointError(
            f"a checkpoint of step {step} was asked for, the learner is at {learner.version}"
        )
    if not folder.is_absolute():
        raise CheckpointError(
            f"the checkpoint folder {folder} must be an absolute path, the same on every rank"
        )
    if (folder / MANIFEST).is_file() and Manifest.read(folder).step == step:
        return None
    if learner.ranks.rank == 0:
        # Files of an interrupted attempt must not mix with the new ones.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return Manifest(
        step=step,
        world_size=learner.ranks.world_size,
        model_path=learner.config.model.path,
        has_critic=learner.critic is not None,
        kl=learner.kl_controller.state_dict(),
        controller_state=state,
        histories=learner.histories.state_dict(),
    )


def _write_shards(learner: Learner, folder: Path) -> None:
    try:
        save_shards(_state(learner), checkpoint_id=folder, process_group=learner.ranks.control)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"writing {folder} failed: {error}; is the disk full or read-only?") from error


def load(learner: Learner, folder: Path) -> Manifest:
    """Fills a learner from a checkpoint that any number of ranks wrote; every rank calls it.

    Raises:
        CheckpointError: it is incomplete or does not fit the run's configuration.
    """
    manifest = Manifest.read(folder)
    if manifest.has_critic != (learner.critic is not None):
        has, needs = ("a", "no") if manifest.has_critic else ("no", "a")
        raise CheckpointError(
            f"{folder} holds {has} critic, algorithm.adv_estimator={learner.config.algorithm.adv_estimator} "
            f"needs {needs} critic; resume with the configuration of the first run"
        )
    state = _state(learner)
    try:
        load_shards(state, checkpoint_id=folder, process_group=learner.ranks.control)
    except (CheckpointException, OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be loaded into this model: {error}") from error
    torch.set_rng_state(state["rng"]["cpu"])
    learner.kl_controller.load_state_dict(manifest.kl)
    learner.histories.load_state_dict(manifest.histories)
    learner.version = manifest.step
    return manifest


def roll_back(learner: Learner, folder: Path) -> Manifest:
    """Fills a learner from an earlier checkpoint of its run and keeps its version; every rank calls it.

    The learner's version then names the weights of an earlier step.

    Raises:
        CommandError: of CheckpointError: there is no such checkpoint; nothing has changed.
        CheckpointError: loading failed half-way; the learner is unusable.
    """
    attempt(learner.ranks, lambda: Manifest.read(folder))
    version = learner.version
    networks = [learner.actor.network, *([learner.critic.network] if learner.critic is not None else [])]
    for network in networks:
        # Loading writes into the shards; gathered parameters would hide them.
        as_fsdp(network).reshard()
    manifest = load(learner, folder)
    learner.version = version
    return manifest


def _state(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """Everything that is saved; loading writes into these tensors."""
    trainables: dict[str, Trainable[Any]] = {POLICY: learner.actor}
    if learner.critic is not None:
        trainables["critic"] = learner.critic
    state: dict[str, dict[str, Tensor]] = {"rng": {"cpu": torch.get_rng_state()}}
    for name, trainable in trainables.items():
        state[name] = dict(hugging_face_names(trainable.network))
        state[f"{name}_optimizer"] = trainable.optimizer.state()
    return state
