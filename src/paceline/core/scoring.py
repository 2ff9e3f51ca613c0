"""What a scorer is asked and what it answers: the domain side of `RewardService.Score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.samples.episode import EpisodeOutcome

REWARD_CONTRACT = 2
"""Version of the contract of reward services; version 1 had neither a description nor groups."""

MAX_ITEMS_PER_CALL = 65536
"""Most items of a call of `Score`, and most results in a message of an attached client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreItem:
    """One response to be scored; for an episode, the policy's last answer.

    `extra` holds the data row's other columns: values that JSON can express. Items of a call with the same
    `group` are all samples of one prompt; an item without a group is scored by itself. `val_set` names the
    set of data.val_sets that the prompt belongs to; "" for all other prompts.
    """

    trajectory_id: str
    prompt: str
    response: str
    ground_truth: str
    data_source: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)
    episode: EpisodeOutcome | None = None
    group: str = ""
    val_set: str = ""

    @property
    def num_chars(self) -> int:
        """The item's approximate bytes in a message."""
        return len(self.prompt) + len(self.response) + len(self.ground_truth)


def groups_of(items: Sequence[ScoreItem]) -> list[list[int]]:
    """Returns each group's item indices, by the index of its first; an item without a group is alone."""
    groups: dict[tuple[str, int], list[int]] = {}
    for place, item in enumerate(items):
        key = (item.group, 0) if item.group else ("", place)
        groups.setdefault(key, []).append(place)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """A scorer's answer for one item: either `reward` is a finite number and `error` None, or the reverse.

    `placed` says which parts of the reward belong where: (end, part) for a step of the response that ends
    before character `end`. The rest of the reward belongs to the response's end.
    """

    trajectory_id: str
    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    placed: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardDescription:
    """A reward service's description of itself.

    Args:
        contract: the version of the contract that it speaks.
        name: its own, for logs.
        data_sources: what it scores; none: everything.
        groups: whether it scores the items of a group together.
        version: version of its computation; "" if it does not say.
    """

    contract: int = REWARD_CONTRACT
    name: str = ""
    data_sources: frozenset[str] = frozenset()
    groups: bool = False
    version: str = ""
