"""The weighted sum of reward functions and services."""

from __future__ import annotations

import pytest

from paceline.config.reward import RewardConfig, RewardFunctionConfig, RewardServiceConfig
from paceline.core.errors import ConfigError
from paceline.core.scoring import ScoreItem
from paceline.core.user_functions.reward_function import check_extra_keys
from paceline.reward.functions.pool import function_specs
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.weighted_sum import WeightedSum
from support.remote_scorer import items, kinds
from support.reward_servers import OddServer, serving


def config(address: str, **changes: object) -> RewardConfig:
    return RewardConfig(
        functions=(
            RewardFunctionConfig(name="exact_match", weight=2.0),
            RewardFunctionConfig(name="support.reward_functions:length", weight=0.5),
        ),
        services=(RewardServiceConfig(name="judge", address=address, weight=-1.0),),
        timeout_s=30.0,
        **changes,  # type: ignore[arg-type]
    )


async def test_the_weighted_sum_adds_functions_and_services() -> None:
    async with serving(OddServer()) as address:
        total = WeightedSum.configured(ScorerSettings(config=config(address, max_reward=1.0)))
        await total.start()
        scores = await total.score(items("aa", "b", "ccc"))
        assert await total.score([]) == []
        await total.close()
    assert kinds(scores) == [str(2.0 + 1.0 - 2.0), "-0.5", "-1.5"]
    assert scores[0].components == {"exact_match": 1.0, "length": 2.0, "judge": 2.0, "judge/words": 1.0}


async def test_the_range_of_the_sum_is_checked() -> None:
    async with serving(OddServer()) as address:
        reward = config(address, min_reward=-1.0, max_reward=0.5)
        total = WeightedSum.configured(ScorerSettings(config=reward))
        await total.start()
        scores = await total.score(items("aa", "b", "ccc"))
        await total.close()
    assert kinds(scores) == ["out_of_range", "-0.5", "out_of_range"]


def test_component_names_are_unique() -> None:
    repeated = RewardConfig(
        functions=(
            RewardFunctionConfig(name="gsm8k"),
            RewardFunctionConfig(name="gsm8k", kwargs={"method": "flexible"}),
            RewardFunctionConfig(name="path/to/file.py:score"),
        )
    )
    specs = function_specs(repeated)
    assert [spec.name for spec in specs] == ["gsm8k", "gsm8k_2", "score"]
    assert specs[1].arguments == {"method": "flexible"}
    with pytest.raises(ConfigError, match="two scorers are named 'score'"):
        services = (RewardServiceConfig(name="score", address="a:1"),)
        WeightedSum.configured(ScorerSettings(config=repeated.model_copy(update={"services": services})))


def test_a_function_named_as_a_total_gets_another_component() -> None:
    """`val/reward/mean` is the mean of the sums."""
    config = RewardConfig(functions=(RewardFunctionConfig(name="mine.py:reward"),))
    assert [spec.name for spec in function_specs(config)] == ["reward_function"]


def test_columns_may_not_shadow_what_a_function_is_given() -> None:
    check_extra_keys(["level"])
    with pytest.raises(ConfigError, match="data.extra_keys names prompt, response"):
        check_extra_keys(["response", "level", "prompt"])


async def test_scorers_take_their_data_sources_clip_and_may_fail_where_they_are_not_required() -> None:
    async with serving(OddServer("refuse_bad")) as address:
        config = RewardConfig(
            functions=(
                RewardFunctionConfig(name="exact_match", data_sources=("maths",)),
                RewardFunctionConfig(name="support.reward_functions:obedient", required=False, weight=0.25),
            ),
            services=(
                RewardServiceConfig(
                    name="judge",
                    address=address,
                    max_value=2.0,
                    min_value=1.5,
                    weight=10.0,
                    required=False,
                    data_sources=("essays",),
                    retry_for_s=0.0,
                ),
            ),
        )
        total = WeightedSum.configured(ScorerSettings(config=config))
        await total.start()
        rows = [("aa", "maths"), ("raise", "essays"), ("a", "essays"), ("bad", "essays"), ("nan", "other")]
        batches = [
            [
                ScoreItem(
                    trajectory_id="t", prompt="", response=response, ground_truth="aa", data_source=source
                )
            ]
            for response, source in rows
        ]
        scores = [score for batch in batches for score in await total.score(batch)]
        await total.close()
    assert [score.reward for score in scores] == [1.25, 20.0, 15.25, 0.25, 0.25]
    assert scores[0].components == {"exact_match": 1.0, "obedient": 1.0, "obedient/failed": 0.0}
    assert scores[1].components == {
        "obedient/failed": 1.0, "judge": 5.0, "judge/words": 1.0, "judge/failed": 0.0,
    }  # fmt: skip
    assert scores[3].components == {"obedient": 1.0, "obedient/failed": 0.0, "judge/failed": 1.0}
