"""A reward process, `python -m paceline.reward.functions.child`: a function pool starts it and feeds it.

In:  the functions, then batches of items.
Out: "ready" or "refused" once, then rows of results in the order of the items.

Before it calls a function it notes the item's number and the time in `Progress`, so that the pool knows which
item the process hung or died on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any, BinaryIO

from paceline.core.errors import ConfigError, RewardError
from paceline.core.reward_function import RewardFunction, check_value, describe, kind_of
from paceline.core.scoring import ScoreItem
from paceline.core.text import one_line
from paceline.reward.functions.registry import load
from paceline.reward.functions.spec import FunctionSpec, combine
from paceline.reward.shape import Shape
from paceline.service.children import frames, pipes
from paceline.service.children.progress import Progress

_FLUSH_AFTER_S = 0.001
_MAX_BUFFERED_VALUES = 4096


class Functions:
    """The configured functions, imported and ready to be called."""

    def __init__(self, specs: Iterable[FunctionSpec]) -> None:
        self._specs, self._pid = tuple(specs), os.getpid()
        self._functions = tuple((spec, load(spec.reference, spec.arguments)) for spec in self._specs)

    def score(self, item: ScoreItem) -> tuple[float | None, dict[str, float], str | None, str]:
        """The reward and the components of an item, or the error's kind and message."""
        specs: list[FunctionSpec] = []
        returned: list[object] = []
        failed: dict[str, float] = {}
        try:
            for spec, function in self._functions:
                if not spec.shape.takes(item):
                    continue
                try:
                    value = self._call(spec, function, item)
                except RewardError:
                    if spec.shape.required:
                        raise
                    failed[f"{spec.name}/failed"] = 1.0
                    continue
                if not spec.shape.required:
                    failed[f"{spec.name}/failed"] = 0.0
                specs.append(spec)
                returned.append(value)
            reward, components = combine(specs, returned)
        except RewardError as error:
            return None, {}, error.kind.value, one_line(str(error))
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  user code too: the methods of what a function returned
            return None, {}, kind_of(error).value, describe("what a reward function returned", error)
        return reward, components | failed, None, ""

    def _call(self, spec: FunctionSpec, function: RewardFunction, item: ScoreItem) -> object:
        """What a function returns; a RewardError for what it raises."""
        keywords = function.keywords(item, spec.arguments)
        try:
            returned = function.call(item.response, item.ground_truth, **keywords)
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  user code: what it raises is this item's error
            raise RewardError(describe(spec.name, error), kind=kind_of(error)) from None
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # a copy that a function forked must not write results
        if not spec.shape.required:
            check_value(spec.name, returned)
        return returned


def serve(requests: BinaryIO, results: BinaryIO, progress: Progress) -> None:
    """Answers the pool until the requests end."""
    specs = frames.read(requests)
    if specs is None:
        return
    try:
        functions = Functions(FunctionSpec(**{**spec, "shape": Shape(**spec["shape"])}) for spec in specs)
    except ConfigError as error:
        pipes.write(results, ["refused", str(error)])
        return
    pipes.write(results, ["ready", ""])
    while (batch := frames.read(requests)) is not None:
        try:
            _score_batch(functions, batch, results, progress)
        except MemoryError:
            os._exit(frames.OUT_OF_MEMORY_EXIT)  # the rest of the process cannot be relied on


def _score_batch(functions: Functions, batch: list[list[Any]], results: BinaryIO, progress: Progress) -> None:
    rows: list[list[object]] = []  # as `jobs.parse_row` reads them
    num_values = 0
    flushed = started = time.monotonic()
    for row in batch:
        number, trajectory_id, prompt, response, ground_truth, data_source, extra = row
        progress.note(number, started)
        item = ScoreItem(
            trajectory_id=trajectory_id,
            prompt=prompt,
            response=response,
            ground_truth=ground_truth,
            data_source=data_source,
            extra=extra,
        )
        reward, components, kind, message = functions.score(item)
        _check_open(results)
        ended = time.monotonic()
        rows.append([number, reward, components, kind, message, ended - started])
        # A result that waits here is lost if a later item of the batch hangs, and is then computed again.
        num_values += 1 + len(components)
        if ended - flushed > _FLUSH_AFTER_S or num_values >= _MAX_BUFFERED_VALUES:
            pipes.write(results, rows)
            rows, num_values = [], 0
            flushed = ended = time.monotonic()
        started = ended
    if rows:
        pipes.write(results, rows)


def _check_open(results: BinaryIO) -> None:
    """Ends the process if the function has closed its pipe, so that this item is blamed and not the next."""
    try:
        os.fstat(results.fileno())
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    pipes.serve(serve)
