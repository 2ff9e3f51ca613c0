"""Records of episodes, which are conversations of several turns with tools or an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OVER_CODE = "episode_over"
"""The code with which a request is refused once a limit has ended the episode."""
OVER_MESSAGE = "this episode is over"
"""The prefix of such a refusal's message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOutcome:
    """How an episode of turns and tool calls ended.

    Attributes:
        stop_reason: a short stable word, see docs/environments.md.
        num_turns: how often the policy answered.
        num_tool_calls: number of tool calls in all turns, including failed ones.
        tool_s: seconds that tools or the environment took.
        reward: the environment's reward; None if it gives none.
        components: further numbers that the environment gives.
    """

    stop_reason: str
    num_turns: int
    num_tool_calls: int
    tool_s: float
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """One attempt at an episode that an attached environment plays.

    Attributes:
        task: the prompt's row, plain data.
        task_seed: seed that all samples of a prompt group share.
        episode_seed: seed that differs between these samples.
        base_url, token, model: where the policy answers this attempt.
    """

    run_id: str
    trajectory_id: str
    attempt: int
    task: Mapping[str, object]
    task_seed: int
    episode_seed: int
    base_url: str
    token: str
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """The result of a `Play`; `error` says why it could not be played, and is "" if it could."""

    stop_reason: str = ""
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
