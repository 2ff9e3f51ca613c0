"""A user's function as a server and an attached client call it: one result per item, whatever it does."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.reward_function import RewardFunction, check_value, describe, inspect_function, kind_of
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.core.text import one_line
from paceline.sdk.threads import LoopThread, Threads


class CalledFunction:
    """Calls a reward function in threads of its own; an async one in an event loop of its own thread.

    Args:
        function: `f(response, ground_truth, **extra) -> float | dict[str, float]`, plain or async. With
            `batch` instead `f(items: list[ScoreItem]) -> list[float | dict[str, float]]`, one value per item.
        batch: pass all items of a call at once, one call at a time.
        max_concurrent: how many items are scored at the same time.
        timeout_s: how long a call may take; then its items have an error.

    Raises:
        ConfigError: the function cannot be called like this.
    """

    def __init__(
        self, function: Callable[..., Any], *, batch: bool, max_concurrent: int, timeout_s: float
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function = (
            _batch_function(self.name, function) if batch else inspect_function(self.name, function)
        )
        self._batch, self._timeout_s = batch, timeout_s
        size = 1 if batch else max_concurrent
        self._threads, self._loop = Threads(size), LoopThread(size)

    @property
    def is_stuck(self) -> bool:
        """Whether so many calls hang that it does not score any more."""
        return self._threads.is_stuck or self._loop.is_stuck

    def close(self) -> None:
        """Ends what is idle; a call that hangs does not keep the process alive."""
        self._threads.close()
        self._loop.close()

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """One result for each item; the error of an item does not affect the others."""
        if self._batch:
            return await self._score_batch(list(items))
        return list(await asyncio.gather(*(self._score_item(item) for item in items)))

    async def _score_item(self, item: ScoreItem) -> ScoreResult:
        try:
            keywords = self._function.keywords(item, {})
            returned = await self._call(item.response, item.ground_truth, **keywords)
            return self._result(item, returned)
        except RewardError as error:
            return _failed(item, error.kind, str(error))
        except Exception as error:  # noqa: BLE001  user code: what it raises is this item's error
            return _failed(item, kind_of(error), describe(self.name, error))

    async def _score_batch(self, items: list[ScoreItem]) -> list[ScoreResult]:
        try:
            returned = _listed(await self._call(items))
        except Exception as error:  # noqa: BLE001  as above
            kind, message = kind_of(error), describe(self.name, error)
            return [_failed(item, kind, message) for item in items]
        if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != len(items):
            got = f"{len(returned)} values" if isinstance(returned, Sequence) else type(returned).__name__
            message = (
                f"{self.name} returned {got} for {len(items)} items: return a list with one value for each"
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
        call: Callable[[], Any] = functools.partial(self._function.call, *positional, **keywords)
        if self._function.is_async:
            return await self._loop.call(call, timeout_s=self._timeout_s)
        return await self._threads.call(call, timeout_s=self._timeout_s)

    def _result(self, item: ScoreItem, returned: object) -> ScoreResult:
        value, further = check_value(self.name, returned)
        components = {label.removeprefix(f"{self.name}/"): part for label, part in further.items()}
        return ScoreResult(trajectory_id=item.trajectory_id, reward=value, components=components)


def _listed(returned: object) -> object:
    """An array or a tensor as a list, without importing its library."""
    convert = getattr(returned, "tolist", None)
    return returned if convert is None else convert()


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
