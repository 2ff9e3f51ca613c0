"""Calls a user's function for a server or an attached client; always returns one result per item."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult, groups_of
from paceline.core.text import one_line
from paceline.core.user_functions.reward_function import (
    RewardFunction,
    check_value,
    check_values,
    describe,
    inspect_function,
    kind_of,
)
from paceline.sdk.threads import LoopThread, Threads


class CalledFunction:
    """Calls a reward function in separate threads; an async one in an event loop in a separate thread.

    Args:
        function: `f(response, ground_truth, **extra) -> float | dict[str, float]`, plain or async. With
            `batch` instead `f(items: list[ScoreItem]) -> list[float | dict[str, float]]`, one value per item.
        batch: pass all items of a call at once, one call at a time.
        group: like `batch`, but call the function with the samples of one prompt.
        max_concurrent: how many items, or groups, are scored at the same time.
        timeout_s: how long a call may take; after that its items get an error.

    Raises:
        ConfigError: the function cannot be called in this form.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        batch: bool,
        max_concurrent: int,
        timeout_s: float,
        group: bool = False,
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        if batch and group:
            raise ConfigError(
                f"reward function {self.name!r}: batch=True passes what has arrived, group=True the samples "
                "of a prompt; choose one of them"
            )
        takes_list = batch or group
        self._function = (
            _batch_function(self.name, function) if takes_list else inspect_function(self.name, function)
        )
        self._batch, self._group, self._timeout_s = batch, group, timeout_s
        size = 1 if batch else max_concurrent
        self._threads, self._loop = Threads(size), LoopThread(size)

    @property
    def is_stuck(self) -> bool:
        """Whether too many calls hang to score any more."""
        return self._threads.is_stuck or self._loop.is_stuck

    def close(self) -> None:
        """Ends idle threads; a hanging call does not keep the process alive."""
        self._threads.close()
        self._loop.close()

    async def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """Returns one result per item; the error of an item does not affect the others."""
        if self._batch:
            return await self._score_batch(list(items))
        if self._group:
            return await self._score_groups(items)
        return list(await asyncio.gather(*(self._score_item(item) for item in items)))

    async def _score_groups(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        groups = groups_of(items)
        calls = [self._score_batch([items[place] for place in places]) for places in groups]
        results = await asyncio.gather(*calls)
        by_place = {
            place: result
            for places, of_group in zip(groups, results, strict=True)
            for place, result in zip(places, of_group, strict=True)
        }
        return [by_place[place] for place in range(len(items))]

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
            returned = check_values(self.name, await self._call(items), len(items))
        except RewardError as error:
            return [_failed(item, error.kind, str(error)) for item in items]
        except Exception as error:  # noqa: BLE001  as above
            kind, message = kind_of(error), describe(self.name, error)
            return [_failed(item, kind, message) for item in items]
        results = []
        for item, value in zip(items, returned, strict=True):
            try:
                if isinstance(value, RewardError):  # concerns only this item
                    raise value
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
        returned, placed = _split_placed(self.name, returned)
        value, further = check_value(self.name, returned)
        components = {label.removeprefix(f"{self.name}/"): part for label, part in further.items()}
        return ScoreResult(
            trajectory_id=item.trajectory_id, reward=value, components=components, placed=placed
        )


def version_of(function: Callable[..., Any]) -> str:
    """Returns a digest of the file that defines a function or a callable's class; "" without a file."""
    try:
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
        return hashlib.blake2b(Path(file or "").read_bytes(), digest_size=8).hexdigest()
    except (OSError, TypeError):
        return ""


def _split_placed(name: str, returned: object) -> tuple[object, tuple[tuple[int, float], ...]]:
    """Splits a returned value into the rest and its "placed" rewards."""
    if not isinstance(returned, Mapping) or "placed" not in returned:
        return returned, ()
    try:
        placed = tuple((operator.index(end), float(part)) for end, part in returned["placed"])
    except (TypeError, ValueError):
        raise RewardError(
            f'{name} returned no list of (end, reward) under "placed": end is the number of characters of '
            "the response up to the end of a step",
            kind=RewardErrorKind.WRONG_TYPE,
        ) from None
    if not all(math.isfinite(part) for _, part in placed):
        raise RewardError(f"{name} placed a reward that is not finite", kind=RewardErrorKind.NOT_FINITE)
    return {key: value for key, value in returned.items() if key != "placed"}, placed


def _batch_function(name: str, function: object) -> RewardFunction:
    if not callable(function):
        raise ConfigError(
            f"reward function {name!r} is {type(function).__name__}, not a function: "
            "write f(items: list[ScoreItem]) -> list[float]"
        )
    return RewardFunction(reference=name, call=function)


def _failed(item: ScoreItem, kind: RewardErrorKind, message: str) -> ScoreResult:
    return ScoreResult(
        trajectory_id=item.trajectory_id, reward=None, error=one_line(f"{kind.value}: {message}")
    )
