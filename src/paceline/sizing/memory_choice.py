"""Chooses what `actor.memory` leaves open: the fastest settings that fit the memory plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.config.run import RunConfig
from paceline.config.training.memory import MemoryConfig
from paceline.core.cards import CARDS, Card
from paceline.engines.memory import engine_budget, engine_while_training
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.learner_memory import LearnerMemory, longest_row
from paceline.sizing.step_time import learning_time

USABLE_SHARE = 0.9
"""Usable share of a GPU's free memory: the plan is an estimate, and torch's allocator leaves gaps.

On H100s of 80 GB the allocator mostly reserved 5 to 8 GiB more than the peak of the tensors. In three runs
with tensors of 70 GiB or more it had to free blocks during an update.
"""

Recompute = float | Literal["none", "full", "from_host"]
LEAST = MemoryConfig(recompute="full", keep_gathered=False, accumulate=True, offload=False)
"""The settings, if nothing is known about model or GPUs."""

_RECOMPUTED: tuple[Recompute, ...] = ("none", 0.9, 0.5, 0.25, "full", "from_host")
# Minimum and maximum tokens of a micro-batch that are tried.
_LEAST_TOKENS = 8_192
_MOST_TOKENS = 24_576
# Bytes of host memory per parameter: the averages, and the checkpoint's copy of weights and averages.
_OFFLOADED, _COPIED = 8, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateChoice:
    """The memory settings of an update, and the tokens of its micro-batches.

    Attributes:
        context: ranks that share the tokens of each row.
        experts: ranks over which the experts of each layer are divided.
        fits: whether the choice fits the memory plan; False if nothing is known about GPUs or model.
    """

    memory: MemoryConfig
    num_tokens: int
    context: int = 1
    experts: int = 1
    fits: bool = False

    def put_into(self, config: RunConfig) -> RunConfig:
        """Applies this choice to the configuration."""
        return config.changed(
            actor={"memory": self.memory, "ppo_max_token_len_per_gpu": self.num_tokens},
            learner={"context_parallel": self.context, "expert_parallel": self.experts},
        )


def _forms() -> list[MemoryConfig]:
    """Returns all memory settings, starting with those that are fastest given enough memory."""
    return [
        MemoryConfig(recompute=recompute, keep_gathered=keep_gathered, accumulate=accumulate, offload=offload)
        for recompute in _RECOMPUTED
        for keep_gathered in (True, False)
        for accumulate in (True, False)
        for offload in (False, True)
    ]


def choose_update(
    config: RunConfig,
    shape: ModelShape | None,
    *,
    learner_gpus: Sequence[int],
    engine_gpus: Sequence[int],
    totals: Mapping[int, int],
    host_bytes: int = 0,
    card: Card = CARDS["H100"],
) -> UpdateChoice:
    """Chooses `actor.memory` and the tokens of micro-batches for a run on GPUs.

    The choice has the shortest estimated update among those that fit the memory plan. A smaller micro-batch
    leaves room to keep more of its activations; a larger one spreads gathers and launches over more tokens.
    Tokens, `learner.context_parallel` and `learner.expert_parallel` given in the file are kept. Layers'
    inputs wait in host memory only if nothing else fits on a rank. Ranks divide experts or share rows only if
    that does not fit either: as few ranks as possible, and if either would do, they divide experts.

    Args:
        shape: shape of the model; None if config.json has other names for its sizes.
        engine_gpus: GPUs of the rollout servers; an engine on a rank's GPU keeps its share.
        totals: bytes of each GPU whose size is known.
        host_bytes: free memory of the host. Averages go there for speed if it also has room for a
            checkpoint's copy, or because nothing else fits; layers' inputs, if the share of what is left
            that they may take has room for them.
    """
    known = [gpu for gpu in learner_gpus if gpu in totals]
    meshes = [] if shape is None else _meshes(config, shape)
    if shape is None or not known or not meshes:
        return least_update(config)
    free = min(
        totals[gpu] - (engine_while_training(config, totals[gpu]) if gpu in engine_gpus else 0)
        for gpu in known
    )
    shared = [totals[gpu] for gpu in known if gpu in engine_gpus and config.rollout.sleep == "always"]
    num_averaged = shape.num_parameters * (2 if "critic" in config.needs else 1)
    on_host = (_OFFLOADED + _COPIED) * num_averaged * len(known) // config.learner.num_shards

    def seconds(choice: UpdateChoice) -> tuple[bool, bool, float]:
        time = learning_time(choice.put_into(config), shape, card)
        # Equal estimates stay in the order of the forms.
        is_cramped = on_host > host_bytes and choice.memory.offloads
        return is_cramped, choice.memory.inputs_on_host, round(time, 6)

    def has_room(choice: UpdateChoice) -> bool:
        learner = LearnerMemory.of(choice.put_into(config), shape, [totals[gpu] for gpu in known])
        left = host_bytes - (on_host if choice.memory.offloads else 0)
        stays = learner.kept_beside(config)  # next to engines that are awake in their turn
        return (
            learner.most <= USABLE_SHARE * free
            and learner.host_inputs * len(known) <= choice.memory.host_share * max(0, left)
            and all(stays + engine_budget(config, total) <= total for total in shared)
        )

    for context, experts in meshes:
        fitting = [choice for choice in _choices(config, shape, context, experts) if has_room(choice)]
        if fitting:
            return replace(min(fitting, key=seconds), fits=True)
    leanest = _choices(config, shape, *meshes[0])
    return min(leanest, key=lambda choice: (_leanness(choice.memory), choice.num_tokens))


def least_update(config: RunConfig) -> UpdateChoice:
    """Returns the leanest settings, for when nothing is known about model or GPUs.

    Raises:
        ConfigError: the token budgets of all ranks together hold no row.
    """
    settled = config.with_context()
    return UpdateChoice(
        memory=config.actor.memory.with_rest_of(LEAST),
        num_tokens=settled.actor.ppo_max_token_len_per_gpu,
        context=settled.learner.num_context_ranks,
        experts=settled.learner.num_expert_ranks,
    )


def _meshes(config: RunConfig, shape: ModelShape) -> list[tuple[int, int]]:
    """Returns how many ranks share a row and divide experts, as pairs to try, the fewest ranks first."""
    sizes = [size for size in config.context_sizes if shape.num_heads % size == 0]
    meshes = [(context, experts) for context in sizes for experts in _expert_sizes(config, shape)]
    return sorted(meshes, key=lambda mesh: (math.prod(mesh), mesh))


def _expert_sizes(config: RunConfig, shape: ModelShape) -> list[int]:
    """Returns the values of `learner.expert_parallel` to try, in ascending order."""
    learner = config.learner
    if learner.expert_parallel != "auto":
        return [learner.expert_parallel]
    most = learner.num_shards if shape.divides_experts else 1
    sizes = range(1, most + 1)
    return [size for size in sizes if learner.num_shards % size == shape.num_experts % size == 0]


def _choices(config: RunConfig, shape: ModelShape, context: int, experts: int) -> list[UpdateChoice]:
    memory = config.actor.memory
    return [
        UpdateChoice(
            memory=memory.with_rest_of(form), num_tokens=num_tokens, context=context, experts=experts
        )
        for form in _forms()
        for num_tokens in _budgets(config, shape, context)
    ]


def _budgets(config: RunConfig, shape: ModelShape, context: int) -> list[int]:
    """Returns numbers of tokens to try: the usual one, and those of complete groups that share a prompt."""
    given = config.actor.ppo_max_token_len_per_gpu
    if "ppo_max_token_len_per_gpu" in config.actor.model_fields_set:
        return [given]
    group = config.data.max_prompt_length + config.rollout.n * config.data.max_response_length
    groups = [-(-number * group // context) for number in range(1, context * _MOST_TOKENS // group + 1)]
    row = longest_row(config, shape, context)
    usual, least = max(given, row), max(row, _LEAST_TOKENS)
    return [usual, *(number for number in (*groups, _LEAST_TOKENS) if least <= number != usual)]


def _leanness(form: MemoryConfig) -> tuple[bool, ...]:
    """Returns a sort key: the smallest needs the least memory."""
    return not form.offloads, form.kept_share > 0, form.keeps_gathered, form.accumulates
