"""Fills in what a configuration leaves open of the learner's update, once its GPUs are settled."""

from __future__ import annotations

from paceline.config.run import RunConfig
from paceline.config.training.memory import MemoryConfig
from paceline.core.cards import CARDS
from paceline.core.errors import ConfigError
from paceline.models.model_shape import ModelShape
from paceline.sizing.gpus import share_gpus
from paceline.sizing.machine import Machine
from paceline.sizing.memory_choice import UpdateChoice, choose_update, least_update
from paceline.sizing.model_files import model_tree


def settle_update(config: RunConfig, machine: Machine) -> tuple[RunConfig, list[str]]:
    """Chooses what an update keeps and how large its micro-batches are, where the configuration does not say.

    Returns the configuration and, in words, what was chosen.
    """
    chosen = update_choice(config, machine)
    config, words = _with_context(config, chosen.context)
    actor = config.actor
    if chosen.num_tokens != actor.ppo_max_token_len_per_gpu:
        words.append(f"actor.ppo_max_token_len_per_gpu={chosen.num_tokens}")
        actor = actor.model_copy(update={"ppo_max_token_len_per_gpu": chosen.num_tokens})
        config = config.model_copy(update={"actor": actor})
    if actor.memory.is_open:
        config = with_memory(config, chosen.memory)
        words.append(_words(config.actor.memory))
    return config, words


def update_choice(config: RunConfig, machine: Machine) -> UpdateChoice:
    """What an update keeps on the GPUs that its ranks have of a machine, and its micro-batches' tokens."""
    try:
        learner, engines = share_gpus(config, machine.gpus)
    except ConfigError:  # the checks say what is wrong with the devices
        return least_update(config)
    return choose_update(
        config,
        ModelShape.of(model_tree(config.model)),
        learner_gpus=learner,
        engine_gpus=[gpu for gpus in engines for gpu in gpus],
        totals=machine.gpu_bytes,
        host_bytes=machine.host_bytes,
        card=machine.card or CARDS["H100"],
    )


def with_memory(config: RunConfig, memory: MemoryConfig) -> RunConfig:
    """The configuration with this `actor.memory`."""
    return config.model_copy(update={"actor": config.actor.model_copy(update={"memory": memory})})


def _with_context(config: RunConfig, size: int) -> tuple[RunConfig, list[str]]:
    """The configuration with `learner.context_parallel`, and why it is more than 1 where we chose it."""
    if config.learner.context_parallel != "auto":
        return config, []
    learner = config.learner.model_copy(update={"context_parallel": size})
    settled = config.model_copy(update={"learner": learner})
    if size == 1:
        return settled, []
    row, budget = f"a row of {config.max_model_len:,} tokens", config.actor.ppo_max_token_len_per_gpu
    is_too_small = "ppo_max_token_len_per_gpu" in config.actor.model_fields_set and (
        budget < config.max_model_len
    )
    why = (
        f"{row} exceeds actor.ppo_max_token_len_per_gpu={budget}"
        if is_too_small
        else f"by the memory plan no rank has room for {row} alone"
    )
    return settled, [f"learner.context_parallel={size}: {why}"]


def _words(memory: MemoryConfig) -> str:
    return "actor.memory: " + ", ".join(
        f"{name}={str(value).lower()}" for name, value in memory.model_dump().items()
    )
