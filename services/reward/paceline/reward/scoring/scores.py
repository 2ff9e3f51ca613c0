"""The score of one item: a reward and its components, or the error that says why there is none."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field

from paceline.core.errors import PacelineError, RewardError, RewardErrorKind
from paceline.core.samples.normalizing import Part
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.core.text import one_line
from paceline.core.user_functions.reward_function import (
    MAX_COMPONENT_CHARS,
    MAX_COMPONENTS,
    describe,
    kind_of,
)
from paceline.reward.scoring.shape import Shape

_log = logging.getLogger(__name__)

RETRIED_KINDS = frozenset({RewardErrorKind.TIMEOUT, RewardErrorKind.CRASHED, RewardErrorKind.UNAVAILABLE})
"""The errors that another attempt may avoid; any other kind would occur again."""

MAX_PLACED = 1024
"""The largest number of parts of a reward that may be placed in a response."""

_KINDS = {kind.value: kind for kind in RewardErrorKind}


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What a scorer gives for one item: a finite `reward`, or None and an `error`.

    `components` maps each scorer's name to its value; a scorer that returns a dict adds its other values as
    `name/key`. `seconds` is the scorers' time in the last attempt. `placed` are weighted parts of the reward,
    each with the character at which its step of the response ends (see `ScoreResult`). `normalized` are the
    components that the controller normalises (see `paceline.core.samples.normalizing`).
    """

    trajectory_id: str
    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    error: tuple[RewardErrorKind, str] | None = None
    seconds: float = 0.0
    placed: tuple[tuple[int, float], ...] = ()
    normalized: tuple[Part, ...] = ()

    @property
    def error_kind(self) -> RewardErrorKind | None:
        """Returns the kind of the error; None if there is a reward."""
        return None if self.error is None else self.error[0]

    @property
    def may_be_retried(self) -> bool:
        """Whether another attempt may give this item a reward."""
        return self.error_kind in RETRIED_KINDS

    def to_result(self) -> ScoreResult:
        """Converts to the answer of `RewardService.Score`, where the error is one line of text."""
        return ScoreResult(
            trajectory_id=self.trajectory_id,
            reward=self.reward,
            components=self.components,
            error=None if self.error is None else one_line(join_error(*self.error)),
            placed=self.placed,
        )


def failed(trajectory_id: str, kind: RewardErrorKind, message: str, seconds: float = 0.0) -> Score:
    """Returns the score of an item that has no reward."""
    return Score(trajectory_id=trajectory_id, reward=None, error=(kind, one_line(message)), seconds=seconds)


def score_of(
    item: ScoreItem, result: ScoreResult | PacelineError, *, name: str, shape: Shape, seconds: float
) -> Score:
    """Converts a scorer's answer about an item, or its error, to a score; clips and weights the reward."""
    try:
        if isinstance(result, PacelineError):
            raise result
        reward, components = _shaped(item, result, name, shape)
        placed = _placed(item, result, shape)
    except PacelineError as error:
        return failed(item.trajectory_id, kind_of(error), f"{name}: {error}", seconds)
    return Score(
        trajectory_id=item.trajectory_id,
        reward=reward,
        components=components,
        seconds=seconds,
        placed=placed,
    )


async def answered(item: ScoreItem, answer: Awaitable[ScoreResult], *, name: str, shape: Shape) -> Score:
    """Awaits the answer about one item; an error of any class becomes the item's score."""
    started = time.monotonic()
    result: ScoreResult | PacelineError
    try:
        result = await answer
    except PacelineError as error:
        result = error
    except OSError as error:  # too many processes, files or connections just now
        result = RewardError(describe("scoring", error), kind=RewardErrorKind.UNAVAILABLE)
    except Exception as error:  # noqa: BLE001  fails one item, never the service
        _log.exception("%s: an item could not be scored", name)
        result = RewardError(describe("scoring", error), kind=RewardErrorKind.RAISED)
    return score_of(item, result, name=name, shape=shape, seconds=time.monotonic() - started)


def _placed(item: ScoreItem, result: ScoreResult, shape: Shape) -> tuple[tuple[int, float], ...]:
    """Returns the weighted parts; the difference that clipping makes belongs to the response's end."""
    pairs = result.placed
    if len(pairs) > MAX_PLACED or any(not 0 < end <= len(item.response) for end, _ in pairs):
        raise RewardError(
            f"the answer places over {MAX_PLACED} parts of its reward, or one outside the response of "
            f"{len(item.response)} characters",
            kind=RewardErrorKind.WRONG_TYPE,
        )
    if not pairs:
        return ()
    if shape.is_normalized:
        raise RewardError(
            "the answer places parts of its reward on the response, which cannot be normalised: remove "
            "normalize from the configuration of this scorer",
            kind=RewardErrorKind.WRONG_TYPE,
        )
    weight = shape.weight_of(item)
    placed = tuple((end, weight * part) for end, part in pairs)
    if not all(math.isfinite(part) for _, part in placed):
        raise RewardError("a part of the reward is not finite", kind=RewardErrorKind.NOT_FINITE)
    return placed


def _shaped(item: ScoreItem, result: ScoreResult, name: str, shape: Shape) -> tuple[float, dict[str, float]]:
    if result.reward is None:
        kind, text = split_error(result.error or "")
        raise RewardError(text, kind=kind)
    reward = shape.contribution(result.reward, item)
    if not math.isfinite(reward):
        text = f"{shape.weight_of(item):g} times {result.reward:g} is {reward}"
        raise RewardError(text, kind=RewardErrorKind.NOT_FINITE)
    components = {
        name: result.reward,
        **{f"{name}/{key}": value for key, value in result.components.items()},
    }
    if len(components) > MAX_COMPONENTS or any(len(key) > MAX_COMPONENT_CHARS for key in components):
        raise RewardError(
            f"the answer has over {MAX_COMPONENTS} components, or names over {MAX_COMPONENT_CHARS} "
            "characters",
            kind=RewardErrorKind.WRONG_TYPE,
        )
    return reward, components


def join_error(kind: RewardErrorKind, message: str) -> str:
    """Returns an error as one text for `ScoreResult.error`; `split_error` reads it."""
    return f"{kind.value}: {message}"


def split_error(text: str) -> tuple[RewardErrorKind, str]:
    """Returns kind and message of a remote error; RAISED if the text does not begin with a kind."""
    word, colon, message = text.partition(": ")
    if colon and word in _KINDS:
        return _KINDS[word], message
    return RewardErrorKind.RAISED, one_line(text)
