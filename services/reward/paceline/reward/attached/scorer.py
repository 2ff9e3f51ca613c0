"""A scorer whose items go to the clients that have attached to this service under its name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from paceline.config.reward import AttachedConfig
from paceline.core.attached_clients.attachment import Leave
from paceline.core.attached_clients.dispatch import Failure
from paceline.core.errors import InvalidMessageError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult, groups_of
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import Score, failed, score_of
from paceline.reward.scoring.shape import Shape
from paceline.service.attach.gateway import Gateway, GatewayOptions
from paceline.wire.calls.attachment import GroupResult, Result, Task
from paceline.wire.calls.protobuf import check_score_item


class AttachedScorer:
    """Sends items to attached clients, as a `Scorer`. Whatever the clients do, every item gets a score."""

    def __init__(self, config: AttachedConfig, *, timeout_s: float, run_id: str = "") -> None:
        self._name, self.names, self.shape = config.name, [config.name], Shape.configured(config)
        self._is_open = False
        self.gateway: Gateway[Task, GroupResult] = Gateway(
            GatewayOptions(
                name=config.name,
                run_id=run_id,
                answer_within_s=config.timeout_s or timeout_s,
                wait_for_s=config.wait_for_s,
                source_of=lambda task: _items(task)[0].data_source,
                size_of=lambda task: sum(item.num_chars for item in _items(task)),
                groups=config.group,
            )
        )

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Self]:
        """Returns one scorer for each name under which clients attach, including reward models."""
        config = settings.config
        return [
            cls(attached, timeout_s=config.timeout_s, run_id=settings.run_id)
            for attached in (*config.attached, *(model.attached for model in config.models))
        ]

    @property
    def version(self) -> str | None:
        """Returns the version that its clients report; None if they differ."""
        return self.gateway.version

    async def start(self) -> None:
        """Starts to accept items; clients may attach at any time."""
        self._is_open = True

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items, with the weight applied."""
        if not self._is_open:
            raise RewardError(f"{self._name}: clients cannot attach now", kind=RewardErrorKind.UNAVAILABLE)
        refused = {index: error for index, item in enumerate(items) if (error := _problem(item)) is not None}
        open_places = [place for place in range(len(items)) if place not in refused]
        tasks = self._tasks([items[place] for place in open_places])
        started = time.monotonic()
        answers = await self.gateway.ask([task for _, task in tasks])
        seconds = time.monotonic() - started
        scores: dict[int, Score] = {}
        for (places, task), answer in zip(tasks, answers, strict=True):
            for place, score in zip(places, self._scores(task, answer, seconds), strict=True):
                scores[open_places[place]] = score
        for place, error in refused.items():
            scores[place] = self._score(items[place], error, seconds)
        return [scores[place] for place in range(len(items))]

    def _tasks(self, items: Sequence[ScoreItem]) -> list[tuple[Sequence[int], Task]]:
        """Returns the tasks for clients (items, or groups), with the places of their items."""
        if not self.shape.group:
            return [((place,), item) for place, item in enumerate(items)]
        return [(places, tuple(items[place] for place in places)) for places in groups_of(items)]

    def _scores(self, task: Task, answer: GroupResult | Failure, seconds: float) -> list[Score]:
        items = _items(task)
        if isinstance(answer, Failure):
            kind = RewardErrorKind.TIMEOUT if answer.is_late else RewardErrorKind.UNAVAILABLE
            message = f"{self._name}: {answer.message}"
            return [failed(item.trajectory_id, kind, message, seconds) for item in items]
        if isinstance(task, ScoreItem) and not isinstance(answer, tuple):
            return [self._score(task, answer, seconds)]
        rows = answer if isinstance(answer, tuple) and not isinstance(task, ScoreItem) else ()
        results = dict(rows)
        if len(rows) != len(items) or results.keys() != {item.trajectory_id for item in items}:
            error = RewardError(
                "a client must answer a group with one result per item, under its trajectory_id, and a "
                "single item with one result",
                kind=RewardErrorKind.WRONG_COUNT,
            )
            return [self._score(item, error, seconds) for item in items]
        return [self._score(item, results[item.trajectory_id], seconds) for item in items]

    async def close(self) -> None:
        """Asks the clients to attach again later, to this service's successor."""
        self._is_open = False
        await self.gateway.close(Leave(reason="this reward service ends"))

    def _score(self, item: ScoreItem, answer: Result, seconds: float) -> Score:
        if isinstance(answer, ScoreResult) and answer.trajectory_id != item.trajectory_id:
            answer = RewardError(
                "a client answered under another trajectory_id than the item's",
                kind=RewardErrorKind.WRONG_COUNT,
            )
        return score_of(item, answer, name=self._name, shape=self.shape, seconds=seconds)


def _items(task: Task) -> Sequence[ScoreItem]:
    return (task,) if isinstance(task, ScoreItem) else task


def _problem(item: ScoreItem) -> RewardError | None:
    """Returns why an item cannot be sent."""
    try:
        check_score_item(item)
    except InvalidMessageError as error:
        return RewardError(str(error), kind=RewardErrorKind.WRONG_TYPE)
    return None
