"""A reward server around a function: `serve_reward(f, port=50061)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.sdk.function import CalledFunction
from paceline.service.credentials import REWARD_TOKEN, Credentials
from paceline.service.grpc_server import RunningServer, start_server
from paceline.service.runtime import ServiceContext, run_service
from paceline.wire.protobuf import score_item_from_proto, score_result_to_proto


class RewardServer:
    """Serves `RewardService.Score` by a function; an async context manager.

    Args:
        function: `f(response, ground_truth, **extra) -> float | dict[str, float]`, plain or async. With
            `batch` instead `f(items: list[ScoreItem]) -> list[float | dict[str, float]]`, one value per item.
        host, port: where to listen; port 0 takes any free one.
        token: what callers must carry; None takes PACELINE_REWARD_TOKEN from the environment. Required if
            other machines can reach the address.
        batch: pass all items of a call at once, and serve one call at a time, as suits a model on one device.
        max_concurrent: how many items are scored at the same time. A plain function runs in threads, an async
            one in an event loop of its own.
        timeout_s: how long a call of the function may take; then its items have an error. When
            `max_concurrent` calls hang, health says NOT_SERVING.

    Raises:
        ConfigError: the function cannot be called like this.
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
    ) -> None:
        self._function = CalledFunction(
            function, batch=batch, max_concurrent=max_concurrent, timeout_s=timeout_s
        )
        self._host, self._port = host, port
        credentials = Credentials.from_env(REWARD_TOKEN).for_outside_callers()
        self._credentials = credentials if token is None else credentials.with_token(token)
        self._running: RunningServer | None = None

    @property
    def address(self) -> str:
        """host:port, once started."""
        if self._running is None:
            raise RuntimeError("the reward server has not been started")
        return self._running.address

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens.

        Raises:
            ConfigError: no token on an address that other machines reach.
            EnvironmentLackError: the port is taken.
        """
        add = reward_pb2_grpc.add_RewardServiceServicer_to_server
        self._running = await start_server(
            add,
            _Servicer(self.score),
            host=self._host,
            port=self._port,
            credentials=self._credentials,
            port_key="the port argument of serve_reward",
        )

    async def stop(self) -> None:
        """Gives calls under way two seconds, then stops. A function that hangs is abandoned."""
        if self._running is not None:
            await self._running.stop()
        self._function.close()

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """The server's answer: one result for each item; the error of an item does not affect the others."""
        results = await self._function.score(items)
        if self._function.is_stuck and self._running is not None:
            await self._running.refuse_work()
        return results


def serve_reward(
    function: Callable[..., Any],
    *,
    port: int,
    host: str = "127.0.0.1",
    token: str | None = None,
    batch: bool = False,
    max_concurrent: int = 16,
    timeout_s: float = 300.0,
) -> None:
    """Serves a reward function until SIGINT or SIGTERM; arguments as of `RewardServer`.

    Raises:
        ConfigError: the function cannot be called as a reward function.
        SystemExit: the server could not start; the reason is in the log on standard error.
    """
    CalledFunction(function, batch=batch, max_concurrent=max_concurrent, timeout_s=timeout_s).close()

    async def serve(context: ServiceContext) -> None:
        server = RewardServer(
            function,
            host=host,
            port=port,
            token=token,
            batch=batch,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
        )
        await server.start()
        context.defer("reward server", server.stop)
        print(f"reward server on {server.address}", file=sys.stderr, flush=True)
        await context.stopping.wait()

    code = run_service(serve, name="reward-server")
    if code:
        raise SystemExit(code)


class _Servicer(reward_pb2_grpc.RewardServiceServicer):
    def __init__(self, score: Callable[[Sequence[ScoreItem]], Any]) -> None:
        self._score = score

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        items = [score_item_from_proto(item) for item in request.items]
        return reward_pb2.ScoreResponse(
            results=[score_result_to_proto(result) for result in await self._score(items)]
        )
