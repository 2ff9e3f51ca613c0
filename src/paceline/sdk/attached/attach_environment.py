"""Attaches an environment to a run, whose episodes it plays; it needs no port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.samples.episode import Play, Played
from paceline.rpc.v1 import environment_pb2_grpc
from paceline.sdk.attached.attachment import Attachment, attach_until_signal
from paceline.sdk.attached.playing import Asker, play
from paceline.sdk.environment import Environment
from paceline.service.identity.credentials import ENVIRONMENT_TOKEN
from paceline.wire.calls.playing import PLAYER_MESSAGES


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
        self._make = make
        super().__init__(
            address=address,
            name=name,
            role="rollout",
            token=token,
            token_variable=ENVIRONMENT_TOKEN,
            messages=PLAYER_MESSAGES,
            stub=environment_pb2_grpc.EnvironmentGatewayStub,
            data_sources=data_sources,
            window=max_episodes,
            patience_s=patience_s,
            every_address=every_address,
        )
        self._ask = Asker(max_episodes, self._credentials.tls)

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
