"""A scoring worker process: `python -m paceline.reward.functions.child`, started and fed by a scorer pool over its pipes.

In:  one setup (the functions, the memory limit), then batches of items.
Out: "ready" or "refused" once, then rows of results in the order of the items.

Before it calls a function it notes the item's number and the time on a page of memory that it shares with the pool
(see `Progress`), so that the pool knows which item a worker hung or died on without a message per item.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterable
from typing import Any, BinaryIO

from paceline.core.errors import ConfigError, RewardError
from paceline.core.reward_function import describe, kind_of, one_line
from paceline.core.scoring import ScoreItem
from paceline.reward.functions import frames
from paceline.reward.functions.registry import load
from paceline.reward.scoring import FunctionSpec, combine

OUT_OF_MEMORY_EXIT = 97
_FLUSH_AFTER_S = 0.001
_MAX_ROWS_HELD = 1024
_PR_SET_PDEATHSIG = 1

Row = list[Any]
"""[number, reward | None, components, error kind | None, message, seconds]"""


class Progress:
    """One page shared between a worker and its pool: the number of the item that the worker took up last, and when.

    The time is CLOCK_MONOTONIC in seconds, which all processes of a machine share.
    """

    SIZE_BYTES = mmap.PAGESIZE
    _LAYOUT = struct.Struct("<qd")

    def __init__(self, file_descriptor: int) -> None:
        self._page = mmap.mmap(file_descriptor, self.SIZE_BYTES)

    def note(self, number: int, started: float) -> None:
        """Called by the worker before each item."""
        self._LAYOUT.pack_into(self._page, 0, number, started)

    def read(self) -> tuple[int, float]:
        """The item's number and the time at which it was taken up; the number is 0 before the first item."""
        number, started = self._LAYOUT.unpack_from(self._page)
        return int(number), float(started)

    def close(self) -> None:
        """Gives the page back."""
        self._page.close()


class Scorer:
    """Applies the configured functions to items; lives in the worker."""

    def __init__(self, specs: Iterable[FunctionSpec]) -> None:
        self._specs = tuple(specs)
        self._functions = tuple((spec, load(spec.reference, spec.arguments)) for spec in self._specs)

    def score(self, item: ScoreItem) -> tuple[float | None, dict[str, float], str | None, str]:
        """The reward and the components of an item, or the word for what went wrong and a sentence about it."""
        returned: list[object] = []
        try:
            for spec, function in self._functions:
                keywords = function.keywords(item, spec.arguments)
                try:
                    returned.append(function.call(item.response, item.ground_truth, **keywords))
                except MemoryError:
                    raise
                except BaseException as error:  # noqa: BLE001  user code: what it raises is this item's error
                    return None, {}, kind_of(error).value, describe(spec.name, error)
            reward, components = combine(self._specs, returned)
        except RewardError as error:
            return None, {}, error.kind.value, one_line(str(error))
        return reward, components, None, ""


def serve(requests: BinaryIO, results: BinaryIO, progress: Progress) -> None:
    """Answers the pool until the requests end."""
    setup = frames.read(requests)
    if setup is None:
        return
    limit_bytes = setup["memory_limit_bytes"]
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    try:
        scorer = Scorer(FunctionSpec(**one) for one in setup["functions"])
    except ConfigError as error:
        _write(results, ["refused", str(error)])
        return
    _write(results, ["ready", ""])
    while (batch := frames.read(requests)) is not None:
        try:
            _score_batch(scorer, batch, results, progress)
        except MemoryError:
            os._exit(OUT_OF_MEMORY_EXIT)  # what is left of the process cannot be relied on


def main() -> None:
    """Takes the pipes away from the functions' reach, then serves."""
    parent, page = int(sys.argv[1]), int(sys.argv[2])
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's owner's to handle
    # What a function prints must not get between the results, and what it reads must not eat requests.
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    progress = Progress(page)
    os.close(page)  # the mapping stays
    serve(requests, results, progress)


def _score_batch(scorer: Scorer, batch: list[list[Any]], results: BinaryIO, progress: Progress) -> None:
    rows: list[Row] = []
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
        reward, components, kind, message = scorer.score(item)
        ended = time.monotonic()
        rows.append([number, reward, components, kind, message, ended - started])
        # A result that waits here is lost if a later item of the batch hangs, and is then computed again.
        if ended - flushed > _FLUSH_AFTER_S or len(rows) >= _MAX_ROWS_HELD:
            _write(results, rows)
            rows = []
            flushed = ended = time.monotonic()
        started = ended
    if rows:
        _write(results, rows)


def _write(results: BinaryIO, message: object) -> None:
    results.write(frames.encode(message))
    results.flush()


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(0)


if __name__ == "__main__":
    main()
