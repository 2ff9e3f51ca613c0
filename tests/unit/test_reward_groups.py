"""Functions that score the samples of a prompt together."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config.reward import RewardConfig, RewardFunctionConfig
from paceline.core.errors import ConfigError
from paceline.core.scoring import ScoreItem
from paceline.reward.functions.pool import FunctionPool
from paceline.reward.functions.registry import load
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.weighted_sum import WeightedSum
from support import cli_configs
from support.reward_items import GROUP, items, kinds

FUNCTIONS = "support.group_functions"
ROOT = Path(__file__).parents[2]


def pool(name: str = "rank", **options: Any) -> FunctionPool:
    spec = FunctionSpec(name=name, reference=f"{FUNCTIONS}:{name}", shape=GROUP, arguments=options)
    return FunctionPool([spec], num_processes=1, timeout_s=4.0)


async def test_a_function_ranks_the_samples_of_each_prompt_by_themselves() -> None:
    async with pool() as functions:
        given = items({"a": ["xxx", "x"], "b": ["xxxx", "xxx", "xx"]})
        mixed = [given[place] for place in (2, 0, 3, 1, 4)]
        assert kinds(await functions.score(mixed)) == [2.0, 1.0, 1.0, 0.0, 0.0]
        alone = [
            ScoreItem(trajectory_id=f"t{n}", prompt="", response="x" * n, ground_truth="") for n in (1, 2)
        ]
        assert kinds(await functions.score(alone)) == [0.0, 0.0]


async def test_a_function_sees_which_set_the_samples_belong_to() -> None:
    function = FunctionSpec(name="of_set", reference=f"{FUNCTIONS}:is_of_set", shape=GROUP)
    async with FunctionPool([function], num_processes=1, timeout_s=20.0) as functions:
        given = [
            replace(item, val_set="hard" if item.group == "a" else "") for item in items({"a": "x", "b": "x"})
        ]
        assert [score.reward for score in await functions.score(given)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [
        (["nan", "x"], ["not_finite", 0.0]),
        (["raise", "x"], ["raised", "raised"]),
        (["short", "x"], ["wrong_count", "wrong_count"]),
        (["hang", "x"], ["timeout", "timeout"]),
        (["exit", "x"], ["crashed", "crashed"]),
    ],
)
async def test_a_member_or_a_group_that_fails_takes_no_other_group_along(
    bad: list[str], outcome: list[object]
) -> None:
    async with pool() as functions:
        scores = await functions.score(items({"a": ["xx", "x"], "b": bad, "c": ["x", "xx"]}))
    assert kinds(scores) == [1.0, 0.0, *outcome, 0.0, 1.0]


async def test_functions_of_both_forms_add_up_and_a_failed_one_may_count_as_nothing() -> None:
    config = RewardConfig(
        functions=(
            RewardFunctionConfig(name="support.reward_functions:length", weight=0.5),
            RewardFunctionConfig(name=f"{FUNCTIONS}:rank", group=True, weight=10.0, required=False),
            RewardFunctionConfig(name=f"{FUNCTIONS}:scaled", group=True, kwargs={"factor": 0.25}),
        )
    )
    total = WeightedSum.configured(ScorerSettings(config=config))
    await total.start()
    scores = await total.score(items({"a": ["xx", "x"], "b": ["raise", "x", "x"]}))
    await total.close()
    assert kinds(scores) == [1.0 + 10.0 + 0.5, 0.5 + 0.5, 2.5 + 0.75, 0.5 + 0.75, 0.5 + 0.75]
    assert scores[0].components == {"length": 2.0, "rank": 1.0, "rank/failed": 0.0, "scaled": 0.5}
    assert scores[2].components == {"length": 5.0, "rank/failed": 1.0, "scaled": 0.75}


async def test_the_example_ranks_right_answers_by_length() -> None:
    spec = FunctionSpec(
        name="f", reference=f"{ROOT}/examples/arithmetic/ranking.py:shortest_right", shape=GROUP
    )
    texts = ["so it is 12", "12", "it is 12", "13", "00 12 12"]
    given = [
        ScoreItem(trajectory_id=str(n), prompt="", response=text, ground_truth="12", group="g")
        for n, text in enumerate(texts)
    ]
    async with FunctionPool([spec], num_processes=1, timeout_s=10.0) as functions:
        assert kinds(await functions.score(given)) == [0.5, 1.0, 0.75, 0.0, 0.75]


@pytest.mark.parametrize(
    ("reference", "arguments", "sentence"),
    [
        ("gsm8k", {}, "the built-in 'gsm8k' scores single responses: remove group: true"),
        (f"{FUNCTIONS}:scaled", {}, "needs factor: name them under kwargs"),
        (f"{FUNCTIONS}:scaled", {"factr": 1}, "has no argument 'factr'; it has factor"),
        (f"{FUNCTIONS}:without_items", {"factor": 1}, "must take the items of a group by position"),
        (f"{FUNCTIONS}:ScoreItem", {}, "is a class: name a function or an instance"),
    ],
)
def test_what_cannot_score_groups_is_refused(
    reference: str, arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(reference, arguments, group=True)


def test_groups_that_do_not_fit_into_a_call_are_refused() -> None:
    service = {"name": "judge", "address": "a:1", "group": True, "max_items_per_call": 8}
    assert cli_configs.config(reward={"services": [service]}, rollout={"n": 8}).reward.has_groups
    for rollout in ({"n": 9}, {"n": 4, "val": {"n": 9}}):
        with pytest.raises(ConfigError, match="max_items_per_call=8 is below .* raise it to 9"):
            cli_configs.config(reward={"services": [service]}, rollout=rollout)
    with pytest.raises(ConfigError, match="group: true and cache_size=5"):
        cli_configs.config(reward={"services": [service | {"cache_size": 5}]}, rollout={"n": 8})
