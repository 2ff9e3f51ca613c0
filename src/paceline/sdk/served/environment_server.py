"""Serves an environment to rollout servers: `serve_environment(Guess, port=50071)`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from paceline.core.errors import ProtocolError
from paceline.core.samples.chat import Message
from paceline.rpc.v1 import environment_pb2 as pb
from paceline.rpc.v1 import environment_pb2_grpc
from paceline.sdk.environment import Environment, Observation
from paceline.sdk.served.serving import Served, serve_until_signal
from paceline.sdk.served.sessions import Key, Sessions
from paceline.service.identity.credentials import ENVIRONMENT_TOKEN, Credentials
from paceline.wire.calls.environment import (
    ENVIRONMENT_CONTRACT,
    message_from_proto,
    message_to_proto,
    tool_to_proto,
)
from paceline.wire.json_object import read_json_object, write_json_object

_EXPIRE_S = 1.0

Tasks = Callable[[str], Iterable[Mapping[str, object]]]
"""Returns the rows of a split."""


class EnvironmentServer(Served):
    """Serves a class as `EnvironmentService`; an async context manager.

    Args:
        make: makes an instance for each attempt at an episode: the class, or a function without arguments.
        host, port: where to listen; port 0 takes any free one.
        token: token that callers must send; None takes PACELINE_ENVIRONMENT_TOKEN from the environment.
            Required if other machines can reach the address.
        max_episodes: most episodes open at a time; callers retry refused ones later.
        tasks: returns the rows of "train" or "val" for a run without data files, always in the same order.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_episodes: int = 64,
        tasks: Tasks | None = None,
    ) -> None:
        self.sessions, self._tasks = Sessions(make, max_episodes), tasks
        self._name = getattr(make, "__name__", type(make).__name__)
        credentials = Credentials.from_env(ENVIRONMENT_TOKEN).with_token(token)
        super().__init__("environment", host=host, port=port, credentials=credentials)
        self._expiring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens, and frees sessions that nobody closes; raises the errors of `Served.start`."""
        await super().start()
        self._expiring = asyncio.create_task(self._expire(), name="leases")

    async def stop(self) -> None:
        """Waits two seconds for calls under way, then frees all episodes."""
        await super().stop()
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.wait([self._expiring])
        await self.sessions.close_all()

    def _service(self) -> tuple[Callable[..., None], object]:
        add = environment_pb2_grpc.add_EnvironmentServiceServicer_to_server
        return add, _Servicer(self.sessions, self._name, self._tasks)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            await self.sessions.expire()


def serve_environment(
    make: Callable[[], Environment],
    *,
    port: int,
    host: str = "127.0.0.1",
    token: str | None = None,
    max_episodes: int = 64,
    tasks: Tasks | None = None,
) -> None:
    """Serves an environment until SIGINT or SIGTERM; arguments as for `EnvironmentServer`.

    Raises:
        SystemExit: the server could not start; the reason is in the log on standard error.
    """

    def make_server() -> EnvironmentServer:
        return EnvironmentServer(
            make, host=host, port=port, token=token, max_episodes=max_episodes, tasks=tasks
        )

    serve_until_signal(make_server, "environment")


class _Servicer(environment_pb2_grpc.EnvironmentServiceServicer):
    def __init__(self, sessions: Sessions, name: str, tasks: Tasks | None) -> None:
        self._sessions, self._name, self._tasks = sessions, name, tasks

    async def Describe(
        self, request: pb.DescribeEnvironmentRequest, context: object
    ) -> pb.EnvironmentDescription:
        return pb.EnvironmentDescription(
            name=self._name,
            max_episodes=self._sessions.max_episodes,
            num_open=self._sessions.num_open,
            contract=ENVIRONMENT_CONTRACT,
        )

    async def Tasks(
        self, request: pb.EnvironmentTasksRequest, context: object
    ) -> AsyncIterator[pb.EnvironmentTask]:
        if self._tasks is None:
            raise ProtocolError(
                f"{self._name} serves no tasks: give serve_environment the argument `tasks`, or the run "
                "data.train_files"
            )
        for row in await asyncio.to_thread(_listed, self._tasks, request.split):
            yield pb.EnvironmentTask(task_json=write_json_object(row, "task"))

    async def Open(self, request: pb.OpenEpisodeRequest, context: object) -> pb.EpisodeObservation:
        key, attempt = _key(request.episode)
        began = time.monotonic()
        said, tools = await self._sessions.open(
            key,
            attempt,
            read_json_object(request.task_json, "task"),
            task_seed=request.task_seed,
            episode_seed=request.episode_seed,
            lease_s=request.lease_s,
        )
        answer = _observation(said, role="user", seconds=time.monotonic() - began)
        answer.tools.extend(tool_to_proto(tool) for tool in tools)
        return answer

    async def Step(self, request: pb.StepEpisodeRequest, context: object) -> pb.EpisodeObservation:
        key, attempt = _key(request.episode)
        began = time.monotonic()
        said = await self._sessions.step(key, attempt, request.turn, message_from_proto(request.action))
        return _observation(said, role="tool", seconds=time.monotonic() - began)

    async def Run(self, request: pb.RunEpisodeRequest, context: object) -> pb.EpisodeRun:
        key, attempt = _key(request.episode)
        reason = await self._sessions.run(
            key, attempt, base_url=request.base_url, token=request.token, model=request.model
        )
        return pb.EpisodeRun(stop_reason=reason)

    async def Close(self, request: pb.CloseEpisodeRequest, context: object) -> pb.EpisodeGrade:
        key, attempt = _key(request.episode)
        outcome = await self._sessions.close(key, attempt, request.stop_reason, graded=request.graded)
        if outcome is None:
            return pb.EpisodeGrade()
        with contextlib.suppress(TypeError, ValueError):
            return pb.EpisodeGrade(reward=outcome.reward, components=dict(outcome.components))
        raise ProtocolError(
            f"{self._name}.close must return an Outcome of numbers, it returned {outcome!r:.200}"
        )


def _listed(tasks: Tasks, split: str) -> list[Mapping[str, object]]:
    return list(tasks(split))


def _key(episode: pb.EpisodeAttempt) -> tuple[Key, int]:
    if not episode.run_id or not episode.trajectory_id or episode.attempt < 1:
        raise ProtocolError(
            "a call names no episode: run_id, trajectory_id and an attempt from 1 on are needed"
        )
    return (episode.run_id, episode.trajectory_id), episode.attempt


def _observation(said: Observation, *, role: str, seconds: float) -> pb.EpisodeObservation:
    messages = said.messages or ((Message(role=role, content=said.text),) if said.text else ())
    return pb.EpisodeObservation(
        messages=[message_to_proto(message) for message in messages], stop_reason=said.done, seconds=seconds
    )
