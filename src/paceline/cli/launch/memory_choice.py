"""Chooses what `actor.memory` leaves open: the fastest of the forms that the memory plan has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from paceline.cli.launch.memory_plan import LearnerMemory, ModelShape
from paceline.config.memory import MemoryConfig
from paceline.config.run import RunConfig

USABLE_SHARE = 0.92
"""Of what is free on a GPU: the plan is an estimate, and torch's allocator leaves gaps."""

Recompute = float | Literal["none", "full"]
LEAST = MemoryConfig(recompute="full", keep_gathered=False, accumulate=True)
"""Where nothing is known of model or GPUs."""

# The fastest first: recomputing costs up to a fifth, gathering a twentieth, reducing every time less.
_RECOMPUTE: tuple[Recompute, ...] = ("none", 0.75, 0.5, 0.25, "full")
_COMMUNICATION = ((True, True), (True, False), (False, False))


def choose_memory(
    config: RunConfig,
    shape: ModelShape | None,
    *,
    learner_gpus: Sequence[int],
    engine_gpus: Sequence[int],
    totals: Mapping[int, int],
) -> MemoryConfig:
    """`actor.memory` of a run on GPUs, with nothing left open.

    Args:
        config: with the layout settled.
        shape: of the model; None if config.json names its sizes otherwise.
        learner_gpus: of the ranks.
        engine_gpus: of the rollout servers; an engine beside a rank keeps its share.
        totals: bytes of each GPU, as far as they are known.
    """
    memory = config.actor.memory
    known = [gpu for gpu in learner_gpus if gpu in totals]
    if not memory.is_open or shape is None or not known:
        return memory.with_rest_of(LEAST)
    share = config.rollout.gpu_memory_utilization
    free = min(totals[gpu] * (1.0 - share if gpu in engine_gpus else 1.0) for gpu in known)
    forms = [
        memory.with_rest_of(MemoryConfig(recompute=recompute, keep_gathered=keeps, accumulate=accumulates))
        for recompute in _RECOMPUTE
        for keeps, accumulates in _COMMUNICATION
    ]
    for form in forms:
        settled = config.model_copy(update={"actor": config.actor.model_copy(update={"memory": form})})
        if LearnerMemory.of(settled, shape).most <= USABLE_SHARE * free:
            return form
    return forms[-1]
