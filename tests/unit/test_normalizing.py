"""Components that are normalised over a step's batch: from scorers through the controller to verify."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.reward import RewardConfig, RewardFunctionConfig, RewardServiceConfig
from paceline.core.errors import ConfigError
from paceline.core.ids import Purpose
from paceline.core.samples.normalizing import Part, normalized, scales
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import Score, score_of
from paceline.reward.scoring.shape import Shape
from paceline.reward.weighted_sum import WeightedSum
from support import cli_configs
from support.sequencer_run import run


def rewards(sums: list[float], parts: list[list[Part]]) -> list[float]:
    by_name = scales(parts)
    return [normalized(reward, of_sample, by_name) for reward, of_sample in zip(sums, parts, strict=True)]


def test_the_numbers_are_those_of_numpy_and_the_order_of_samples_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    values, others = rng.normal(3.0, 40.0, 37), rng.normal(0.0, 1.0, 37)
    weights = rng.choice([0.5, 2.0], 37)
    sums = (others + weights * values).tolist()
    parts: list[list[Part]] = [[("a", v, w)] for v, w in zip(values.tolist(), weights.tolist(), strict=True)]
    got = rewards(sums, parts)
    wanted = others + weights * (values - values.mean()) / values.std()
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)
    places = list(range(37))
    random.Random(1).shuffle(places)
    shuffled = rewards([sums[place] for place in places], [parts[place] for place in places])
    assert shuffled == [got[place] for place in places]


def test_a_component_is_normalised_over_the_samples_that_have_it() -> None:
    parts: list[list[Part]] = [
        [("a", 1.0, 1.0), ("b", 5.0, 2.0)], [("a", 3.0, 1.0)], [("b", 5.0, 2.0)], [],
    ]  # fmt: skip
    assert rewards([11.5, 3.0, 10.0, 7.0], parts) == pytest.approx([0.5 - 1.0, 1.0, 0.0, 7.0])


@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, 1e300, -1e-300])
def test_equal_values_become_zero_and_sizes_do_not_overflow(value: float) -> None:
    assert rewards([value, value], [[("a", value, 1.0)]] * 2) == [0.0, 0.0]
    rounded = [[("a", 0.1, 1.0)], [("a", float(np.float32(0.1)), 1.0)]]
    assert rewards([0.1, float(np.float32(0.1))], rounded) == [0.0, 0.0]
    huge: list[list[Part]] = [[("a", 1e300, 1e-300)], [("a", -1e300, 1e-300)]]
    np.testing.assert_allclose(rewards([1.0, -1.0], huge), [1e-300, -1e-300], atol=1e-15)


async def test_scorers_say_what_is_normalised_after_clipping_and_with_the_rows_weight() -> None:
    config = RewardConfig(
        functions=(
            RewardFunctionConfig(
                name="support.reward_functions:length",
                normalize="batch",
                max_value=3.0,
                weight=0.5,
                weight_key="w",
            ),
            RewardFunctionConfig(name="exact_match"),
        )
    )
    total = WeightedSum.configured(ScorerSettings(config=config))
    await total.start()
    item = ScoreItem(trajectory_id="t", prompt="", response="abcde", ground_truth="abcde", extra={"w": 4})
    (score,) = await total.score([item])
    await total.close()
    assert (score.reward, score.components["length"]) == (7.0, 5.0)
    assert score.normalized == (("length", 3.0, 2.0),)


def test_every_kind_of_scorer_can_be_normalised(tmp_path: Path) -> None:
    """What each kind's entry asks for is what the sum tells the controller."""
    (tmp_path / "prompt.txt").write_text("{response}")
    outside = {"normalize": "batch", "weight": 0.5}
    judge = {"address": "http://127.0.0.1:1/v1", "model": "m", "prompt_file": str(tmp_path / "prompt.txt")}
    config = RewardConfig.model_validate(
        {
            "functions": [{"name": "exact_match", **outside}],
            "services": [{"name": "service", "address": "a:1", **outside}],
            "attached": [{"name": "attached", **outside}],
            "judges": [{"name": "judge", **judge, **outside}],
            "code": [{"name": "code", **outside}, {"name": "plain"}],
        }
    )
    total = WeightedSum.configured(ScorerSettings(config=config))
    item = ScoreItem(trajectory_id="t", prompt="", response="r", ground_truth="")
    values = {name: float(place) for place, name in enumerate(total.names)}
    score = total._with_parts(item, Score(trajectory_id="t", reward=1.0, components=values))
    wanted = ("exact_match", "service", "attached", "judge", "code")
    assert sorted(score.normalized) == sorted((name, values[name], 0.5) for name in wanted)


async def test_the_controller_normalises_what_is_trained_and_verify_finds_the_same(tmp_path: Path) -> None:
    def answer(group: Any, index: int) -> dict[str, Any]:
        value = float(group.prompt_id + 10 * index)
        return {
            "reward": 1.0 + 0.5 * value,
            "reward_error": None,
            "components": {"a": value},
            "normalized": (("a", value, 0.5),),
        }

    async with run(tmp_path, trainer__total_steps=1) as it:
        await it.enlist_all()
        await it.go(answer)
        (order,) = it.services.orders
        values = np.array(
            [row.trajectory_id.prompt_id + 10 * row.trajectory_id.sample_index for row in order.rows]
        )
        wanted = 1.0 + 0.5 * (values - values.mean()) / values.std()
        np.testing.assert_allclose([row.reward for row in order.rows], wanted, rtol=1e-12)
        assert it.breaches() == []
        path = tmp_path / "events.jsonl"
        events = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        (first, *_) = (event for event in events if event.get("id", "").startswith("train:"))
        first["normalized"][0][1] += 1.0
        path.write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")
        assert it.breaches() != []
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()]
    validated = [row["val/reward/mean"] for row in metrics if "val/reward/mean" in row]
    # A validation is not normalised: prompts 0 and 1, with 1 + 0.5 * 0 and 1 + 0.5 * 1.
    assert validated == [1.25] * len(validated) != []


async def test_a_greedy_answer_is_measured_with_the_scale_of_the_batch(tmp_path: Path) -> None:
    def answer(group: Any, index: int) -> dict[str, Any]:
        value = 100.0 if group.purpose == Purpose.GREEDY else float(group.prompt_id + 10 * index)
        return {"reward": value, "reward_error": None, "normalized": (("a", value, 1.0),)}

    changes = {"algorithm__adv_estimator": "remax", "trainer__val_before_train": False}
    async with run(tmp_path, trainer__total_steps=1, **changes) as it:
        await it.enlist_all()
        await it.go(answer)
        (order,) = it.services.orders
        values = np.array(
            [row.trajectory_id.prompt_id + 10 * row.trajectory_id.sample_index for row in order.rows]
        )
        scale = (100.0 - values.mean()) / values.std()
        np.testing.assert_allclose([row.greedy_score for row in order.rows], scale, rtol=1e-12)
        assert it.breaches() == []


def test_what_places_its_reward_cannot_be_normalised() -> None:
    model = {"name": "steps", "path": "m", "kind": "process", "normalize": "batch"}
    with pytest.raises(ConfigError, match="'steps' places parts of its reward on tokens"):
        cli_configs.config(reward={"models": [model]})
    item = ScoreItem(trajectory_id="t", prompt="", response="abc", ground_truth="")
    result = ScoreResult(trajectory_id="t", reward=1.0, placed=((1, 0.5),))
    shape = Shape.configured(RewardServiceConfig(name="judge", address="a:1", normalize="batch"))
    score = score_of(item, result, name="judge", shape=shape, seconds=0.0)
    assert score.error is not None
    assert "cannot be normalised: remove normalize" in score.error[1]
