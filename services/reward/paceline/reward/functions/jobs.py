"""Items in a pool: the caller's request, its jobs, and the rows that travel through the pipes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ProtocolError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.text import one_line
from paceline.reward.functions.spec import SENT_FIELDS
from paceline.reward.scoring.scores import Score, failed
from paceline.service.children import frames

_LONGEST_S = 1e6


@dataclass(slots=True)
class ScoreCall:
    """One call of `score`: the scores so far, and the future that its caller waits on."""

    scores: list[Score | None]
    num_open: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class Job:
    """What a process scores in one piece: an item of a request, or the items of a group, with their places.

    A suspect is scored separately, because it or another job of its batch has forged results.
    """

    request: ScoreCall
    places: Sequence[int]
    items: Sequence[ScoreItem]
    is_suspect: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether its caller still waits."""
        return not self.request.done.done()

    @property
    def num_chars(self) -> int:
        """The characters of its prompts and responses."""
        return sum(len(item.response) + len(item.prompt) for item in self.items)

    def settle(self, scores: Sequence[Score]) -> None:
        """Stores the items' scores; the last ones of a request wake its caller."""
        request = self.request
        for place, score in zip(self.places, scores, strict=True):
            request.scores[place] = score
        request.num_open -= len(scores)
        if request.num_open == 0 and not request.done.done():
            request.done.set_result(None)

    def fail(self, kind: RewardErrorKind, message: str, seconds: float = 0.0) -> None:
        """Stores an error as the score of each item."""
        self.settle([failed(item.trajectory_id, kind, message, seconds) for item in self.items])


def encode_batch(jobs: dict[int, Job]) -> bytes:
    """Encodes a batch as one frame. Jobs whose items cannot be encoded fail, and leave `jobs`."""
    rows = {number: [number, *map(_fields, job.items)] for number, job in jobs.items()}
    try:
        return frames.encode(list(rows.values()))
    except (TypeError, ValueError, OverflowError):
        pass  # one item is at fault; the others are sent without it
    for number, row in list(rows.items()):
        try:
            frames.encode(row)
        except (TypeError, ValueError, OverflowError) as error:
            del rows[number]
            message = f"the item's fields cannot be handed to a reward function: {error}"
            jobs.pop(number).fail(RewardErrorKind.WRONG_TYPE, message)
    return frames.encode(list(rows.values()))


def parse_row(row: Any, jobs: dict[int, Job]) -> tuple[int, list[Score]]:
    """Reads the results of a job that a child wrote for one of `jobs`. User code there may have damaged it.

    Returns:
        The job's number and the scores of its items.

    Raises:
        ProtocolError: `paceline.reward.functions.child` did not write it, or not for one of `jobs`.
    """
    try:
        number, seconds, *results = row
        number, seconds = int(number), float(seconds)
        if not 0 <= seconds <= _LONGEST_S:
            raise ValueError(f"an item that took {seconds} s")
    except (TypeError, ValueError, OverflowError) as fault:
        raise ProtocolError(f"a reward process sent a row that cannot be read: {fault}") from fault
    if number not in jobs:
        raise ProtocolError(f"a reward process answered for item {number}, which it was not given")
    items = jobs[number].items
    if len(results) != len(items):
        raise ProtocolError(f"a reward process sent {len(results)} results for {len(items)} items")
    return number, [_score(item, result, seconds) for item, result in zip(items, results, strict=True)]


def _score(item: ScoreItem, result: Any, seconds: float) -> Score:
    try:
        reward, components, kind, message = result
        error = None if kind is None else (RewardErrorKind(kind), one_line(str(message)))
        is_sound = isinstance(reward, float) and math.isfinite(reward) if error is None else reward is None
        if not is_sound or not _are_components(components):
            raise ValueError("neither a reward nor an error")
    except (TypeError, ValueError, OverflowError) as fault:
        raise ProtocolError(f"a reward process sent a row that cannot be read: {fault}") from fault
    return Score(
        trajectory_id=item.trajectory_id, reward=reward, components=components, error=error, seconds=seconds
    )


def _are_components(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(number, float) and math.isfinite(number)
        for name, number in value.items()
    )


def _fields(item: ScoreItem) -> list[object]:
    values = [getattr(item, name) for name in SENT_FIELDS]
    return [dict(value) if isinstance(value, Mapping) else value for value in values]
