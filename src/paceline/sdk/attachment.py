"""What the SDK's attached clients share: a stream to each server of a run, until the run is over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from paceline.core.attachment import FromClient, Hello, ToClient
from paceline.core.errors import ConfigError
from paceline.service import channels
from paceline.service.attaching import AttachedClient, ClientOptions
from paceline.service.credentials import Credentials
from paceline.service.runtime import ServiceContext, run_service

TaskT = TypeVar("TaskT")
AnswerT = TypeVar("AnswerT")

_READY_FILE_EVERY_S: Final = 2.0


class Attachment(Generic[TaskT, AnswerT]):
    """Answers tasks that a run sends, until the run is over.

    Args:
        address: host:port of a server of the run; several: one stream to each.
        name: what it attaches as.
        role: of the servers.
        credentials: that the servers ask for.
        data_sources: what it takes; none: everything.
        window: most tasks at a time, from each server.
        patience_s: how long to try to reach a run that is away.
        version: of what it computes; "" does not say.
        groups: whether its tasks are groups.
    """

    def __init__(
        self,
        *,
        address: str | Sequence[str],
        name: str,
        role: str,
        credentials: Credentials,
        data_sources: Iterable[str],
        window: int,
        patience_s: float,
        version: str = "",
        groups: bool = False,
    ) -> None:
        self._credentials, self._role = credentials, role
        self._addresses = [address] if isinstance(address, str) else list(address)
        self._patience_s = patience_s
        self._hello = Hello(
            name=name,
            client=f"{socket.gethostname()}/{os.getpid()}",
            data_sources=frozenset(data_sources),
            window=window,
            version=version,
            groups=groups,
        )
        self._clients: list[AttachedClient[TaskT, AnswerT]] = []

    async def run(self) -> None:
        """Returns when the run is over, or after `stop`. When cancelled, its tasks go to other clients.

        Raises:
            PeerLostError, DeadlineError: the run was away for `patience_s`.
            ConfigError: the run refused the token, or has no such name.
            ProtocolError: it speaks another version of the contract.
            RewardError: all calls of a reward function hang; its items go to other clients.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for address in self._addresses:
                    tasks.create_task(self._attach(address), name=f"attached to {address}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._end()

    @property
    def is_attached(self) -> bool:
        """Whether it has an open stream to each server."""
        return len(self._clients) == len(self._addresses) and all(c.is_attached for c in self._clients)

    def stop(self) -> None:
        """Answers what is under way, then leaves."""
        for client in self._clients:
            client.stop()

    async def _attach(self, address: str) -> None:
        channel = channels.connect(address, credentials=self._credentials, role=self._role)
        peer = f"the run at {address}"

        def open_stream(messages: AsyncIterator[FromClient[AnswerT]]) -> AsyncIterator[ToClient[TaskT]]:
            return self._stream(channel, messages, peer)

        options = ClientOptions(hello=self._hello, peer=peer, patience_s=self._patience_s)
        client = AttachedClient(options, open_stream, self._answer)
        self._clients.append(client)
        try:
            await client.run()
        finally:
            await channel.close()

    def _stream(
        self, channel: Any, messages: AsyncIterator[FromClient[AnswerT]], peer: str
    ) -> AsyncIterator[ToClient[TaskT]]:
        """What comes over a stream that is opened with these messages."""
        raise NotImplementedError

    async def _answer(self, task: TaskT) -> AnswerT:
        """A task's answer."""
        raise NotImplementedError

    def _end(self) -> None:
        """Frees what the client holds."""


class _Runnable(Protocol):
    @property
    def is_attached(self) -> bool: ...
    async def run(self) -> None: ...
    def stop(self) -> None: ...


def attach_until_signal(
    make: Callable[[], _Runnable], name: str, *, ready_file: str | Path | None = None
) -> None:
    """Answers what a run sends until it is over, or a signal comes.

    Args:
        make: makes the client.
        name: of the process, in its log.
        ready_file: see `keep_ready_file`.

    Raises:
        SystemExit: the run cannot be reached, or refuses this client; the reason is in the log.
    """
    attachment = make()

    async def serve(context: ServiceContext) -> None:
        if ready_file is not None:
            context.spawn("ready file", keep_ready_file(Path(ready_file), attachment))
        running = asyncio.create_task(attachment.run(), name="attachment")
        await context.stopping_or(running)
        attachment.stop()
        await running  # run_service bounds it

    code = run_service(serve, name=name)
    if code:
        raise SystemExit(code)


async def keep_ready_file(file: Path, attachment: _Runnable) -> None:
    """Writes `file` anew every two seconds while the client is attached, and removes it while it is not.

    For what watches a process without a port: a container's probes look for the file, and how old it is.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        while True:
            _mark(file, is_there=attachment.is_attached)
            await asyncio.sleep(_READY_FILE_EVERY_S)
    except OSError as error:
        raise ConfigError(f"the ready file {file} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            _mark(file, is_there=False)


def _mark(file: Path, *, is_there: bool) -> None:
    if is_there:
        file.touch()
    else:
        file.unlink(missing_ok=True)
