"""Reward functions in the forms of verl and TRL: what they get, and what becomes of what they return."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import ConfigError, RewardError
from paceline.core.scoring import ScoreItem
from paceline.core.user_functions.reward_function import inspect_function, inspect_group_function
from paceline.reward.functions.child import Functions
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.scoring.shape import Shape

ITEM = ScoreItem(
    trajectory_id="t",
    prompt="2 + 2",
    response="it is 4",
    ground_truth="4",
    data_source="sums",
    extra={"extra_info": {"split": "train"}, "level": 3},
)
SIBLING = ScoreItem(
    trajectory_id="u", prompt="2 + 2", response="5", ground_truth="4", extra={"level": 3}, group="g"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """As in verl's documentation; returns also what is no number."""
    assert (data_source, extra_info) == ("sums", {"split": "train"})
    return {"score": 1, "acc": solution_str.endswith(ground_truth), "pred": solution_str}


def truth_value(solution_str: str, **kwargs: Any) -> bool:
    """Verl's form with the least of it."""
    return solution_str == "it is 4" and kwargs["ground_truth"] == "4"


def ranks(prompts: list[str], completions: list[str], level: list[int], **kwargs: Any) -> list[float | None]:
    """TRL's form: the longest is the best, and the level counts."""
    kwargs["log_metric"]("longest", 1.0)
    assert prompts == ["2 + 2"] * len(completions)
    assert kwargs["ground_truth"] == ["4"] * len(completions)
    longest = max(map(len, completions))
    return [
        float(one) if len(text) == longest else None for text, one in zip(completions, level, strict=True)
    ]


def contents(completions: list[Any]) -> list[float]:
    """TRL's form on conversations."""
    return [float(len(completion[0]["content"])) for completion in completions]


def needs_a_column(completions: list[str], solution: list[str]) -> list[float]:
    """TRL's form with a column that the rows do not have."""
    return [0.0 for _ in zip(completions, solution, strict=True)]


async def waits(solution_str: str, ground_truth: str) -> float:
    """Verl's form, async."""
    return 0.0


def scored(name: str, *items: ScoreItem, group: bool = False, **arguments: Any) -> list[Any]:
    spec = FunctionSpec(
        name=name, reference=f"{__file__}:{name}", shape=Shape(group=group), arguments=arguments
    )
    return [(reward, components, error) for reward, components, _, error in Functions([spec]).score(items)]


def test_verls_form_gets_its_arguments_by_name() -> None:
    assert scored("compute_score", ITEM) == [(1.0, {"compute_score": 1.0, "compute_score/acc": 1.0}, "")]
    assert scored("truth_value", ITEM) == [(1.0, {"truth_value": 1.0}, "")]


def test_trls_form_gets_the_samples_of_a_prompt() -> None:
    first, second = scored("ranks", ITEM, SIBLING, group=True)
    assert (first[0], second[0]) == (3.0, 0.0)
    lengths = scored("contents", ITEM, SIBLING, group=True, completions="messages")
    assert [reward for reward, _, _ in lengths] == [7.0, 1.0]


def test_what_is_missing_is_named() -> None:
    ((_, _, error), _) = scored("needs_a_column", ITEM, SIBLING, group=True)
    assert "needs the column solution, which the row does not have: add it to data.extra_keys" in error
    with pytest.raises(ConfigError, match="has TRL's form.*set group: true"):
        inspect_function("f", ranks)
    with pytest.raises(ConfigError, match="no argument 'length'; it has completions"):
        inspect_group_function("f", ranks).check_arguments({"length": 3})
    with pytest.raises(RewardError, match="f needs extra_info, .*data.extra_keys"):
        inspect_function("f", lambda solution_str, extra_info: 0.0).keywords(SIBLING, {})


def test_an_async_function_stays_one() -> None:
    assert inspect_function("f", waits).is_async
