"""Loads checkpoints; each is verified before anything of the learner changes.

torch's metadata file is a pickle: load checkpoints of your own runs only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from paceline.config.training.algorithm import REFERENCE
from paceline.core.errors import CheckpointError
from paceline.learner.checkpoint import files
from paceline.learner.checkpoint.manifest import Manifest
from paceline.learner.checkpoint.state import (
    POLICY,
    State,
    base_of,
    digests_of_frozen,
    state_of,
    trainables_of,
)
from paceline.learner.distributed.collectives import CommandError, attempt
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import as_fsdp
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.state.schedule import Schedule
from paceline.storage.folder import Folder, Place

log = logging.getLogger(__name__)


def load_newest(
    learner: Learner, folders: Sequence[Place], *, notify: Callable[[str], None] = lambda message: None
) -> Place | None:
    """Fills a learner from the first of `folders` that is intact; every rank calls it.

    Args:
        learner: a learner at its initial weights.
        folders: folders of checkpoints, newest first; with none the learner stays as it is.
        notify: called with a sentence for every damaged checkpoint, and for a changed learning rate.

    Raises:
        CheckpointError: none of `folders` is intact, or the checkpoint does not fit the run's configuration.
    """
    reasons = []
    for folder in folders:
        try:
            load(learner, folder, notify=notify)
        except CommandError as error:
            reasons.append(str(error))
            notify(f"the checkpoint {folder} is damaged and passed over: {error}")
            continue
        return folder
    if reasons:
        raise CheckpointError(
            f"none of the {len(reasons)} checkpoints is intact: {'; '.join(reasons)}. Put one back, "
            "or set trainer.resume: never and another trainer.run_dir to start from the model"
        )
    return None


def load(learner: Learner, folder: Place, *, notify: Callable[[str], None] = log.warning) -> Manifest:
    """Fills a learner from a checkpoint that any number of ranks wrote; every rank calls it.

    The configuration stays in force. `notify` is called if it changes learning rate or frozen networks.

    Raises:
        CommandError: wraps a CheckpointError: the checkpoint is incomplete or damaged; nothing has changed.
        CheckpointError: the checkpoint does not fit the run's configuration.
    """
    manifest = verify(folder, learner.ranks)
    if manifest.has_critic != (learner.critic is not None):
        has, needs = ("a", "no") if manifest.has_critic else ("no", "a")
        raise CheckpointError(
            f"{folder} holds {has} critic, algorithm.adv_estimator={learner.config.algorithm.adv_estimator} "
            f"needs {needs} critic; resume with the configuration of the first run"
        )
    manifest.base.require(base_of(learner), folder=folder, model_path=learner.config.model.path)
    _fill(learner, folder, manifest)
    _tell_of_frozen(learner, manifest, notify)
    _resume_schedules(learner, manifest, notify)
    return manifest


def _tell_of_frozen(learner: Learner, manifest: Manifest, notify: Callable[[str], None]) -> None:
    """Says which frozen networks are new, are gone, or have other weights than in the checkpoint."""
    folders, before, now = learner.config.frozen_folders, manifest.frozen, digests_of_frozen(learner)
    for name in sorted(before.keys() | now.keys()):
        is_reference = name == REFERENCE
        use = "actor.use_kl_loss and algorithm.use_kl_in_reward" if is_reference else "algorithm.networks"
        path = "model.path" if is_reference else f"algorithm.networks.{name}.path"
        if name not in now:
            what, hint = "is gone: the run was trained with it", f"set {use} back"
        elif name not in before:
            what, hint = "is new: the run was trained without it", f"set {use} back"
        elif before[name] != now[name]:
            what, hint = f"has other weights in {folders[name]} than", f"set {path} or its files back"
        else:
            continue
        notify(f"the frozen network {name} {what} up to step {manifest.step}; if this is not meant, {hint}")


def _resume_schedules(learner: Learner, manifest: Manifest, notify: Callable[[str], None]) -> None:
    step = manifest.step
    for name, trainable in trainables_of(learner).items():
        before, now = Schedule(**manifest.schedules[name]), trainable.schedule
        now.load_state_dict(manifest.schedules[name], step=step)
        is_longer = now.total_steps != before.total_steps
        if is_longer or now.at(step + 1) != before.at(step + 1):
            steps = f"trainer.total_steps {before.total_steps} -> {now.total_steps}: " if is_longer else ""
            network = "policy" if name == POLICY else name
            notify(
                f"{steps}the learning rate of the {network} goes on from {before.at(step):.3g} in step "
                f"{step} to {now.at(step + 1):.3g} in step {step + 1}; it would have been "
                f"{before.at(step + 1):.3g}"
            )
            if now.at(step + 1) == now.at(now.total_steps) == 0.0:
                section = "actor" if name == POLICY else name
                notify(
                    f"the learning rate of the {network} has fallen to 0 and stays there, so nothing more is "
                    f"learned; set {section}.optim.min_lr_ratio above 0, or lr_scheduler: constant with a "
                    "lower lr"
                )


def roll_back(learner: Learner, folder: Place) -> Manifest:
    """Fills a learner from an earlier checkpoint of its run and keeps its version; every rank calls it.

    The learner's version then names the weights of an earlier step.

    Raises:
        CommandError: wraps a CheckpointError: the checkpoint is missing or damaged; nothing has changed.
        CheckpointError: loading failed half-way; the learner is unusable.
    """
    version = learner.version
    manifest = verify(folder, learner.ranks)
    networks = [learner.actor.network, *([learner.critic.network] if learner.critic is not None else [])]
    for network in networks:
        # Loading writes into the shards; gathered parameters would hide them.
        as_fsdp(network).reshard()
    _fill(learner, folder, manifest)
    learner.version = version
    return manifest


def verify(place: Place, ranks: Ranks) -> Manifest:
    """Checks the files, each rank its share; returns the manifest.

    Raises:
        CommandError: wraps a CheckpointError, on all ranks: the checkpoint is incomplete or damaged.
    """

    def check() -> Manifest:
        folder = Folder.at(place)
        manifest = Manifest.read(place)
        files.check(folder, manifest.files, files.share(manifest.files, ranks.world.rank, ranks.world.size))
        return manifest

    return attempt(ranks, check)


def _fill(learner: Learner, folder: Place, manifest: Manifest) -> None:
    state = state_of(learner)
    fill(state, folder, learner.ranks)
    torch.set_rng_state(state["rng"]["cpu"])
    learner.kl_controller.load_state_dict(manifest.kl)
    learner.histories.load_state_dict(manifest.histories)
    learner.version = manifest.step


def fill(state: State, folder: Place, ranks: Ranks) -> None:
    """Reads a verified checkpoint into the tensors of a state; every rank calls it.

    Raises:
        CheckpointError: the checkpoint does not fit the state.
    """
    try:
        load_shards(state, storage_reader=files.reader(Folder.at(folder)), process_group=ranks.control)
    except (CheckpointException, OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} cannot be loaded into this model, with the optimizer that is configured: {error}"
        ) from error
