"""The guard's readings of a step's rewards: scorers with constant values, and scorers that fail."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from paceline.controller.batch.collected_batch import Batch, values_of_components
from paceline.core.guard import Histories, Reading

_OF_A_REWARD = "reward:"  # begins the reason of a group that was dropped for its rewards
_FAILED = "/failed"


def readings(batch: Batch, histories: Histories) -> Iterator[Reading]:
    """Returns the readings of a step's rewards; notes the spread of each component in `histories`.

    A component with fewer than two values in a step keeps its streak.
    """
    values = values_of_components(batch.samples)
    for name, of_component in values.items():
        if "/" not in name and len(of_component) > 1:
            histories.add(f"component/{name}", max(of_component) - min(of_component))
            steps = histories.streak(f"component/{name}", 0.0)
            yield Reading(rule="component_constant", value=float(steps), detail=name)
    dropped = sum(group.reason.startswith(_OF_A_REWARD) for group in batch.dropped)
    yield Reading(rule="reward_errors", value=dropped / max(1, batch.num_groups), detail="dropped groups")
    for name, of_component in values.items():
        if name.endswith(_FAILED):
            scorer = name.removesuffix(_FAILED)
            yield Reading(rule="reward_errors", value=fmean(of_component), detail=f"responses to {scorer}")
