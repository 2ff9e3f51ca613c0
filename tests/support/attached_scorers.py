"""A gateway of a reward service, and clients that attach to it, well-behaved or not, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from paceline.config.reward import AttachedConfig
from paceline.core.attached_clients.attachment import (
    FromClient,
    Hello,
    ToClient,
    Welcome,
    Work,
)
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.attached.scorer import AttachedScorer
from paceline.reward.attached.servicer import GatewayServicer
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.sdk import RewardAttachment
from paceline.service.grpc import channels
from paceline.service.grpc.server import start_server
from paceline.service.identity.credentials import Credentials
from paceline.wire.calls.attachment import SCORER_MESSAGES, GroupAnswer


def items(*responses: str, data_source: str = "") -> list[ScoreItem]:
    """An item for each response."""
    return [
        ScoreItem(
            trajectory_id=f"t{index}", prompt="", response=response, ground_truth="", data_source=data_source
        )
        for index, response in enumerate(responses)
    ]


def length(response: str, ground_truth: str) -> float:
    """A score."""
    return float(len(response))


@dataclass
class Run:
    """A gateway that serves, with its one scorer."""

    scorer: AttachedScorer
    address: str
    server: Any

    def attach(self, function: Callable[..., Any] = length, **options: Any) -> asyncio.Task[None]:
        attachment = RewardAttachment(function, address=self.address, name="judge", **options)
        return asyncio.create_task(attachment.run())

    async def clients(self, number: int) -> None:
        async with asyncio.timeout(120):
            while self.scorer.gateway.num_clients != number:  # noqa: ASYNC110  a test's own look
                await asyncio.sleep(0.01)


@asynccontextmanager
async def run(
    *,
    timeout_s: float = 30.0,
    wait_for_s: float = 30.0,
    weight: float = 1.0,
    token: str = "",
    port: int = 0,
    host: str = "127.0.0.1",
    credentials: Credentials | None = None,
) -> AsyncIterator[Run]:
    """A run whose gateway serves."""
    config = AttachedConfig(name="judge", weight=weight, timeout_s=timeout_s, wait_for_s=wait_for_s)
    scorer = AttachedScorer(config, timeout_s=1.0, run_id="run-1")
    servicer = GatewayServicer()
    servicer.gateways = {"judge": scorer.gateway}
    add: Callable[..., None] = reward_pb2_grpc.add_RewardGatewayServicer_to_server
    credentials = credentials or Credentials(token=token)
    server = await start_server(add, servicer, host=host, port=port, credentials=credentials)
    await scorer.start()
    try:
        yield Run(scorer, server.address, server)
    finally:
        await scorer.close()
        await server.stop(grace_s=0)


async def ended(*tasks: asyncio.Task[None]) -> None:
    """Cancels tasks and waits for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RawClient:
    """Says what a test wants it to say."""

    def __init__(self, address: str, token: str = "") -> None:
        self._channel = channels.connect(address, credentials=Credentials(token=token))
        self._says: asyncio.Queue[FromClient[GroupAnswer] | None] = asyncio.Queue()
        attach = reward_pb2_grpc.RewardGatewayStub(self._channel).Attach
        self.hears = channels.duplex(attach, self._messages(), phase="ATTACH", peer="gateway")

    async def _messages(self) -> AsyncIterator[reward_pb2.ScorerMessage]:
        while (message := await self._says.get()) is not None:
            yield SCORER_MESSAGES.client_to_proto(message)

    def say(self, message: FromClient[GroupAnswer] | None) -> None:
        self._says.put_nowait(message)

    async def next(self) -> ToClient[ScoreItem]:
        async with asyncio.timeout(120):
            return SCORER_MESSAGES.server_from_proto(await anext(self.hears))

    async def hello(self, *, window: int = 16) -> None:
        self.say(Hello(name="judge", client="raw", window=window))
        assert isinstance(await self.next(), Welcome)

    async def work(self) -> list[tuple[int, ScoreItem]]:
        message = await self.next()
        assert isinstance(message, Work), message
        return list(message.tasks)

    async def close(self) -> None:
        await self._channel.close()


def answer(ticket: int, item: ScoreItem, reward: float = 7.0) -> tuple[int, ScoreResult]:
    return ticket, ScoreResult(trajectory_id=item.trajectory_id, reward=reward)
