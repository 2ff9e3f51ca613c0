"""Hands tasks to attached clients, which answer over their streams.

    ask -> TaskDispatcher -> a stream's outbox -> client -> answers -> TaskDispatcher -> ask returns

The owner defines the content of the streams and its wire format.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.core.attached_clients.attachment import (
    Answers,
    FromClient,
    Hello,
    Leave,
    ToClient,
    Welcome,
    Window,
    Work,
)
from paceline.core.attached_clients.dispatch import MAX_TRIES, Failure, Reception, TaskDispatcher
from paceline.core.errors import ConfigError, DeadlineError, ProtocolError
from paceline.core.text import one_line
from paceline.service.tasks import wait_at_most

_log = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")
AnswerT = TypeVar("AnswerT")

_MAX_TASKS_PER_MESSAGE = 256
_MAX_MESSAGE_SIZE = 4 * 2**20
_TICK_S = 0.1
# A stream is opened again after this time, so that a token or a certificate that has expired ends it.
_STREAM_AGE_S = 600.0
_LEAVE_GRACE_S = 5.0
_MAX_IDLE_MESSAGES = 1000
_HELLO_S = 10.0


async def first_hello(messages: AsyncIterator[FromClient[AnswerT]]) -> Hello:
    """Reads the hello with which a client begins.

    Raises:
        DeadlineError: the client sends nothing.
        ProtocolError: its first message is not a hello.
    """
    try:
        async with asyncio.timeout(_HELLO_S):
            message = await anext(messages, None)
    except TimeoutError:
        raise DeadlineError(phase="ATTACH", peer="a client", seconds=_HELLO_S, hint="say hello") from None
    if not isinstance(message, Hello):
        raise ProtocolError("a client says hello in its first message")
    return message


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayOptions(Generic[TaskT]):
    """How tasks are given out.

    Args:
        name: name under which clients attach.
        run_id: id of the run, which clients are told.
        answer_within_s: how long a client may work on a task before another one gets it.
        wait_for_s: how long a task waits for a client.
        source_of: returns a task's data source.
        size_of: returns a task's approximate size in bytes.
        max_tries: number of clients to which a task is given, one after the other.
        stream_age_s: time after which a client is asked to open its stream again.
        groups: whether tasks are groups; a client must then declare that it scores groups.
    """

    name: str
    run_id: str = ""
    answer_within_s: float
    wait_for_s: float
    source_of: Callable[[TaskT], str]
    size_of: Callable[[TaskT], int]
    max_tries: int = MAX_TRIES
    stream_age_s: float = _STREAM_AGE_S
    groups: bool = False


@dataclass(slots=True)
class _Stream(Generic[TaskT]):
    version: str = ""
    outbox: list[tuple[int, TaskT]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    leave: Leave | None = None


class Gateway(Generic[TaskT, AnswerT]):
    """Gives tasks to attached clients. Whatever the clients do, every task gets one answer or one failure."""

    def __init__(self, options: GatewayOptions[TaskT]) -> None:
        self._options = options
        self._dispatcher = TaskDispatcher(
            answer_within_s=options.answer_within_s, max_tries=options.max_tries
        )
        self._streams: dict[int, _Stream[TaskT]] = {}
        self._version = ""
        self._pending: dict[int, tuple[TaskT, asyncio.Future[AnswerT | Failure]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed, self._left = False, asyncio.Event()

    @property
    def num_clients(self) -> int:
        """How many clients are attached."""
        return self._dispatcher.num_clients

    @property
    def version(self) -> str | None:
        """The version that all attached clients report, or the last ones reported; None if they differ."""
        versions = {stream.version for stream in self._streams.values()} or {self._version}
        return versions.pop() if len(versions) == 1 else None

    async def ask(self, tasks: Sequence[TaskT]) -> list[AnswerT | Failure]:
        """Returns one answer or failure per task, in the order of the tasks.

        Raises:
            ProtocolError: the gateway has been closed.
        """
        if self._closed:
            raise ProtocolError(f"the gateway {self._options.name} has been closed")
        until = time.monotonic() + self._options.wait_for_s
        loop = asyncio.get_running_loop()
        tickets: dict[int, asyncio.Future[AnswerT | Failure]] = {}
        for task in tasks:
            ticket = self._dispatcher.submit(self._options.source_of(task), until=until)
            tickets[ticket] = loop.create_future()
            self._pending[ticket] = (task, tickets[ticket])
        self._assign()
        self._tick()
        try:
            return [await answer for answer in tickets.values()]
        finally:
            for ticket in tickets:
                if self._pending.pop(ticket, None) is not None:
                    self._dispatcher.withdraw(ticket)

    async def serve(
        self, hello: Hello, messages: AsyncIterator[FromClient[AnswerT]]
    ) -> AsyncIterator[ToClient[TaskT]]:
        """Serves one client's stream: yields the messages to send until the client ends its side.

        Raises:
            ProtocolError: the client answers a task that it was not given, or sends an unexpected message.
            InvalidMessageError: a message cannot be read.
            ConfigError: the client scores groups but the tasks are single items, or the reverse.
        """
        self._check_form(hello)
        number = self._dispatcher.join(hello.client, window=hello.window, sources=hello.data_sources)
        stream = self._streams[number] = _Stream(version=hello.version)
        self._version = hello.version
        _log.info("%s: the client %s has attached; clients: %d", *self._names(hello), self.num_clients)
        reading = asyncio.create_task(self._read(number, messages), name=f"read {hello.client}")
        # Not at the end of this method, which may wait to send when the client goes away.
        reading.add_done_callback(lambda _: self._on_gone(number, hello))
        try:
            yield Welcome(run_id=self._options.run_id, answer_within_s=self._options.answer_within_s)
            self._assign()
            async for message in self._to_send(stream, reading):
                yield message
                if isinstance(message, Leave) and number in self._streams:
                    self._dispatcher.take_no_more(number)
            reading.result()
        finally:
            reading.cancel()

    def _check_form(self, hello: Hello) -> None:
        if hello.groups == self._options.groups:
            return
        if hello.groups:
            raise ConfigError(
                f"this client scores the samples of a prompt together, and {self._options.name} is asked "
                "about each by itself: attach without group=True, or write group: true in the run's "
                "configuration"
            )
        raise ConfigError(
            f"{self._options.name} is asked about the samples of a prompt together, which this client does "
            "not score: attach with group=True, or remove group: true from the run's configuration"
        )

    async def close(self, leave: Leave) -> None:
        """Asks all clients to leave and waits a little; calls of `ask` that still wait end in failures."""
        self._closed = True
        for ticket, (_, answer) in list(self._pending.items()):
            if not answer.done():
                answer.set_result(Failure(ticket, is_late=False, message=leave.reason))
        for stream in self._streams.values():
            stream.leave = stream.leave or leave
            stream.changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_GRACE_S):
                while self._streams:
                    self._left.clear()
                    await self._left.wait()
        if self._timer is not None:
            self._timer.cancel()

    async def _to_send(
        self, stream: _Stream[TaskT], reading: asyncio.Task[None]
    ) -> AsyncIterator[Work[TaskT] | Leave]:
        """Yields the messages to a client after the welcome, until nothing more can be read from it."""
        until = time.monotonic() + self._options.stream_age_s
        has_left = False
        while not reading.done():
            if stream.outbox:
                yield Work(self._next_tasks(stream.outbox))
                continue
            if stream.leave is not None and not has_left:
                has_left = True
                yield stream.leave
                until = time.monotonic() + self._options.answer_within_s + _LEAVE_GRACE_S
                continue
            await wait_at_most(stream.changed, max(0.0, until - time.monotonic()))
            stream.changed.clear()
            if time.monotonic() >= until:
                if has_left:
                    return
                stream.leave = Leave(reason="the stream is to be opened again")

    def _next_tasks(self, outbox: list[tuple[int, TaskT]]) -> tuple[tuple[int, TaskT], ...]:
        size, count = 0, 0
        for _, task in outbox[:_MAX_TASKS_PER_MESSAGE]:
            size += self._options.size_of(task)
            if count and size > _MAX_MESSAGE_SIZE:
                break
            count += 1
        tasks = tuple(outbox[:count])
        del outbox[:count]
        return tasks

    async def _read(self, number: int, messages: AsyncIterator[FromClient[AnswerT]]) -> None:
        num_idle = 0
        async for message in messages:
            match message:
                case Answers(answers):
                    num_idle += not self._take(number, answers)
                case Window(window=window):
                    self._dispatcher.resize(number, window)
                    num_idle += 1
                case Leave():
                    self._dispatcher.take_no_more(number)
                    num_idle += 1
                case _:
                    raise ProtocolError("a client says hello once, in its first message")
            if self._dispatcher.is_confused(number) or num_idle > _MAX_IDLE_MESSAGES:
                raise ProtocolError(
                    "this client answers tasks that it was not given, or answers again: answer each ticket "
                    "once, on the stream that brought it"
                )
            self._assign()

    def _take(self, number: int, answers: Sequence[tuple[int, AnswerT]]) -> bool:
        """Settles the tasks of these answers; returns whether the client had any of them."""
        is_useful = False
        for ticket, answer in answers:
            reception = self._dispatcher.answer(number, ticket)
            is_useful |= reception is not Reception.STRAY
            if reception is Reception.TAKEN:
                self._settle(ticket, answer)
        return is_useful

    def _settle(self, ticket: int, answer: AnswerT | Failure) -> None:
        _, waiting = self._pending.pop(ticket)
        if not waiting.done():
            waiting.set_result(answer)

    def _on_gone(self, number: int, hello: Hello) -> None:
        stream = self._streams.pop(number)
        stream.changed.set()
        self._left.set()
        for failure in self._dispatcher.leave(number):
            self._settle(failure.ticket, failure)
        _log.info("%s: the client %s has left; clients: %d", *self._names(hello), self.num_clients)
        self._assign()

    def _assign(self) -> None:
        for assignment in self._dispatcher.assign(time.monotonic()):
            stream = self._streams[assignment.client]
            stream.outbox.append((assignment.ticket, self._pending[assignment.ticket][0]))
            stream.changed.set()

    def _tick(self) -> None:
        """Looks for tasks that are overdue, for as long as there are tasks."""
        if self._timer is not None:
            return
        for failure in self._dispatcher.overdue(time.monotonic()):
            self._settle(failure.ticket, failure)
        self._assign()
        if self._pending:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._timer = None
        self._tick()

    def _names(self, hello: Hello) -> tuple[str, str]:
        return self._options.name, one_line(hello.client)
