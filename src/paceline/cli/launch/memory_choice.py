"""Chooses what `actor.memory` leaves open: the fastest of the forms that the memory plan has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from paceline.cli.launch.learner_memory import LearnerMemory
from paceline.cli.launch.memory_plan import engine_budget, engine_while_training
from paceline.cli.launch.model_shape import ModelShape
from paceline.config.memory import MemoryConfig
from paceline.config.run import RunConfig

USABLE_SHARE = 0.92
"""Of what is free on a GPU: the plan is an estimate, and torch's allocator leaves gaps."""

Recompute = float | Literal["none", "full"]
LEAST = MemoryConfig(recompute="full", keep_gathered=False, accumulate=True, offload=False)
"""Where nothing is known of model or GPUs."""

# Shares of an update's time, of compiled layers of 7B on two and four GPUs; they only set an order.
_RECOMPUTING: Mapping[Recompute, float] = {"none": 0.0, 0.75: 0.03, 0.5: 0.06, 0.25: 0.1, "full": 0.28}
_GATHERING, _REDUCING = 0.05, 0.03
# Tokens of a mini-batch whose passes take as long as the averages need to visit the GPU once and go back: 16
# bytes per parameter at 75 GB/s, 6 operations per parameter and token at 0.5e15 per second.
_OFFLOADING_TOKENS = 18_000
# Bytes per parameter that a host needs: the averages, and the copy of weights and averages for a checkpoint.
_OFFLOADED, _COPIED = 8, 12


def _forms(offloading: float) -> list[MemoryConfig]:
    """The fastest first; `offloading` is the share of an update that the averages' visits take."""
    costs = {
        (recompute, keep_gathered, accumulate, offload): recomputing
        + (0.0 if keep_gathered else _GATHERING)
        + (0.0 if accumulate else _REDUCING)
        + (offloading if offload else 0.0)
        for recompute, recomputing in _RECOMPUTING.items()
        for keep_gathered in (True, False)
        for accumulate in (True, False)
        for offload in (False, True)
    }
    return [
        MemoryConfig(recompute=recompute, keep_gathered=keep_gathered, accumulate=accumulate, offload=offload)
        for recompute, keep_gathered, accumulate, offload in sorted(costs, key=costs.__getitem__)
    ]


def fits_awake(config: RunConfig, shape: ModelShape, totals: Sequence[int]) -> bool:
    """Whether the learner has room for its fastest form beside engines that never sleep."""
    fastest = config.actor.memory.with_rest_of(_forms(_offloading(config))[0])
    settled = config.model_copy(update={"actor": config.actor.model_copy(update={"memory": fastest})})
    most = LearnerMemory.of(settled, shape, totals).most
    return all(most <= USABLE_SHARE * (total - engine_budget(config, total)) for total in totals)


def choose_memory(
    config: RunConfig,
    shape: ModelShape | None,
    *,
    learner_gpus: Sequence[int],
    engine_gpus: Sequence[int],
    totals: Mapping[int, int],
    host_bytes: int = 0,
) -> MemoryConfig:
    """`actor.memory` of a run on GPUs, with nothing left open.

    Args:
        config: with the layout settled.
        shape: of the model; None if config.json names its sizes otherwise.
        learner_gpus: of the ranks.
        engine_gpus: of the rollout servers; an engine beside a rank keeps its share.
        totals: bytes of each GPU, as far as they are known.
        host_bytes: free memory of the host; averages go there for speed only where it has room for them and
            for a checkpoint's copy, and else where nothing else fits.
    """
    memory = config.actor.memory
    known = [gpu for gpu in learner_gpus if gpu in totals]
    if not memory.is_open or shape is None or not known:
        return memory.with_rest_of(LEAST)
    free = min(
        totals[gpu] - (engine_while_training(config, totals[gpu]) if gpu in engine_gpus else 0)
        for gpu in known
    )
    shared = [totals[gpu] for gpu in known if gpu in engine_gpus and config.rollout.sleep == "always"]
    forms = _forms(_offloading(config))
    on_host = (_OFFLOADED + _COPIED) * _num_averaged(config, shape) * len(known) // config.learner.world_size
    if on_host > host_bytes:
        forms.sort(key=lambda form: form.offloads)
    for form in (memory.with_rest_of(form) for form in forms):
        settled = config.model_copy(update={"actor": config.actor.model_copy(update={"memory": form})})
        learner = LearnerMemory.of(settled, shape, [totals[gpu] for gpu in known])
        if learner.most <= USABLE_SHARE * free and _leaves_room(config, learner, shared):
            return form
    return memory.with_rest_of(min(forms, key=_leanness))


def _leanness(form: MemoryConfig) -> tuple[bool, ...]:
    """The least is what needs the least memory."""
    return not form.offloads, form.recompute != "full", form.keeps_gathered, form.accumulates


def _offloading(config: RunConfig) -> float:
    """With responses of half the length that they may have."""
    sequences = config.actor.ppo_mini_batch_size * config.rollout.n
    return _OFFLOADING_TOKENS / (sequences * config.max_model_len / 2)


def _num_averaged(config: RunConfig, shape: ModelShape) -> int:
    return shape.num_parameters * (2 if config.needs_critic else 1)


def _leaves_room(config: RunConfig, learner: LearnerMemory, totals: Sequence[int]) -> bool:
    """Whether what stays of the learner fits beside engines that are awake in their turn."""
    stays = learner.kept_beside(config)
    return all(stays + engine_budget(config, total) <= total for total in totals)
