"""Assigns tasks to attached clients: a state machine without clock, asyncio tasks or network.

    submit -> QUEUED --assign--> GIVEN --answer--> answered
                ^                  |
                '-- client left, --'--> FAILED: too many clients left or were late, or none came in time
                    or is late

A client has at most its window of tasks, including late ones, so a client that never answers gets no more.
Only the client that has a task can answer it, and only once.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

MAX_TRIES: Final = 3
MAX_STRAYS: Final = 16


class Reception(enum.Enum):
    """What the dispatcher did with an answer."""

    TAKEN = "taken"
    LATE = "late"
    """The task had been given to another client, or was no longer wanted."""

    STRAY = "stray"
    """The client was never given the task, or has answered it before."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task that was given to a client."""

    client: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that failed; `is_late` means that clients did not answer in time."""

    ticket: int
    is_late: bool
    message: str


@dataclass(slots=True)
class _Task:
    source: str
    until: float
    client: int | None = None
    answer_by: float = math.inf
    tries: int = 0
    late: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Client:
    name: str
    sources: frozenset[str]
    window: int
    tickets: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    strays: int = 0
    is_leaving: bool = False

    @property
    def load(self) -> float:
        """The share of its window that is in use."""
        return (len(self.tickets) + len(self.late)) / self.window

    def takes(self, source: str) -> bool:
        return not self.is_leaving and (not self.sources or source in self.sources)


class TaskDispatcher:
    """Gives tasks to clients and takes their answers.

    Times are in seconds, by the caller's clock.

    Args:
        answer_within_s: how long a client may work on a task before another one gets it.
        max_tries: number of clients to which a task is given, one after the other.
    """

    def __init__(self, *, answer_within_s: float, max_tries: int = MAX_TRIES) -> None:
        self._answer_within_s, self._max_tries = answer_within_s, max_tries
        self._tickets, self._numbers = itertools.count(1), itertools.count(1)
        self._tasks: dict[int, _Task] = {}
        self._queues: dict[str, deque[int]] = {}
        self._clients: dict[int, _Client] = {}

    @property
    def num_clients(self) -> int:
        """How many clients are attached."""
        return len(self._clients)

    # --- clients

    def join(self, name: str, *, window: int, sources: frozenset[str] = frozenset()) -> int:
        """Notes that a client has attached; returns its number."""
        number = next(self._numbers)
        self._clients[number] = _Client(name, sources, window)
        return number

    def resize(self, client: int, window: int) -> None:
        """Notes that a client takes more or fewer tasks at a time."""
        self._clients[client].window = window

    def take_no_more(self, client: int) -> None:
        """Lets a client leave: it may answer its tasks and gets no more."""
        self._clients[client].is_leaving = True

    def leave(self, client: int) -> list[Failure]:
        """Notes that a client is gone; its tasks go to others, unless they have been tried too often."""
        gone = self._clients.pop(client)
        failures = []
        # The lowest ticket, which was submitted first, comes to the head of the queue last.
        for ticket in sorted(gone.tickets, reverse=True):
            failure = self._back(ticket, is_late=False, message=f"the client {gone.name} left unfinished")
            failures += [failure] if failure else []
        return failures

    # --- tasks

    def submit(self, source: str, *, until: float) -> int:
        """Adds a task of a data source, which fails if no client gets it by `until`; returns its ticket."""
        ticket = next(self._tickets)
        self._tasks[ticket] = _Task(source, until)
        self._queues.setdefault(source, deque()).append(ticket)
        return ticket

    def withdraw(self, ticket: int) -> None:
        """Drops a task that nobody waits for any more; does nothing if it has ended."""
        task = self._tasks.pop(ticket, None)
        if task is not None and task.client is not None:
            client = self._clients[task.client]
            client.tickets.discard(ticket)
            client.late.add(ticket)

    def answer(self, client: int, ticket: int) -> Reception:
        """Notes that a client has answered a task, which ends if the answer is TAKEN."""
        answering = self._clients[client]
        if ticket in answering.tickets:
            answering.tickets.discard(ticket)
            del self._tasks[ticket]
            return Reception.TAKEN
        if ticket in answering.late:
            answering.late.discard(ticket)
            return Reception.LATE
        answering.strays += 1
        return Reception.STRAY

    def is_confused(self, client: int) -> bool:
        """Returns whether a client has answered too many tasks that it did not have."""
        return self._clients[client].strays > MAX_STRAYS

    def assign(self, now: float) -> list[Assignment]:
        """Gives tasks to clients that have room: the oldest first, to the client with the most room."""
        return [assignment for source in list(self._queues) for assignment in self._assign_from(source, now)]

    def overdue(self, now: float) -> list[Failure]:
        """Takes tasks from late clients; returns those that failed."""
        failures = []
        for ticket, task in sorted(self._tasks.items(), reverse=True):
            if task.client is not None and now >= task.answer_by:
                client = self._clients[task.client]
                client.tickets.discard(ticket)
                client.late.add(ticket)
                task.late.add(task.client)
                message = f"the client {client.name} did not answer within {self._answer_within_s:g} s"
                failure = self._back(ticket, is_late=True, message=message)
            elif task.client is None and now >= task.until:
                failure = self._fail(ticket, is_late=False, message=self._nobody(task.source))
            else:
                failure = None
            failures += [failure] if failure else []
        return failures

    def _assign_from(self, source: str, now: float) -> Iterator[Assignment]:
        queue = self._queues[source]
        while queue:
            task = self._tasks.get(queue[0])
            if task is None or task.client is not None:  # withdrawn, or failed
                queue.popleft()
                continue
            number = self._roomiest(source, avoid=task.late)
            if number is None:
                return
            ticket = queue.popleft()
            task.client, task.answer_by, task.tries = number, now + self._answer_within_s, task.tries + 1
            self._clients[number].tickets.add(ticket)
            yield Assignment(number, ticket)
        del self._queues[source]

    def _roomiest(self, source: str, *, avoid: set[int]) -> int | None:
        """Returns the accepting client with the most room, preferably one that was not late with the task."""
        free = [
            (number in avoid, client.load, number)
            for number, client in self._clients.items()
            if client.takes(source) and client.load < 1
        ]
        return min(free)[2] if free else None

    def _back(self, ticket: int, *, is_late: bool, message: str) -> Failure | None:
        """Puts a task at the head of its queue, or ends it."""
        task = self._tasks[ticket]
        task.client = None
        if task.tries >= self._max_tries:
            return self._fail(ticket, is_late=is_late, message=f"given out {task.tries} times: {message}")
        self._queues.setdefault(task.source, deque()).appendleft(ticket)
        return None

    def _fail(self, ticket: int, *, is_late: bool, message: str) -> Failure:
        del self._tasks[ticket]
        return Failure(ticket, is_late, message)

    def _nobody(self, source: str) -> str:
        if not self._clients:
            return (
                "no client is attached here; if the run has several servers, a client attaches to each of "
                "them (every_address=True, or a list of addresses)"
            )
        if any(client.takes(source) for client in self._clients.values()):
            return f"all of the {len(self._clients)} attached clients were busy"
        return f"none of the {len(self._clients)} attached clients takes the data source {source!r}"
