"""The guard's readings of a step's rewards: scorers with constant values, and scorers that fail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from paceline.controller.batch.collect import Batch
from paceline.core.guard import Histories, Reading
from paceline.core.samples.trajectory import ScoredHeader

_OF_A_REWARD = "reward:"  # begins the reason of a group that was dropped for its rewards
_FAILED = "/failed"


def readings(batch: Batch, histories: Histories) -> Iterator[Reading]:
    """Returns the readings of a step's rewards; notes the spread of each component in `histories`.

    A component with fewer than two values in a step keeps its streak.
    """
    values = _components(batch.samples)
    for name, of_component in values.items():
        if "/" not in name and len(of_component) > 1:
            histories.add(_history(name), max(of_component) - min(of_component))
            steps = histories.streak(_history(name), 0.0)
            yield Reading(rule="component_constant", value=float(steps), detail=name)
    dropped = sum(group.reason.startswith(_OF_A_REWARD) for group in batch.dropped)
    yield Reading(rule="reward_errors", value=dropped / max(1, batch.num_groups), detail="dropped groups")
    for name, of_component in values.items():
        if name.endswith(_FAILED):
            scorer = name.removesuffix(_FAILED)
            yield Reading(rule="reward_errors", value=fmean(of_component), detail=f"responses to {scorer}")


def _components(samples: Sequence[ScoredHeader]) -> Mapping[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for header in samples:
        for name, value in header.components.items():
            values[name].append(value)
    return dict(sorted(values.items()))


def _history(component: str) -> str:
    return f"component/{component}"
