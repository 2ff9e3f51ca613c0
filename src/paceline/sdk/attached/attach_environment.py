"""Attaches an environment to a run, whose episodes it plays; it needs no port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.core.attached_clients.attachment import FromClient, ToClient
from paceline.core.samples.episode import Play, Played
from paceline.rpc.v1 import environment_pb2_grpc
from paceline.sdk.attached.attachment import Attachment, attach_until_signal
from paceline.sdk.attached.playing import Asker, play
from paceline.sdk.environment import Environment
from paceline.service.grpc import channels
from paceline.service.identity.credentials import ENVIRONMENT_TOKEN, Credentials
from paceline.wire.calls.playing import play_gateway_message_from_proto, player_message_to_proto


class EnvironmentAttachment(Attachment[Play, Played]):
    """Plays the episodes that a run sends, until the run is over.

    Args:
        make: the class, or a function without arguments that makes an instance: one per attempt.
        address: host:port of one or several rollout servers of the run; each gets a stream.
        every_address: attach to every address to which the host of `address` resolves, and look them up
            again every five seconds: for several servers of the run behind one name.
        name: the name in `rollout.environment.attached` of the run's configuration.
        token: token of the scope `attach`, or the run's; None takes PACELINE_ENVIRONMENT_TOKEN.
        max_episodes: most episodes at a time, from each server.
        data_sources: data sources that it can play; empty: all.
        patience_s: how long to try to reach a run that does not answer.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        address: str | Sequence[str],
        name: str,
        token: str | None = None,
        max_episodes: int = 64,
        data_sources: Sequence[str] = (),
        patience_s: float = 300.0,
        every_address: bool = False,
    ) -> None:
        credentials = Credentials.from_env(ENVIRONMENT_TOKEN)
        self._make, self._ask = make, Asker(max_episodes, credentials.tls)
        super().__init__(
            address=address,
            name=name,
            role="rollout",
            credentials=credentials if token is None else credentials.with_token(token),
            data_sources=data_sources,
            window=max_episodes,
            patience_s=patience_s,
            every_address=every_address,
        )

    def _stream(
        self, channel: Any, messages: AsyncIterator[FromClient[Played]], peer: str
    ) -> AsyncIterator[ToClient[Play]]:
        attach = environment_pb2_grpc.EnvironmentGatewayStub(channel).Attach
        requests = (player_message_to_proto(message) async for message in messages)
        answers = channels.duplex(attach, requests, phase="ATTACH", peer=peer, token=ENVIRONMENT_TOKEN)
        return (play_gateway_message_from_proto(message) async for message in answers)

    def _end(self) -> None:
        self._ask.close()

    async def _answer(self, task: Play) -> Played:
        return await play(self._make(), task, self._ask)


def attach_environment(
    make: Callable[[], Environment], *, address: str | Sequence[str], name: str, **options: Any
) -> None:
    """Plays a run's episodes until the run is over or a signal comes; see `EnvironmentAttachment`.

    Raises:
        SystemExit: the run cannot be reached, or refuses this client; the reason is in the log.
    """
    attach_until_signal(
        lambda: EnvironmentAttachment(make, address=address, name=name, **options), "attached-environment"
    )
