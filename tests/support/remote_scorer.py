"""A scorer that asks a reward service, with its items and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from paceline.core.scoring import ScoreItem
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from paceline.reward.scoring.scores import Score
from paceline.reward.scoring.shape import Shape


def items(*responses: str) -> list[ScoreItem]:
    """An item for each response."""
    return [
        ScoreItem(trajectory_id=f"t{index}", prompt="", response=response, ground_truth="aa")
        for index, response in enumerate(responses)
    ]


@asynccontextmanager
async def scorer(
    address: str,
    *,
    shape: Shape = Shape(),  # noqa: B008  it is frozen
    timeout_s: float = 30.0,
    retry_for_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[RemoteScorer]:
    """A scorer that asks a service."""
    remote = RemoteScorer(
        RemoteScorerOptions(
            name="judge",
            address=address,
            shape=shape,
            timeout_s=timeout_s,
            retry_for_s=retry_for_s,
            **options,
        )
    )
    await remote.start()
    yield remote
    await remote.close()


def kinds(scores: list[Score]) -> list[str]:
    """The scores, or the kinds of their errors."""
    return [score.error[0].value if score.error else str(score.reward) for score in scores]
