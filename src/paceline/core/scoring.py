"""The requests to a scorer and its answers: the domain types behind `RewardService.Score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.samples.episode import EpisodeOutcome

REWARD_CONTRACT = 2
"""Version of the contract of reward services; version 1 had neither a description nor groups."""

MAX_ITEMS_PER_CALL = 65536
"""Maximum number of items in a call of `Score`, and of results in a message of an attached client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreItem:
    """One response to be scored; for an episode, the policy's last answer.

    `extra` holds the data row's other columns: values that JSON can express. Items of a call with the same
    `group` are all samples of one prompt; an item without a group is scored by itself. `val_set` names the
    set of data.val_sets to which the prompt belongs; "" for all other prompts.
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
    """Returns the item indices of each group, ordered by its first item; an item without a group is alone."""
    groups: dict[tuple[str, int], list[int]] = {}
    for place, item in enumerate(items):
        key = (item.group, 0) if item.group else ("", place)
        groups.setdefault(key, []).append(place)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """A scorer's answer for one item: either `reward` is a finite number and `error` None, or the reverse.

    `placed` assigns parts of the reward to steps of the response: (end, part) for the step that ends before
    character `end`. The rest of the reward belongs to the response's end.
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
        contract: version of the contract that the service speaks.
        name: the service's name, for logs.
        data_sources: the data sources that it scores; all if empty.
        groups: whether it scores the items of a group together.
        version: version of its computation; "" if it states none.
    """

    contract: int = REWARD_CONTRACT
    name: str = ""
    data_sources: frozenset[str] = frozenset()
    groups: bool = False
    version: str = ""
