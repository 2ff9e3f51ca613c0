"""Items of several prompts for scorers of groups, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.scores import Score
from paceline.reward.scoring.shape import Shape

GROUP = Shape(group=True)


def items(groups: dict[str, Sequence[str]]) -> list[ScoreItem]:
    return [
        ScoreItem(trajectory_id=f"{group}{place}", prompt="", response=response, ground_truth="", group=group)
        for group, responses in groups.items()
        for place, response in enumerate(responses)
    ]


def kinds(scores: Sequence[Score]) -> list[object]:
    return [score.error[0].value if score.error else score.reward for score in scores]
