"""The batch that a collection gives: its samples, how they came in, and their rewards by component."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from paceline.controller.batch.barrier import DroppedGroup, Verdict
from paceline.core.ids import Purpose
from paceline.core.samples.trajectory import ScoredHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The result of an order.

    Attributes:
        samples: headers of the groups to train, in (prompt id, sample index) order.
        beside: the samples of further purposes, in the same order.
        set_aside: samples of the groups that a refill set aside.
        num_extra: number of groups that a refill requested; None without a refill.
        gen_s: seconds until the last sample was generated.
        reward_s: further seconds until that sample was scored.
        wait_s: seconds between the first and the last arrival.
    """

    samples: Sequence[ScoredHeader]
    dropped: Sequence[DroppedGroup]
    verdicts: Counter[Verdict]
    num_groups: int
    beside: Mapping[str, Sequence[ScoredHeader]] = field(default_factory=dict)
    set_aside: Sequence[ScoredHeader] = ()
    num_extra: int | None = None
    gen_s: float = 0.0
    reward_s: float = 0.0
    wait_s: float = 0.0

    @property
    def greedy(self) -> dict[int, ScoredHeader]:
        """The greedy answers by prompt id."""
        return {h.trajectory_id.prompt_id: h for h in self.beside.get(Purpose.GREEDY, ())}

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of the samples."""
        return sum(header.num_prompt_tokens + header.num_response_tokens for header in self.samples)


def share_without_spread(samples: Iterable[ScoredHeader]) -> float | None:
    """Returns the share of prompt groups whose rewards are all equal; None if no group has two samples."""
    groups: dict[int, list[float]] = defaultdict(list)
    for header in samples:
        groups[header.trajectory_id.prompt_id].append(header.reward or 0.0)
    if max(map(len, groups.values()), default=0) < 2:
        return None
    return fmean(min(group) == max(group) for group in groups.values())


def values_of_components(samples: Iterable[ScoredHeader]) -> dict[str, list[float]]:
    """Returns the values of every reward component, by name, of the samples that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for header in samples:
        for name, value in header.components.items():
            values[name].append(value)
    return dict(sorted(values.items()))


def reward_components(samples: Iterable[ScoredHeader]) -> dict[str, float]:
    """Returns the mean of every reward component over the samples that have it."""
    return {name: sum(own) / len(own) for name, own in values_of_components(samples).items()}
