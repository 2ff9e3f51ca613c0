"""A client that attaches to a gateway: keeps a stream open, works on tasks and answers them.

connecting --welcome--> attached --leave--> answering what it has --> connecting, or done
    ^                      |
    '---- stream lost -----'
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.core.attached_clients.attachment import (
    Answers,
    FromClient,
    Hello,
    Leave,
    ToClient,
    Welcome,
    Work,
)
from paceline.core.errors import DeadlineError, EnvironmentLackError, PeerLostError, ProtocolError
from paceline.service.tasks import wait_at_most

_log = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")
AnswerT = TypeVar("AnswerT")

_MAX_ANSWERS_PER_MESSAGE = 256
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_WELCOME_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """Says where and how a client attaches.

    Args:
        patience_s: how long to try to reach a gateway that does not answer.
    """

    hello: Hello
    peer: str
    patience_s: float = 300.0


class AttachedClient(Generic[TaskT, AnswerT]):
    """Answers a gateway's tasks until the run is over or `stop` is called.

    Args:
        open_stream: makes a stream from an iterator of the client's messages.
        handle: answers one task; several run at a time, up to the window. If it raises, the client ends and
            its tasks go to other clients.
    """

    def __init__(
        self,
        options: ClientOptions,
        open_stream: Callable[[AsyncIterator[FromClient[AnswerT]]], AsyncIterator[ToClient[TaskT]]],
        handle: Callable[[TaskT], Awaitable[AnswerT]],
    ) -> None:
        self._options, self._open_stream, self._handle = options, open_stream, handle
        self._stopping = asyncio.Event()
        self._stream: _Stream[TaskT, AnswerT] | None = None

    @property
    def is_attached(self) -> bool:
        """Whether the gateway has welcomed it, on a stream that is still open."""
        return self._stream is not None and self._stream.is_welcome and not self._stream.is_over

    def stop(self) -> None:
        """Makes `run` return when all current tasks are answered."""
        self._stopping.set()

    async def run(self) -> None:
        """Attaches, and attaches again after a loss, until the run is over or `stop` is called.

        Raises:
            PeerLostError, DeadlineError, EnvironmentLackError: the gateway did not answer for `patience_s`.
            ConfigError: the gateway refused the token, or does not know the name.
            ProtocolError: the gateway speaks another version, or says that this client breaks the contract.
            Exception: what `handle` raises.
        """
        pause_s, last = _FIRST_PAUSE_S, time.monotonic()
        while not self._stopping.is_set():
            stream = self._stream = _Stream(self._options, self._handle, self._stopping)
            try:
                leave = await stream.run(self._open_stream)
            except (PeerLostError, DeadlineError, EnvironmentLackError) as error:
                if stream.is_welcome:
                    pause_s, last = _FIRST_PAUSE_S, time.monotonic()
                if time.monotonic() - last > self._options.patience_s:
                    raise
                _log.warning("%s; attaching again in %.1f s", error, pause_s)
            else:
                if leave is not None and leave.for_good:
                    _log.info("%s: %s", self._options.peer, leave.reason)
                    return
                pause_s, last = _FIRST_PAUSE_S, time.monotonic()
            await wait_at_most(self._stopping, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Stream(Generic[TaskT, AnswerT]):
    def __init__(
        self, options: ClientOptions, handle: Callable[[TaskT], Awaitable[AnswerT]], stopping: asyncio.Event
    ) -> None:
        self._options, self._handle, self._stopping = options, handle, stopping
        self._outbox: list[tuple[int, AnswerT]] = []
        self._changed = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        self._leave: Leave | None = None
        self._error: BaseException | None = None
        self.is_over = False
        self.is_welcome = False

    async def run(
        self, open_stream: Callable[[AsyncIterator[FromClient[AnswerT]]], AsyncIterator[ToClient[TaskT]]]
    ) -> Leave | None:
        """Returns the gateway's leave; None if this side left first."""
        stopping = asyncio.create_task(self._on_stop(), name="attached: stop")
        try:
            async with asyncio.timeout(_WELCOME_S) as waiting:
                async for message in open_stream(self._messages()):
                    match message:
                        case Welcome():
                            self.is_welcome = True
                            waiting.reschedule(None)
                            _log.info("attached to %s as %s", self._options.peer, self._options.hello.name)
                        case Work(tasks):
                            for ticket, task in tasks:
                                self._begin(ticket, task)
                        case Leave():
                            self._leave = message
                            self._changed.set()
        except TimeoutError:
            raise DeadlineError(phase="ATTACH", peer=self._options.peer, seconds=_WELCOME_S) from None
        except (PeerLostError, EnvironmentLackError):
            # A gateway that has said goodbye waits a little for answers, and then breaks off.
            if self._leave is None:
                raise
        finally:
            for running in (stopping, *self._under_way):
                running.cancel()
            # When the other side has ended the call, gRPC still waits for this client's next message.
            self.is_over = True
            self._changed.set()
        self._check_end()
        return self._leave

    def _check_end(self) -> None:
        """Raises the error that ended the stream, unless one side has left."""
        if self._error is not None:
            raise self._error
        if not self.is_welcome:
            raise ProtocolError(f"{self._options.peer} ended the stream without a welcome")
        if self._leave is None and not self._stopping.is_set():
            raise PeerLostError(f"{self._options.peer} ended the stream", peer=self._options.peer)

    async def _messages(self) -> AsyncIterator[FromClient[AnswerT]]:
        """Yields this client's messages, until the stream ends, or one side has left and all is answered."""
        yield self._options.hello
        has_left = False
        while self._error is None and not self.is_over:
            if self._outbox:
                answers = tuple(self._outbox[:_MAX_ANSWERS_PER_MESSAGE])
                del self._outbox[: len(answers)]
                yield Answers(answers)
                continue
            if self._stopping.is_set() and self._leave is None and not has_left:
                has_left = True
                yield Leave(reason="stopped")
                continue
            if (has_left or self._leave is not None) and not self._under_way:
                return
            await self._changed.wait()
            self._changed.clear()

    def _begin(self, ticket: int, task: TaskT) -> None:
        answering = asyncio.create_task(self._answer(ticket, task), name=f"task {ticket}")
        self._under_way.add(answering)
        answering.add_done_callback(self._end)

    async def _answer(self, ticket: int, task: TaskT) -> None:
        self._outbox.append((ticket, await self._handle(task)))

    def _end(self, answering: asyncio.Task[None]) -> None:
        self._under_way.discard(answering)
        if not answering.cancelled():
            self._error = self._error or answering.exception()
        self._changed.set()

    async def _on_stop(self) -> None:
        await self._stopping.wait()
        self._changed.set()
