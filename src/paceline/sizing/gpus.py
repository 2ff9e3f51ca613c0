"""Divides the GPUs of a machine between learner, engines and reward models."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError


def gpus_to_share(config: RunConfig, gpus: Sequence[int]) -> tuple[int, ...]:
    """Returns the GPUs that reward models leave to learner and engines; all GPUs if they leave none."""
    return tuple(gpu for gpu in gpus if gpu not in config.reward.model_gpus) or tuple(gpus)


def share_gpus(config: RunConfig, gpus: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Returns the learner's GPUs and those of each rollout server; empty tuples on a CPU.

    Raises:
        ConfigError: too few GPUs, or lists of devices of the wrong length.
    """
    learner, rollout = config.learner, config.rollout
    gpus = gpus_to_share(config, gpus)
    per_engine, replicas = rollout.tensor_model_parallel_size, rollout.replicas
    on_cpu: list[tuple[int, ...]] = [()] * replicas
    if learner.device == "cpu" or (learner.device == "auto" and not gpus):
        return (), on_cpu
    learner_gpus = learner.devices if learner.devices is not None else tuple(gpus[: learner.world_size])
    if len(learner_gpus) != learner.world_size:
        raise ConfigError(
            f"learner.world_size={learner.world_size} needs as many GPUs, there are {len(learner_gpus)} "
            f"({joined(learner_gpus)}); lower it, name learner.devices, or set learner.device: cpu"
        )
    free = rollout.devices if rollout.devices is not None else tuple(g for g in gpus if g not in learner_gpus)
    needed = replicas * per_engine
    if len(free) < needed:
        raise ConfigError(
            f"rollout.replicas={replicas} x rollout.tensor_model_parallel_size={per_engine} need "
            f"{needed} GPUs, {len(free)} are left beside the learner's ({joined(learner_gpus)}); lower them, "
            "or name rollout.devices"
        )
    return learner_gpus, [free[i * per_engine : (i + 1) * per_engine] for i in range(replicas)]


def joined(gpus: Sequence[int]) -> str:
    """Formats GPU numbers for CUDA_VISIBLE_DEVICES and messages: "0,1"."""
    return ",".join(map(str, gpus))
