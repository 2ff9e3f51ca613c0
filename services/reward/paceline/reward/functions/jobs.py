"""Items on their way through a pool: the caller's request, a job per item, the rows that the pipes carry."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ProtocolError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.text import one_line
from paceline.reward.scores import Score, failed
from paceline.service.children import frames

_LONGEST_S = 1e6


@dataclass(slots=True)
class Request:
    """One call of `score`: the scores so far, and the future that its caller waits on."""

    scores: list[Score | None]
    num_open: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class Job:
    """One item of a request. A suspect is scored by itself: it, or another of its batch, forged results."""

    request: Request
    index: int
    item: ScoreItem
    is_suspect: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether its caller still waits."""
        return not self.request.done.done()

    def settle(self, score: Score) -> None:
        """Stores the item's score; the last one of a request wakes its caller."""
        request = self.request
        request.scores[self.index] = score
        request.num_open -= 1
        if request.num_open == 0 and not request.done.done():
            request.done.set_result(None)

    def fail(self, kind: RewardErrorKind, message: str, seconds: float = 0.0) -> None:
        """Stores an error as the item's score."""
        self.settle(failed(self.item.trajectory_id, kind, message, seconds))


def encode_batch(jobs: dict[int, Job]) -> bytes:
    """The frame of a batch. Jobs whose items cannot be encoded fail, and leave `jobs`."""
    rows = {number: _row(number, job.item) for number, job in jobs.items()}
    try:
        return frames.encode(list(rows.values()))
    except (TypeError, ValueError, OverflowError):
        pass  # one item is at fault; the others must not suffer for it
    for number, row in list(rows.items()):
        try:
            frames.encode(row)
        except (TypeError, ValueError, OverflowError) as error:
            del rows[number]
            message = f"the item's fields cannot be handed to a reward function: {error}"
            jobs.pop(number).fail(RewardErrorKind.WRONG_TYPE, message)
    return frames.encode(list(rows.values()))


def parse_row(row: Any, jobs: dict[int, Job]) -> tuple[int, Score]:
    """Reads a result that a child wrote for one of `jobs`. User code in the child may have damaged it.

    Returns:
        The job's number and the score.

    Raises:
        ProtocolError: it is not what `paceline.reward.functions.child` writes, or for no job of these.
    """
    try:
        number, reward, components, kind, message, seconds = row
        error = None if kind is None else (RewardErrorKind(kind), one_line(str(message)))
        is_sound = isinstance(reward, float) and math.isfinite(reward) if error is None else reward is None
        if not is_sound or not _are_components(components):
            raise ValueError("neither a reward nor an error")
        number, seconds = int(number), float(seconds)
        if not 0 <= seconds <= _LONGEST_S:
            raise ValueError(f"an item that took {seconds} s")
    except (TypeError, ValueError, OverflowError) as fault:
        raise ProtocolError(f"a reward process sent a row that cannot be read: {fault}") from fault
    if number not in jobs:
        raise ProtocolError(f"a reward process answered for item {number}, which it was not given")
    score = Score(
        trajectory_id=jobs[number].item.trajectory_id,
        reward=reward,
        components=components,
        error=error,
        seconds=seconds,
    )
    return number, score


def _are_components(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(number, float) and math.isfinite(number)
        for name, number in value.items()
    )


def _row(number: int, item: ScoreItem) -> list[object]:
    return [
        number,
        item.trajectory_id,
        item.prompt,
        item.response,
        item.ground_truth,
        item.data_source,
        dict(item.extra),
    ]
