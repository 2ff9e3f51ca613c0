"""A scorer: items for clients that have attached to this service under its name."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.config.reward import AttachedConfig
from paceline.core.attachment import Leave
from paceline.core.dispatch import Failure
from paceline.core.errors import InvalidMessageError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.scorer import ScorerSettings
from paceline.reward.scores import Score, failed, score_of
from paceline.reward.shape import Shape
from paceline.reward.shaped import Shaped
from paceline.service.gateway import Gateway, GatewayOptions
from paceline.wire.attachment import Result
from paceline.wire.protobuf import check_score_item


class AttachedScorer:
    """A `Scorer` whose items go to attached clients. Whatever these do, every item gets a score."""

    def __init__(self, config: AttachedConfig, *, timeout_s: float, run_id: str = "") -> None:
        self._name, self._shape = config.name, Shape.configured(config)
        self._is_open = False
        self.gateway: Gateway[ScoreItem, Result] = Gateway(
            GatewayOptions(
                name=config.name,
                run_id=run_id,
                answer_within_s=config.timeout_s or timeout_s,
                wait_for_s=config.wait_for_s,
                source_of=lambda item: item.data_source,
                size_of=lambda item: len(item.prompt) + len(item.response) + len(item.ground_truth),
            )
        )

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Shaped]:
        """One scorer for each configured name under which clients attach."""
        config = settings.config
        return [
            Shaped(
                cls(attached, timeout_s=config.timeout_s, run_id=settings.run_id), Shape.configured(attached)
            )
            for attached in config.attached
        ]

    @property
    def names(self) -> Sequence[str]:
        """The name of its component."""
        return [self._name]

    async def start(self) -> None:
        """From now on it can be asked; clients attach when they like."""
        self._is_open = True

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """One score per item, in the order of the items, with the weight applied.

        Raises:
            RewardError: UNAVAILABLE, when it was closed or not started.
        """
        if not self._is_open:
            raise RewardError(f"{self._name}: clients cannot attach now", kind=RewardErrorKind.UNAVAILABLE)
        refused = {index: error for index, item in enumerate(items) if (error := _problem(item)) is not None}
        started = time.monotonic()
        answers = iter(
            await self.gateway.ask([item for index, item in enumerate(items) if index not in refused])
        )
        seconds = time.monotonic() - started
        return [
            self._score(item, refused[index] if index in refused else next(answers), seconds)
            for index, item in enumerate(items)
        ]

    async def close(self) -> None:
        """Asks the clients to attach again later, to this service's successor."""
        self._is_open = False
        await self.gateway.close(Leave(reason="this reward service ends"))

    def _score(self, item: ScoreItem, answer: Result | Failure, seconds: float) -> Score:
        match answer:
            case Failure(is_late=is_late, message=message):
                kind = RewardErrorKind.TIMEOUT if is_late else RewardErrorKind.UNAVAILABLE
                return failed(item.trajectory_id, kind, f"{self._name}: {message}", seconds)
            case ScoreResult(trajectory_id=trajectory_id) if trajectory_id != item.trajectory_id:
                answer = RewardError(
                    "a client answered under another trajectory_id than the item's",
                    kind=RewardErrorKind.WRONG_COUNT,
                )
        return score_of(item, answer, name=self._name, shape=self._shape, seconds=seconds)


def _problem(item: ScoreItem) -> RewardError | None:
    """Why an item cannot be sent."""
    try:
        check_score_item(item)
    except InvalidMessageError as error:
        return RewardError(str(error), kind=RewardErrorKind.WRONG_TYPE)
    return None
