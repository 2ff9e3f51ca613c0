"""Serves a reward function: `serve_reward(f, port=50061)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.scoring import RewardDescription, ScoreItem, ScoreResult
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.sdk.function import CalledFunction, version_of
from paceline.sdk.served.serving import Served, serve_until_signal
from paceline.service.identity.credentials import REWARD_TOKEN, Credentials
from paceline.wire.calls.protobuf import description_to_proto, score_items_from_proto, score_result_to_proto


class RewardServer(Served):
    """Serves a function as `RewardService`; an async context manager.

    Args:
        function: `f(response, ground_truth, **extra) -> float | dict[str, float]`, plain or async. With
            `batch` instead `f(items: list[ScoreItem]) -> list[float | dict[str, float]]`, one value per item.
        host, port: where to listen; port 0 takes any free one.
        token: token that callers must send; None takes PACELINE_REWARD_TOKEN from the environment.
            Required if other machines can reach the address.
        batch: pass all items of a call at once, and serve one call at a time, as a model on a GPU needs.
        max_concurrent: how many items are scored at the same time. A plain function runs in threads, an async
            one in a separate event loop.
        timeout_s: how long a call of the function may take; after that its items get an error. When
            `max_concurrent` calls hang, health reports NOT_SERVING.
        data_sources: data sources that the function can score; empty: all.
        version: version of what it computes: a run that caches scores asks again after a change. None: a
            digest of the file that defines the function, which misses changes of imported code and of files
            that the function reads.
        group: call `f(items)` once per prompt, with all its samples. The run's configuration must set
            `group: true`, too.

    Raises:
        ConfigError: the function cannot be called in this form.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        batch: bool = False,
        max_concurrent: int = 16,
        timeout_s: float = 300.0,
        data_sources: Sequence[str] = (),
        version: str | None = None,
        group: bool = False,
    ) -> None:
        self._function = CalledFunction(
            function, batch=batch, group=group, max_concurrent=max_concurrent, timeout_s=timeout_s
        )
        self._description = RewardDescription(
            name=self._function.name,
            data_sources=frozenset(data_sources),
            groups=group,
            version=version_of(function) if version is None else version,
        )
        credentials = Credentials.from_env(REWARD_TOKEN).with_token(token)
        super().__init__("reward", host=host, port=port, credentials=credentials)

    async def stop(self) -> None:
        """Waits two seconds for calls under way, then stops. A function that hangs is abandoned."""
        await super().stop()
        self._function.close()

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """Returns one result per item; the error of an item does not affect the others."""
        results = await self._function.score(items)
        if self._function.is_stuck and self._running is not None:
            await self._running.refuse_work()
        return results

    def _service(self) -> tuple[Callable[..., None], object]:
        return reward_pb2_grpc.add_RewardServiceServicer_to_server, _Servicer(self.score, self._description)


def serve_reward(
    function: Callable[..., Any],
    *,
    port: int,
    host: str = "127.0.0.1",
    token: str | None = None,
    batch: bool = False,
    max_concurrent: int = 16,
    timeout_s: float = 300.0,
    data_sources: Sequence[str] = (),
    version: str | None = None,
    group: bool = False,
) -> None:
    """Serves a reward function until SIGINT or SIGTERM; arguments as for `RewardServer`.

    Raises:
        ConfigError: the function cannot be called as a reward function.
        SystemExit: the server could not start; the reason is in the log on standard error.
    """
    CalledFunction(
        function, batch=batch, group=group, max_concurrent=max_concurrent, timeout_s=timeout_s
    ).close()

    def make() -> RewardServer:
        return RewardServer(
            function,
            host=host,
            port=port,
            token=token,
            batch=batch,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
            data_sources=data_sources,
            version=version,
            group=group,
        )

    serve_until_signal(make, "reward")


class _Servicer(reward_pb2_grpc.RewardServiceServicer):
    def __init__(self, score: Callable[[Sequence[ScoreItem]], Any], description: RewardDescription) -> None:
        self._score, self._description = score, description

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        items = score_items_from_proto(request.items)
        return reward_pb2.ScoreResponse(
            results=[score_result_to_proto(result) for result in await self._score(items)]
        )

    async def Describe(
        self, request: reward_pb2.DescribeRewardRequest, context: object
    ) -> reward_pb2.RewardDescription:
        return description_to_proto(self._description)
