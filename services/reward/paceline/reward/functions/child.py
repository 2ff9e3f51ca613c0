"""A reward process, `python -m paceline.reward.functions.child`: a function pool starts it and feeds it.

In:  the functions and a seed, then batches of jobs: an item each, or the items of a group.
Out: "ready" or "refused" once, then a row of results for each job, in their order.

Before it calls a function it notes the job's number and the time in `ItemProgress`, so that the pool knows
which item the process hung or died on.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

from paceline.core.errors import RewardError
from paceline.core.scoring import ScoreItem
from paceline.core.text import one_line
from paceline.core.user_functions.reward_function import (
    RewardFunction,
    check_value,
    check_values,
    describe,
    kind_of,
)
from paceline.reward.functions.registry import load
from paceline.reward.functions.spec import SENT_FIELDS, FunctionSpec, combine
from paceline.reward.scoring.shape import Shape
from paceline.service.children import pipes
from paceline.service.children.progress import ItemProgress

_FLUSH_AFTER_S = 0.001
_MAX_BUFFERED_VALUES = 4096


Result = tuple[float | None, dict[str, float], str | None, str]
"""The reward and the components of an item, or None and the error's kind and message."""


class _Sum:
    """Sums up the functions' results for an item, until the first error of a required function."""

    def __init__(self, item: ScoreItem) -> None:
        self._item = item
        self._error: RewardError | None = None
        self._specs: list[FunctionSpec] = []
        self._returned: list[object] = []
        self._failed: dict[str, float] = {}

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def add(self, spec: FunctionSpec, returned: object) -> None:
        """Adds a function's result, or a RewardError for the error that it raised."""
        try:
            if not spec.shape.required and not isinstance(returned, RewardError):
                check_value(spec.name, returned)
        except RewardError as error:
            returned = error
        if not spec.shape.required:
            self._failed[f"{spec.name}/failed"] = float(isinstance(returned, RewardError))
        if not isinstance(returned, RewardError):
            self._specs.append(spec)
            self._returned.append(returned)
        elif spec.shape.required:
            self._error = self._error or returned

    def result(self) -> Result:
        try:
            if self._error is not None:
                raise self._error
            reward, components = combine(self._specs, self._returned, self._item)
        except RewardError as error:
            return None, {}, error.kind.value, one_line(str(error))
        return reward, components | self._failed, None, ""


class Functions:
    """The configured functions, imported and ready to be called."""

    def __init__(self, specs: Iterable[FunctionSpec]) -> None:
        self._pid = os.getpid()
        self._functions = tuple(
            (spec, load(spec.reference, spec.arguments, group=spec.shape.group)) for spec in specs
        )

    def score(self, items: Sequence[ScoreItem]) -> list[Result]:
        """Returns a result for each item; calls functions that score groups once for all items."""
        try:
            sums = [_Sum(item) for item in items]
            for spec, function in self._functions:
                if not spec.shape.takes(items[0]) or all(item_sum.has_failed for item_sum in sums):
                    continue
                for item_sum, value in zip(sums, self._values(spec, function, items), strict=True):
                    item_sum.add(spec, value)
            return [item_sum.result() for item_sum in sums]
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  user code too: the methods of what a function returned
            message = describe("what a reward function returned", error)
            return [(None, {}, kind_of(error).value, message)] * len(items)

    def _values(
        self, spec: FunctionSpec, function: RewardFunction, items: Sequence[ScoreItem]
    ) -> Sequence[object]:
        """Returns a function's result for each item, or a RewardError for the error that it raises."""
        try:
            if spec.shape.group:
                returned = self._call(spec, function, list(items), **spec.arguments)
                return check_values(spec.name, returned, len(items))
            (item,) = items
            keywords = function.keywords(item, spec.arguments)
            return [self._call(spec, function, item.response, item.ground_truth, **keywords)]
        except RewardError as error:
            return [error] * len(items)

    def _call(
        self, spec: FunctionSpec, function: RewardFunction, *given: object, **keywords: object
    ) -> object:
        """Calls a function; turns the errors that it raises into a RewardError."""
        try:
            return function.call(*given, **keywords)
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  user code: what it raises is this item's error
            raise RewardError(describe(spec.name, error), kind=kind_of(error)) from None
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # a copy that a function forked must not write results


def _begin(setup: Any, results: BinaryIO, progress: ItemProgress) -> tuple[str, Callable[[Any], None]]:
    """Imports the functions; returns how batches are answered."""
    seed: int | None = setup["seed"]
    _seed_generators(seed)
    functions = Functions(
        FunctionSpec(**{**spec, "shape": Shape(**spec["shape"])}) for spec in setup["functions"]
    )
    # Seeds again after the imports, which may have drawn numbers; also numpy, if it was imported.
    _seed_generators(None if seed is None else seed + 1)
    return "", lambda batch: _score_batch(functions, batch, results, progress)


def _seed_generators(seed: int | None) -> None:
    """Seeds `random`, and numpy's own generator if it has been imported."""
    if seed is None:
        return
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)  # numpy takes at most 32 bits


def _score_batch(
    functions: Functions, batch: list[list[Any]], results: BinaryIO, progress: ItemProgress
) -> None:
    rows: list[list[object]] = []  # as `jobs.parse_row` reads them
    num_values = 0
    flushed = started = time.monotonic()
    for row in batch:
        number, *fields = row
        progress.note(number, started)
        scored = functions.score(
            [ScoreItem(**dict(zip(SENT_FIELDS, values, strict=True))) for values in fields]
        )
        _check_open(results)
        ended = time.monotonic()
        rows.append([number, ended - started, *scored])
        # A result that waits here is lost if a later item of the batch hangs, and is then computed again.
        num_values += sum(1 + len(components) for _, components, _, _ in scored)
        if ended - flushed > _FLUSH_AFTER_S or num_values >= _MAX_BUFFERED_VALUES:
            pipes.write(results, rows)
            rows, num_values = [], 0
            flushed = ended = time.monotonic()
        started = ended
    if rows:
        pipes.write(results, rows)


def _check_open(results: BinaryIO) -> None:
    """Ends the process if the function has closed its pipe, so that the right item is blamed."""
    try:
        os.fstat(results.fileno())
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    pipes.serve(_begin)
