"""Serves `RewardGateway.Attach`: connects the streams of attached clients with the gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.core.text import one_line
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.service.attach.gateway import Gateway, first_hello
from paceline.wire.calls.attachment import SCORER_MESSAGES, GroupResult, Task


class GatewayServicer(reward_pb2_grpc.RewardGatewayServicer):
    """Lets clients attach after `gateways` is set, which has the gateway for each name of clients."""

    def __init__(self) -> None:
        self.gateways: Mapping[str, Gateway[Task, GroupResult]] | None = None

    async def Attach(
        self, messages: AsyncIterator[reward_pb2.ScorerMessage], context: object
    ) -> AsyncIterator[reward_pb2.GatewayMessage]:
        """Serves the stream of one client.

        Raises:
            EnvironmentLackError: the service is still starting.
            ConfigError: the configuration has no such name.
            ProtocolError, InvalidMessageError, DeadlineError: the client's messages break the protocol.
        """
        read = (SCORER_MESSAGES.client_from_proto(message) async for message in messages)
        hello = await first_hello(read)
        if self.gateways is None:
            raise EnvironmentLackError("the reward service is still starting: try again")
        gateway = self.gateways.get(hello.name)
        if gateway is None:
            names = ", ".join(sorted(self.gateways)) or "none"
            raise ConfigError(
                f"no client can attach as {one_line(hello.name)!r} to this run: reward.attached names {names}"
            )
        async for message in gateway.serve(hello, read):
            yield SCORER_MESSAGES.server_to_proto(message)
