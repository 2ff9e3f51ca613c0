"""A reward server around a function: `serve_reward(f, port=50061)`."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.reward_function import (
    RewardFunction,
    check_value,
    describe,
    inspect_function,
    kind_of,
)
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.core.text import one_line
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
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
        max_concurrent: how many items are scored at the same time; a plain function runs in threads.

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
    ) -> None:
        self._name = getattr(function, "__name__", type(function).__name__)
        self._function = (
            _batch_function(self._name, function) if batch else inspect_function(self._name, function)
        )
        self._batch = batch
        self._host, self._port = host, port
        credentials = Credentials.from_env(REWARD_TOKEN).for_outside_callers()
        self._credentials = credentials if token is None else credentials.with_token(token)
        self._slots = asyncio.Semaphore(1 if batch else max_concurrent)
        self._threads = ThreadPoolExecutor(1 if batch else max_concurrent, thread_name_prefix="reward")
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
        """Gives calls under way two seconds, then stops. A function that hangs in its thread is abandoned."""
        if self._running is not None:
            await self._running.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """The server's answer: one result for each item; the error of an item does not affect the others."""
        if self._batch:
            return await self._score_batch(list(items))
        return list(await asyncio.gather(*(self._score_one(item) for item in items)))

    async def _score_one(self, item: ScoreItem) -> ScoreResult:
        try:
            keywords = self._function.keywords(item, {})
            returned = await self._call(item.response, item.ground_truth, **keywords)
            return self._result(item, returned)
        except RewardError as error:
            return _failed(item, error.kind, str(error))
        except Exception as error:  # noqa: BLE001  user code: what it raises is this item's error
            return _failed(item, kind_of(error), describe(self._name, error))

    async def _score_batch(self, items: list[ScoreItem]) -> list[ScoreResult]:
        try:
            returned = await self._call(items)
        except Exception as error:  # noqa: BLE001  as above
            kind, message = kind_of(error), describe(self._name, error)
            return [_failed(item, kind, message) for item in items]
        if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != len(items):
            got = f"{len(returned)} values" if isinstance(returned, Sequence) else type(returned).__name__
            message = (
                f"{self._name} returned {got} for {len(items)} items: return a list with one value for each"
            )
            return [_failed(item, RewardErrorKind.WRONG_COUNT, message) for item in items]
        results = []
        for item, value in zip(items, returned, strict=True):
            try:
                results.append(self._result(item, value))
            except RewardError as error:
                results.append(_failed(item, error.kind, str(error)))
        return results

    async def _call(self, *positional: object, **keywords: object) -> object:
        async with self._slots:
            if self._function.is_async:
                return await self._function.call(*positional, **keywords)  # type: ignore[misc]
            loop = asyncio.get_running_loop()
            call = functools.partial(_guarded, self._function.call, *positional, **keywords)
            returned, error = await loop.run_in_executor(self._threads, call)
            if error is not None:
                raise error
            return returned

    def _result(self, item: ScoreItem, returned: object) -> ScoreResult:
        value, further = check_value(self._name, returned)
        components = {label.removeprefix(f"{self._name}/"): part for label, part in further.items()}
        return ScoreResult(trajectory_id=item.trajectory_id, reward=value, components=components)


def serve_reward(
    function: Callable[..., Any],
    *,
    port: int,
    host: str = "127.0.0.1",
    token: str | None = None,
    batch: bool = False,
    max_concurrent: int = 16,
) -> None:
    """Serves a reward function until SIGINT or SIGTERM; arguments as of `RewardServer`.

    Raises:
        ConfigError: the function cannot be called as a reward function.
        SystemExit: the server could not start; the reason is in the log on standard error.
    """
    look_at_first = _batch_function if batch else inspect_function
    look_at_first(getattr(function, "__name__", "function"), function)

    async def serve(context: ServiceContext) -> None:
        server = RewardServer(
            function, host=host, port=port, token=token, batch=batch, max_concurrent=max_concurrent
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


def _guarded(
    function: Callable[..., object], *positional: object, **keywords: object
) -> tuple[object, Exception | None]:
    """Runs in a thread. A future cannot carry StopIteration, and SystemExit would end the server."""
    try:
        return function(*positional, **keywords), None
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        return None, RuntimeError(describe("the function", error))
    except Exception as error:  # noqa: BLE001  user code
        return None, error


def _batch_function(name: str, function: object) -> RewardFunction:
    if not callable(function):
        raise ConfigError(
            f"reward function {name!r} is {type(function).__name__}, not a function: "
            "write f(items: list[ScoreItem]) -> list[float]"
        )
    return RewardFunction(
        reference=name, call=function, named=frozenset(), required=frozenset(), takes_any=False
    )


def _failed(item: ScoreItem, kind: RewardErrorKind, message: str) -> ScoreResult:
    return ScoreResult(
        trajectory_id=item.trajectory_id, reward=None, error=one_line(f"{kind.value}: {message}")
    )
