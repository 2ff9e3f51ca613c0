"""The interface between an episode and its environment: the tools of this server, or a service."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

from paceline.core.errors import PeerLostError
from paceline.core.samples.chat import Message, ToolSpec
from paceline.core.samples.trajectory import PromptGroup


class EnvironmentLostError(PeerLostError):
    """The environment is gone, refused the episode or broke its contract; the policy is not at fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTask:
    """What an episode is about.

    Attributes:
        attempt: increases with every opening of the same episode.
        task: the prompt's row, plain data.
        task_seed: equal in a prompt group, so that all of its episodes begin alike.
        episode_seed: differs between the group's episodes.
    """

    run_id: str
    trajectory_id: str
    attempt: int
    task: Mapping[str, object]
    task_seed: int
    episode_seed: int

    @classmethod
    def of(cls, group: PromptGroup, index: int, attempt: int) -> Self:
        """Returns the task of one sample of a prompt group."""
        context = group.context
        start = f"{group.step}/{group.prompt_id}/{group.seeds[0]}".encode()
        return cls(
            run_id=group.run_id,
            trajectory_id=str(group.trajectory_id(index)),
            attempt=attempt,
            task={
                "messages": [dict(message) for message in group.messages],
                "ground_truth": context.ground_truth,
                "data_source": context.data_source,
                **context.extra,
            },
            task_seed=int.from_bytes(hashlib.blake2b(start, digest_size=8).digest(), "big") >> 33,
            episode_seed=group.seeds[index],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The beginning of an episode: messages that follow the prompt's, and tools; both may be empty."""

    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnResult:
    """The environment's answer to a turn.

    `seconds` is the time that counts as the policy's, without waiting for a process. `stop_reason` says why
    the environment ends the episode; "" if it goes on.
    """

    messages: tuple[Message, ...] = ()
    seconds: float = 0.0
    stop_reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The environment's reward, None if it gives none, and further numbers."""

    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)


class Session(Protocol):
    """One episode's side of the environment. Each call has a deadline of its own.

    Raises:
        EnvironmentLostError: from every method; the episode is then begun again in another session.
    """

    async def open(self) -> Opening:
        """Begins the episode in the environment."""

    async def step(self, turn: int, action: Message) -> TurnResult:
        """Answers the policy's turn, counted from 1."""

    async def close(self, stop_reason: str) -> Grade:
        """Grades the episode, and frees the session's resources."""

    async def abandon(self) -> None:
        """Frees the session's resources; nothing is graded. Never raises."""


@runtime_checkable
class DrivenSession(Session, Protocol):
    """A session whose program asks for the policy's answers itself, between `open` and `close`."""

    async def run(self, base_url: str, token: str, model: str) -> str:
        """Runs the program to its end; returns why it ended, "" for no particular reason."""


class EpisodeEnvironment(Protocol):
    """Opens sessions for attempts at episodes."""

    async def start(self) -> None:
        """Makes the environment ready for sessions.

        Raises:
            PacelineError: the environment cannot be used as configured.
        """

    def session(self, task: EpisodeTask) -> Session:
        """Returns a session for one attempt at an episode."""

    async def close(self) -> None:
        """Ends its processes and connections. May be repeated."""

    @property
    def call_names(self) -> Sequence[str]:
        """Names of the tools that are known before any episode."""
