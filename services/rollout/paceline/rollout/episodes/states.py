"""The state machine of an episode. Pure: it neither waits nor communicates.

    OPENING -> DECODING <-> ACTING -> CLOSING -> ENDED
                   `------------------^  a limit of the policy's turn

Limits are checked in a fixed order, so that an episode that reaches several always ends for the same reason.
An episode that ends because of the policy is trained on. Failures of machines are no events here: the episode
begins again from OPENING.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.config.rollout import RolloutConfig
from paceline.core.errors import ProtocolError
from paceline.core.samples.episode import EpisodeOutcome


class EpisodePhase(enum.Enum):
    """What an episode waits for: its environment, or the engine."""

    OPENING = "opening"
    DECODING = "decoding"
    ACTING = "acting"
    CLOSING = "closing"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    """What ends an episode; `max_response_tokens` counts all tokens after the prompt."""

    max_turns: int
    max_turn_tokens: int
    max_sampled_tokens: int
    max_response_tokens: int
    max_tool_calls: int
    tool_s: float

    @classmethod
    def of(cls, config: RolloutConfig, max_response_tokens: int) -> EpisodeLimits:
        """Returns the limits that the configuration sets."""
        episode = config.episode
        return cls(
            max_turns=episode.max_turns,
            max_turn_tokens=episode.max_turn_tokens or max_response_tokens,
            max_sampled_tokens=episode.max_sampled_tokens or max_response_tokens,
            max_response_tokens=max_response_tokens,
            max_tool_calls=episode.max_tool_calls,
            tool_s=episode.tool_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeProgress:
    """An episode's phase and its use of the limits; `stop_reason` is set from CLOSING on."""

    phase: EpisodePhase = EpisodePhase.OPENING
    num_turns: int = 0
    num_tool_calls: int = 0
    num_sampled: int = 0
    num_response: int = 0
    tool_s: float = 0.0
    stop_reason: str = ""

    def turn_tokens(self, limits: EpisodeLimits) -> int:
        """Returns the most tokens that the next turn may have."""
        return min(
            limits.max_turn_tokens,
            limits.max_sampled_tokens - self.num_sampled,
            limits.max_response_tokens - self.num_response,
        )

    def outcome(self, reward: float | None, components: Mapping[str, float]) -> EpisodeOutcome:
        """Returns the record of the episode with its grade."""
        return EpisodeOutcome(
            stop_reason=self.stop_reason,
            num_turns=self.num_turns,
            num_tool_calls=self.num_tool_calls,
            tool_s=self.tool_s,
            reward=reward,
            components=components,
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """Says that the environment is ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSampled:
    """The policy has answered; `is_cut` says that a limit ended the answer, not a token that ends a turn."""

    num_tokens: int
    num_tool_calls: int
    is_cut: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The environment has answered after `seconds`.

    `num_tokens` includes the template's tokens that open the policy's next turn.

    `stop_reason`: why the environment has ended the episode, for example "answered"; "" if it goes on.
    """

    seconds: float
    num_tokens: int = 0
    stop_reason: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """The environment has graded and freed the episode."""


Event = Opened | TurnSampled | Observed | Closed


def advance(standing: EpisodeProgress, event: Event, limits: EpisodeLimits) -> EpisodeProgress:
    """Returns the progress after an event.

    Raises:
        ProtocolError: the event cannot happen in this phase.
    """
    match standing.phase, event:
        case EpisodePhase.OPENING, Opened():
            return replace(standing, phase=EpisodePhase.DECODING)
        case EpisodePhase.DECODING, TurnSampled():
            return _after_turn(standing, event, limits)
        case EpisodePhase.ACTING, Observed():
            return _after_observation(standing, event, limits)
        case EpisodePhase.CLOSING, Closed():
            return replace(standing, phase=EpisodePhase.ENDED)
    raise ProtocolError(f"an episode that is {standing.phase.value} cannot take {type(event).__name__}")


def _after_turn(standing: EpisodeProgress, event: TurnSampled, limits: EpisodeLimits) -> EpisodeProgress:
    after = replace(
        standing,
        phase=EpisodePhase.ACTING,
        num_turns=standing.num_turns + 1,
        num_tool_calls=standing.num_tool_calls + event.num_tool_calls,
        num_sampled=standing.num_sampled + event.num_tokens,
        num_response=standing.num_response + event.num_tokens,
    )
    if event.is_cut:
        if after.num_sampled >= limits.max_sampled_tokens < limits.max_response_tokens:
            return _close(after, "max_sampled_tokens")
        full = after.num_response >= limits.max_response_tokens
        return _close(after, "max_response_tokens" if full else "max_turn_tokens")
    if after.num_tool_calls > limits.max_tool_calls:
        return _close(after, "max_tool_calls")
    return after


def _after_observation(standing: EpisodeProgress, event: Observed, limits: EpisodeLimits) -> EpisodeProgress:
    after = replace(standing, tool_s=standing.tool_s + event.seconds)
    if event.stop_reason:
        return _close(after, event.stop_reason)
    if after.num_turns >= limits.max_turns:
        return _close(after, "max_turns")
    if after.tool_s >= limits.tool_s:
        return _close(after, "tool_time")
    after = replace(after, phase=EpisodePhase.DECODING, num_response=standing.num_response + event.num_tokens)
    if after.turn_tokens(limits) < 1:
        reason = (
            "max_sampled_tokens" if after.num_sampled >= limits.max_sampled_tokens else "max_response_tokens"
        )
        return _close(replace(after, num_response=standing.num_response), reason)
    return after


def _close(standing: EpisodeProgress, reason: str) -> EpisodeProgress:
    return replace(standing, phase=EpisodePhase.CLOSING, stop_reason=reason)
