"""The messages between an attached client and the gateway, independent of the wire format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

TaskT = TypeVar("TaskT", covariant=True)
AnswerT = TypeVar("AnswerT", covariant=True)

CONTRACT = 1
"""Version of the contract between a client and the gateway."""

MAX_WINDOW = 4096
MAX_NAME_CHARS = 256
MAX_DATA_SOURCES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message of a client that attaches.

    Args:
        name: the name under which it attaches, as the run's configuration has it.
        client: the client's own name, for logs.
        data_sources: the data sources that it accepts; all if empty.
        window: maximum number of tasks that it accepts at a time.
        version: version of its computation; "" if unknown.
        contract: version of the protocol that it speaks.
        groups: whether a task is a group, that is, all samples of a prompt.
    """

    name: str
    client: str
    window: int
    data_sources: frozenset[str] = frozenset()
    version: str = ""
    contract: int = CONTRACT
    groups: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Tells a client to take this many tasks at a time."""

    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """Tells a client that there is no more work.

    `for_good`: the run is over, so the client should not attach again.
    """

    reason: str
    for_good: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The gateway's first message; a task that takes longer than `answer_within_s` goes to another client."""

    run_id: str
    answer_within_s: float
    contract: int = CONTRACT


@dataclass(frozen=True, slots=True)
class Work(Generic[TaskT]):
    """Tasks for a client, each with its ticket."""

    tasks: tuple[tuple[int, TaskT], ...]


@dataclass(frozen=True, slots=True)
class Answers(Generic[AnswerT]):
    """A client's answers, each with the ticket of its task."""

    answers: tuple[tuple[int, AnswerT], ...]


FromClient = Hello | Window | Answers[AnswerT] | Leave
ToClient = Welcome | Work[TaskT] | Leave
