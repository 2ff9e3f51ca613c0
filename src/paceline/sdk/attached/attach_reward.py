"""Attaches a reward function to a run, whose items it scores; it needs no port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.rpc.v1 import reward_pb2_grpc
from paceline.sdk.attached.attachment import Attachment, attach_until_signal
from paceline.sdk.function import CalledFunction, version_of
from paceline.service.identity.credentials import REWARD_TOKEN
from paceline.wire.calls.attachment import SCORER_MESSAGES, GroupAnswer, Task


class RewardAttachment(Attachment[Task, GroupAnswer]):
    """Scores the items that a run sends, until the run is over.

    Args:
        function: as in `RewardServer`: `f(response, ground_truth, **extra)`; with `batch`, `f(items)`.
        address: host:port of one or several reward services of the run; each gets a stream.
        every_address: attach to every address to which the host of `address` resolves, and look them up
            again every five seconds: for several servers of the run behind one name.
        name: one of the names under `reward.attached` of the run's configuration.
        token: token of the scope `attach`, or the run's; None takes PACELINE_REWARD_TOKEN.
        data_sources: data sources that the function can score; empty: all.
        batch: the function scores all items that have arrived, up to `max_batch`, in one call.
        group: the function `f(items)` scores the samples of one prompt in one call.
        max_concurrent: how many items, or groups, are scored at the same time.
        max_batch: largest batch.
        timeout_s: how long a call of the function may take.
        patience_s: how long to try to reach a run that does not answer.
        version: version of what the function computes; as in `RewardServer`.

    Raises:
        ConfigError: the function cannot be called in this form.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        address: str | Sequence[str],
        name: str,
        token: str | None = None,
        data_sources: Sequence[str] = (),
        batch: bool = False,
        max_concurrent: int = 16,
        max_batch: int = 64,
        timeout_s: float = 300.0,
        patience_s: float = 300.0,
        version: str | None = None,
        group: bool = False,
        every_address: bool = False,
    ) -> None:
        self._function = CalledFunction(
            function, batch=batch, group=group, max_concurrent=max_concurrent, timeout_s=timeout_s
        )
        self._batches = _Batches(self._function, max_batch) if batch else None
        super().__init__(
            address=address,
            name=name,
            role="reward",
            token=token,
            token_variable=REWARD_TOKEN,
            messages=SCORER_MESSAGES,
            stub=reward_pb2_grpc.RewardGatewayStub,
            data_sources=data_sources,
            window=max_batch if batch else max_concurrent,
            patience_s=patience_s,
            version=version_of(function) if version is None else version,
            groups=group,
            every_address=every_address,
        )

    def _end(self) -> None:
        self._function.close()

    async def _answer(self, task: Task) -> GroupAnswer:
        if self._function.is_stuck:  # another client may be able to score
            raise RewardError(
                f"calls of {self._function.name} hang: start this client again",
                kind=RewardErrorKind.UNAVAILABLE,
            )
        if not isinstance(task, ScoreItem):
            return tuple(await self._function.score(task))
        if self._batches is not None:
            return await self._batches.score(task)
        (result,) = await self._function.score([task])
        return result


class _Batches:
    """Collects the items that arrive while the function runs."""

    def __init__(self, function: CalledFunction, size: int) -> None:
        self._function, self._size = function, size
        self._waiting: list[tuple[ScoreItem, asyncio.Future[ScoreResult]]] = []
        self._working: asyncio.Task[None] | None = None

    async def score(self, item: ScoreItem) -> ScoreResult:
        done: asyncio.Future[ScoreResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(), name="batches")
        return await done

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # lets the rest of a message arrive
            batch = [row for row in self._waiting[: self._size] if not row[1].done()]
            del self._waiting[: self._size]
            results = await self._function.score([item for item, _ in batch]) if batch else []
            for (_, done), result in zip(batch, results, strict=True):
                if not done.done():
                    done.set_result(result)


def attach_reward(
    function: Callable[..., Any],
    *,
    address: str | Sequence[str],
    name: str,
    ready_file: str | Path | None = None,
    **options: Any,
) -> None:
    """Scores a run's items until the run is over or a signal comes; arguments as for `RewardAttachment`.

    `ready_file` exists, and is rewritten every two seconds, while this client is attached.

    Raises:
        ConfigError: the function cannot be called as a reward function.
        SystemExit: the run cannot be reached, or refuses this client; the reason is in the log.
    """
    attach_until_signal(
        lambda: RewardAttachment(function, address=address, name=name, **options),
        "attached-reward",
        ready_file=ready_file,
    )
