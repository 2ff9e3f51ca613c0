"""A client that attaches to a run and scores its items, without a port of its own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.core.attachment import FromClient, Hello, ToClient
from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.sdk.function import CalledFunction
from paceline.service import channels
from paceline.service.attaching import AttachedClient, ClientOptions
from paceline.service.credentials import REWARD_TOKEN, Credentials
from paceline.service.runtime import ServiceContext, run_service
from paceline.wire.attachment import gateway_message_from_proto, scorer_message_to_proto


class RewardAttachment:
    """Scores what a run sends, until the run is over.

    Args:
        function: as of `RewardServer`: `f(response, ground_truth, **extra)`, or with `batch` `f(items)`.
        address: host:port of the run's reward service; several: one stream to each.
        name: one of the names under `reward.attached` of the run's configuration.
        token: of the scope `attach`, or the run's; None takes PACELINE_REWARD_TOKEN from the environment.
        data_sources: what the function can score; none: everything.
        batch: the function scores all items that have arrived, up to `max_batch`, in one call.
        max_concurrent: how many items are scored at the same time.
        max_batch: largest batch.
        timeout_s: how long a call of the function may take.
        patience_s: how long to try to reach a run that is away.

    Raises:
        ConfigError: the function cannot be called like this.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        address: str | Sequence[str],
        name: str,
        token: str | None = None,
        data_sources: Sequence[str] = (),
        batch: bool = False,
        max_concurrent: int = 16,
        max_batch: int = 64,
        timeout_s: float = 300.0,
        patience_s: float = 300.0,
    ) -> None:
        self._function = CalledFunction(
            function, batch=batch, max_concurrent=max_concurrent, timeout_s=timeout_s
        )
        credentials = Credentials.from_env(REWARD_TOKEN)
        self._credentials = credentials if token is None else credentials.with_token(token)
        self._addresses = [address] if isinstance(address, str) else list(address)
        self._batches = _Batches(self._function, max_batch) if batch else None
        self._patience_s = patience_s
        self._hello = Hello(
            name=name,
            client=f"{socket.gethostname()}/{os.getpid()}",
            data_sources=frozenset(data_sources),
            window=max_batch if batch else max_concurrent,
        )
        self._clients: list[AttachedClient[ScoreItem, ScoreResult]] = []

    async def run(self) -> None:
        """Returns when the run is over, or after `stop`. When cancelled, its items go to other clients.

        Raises:
            PeerLostError, DeadlineError: the run was away for `patience_s`.
            ConfigError: the run refused the token, or has no such name.
            ProtocolError: it speaks another version of the contract.
            RewardError: all calls of the function hang; its items go to other clients.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for address in self._addresses:
                    tasks.create_task(self._attach(address), name=f"attached to {address}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._function.close()

    def stop(self) -> None:
        """Answers what is under way, then leaves."""
        for client in self._clients:
            client.stop()

    async def _attach(self, address: str) -> None:
        channel = channels.connect(address, credentials=self._credentials, role="reward")
        peer = f"the run at {address}"

        def open_stream(
            messages: AsyncIterator[FromClient[ScoreResult]],
        ) -> AsyncIterator[ToClient[ScoreItem]]:
            return _streamed(channel, messages, peer)

        options = ClientOptions(hello=self._hello, peer=peer, patience_s=self._patience_s)
        client = AttachedClient(options, open_stream, self._score)
        self._clients.append(client)
        try:
            await client.run()
        finally:
            await channel.close()

    async def _score(self, item: ScoreItem) -> ScoreResult:
        if self._function.is_stuck:  # others may do better
            raise RewardError(
                f"calls of {self._function.name} hang: start this client again",
                kind=RewardErrorKind.UNAVAILABLE,
            )
        if self._batches is not None:
            return await self._batches.score(item)
        (result,) = await self._function.score([item])
        return result


async def _streamed(
    channel: Any, messages: AsyncIterator[FromClient[ScoreResult]], peer: str
) -> AsyncIterator[ToClient[ScoreItem]]:
    requests = (scorer_message_to_proto(message) async for message in messages)
    attach = reward_pb2_grpc.RewardGatewayStub(channel).Attach
    answers: AsyncIterator[reward_pb2.GatewayMessage] = channels.duplex(
        attach, requests, phase="ATTACH", peer=peer
    )
    async for message in answers:
        yield gateway_message_from_proto(message)


class _Batches:
    """Collects the items that arrive while the function is at work."""

    def __init__(self, function: CalledFunction, size: int) -> None:
        self._function, self._size = function, size
        self._waiting: list[tuple[ScoreItem, asyncio.Future[ScoreResult]]] = []
        self._working: asyncio.Task[None] | None = None

    async def score(self, item: ScoreItem) -> ScoreResult:
        done: asyncio.Future[ScoreResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(), name="batches")
        return await done

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # the rest of a message
            batch = [row for row in self._waiting[: self._size] if not row[1].done()]
            del self._waiting[: self._size]
            results = await self._function.score([item for item, _ in batch]) if batch else []
            for (_, done), result in zip(batch, results, strict=True):
                if not done.done():
                    done.set_result(result)


def attach_reward(
    function: Callable[..., Any], *, address: str | Sequence[str], name: str, **options: Any
) -> None:
    """Scores what a run sends until it is over, or a signal comes; arguments as of `RewardAttachment`.

    Raises:
        ConfigError: the function cannot be called as a reward function.
        SystemExit: the run cannot be reached, or refuses this client; the reason is in the log.
    """
    attachment = RewardAttachment(function, address=address, name=name, **options)

    async def serve(context: ServiceContext) -> None:
        running = asyncio.create_task(attachment.run(), name="attachment")
        await context.stopping_or(running)
        attachment.stop()
        await running  # run_service bounds it

    code = run_service(serve, name="attached-reward")
    if code:
        raise SystemExit(code)
