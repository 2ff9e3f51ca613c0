"""Keeps a stream to each server of a run until the run is over: the base of the attached clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from paceline.core.attached_clients.attachment import FromClient, Hello, ToClient
from paceline.core.errors import ConfigError, DeadlineError, EnvironmentLackError, PeerLostError
from paceline.service import addresses
from paceline.service.attach.attaching import AttachedClient, ClientOptions
from paceline.service.grpc import channels
from paceline.service.identity.credentials import Credentials
from paceline.service.member.runtime import ServiceContext, run_service
from paceline.service.tasks import cancel, wait_at_most
from paceline.wire.calls.attachment import AttachmentMessages

_log = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")
AnswerT = TypeVar("AnswerT")

_LET_GO_EVERY_S: Final = 0.5
_READY_FILE_EVERY_S: Final = 2.0
_LOOK_UP_EVERY_S: Final = 5.0
_LOOK_UP_S: Final = 30.0


class Attachment(Generic[TaskT, AnswerT]):
    """Answers tasks that a run sends, until the run is over.

    Args:
        address: host:port of one or several servers of the run; each gets a stream.
        name: name under which it attaches.
        role: role of the servers.
        token: token of the scope `attach`, or the run's; None takes that of `token_variable`.
        messages: converts the messages of this kind of client.
        stub: makes the stub of the servers' gateway from a channel.
        data_sources: data sources that it takes; empty: all.
        window: most tasks at a time, from each server.
        patience_s: how long to try to reach a run that does not answer.
        version: version of what it computes; "": unknown.
        groups: whether its tasks are groups.
        every_address: attach to every address to which the host of `address` resolves, and look them up
            repeatedly: for several servers behind one name.
    """

    def __init__(
        self,
        *,
        address: str | Sequence[str],
        name: str,
        role: str,
        token: str | None,
        token_variable: str,
        messages: AttachmentMessages[TaskT, AnswerT, Any],
        stub: Callable[[Any], Any],
        data_sources: Iterable[str],
        window: int,
        patience_s: float,
        version: str = "",
        groups: bool = False,
        every_address: bool = False,
    ) -> None:
        self._credentials = Credentials.from_env(token_variable).with_token(token)
        self._role, self._token_variable, self._messages, self._stub = role, token_variable, messages, stub
        self._every_address, self._stopping = every_address, asyncio.Event()
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
        self._clients: dict[str, AttachedClient[TaskT, AnswerT]] = {}

    async def run(self) -> None:
        """Answers tasks until the run is over or `stop` is called; when cancelled, others get its tasks.

        Raises:
            PeerLostError, DeadlineError: the run did not answer for `patience_s`.
            ConfigError: the run refused the token, or has no such name.
            ProtocolError: the run speaks another version of the contract.
            RewardError: all calls of a reward function hang; its items go to other clients.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                attach = self._attach_to_every if self._every_address else self._attach
                for address in self._addresses:
                    tasks.create_task(attach(address), name=f"attached to {address}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._end()

    @property
    def is_attached(self) -> bool:
        """Whether it has an open stream to each server; with `every_address`, to at least one."""
        attached = [client.is_attached for client in self._clients.values()]
        return (
            any(attached)
            if self._every_address
            else len(attached) == len(set(self._addresses)) and all(attached)
        )

    def stop(self) -> None:
        """Finishes the tasks under way, then leaves."""
        self._stopping.set()
        for client in self._clients.values():
            client.stop()

    async def _attach_to_every(self, name: str) -> None:
        """Keeps a stream to each address of the name until the run is over."""
        streams: dict[str, asyncio.Task[None]] = {}
        is_over, last = False, time.monotonic()
        try:
            while True:
                is_ending = is_over or self._stopping.is_set()
                listed = set() if is_ending else await _look_up(name)
                for address in listed - streams.keys():
                    streams[address] = asyncio.create_task(
                        self._attach(address), name=f"attached to {address}"
                    )
                for address in streams.keys() - listed:
                    if not self._is_attached_to(address):  # the server is gone for good
                        gone = streams.pop(address)
                        await cancel(gone)
                if is_ending and not streams:
                    return
                if streams:
                    last = time.monotonic()
                elif time.monotonic() - last > self._patience_s:
                    raise PeerLostError(
                        f"{name} has not resolved to any address for {self._patience_s:g} s", peer=name
                    )
                await self._wait_for_change(streams.values())
                for address in [address for address, stream in streams.items() if stream.done()]:
                    is_over |= self._has_ended(streams.pop(address))
        finally:
            await cancel(*streams.values())

    def _is_attached_to(self, address: str) -> bool:
        client = self._clients.get(address)
        return client is not None and client.is_attached

    async def _wait_for_change(self, streams: Collection[asyncio.Task[None]]) -> None:
        """Waits until the next look-up is due, a stream ends, or (without streams) `stop` is called."""
        if streams:
            await asyncio.wait(streams, timeout=_LOOK_UP_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            return
        await wait_at_most(self._stopping, _LOOK_UP_EVERY_S)

    def _has_ended(self, stream: asyncio.Task[None]) -> bool:
        """Returns whether the run is over; False after the loss of one server of several."""
        try:
            stream.result()
        except (PeerLostError, DeadlineError, EnvironmentLackError) as error:
            if not self.is_attached:
                raise
            _log.warning("%s; this client stays attached to others", error)
            return False
        return True

    async def _attach(self, address: str) -> None:
        channel = channels.connect(address, credentials=self._credentials, role=self._role)
        peer = f"the run at {address}"

        def open_stream(messages: AsyncIterator[FromClient[AnswerT]]) -> AsyncIterator[ToClient[TaskT]]:
            requests = (self._messages.client_to_proto(message) async for message in messages)
            attach, token = self._stub(channel).Attach, self._token_variable
            answers = channels.duplex(attach, requests, phase="ATTACH", peer=peer, token=token)
            return (self._messages.server_from_proto(message) async for message in answers)

        options = ClientOptions(hello=self._hello, peer=peer, patience_s=self._patience_s)
        client = self._clients[address] = AttachedClient(options, open_stream, self._answer)
        try:
            await client.run()
        finally:
            if self._every_address:
                del self._clients[address]
            await channel.close()

    async def _answer(self, task: TaskT) -> AnswerT:
        raise NotImplementedError

    def _end(self) -> None:
        """Frees the resources of the client."""


async def _look_up(name: str) -> set[str]:
    """Resolves the host of host:port to addresses of one family; returns none for an unknown host.

    Raises:
        ConfigError: `name` is not of the form host:port.
    """
    host, port = addresses.split(name)
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        _log.warning("%s cannot be looked up (%s)", host, error)
        return set()
    # One family, because a server may have both an IPv4 and an IPv6 address.
    return {addresses.join(str(row[4][0]), port) for row in rows if row[0] == rows[0][0]}


def attach_until_signal(
    make: Callable[[], Attachment[Any, Any]], name: str, *, ready_file: str | Path | None = None
) -> None:
    """Answers a run's tasks until the run is over or a signal comes.

    With a grace period (`service.member.runtime`), it answers after SIGTERM as long as a server is attached.

    Args:
        name: name of the process in its log.
        ready_file: see `keep_ready_file`.

    Raises:
        SystemExit: the run cannot be reached, or refuses this client; the reason is in the log.
    """
    attachment = make()

    async def serve(context: ServiceContext) -> None:
        if ready_file is not None:
            context.spawn("ready file", keep_ready_file(Path(ready_file), attachment))
        context.before_stopping(lambda: context.spawn("until let go", _until_let_go(context, attachment)))
        running = asyncio.create_task(attachment.run(), name="attachment")
        await context.stopping_or(running)
        context.is_over = running.done()
        attachment.stop()
        await running  # run_service bounds this wait

    code = run_service(serve, name=name)
    if code:
        raise SystemExit(code)


async def _until_let_go(context: ServiceContext, attachment: Attachment[Any, Any]) -> None:
    while attachment.is_attached:  # noqa: ASYNC110  it has no event for that
        await asyncio.sleep(_LET_GO_EVERY_S)
    context.stop("nobody is attached any more")


async def keep_ready_file(file: Path, attachment: Attachment[Any, Any]) -> None:
    """Rewrites `file` every two seconds while the client is attached; removes it while it is not.

    A container's probes check the file's existence and age, because the process has no port.

    Raises:
        ConfigError: the file cannot be written.
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
