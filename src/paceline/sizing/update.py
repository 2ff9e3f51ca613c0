"""Fills in what a configuration leaves open about the learner's update and its copies of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.run import RunConfig
from paceline.config.training.memory import MemoryConfig
from paceline.core.cards import CARDS
from paceline.core.errors import ConfigError
from paceline.engines.memory import GIB, engine_while_training
from paceline.models.model_shape import ModelShape
from paceline.sizing.gpus import share_gpus
from paceline.sizing.machine import Machine
from paceline.sizing.memory.learner_memory import LearnerMemory
from paceline.sizing.memory_choice import USABLE_SHARE, UpdateChoice, choose_update, least_update
from paceline.sizing.model_files import model_tree


def settle_update(config: RunConfig, machine: Machine) -> tuple[RunConfig, list[str]]:
    """Chooses the update's memory settings and micro-batch size, if the configuration leaves them open.

    Returns the configuration and, in words, what was chosen.
    """
    chosen = update_choice(config, machine)
    config, words = _with_context(config, chosen.context)
    if config.learner.expert_parallel == "auto":
        config = config.changed(learner={"expert_parallel": chosen.experts})
        if chosen.experts > 1:
            words.append(
                f"learner.expert_parallel={chosen.experts}: by the memory plan, the update does not fit on "
                "ranks that gather all experts of a layer"
            )
    if chosen.num_tokens != config.actor.ppo_max_token_len_per_gpu:
        words.append(f"actor.ppo_max_token_len_per_gpu={chosen.num_tokens}")
        config = config.changed(actor={"ppo_max_token_len_per_gpu": chosen.num_tokens})
    if config.actor.memory.is_open:
        config = config.changed(actor={"memory": chosen.memory})
        words.append(_words(config.actor.memory))
    return config, words


def update_choice(config: RunConfig, machine: Machine) -> UpdateChoice:
    """Returns the memory settings and micro-batch tokens for a machine's GPUs."""
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


def settle_copies(
    config: RunConfig, ranks_per_host: Sequence[int], totals: Sequence[int]
) -> tuple[RunConfig, list[str]]:
    """Gives each host a copy of weights and optimizer, if the memory plan has room for it.

    A layer's weights are then gathered within each host, and only gradients cross the network. Gradients are
    summed in another order, so they are rounded differently.

    Args:
        config: configuration with `actor.memory` chosen.
        ranks_per_host: learner ranks of each host that has any.
        totals: bytes of a GPU of each of these hosts, if known.

    Returns:
        The configuration, and the reason for its `learner.fsdp_size` in words, if it was chosen here.
    """
    if config.learner.fsdp_size != "auto":
        return config, []
    if len(ranks_per_host) == 1:
        return config.changed(learner={"fsdp_size": None}), []
    if why := _why_not(config, ranks_per_host, totals):
        words = f"learner.fsdp_size: one copy of the weights over all hosts, as {why}"
        return config.changed(learner={"fsdp_size": None}), [words]
    size, reason = ranks_per_host[0], "each host has a copy of the weights, which are gathered within it"
    return config.changed(learner={"fsdp_size": size}), [f"learner.fsdp_size={size}: {reason}"]


def _why_not(config: RunConfig, ranks_per_host: Sequence[int], totals: Sequence[int]) -> str:
    """Returns why the hosts cannot have a copy each; "" if they can."""
    size, shape = ranks_per_host[0], ModelShape.of(model_tree(config.model))
    if any(ranks != size for ranks in ranks_per_host):
        return f"they have {', '.join(map(str, ranks_per_host))} ranks"
    if size % config.learner.num_expert_ranks:
        return (
            f"learner.expert_parallel={config.learner.num_expert_ranks} does not divide a host's {size} ranks"
        )
    if len(totals) < len(ranks_per_host):
        return "HOSTS.yaml does not name the card of each"
    if shape is None:
        return "the sizes of the model are not known"
    total = min(totals)
    engine = engine_while_training(config, total) if config.placement == "colocated" else 0
    needed = LearnerMemory.of(config.changed(learner={"fsdp_size": size}), shape, totals).most
    if needed > USABLE_SHARE * (total - engine):
        sizes = f"{needed / GIB:.1f} of {total / GIB:.1f} GiB"
        return f"the learner would need {sizes} on each GPU with one per host"
    return ""


def settle_context(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Applies `RunConfig.with_context`; also returns in words why several ranks share a row."""
    settled = config.with_context()
    return settled, _with_context(config, settled.learner.num_context_ranks)[1]


def _with_context(config: RunConfig, size: int) -> tuple[RunConfig, list[str]]:
    """Sets `learner.context_parallel`; also returns why it is more than 1, if it was chosen here."""
    if config.learner.context_parallel != "auto":
        return config, []
    settled = config.changed(learner={"context_parallel": size})
    if size in (1, config.learner.tensor_parallel):
        return settled, []
    row, budget = f"a row of {config.max_model_len:,} tokens", config.actor.ppo_max_token_len_per_gpu
    is_too_small = "ppo_max_token_len_per_gpu" in config.actor.model_fields_set and (
        budget < config.max_model_len
    )
    why = (
        f"{row} exceeds actor.ppo_max_token_len_per_gpu={budget}"
        if is_too_small
        else f"by the memory plan, {row} does not fit on one rank"
    )
    return settled, [f"learner.context_parallel={size}: {why}"]


def _words(memory: MemoryConfig) -> str:
    return "actor.memory: " + ", ".join(
        f"{name}={str(value).lower()}" for name, value in memory.model_dump(exclude_none=True).items()
    )
