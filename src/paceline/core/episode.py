"""Episodes: what a conversation of several turns with tools or an environment ended in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOutcome:
    """How an episode of turns and tool calls ended.

    Attributes:
        stop_reason: a short stable word, see docs/environments.md.
        num_turns: how often the policy answered.
        num_tool_calls: in all turns, those that failed included.
        tool_s: seconds that tools or the environment took.
        reward: the environment's; None from one that gives none.
        components: further numbers of the environment.
    """

    stop_reason: str
    num_turns: int
    num_tool_calls: int
    tool_s: float
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
