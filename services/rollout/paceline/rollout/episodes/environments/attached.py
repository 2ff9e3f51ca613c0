"""Environments that have attached to this server: each plays whole episodes and requests answers.

An attempt is given to one environment. If that environment leaves, the next attempt is given to another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from paceline.core.attached_clients.attachment import Leave
from paceline.core.attached_clients.dispatch import Failure
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.core.samples.chat import Message
from paceline.core.samples.episode import Play, Played
from paceline.core.text import one_line
from paceline.rollout.episodes.environment import (
    EnvironmentLostError,
    EpisodeTask,
    Grade,
    Opening,
    TurnResult,
)
from paceline.rpc.v1 import environment_pb2 as pb
from paceline.rpc.v1 import environment_pb2_grpc
from paceline.service.attach.gateway import Gateway, GatewayOptions, first_hello
from paceline.wire.calls.playing import PLAYER_MESSAGES
from paceline.wire.records import values_of


class AttachedEnvironment:
    """An `EpisodeEnvironment` whose episodes are played by attached clients.

    Args:
        name: name under which clients attach.
        run_id: id of the run, which clients are told.
        play_s: longest time of an episode.
        wait_s: how long an episode waits for a client.
        is_over: returns whether the run is over; if it is, clients are told not to attach again.
    """

    call_names: Sequence[str] = ()

    def __init__(
        self, name: str, *, run_id: str, play_s: float, wait_s: float, is_over: Callable[[], bool]
    ) -> None:
        self.name, self._is_over = name, is_over
        self.gateway: Gateway[Play, Played] = Gateway(
            GatewayOptions(
                name=name,
                run_id=run_id,
                answer_within_s=play_s,
                wait_for_s=wait_s,
                source_of=lambda play: str(play.task.get("data_source", "")),
                size_of=lambda play: len(str(play.task)),
                max_tries=1,  # the requests of two clients must not meet in one attempt
            )
        )

    async def start(self) -> None:
        """Does nothing: clients attach at any time."""

    async def close(self) -> None:
        """Asks the clients to leave."""
        is_over = self._is_over()
        reason = "the run is over" if is_over else "this rollout server ends"
        await self.gateway.close(Leave(reason=reason, for_good=is_over))

    def session(self, task: EpisodeTask) -> AttachedSession:
        """Returns a session for one attempt."""
        return AttachedSession(self.gateway, self.name, task)


class AttachedSession:
    """One attempt at an episode, at a client."""

    def __init__(self, gateway: Gateway[Play, Played], name: str, task: EpisodeTask) -> None:
        self._gateway, self._peer = gateway, f"environments attached as {name}"
        self._task = task
        self._played = Played()

    async def open(self) -> Opening:
        """Returns nothing yet: the client opens the episode when it plays it."""
        return Opening()

    async def run(self, base_url: str, token: str, model: str) -> str:
        """Has a client play the episode, once."""
        play = Play(**values_of(self._task), base_url=base_url, token=token, model=model)
        [played] = await self._gateway.ask([play])
        fault = played.message if isinstance(played, Failure) else played.error
        if isinstance(played, Failure) or fault:
            raise EnvironmentLostError(one_line(f"{play.trajectory_id}: {fault}"), peer=self._peer)
        self._played = played
        return one_line(played.stop_reason)[:64]

    async def step(self, turn: int, action: Message) -> TurnResult:
        """Is never called, because clients lead their episodes."""
        raise EnvironmentLostError(f"turn {turn} was not asked by the client", peer=self._peer)

    async def close(self, stop_reason: str) -> Grade:
        """Returns the client's grade, if it played the episode to its end."""
        return Grade(reward=self._played.reward, components=self._played.components)

    async def abandon(self) -> None:
        """Does nothing: the token of this attempt is gone, so the client's next request is refused."""


class EnvironmentGatewayServicer(environment_pb2_grpc.EnvironmentGatewayServicer):
    """Lets clients attach once `environment` is set."""

    def __init__(self) -> None:
        self.environment: AttachedEnvironment | None = None

    async def Attach(
        self, messages: AsyncIterator[pb.PlayerMessage], context: object
    ) -> AsyncIterator[pb.PlayGatewayMessage]:
        """Serves the stream of one client.

        Raises:
            EnvironmentLackError: the server is still starting, or no environment attaches to this run.
            ConfigError: environments attach under another name.
            ProtocolError, InvalidMessageError, DeadlineError: the client's messages break the protocol.
        """
        read = (PLAYER_MESSAGES.client_from_proto(message) async for message in messages)
        hello = await first_hello(read)
        environment = self.environment
        if environment is None:
            raise EnvironmentLackError(
                "no environment can attach here (yet): the server is starting, or "
                "rollout.environment.attached is not set"
            )
        if hello.name != environment.name:
            raise ConfigError(
                f"nothing attaches as {one_line(hello.name)!r} to this run: rollout.environment.attached is "
                f"{environment.name!r}"
            )
        async for message in environment.gateway.serve(hello, read):
            yield PLAYER_MESSAGES.server_to_proto(message)
