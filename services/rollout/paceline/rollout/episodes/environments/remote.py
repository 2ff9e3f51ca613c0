"""An environment that is served over gRPC as an `EnvironmentService`.

While the service cannot be reached, a call is repeated for a short time, with the same attempt and turn; the
service gives a repeated call the same answer. A call that fails for longer, or is refused, loses the attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.config.rollout import EnvironmentConfig
from paceline.core.errors import PacelineError, PeerLostError
from paceline.core.samples.chat import Message
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
from paceline.service.grpc import channels
from paceline.service.identity.credentials import Credentials
from paceline.wire.calls.environment import (
    grade_from_proto,
    message_to_proto,
    messages_from_proto,
    tool_from_proto,
)
from paceline.wire.json_object import read_json_object, write_json_object

log = logging.getLogger(__name__)

_REACH_S = 3.0
_ABANDON_S = 1.0
_REPEAT_PAUSES_S = (0.2, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteEnvironmentOptions:
    """How the service is called.

    Args:
        address: host:port.
        call_s: deadline of each call.
        lease_s: silence after which the service frees an episode; longer than any turn takes.
        credentials: the token that the service requires, and the files for TLS.
        run_s: deadline of an episode that the service drives.
    """

    address: str
    call_s: float
    lease_s: float
    credentials: Credentials
    run_s: float = 600.0

    @classmethod
    def of(
        cls, config: EnvironmentConfig, *, turn_s: float, credentials: Credentials
    ) -> RemoteEnvironmentOptions:
        """Returns the options of the configuration.

        Args:
            turn_s: longest time that a group may be under way.

        Raises:
            ConfigError: the file with the token cannot be read.
        """
        assert config.address is not None, "environments that attach have no address"
        return cls(
            address=config.address,
            call_s=config.call_s,
            lease_s=turn_s + 2 * config.call_s,
            credentials=credentials.with_token_file(
                config.token_file,
                setting=f"rollout.environment.token_file={config.token_file}",
                place="on the hosts of the rollout servers",
            ),
            run_s=turn_s,
        )


class RemoteEnvironment:
    """An `EpisodeEnvironment` behind an address."""

    call_names: Sequence[str] = ()

    def __init__(self, options: RemoteEnvironmentOptions) -> None:
        self._options = options
        self._peer = f"environment at {options.address}"
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Connects to the service of the environment.

        A service that cannot be reached now is logged, and may come up later.
        """
        try:
            description = await self.describe()
        except PacelineError as error:
            log.warning("%s cannot be reached (yet): %s", self._peer, error)
        else:
            log.info("%s: %s, up to %d episodes", self._peer, description.name, description.max_episodes)

    async def describe(self) -> pb.EnvironmentDescription:
        """Asks for the service's description, for a few seconds; raises what `channels.call` raises."""
        if self._channel is None:
            self._channel = channels.connect(
                self._options.address, credentials=self._options.credentials, role="environment"
            )
        return await channels.call(
            environment_pb2_grpc.EnvironmentServiceStub(self._channel).Describe,
            pb.DescribeEnvironmentRequest(),
            timeout_s=_REACH_S,
            phase="ENVIRONMENT",
            peer=self._peer,
            wait_for_ready=True,
        )

    async def first_tasks(self, at_most: int) -> list[dict[str, object]]:
        """Returns the first training rows of an environment that serves rows and was started.

        Raises:
            PacelineError: as in `channels.stream`, for example because the environment serves no rows.
        """
        assert self._channel is not None, "the environment has been started"
        rows: list[dict[str, object]] = []
        answers = channels.stream(
            environment_pb2_grpc.EnvironmentServiceStub(self._channel).Tasks,
            pb.EnvironmentTasksRequest(split="train"),
            phase="TASKS",
            peer=self._peer,
            timeout_s=self._options.call_s,
        )
        async with contextlib.aclosing(answers):
            async for answer in answers:
                rows.append(read_json_object(answer.task_json, f"task of the {self._peer}"))
                if len(rows) == at_most:
                    break
        return rows

    async def close(self) -> None:
        """Closes the connection to the service."""
        if self._channel is not None:
            await self._channel.close()

    def session(self, task: EpisodeTask) -> RemoteSession:
        """Returns a session for one attempt."""
        assert self._channel is not None, "the environment has been started"
        stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel)
        return RemoteSession(stub, self._options, self._peer, task)


class RemoteSession:
    """One attempt at an episode, in the service."""

    def __init__(self, stub: Any, options: RemoteEnvironmentOptions, peer: str, task: EpisodeTask) -> None:
        self._stub, self._options, self._peer, self._task = stub, options, peer, task
        self._episode = pb.EpisodeAttempt(
            run_id=task.run_id, trajectory_id=task.trajectory_id, attempt=task.attempt
        )

    async def open(self) -> Opening:
        """Begins the episode; the service's messages follow the prompt's."""
        request = pb.OpenEpisodeRequest(
            episode=self._episode,
            task_json=write_json_object(self._task.task, "task"),
            task_seed=self._task.task_seed,
            episode_seed=self._task.episode_seed,
            lease_s=self._options.lease_s,
        )
        with self._losses("Open"):
            answer = await self._call(self._stub.Open, request)
            return Opening(
                messages=messages_from_proto(answer.messages),
                tools=tuple(tool_from_proto(tool) for tool in answer.tools),
            )

    async def step(self, turn: int, action: Message) -> TurnResult:
        """Sends a turn and returns the environment's answer.

        A service that returns no message and does not end the episode breaks the contract.
        """
        request = pb.StepEpisodeRequest(
            episode=self._episode,
            turn=turn,
            action=message_to_proto(action),
            deadline_s=self._options.call_s,
        )
        with self._losses("Step"):
            answer = await self._call(self._stub.Step, request)
            messages = messages_from_proto(answer.messages)
        if not messages and not answer.stop_reason:
            raise EnvironmentLostError(
                f"{self._peer} answered turn {turn} with nothing: it must send a message, or end the episode",
                peer=self._peer,
            )
        return TurnResult(
            messages=messages,
            seconds=max(answer.seconds, 0.0),
            stop_reason=one_line(answer.stop_reason)[:64],
        )

    async def run(self, base_url: str, token: str, model: str) -> str:
        """Makes the service drive the episode. A broken call is not repeated: the episode would restart."""
        request = pb.RunEpisodeRequest(episode=self._episode, base_url=base_url, token=token, model=model)
        with self._losses("Run"):
            answer = await self._once(self._stub.Run, request, timeout_s=self._options.run_s)
        return one_line(answer.stop_reason)[:64]

    async def close(self, stop_reason: str) -> Grade:
        """Grades the episode and frees it."""
        request = pb.CloseEpisodeRequest(episode=self._episode, stop_reason=stop_reason, graded=True)
        with self._losses("Close"):
            reward, components = grade_from_proto(await self._call(self._stub.Close, request))
        return Grade(reward=reward, components=components)

    async def abandon(self) -> None:
        """Frees the episode if the service can be reached at once; otherwise the lease's end frees it."""
        request = pb.CloseEpisodeRequest(episode=self._episode, graded=False)
        try:
            await self._once(self._stub.Close, request, timeout_s=_ABANDON_S)
        except PacelineError as error:
            log.info("episode %s is left to its lease: %s", self._task.trajectory_id, error)

    async def _once(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        return await channels.call(method, request, timeout_s=timeout_s, phase="ENVIRONMENT", peer=self._peer)

    async def _call(self, method: Any, request: Any) -> Any:
        for pause_s in (*_REPEAT_PAUSES_S, None):
            try:
                return await self._once(method, request, timeout_s=self._options.call_s)
            except PeerLostError:
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("the last call returns or raises")

    @contextlib.contextmanager
    def _losses(self, name: str) -> Any:
        try:
            yield
        except PacelineError as error:
            raise EnvironmentLostError(
                one_line(f"{name} of {self._task.trajectory_id}: {type(error).__name__}: {error}"),
                peer=self._peer,
            ) from error
