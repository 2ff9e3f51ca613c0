"""What every `Scorer` promises: functions in child processes, a remote service, the sum of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from paceline.config.load import parse
from paceline.config.reward import RewardConfig, RewardFunctionConfig, RewardServiceConfig
from paceline.config.run import RunConfig
from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.reward.functions.pool import FunctionPool
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from paceline.reward.scoring.scorer import Scorer, ScorerSettings
from paceline.reward.scoring.shape import Shape
from paceline.reward.val_rewards import RewardBySet
from paceline.reward.weighted_sum import WeightedSum
from paceline.sdk import RewardServer
from support.reward_functions import length_or_error

WEIGHT = 0.5
SHAPE = Shape(weight=WEIGHT)
RANK = "support.group_functions:rank"
LENGTH = "support.reward_functions:length_or_error"


def pool(address: str) -> Scorer:
    function = FunctionSpec(name="length", reference=LENGTH, shape=SHAPE)
    return FunctionPool([function], num_processes=1, timeout_s=20.0)


def remote(address: str) -> Scorer:
    return RemoteScorer(RemoteScorerOptions(name="length", address=address, shape=SHAPE, timeout_s=20.0))


def weighted_sum(address: str) -> Scorer:
    config = RewardConfig(
        functions=(RewardFunctionConfig(name=LENGTH, weight=0.3),),
        services=(RewardServiceConfig(name="length", address=address, weight=0.2),),
        timeout_s=20.0,
    )
    return WeightedSum.configured(ScorerSettings(config=config))


def by_set(address: str) -> Scorer:
    """As the sum, by itself and for a set; a second set has another reward."""
    tree = {
        "data": {
            "train_files": "t.jsonl",
            "val_sets": {
                "own": {"files": "o.jsonl", "reward": {"functions": [{"name": LENGTH, "weight": -1}]}},
                "ranked": {"files": "r.jsonl", "reward": {"functions": [{"name": RANK, "group": True}]}},
            },
        },
        "model": {"path": "m"},
        "trainer": {"total_steps": 1},
        "actor": {"ppo_mini_batch_size": 64},
        "reward": {
            "functions": [{"name": LENGTH, "weight": 0.3}],
            "services": [{"name": "length", "address": address, "weight": 0.2}],
            "timeout_s": 20.0,
        },
    }
    config = parse(RunConfig, tree)
    return RewardBySet.configured(ScorerSettings(config=config.reward), config)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with RewardServer(length_or_error) as server:
        yield server.address


@pytest.fixture(params=[pool, remote, weighted_sum, by_set])
def new_scorer(request: pytest.FixtureRequest, address: str) -> Callable[[], Scorer]:
    return lambda: request.param(address)


@pytest.fixture
async def scorer(new_scorer: Callable[[], Scorer]) -> AsyncIterator[Scorer]:
    scorer = new_scorer()
    await scorer.start()
    yield scorer
    await scorer.close()


def items(*responses: str) -> list[ScoreItem]:
    return [
        ScoreItem(trajectory_id=f"t{index}", prompt="", response=response, ground_truth="")
        for index, response in enumerate(responses)
    ]


async def test_one_weighted_score_per_item_in_order(scorer: Scorer) -> None:
    scores = await scorer.score(items("aaa", "", "aa"), run_id="run", step=3)
    assert [score.trajectory_id for score in scores] == ["t0", "t1", "t2"]
    assert [score.reward for score in scores] == pytest.approx([1.5, 0.0, 1.0])
    # These items come from no environment, which the sum would name too.
    assert scores[0].components == dict.fromkeys(set(scorer.names) - {"environment"}, 3.0)


async def test_an_error_is_its_items_alone(scorer: Scorer) -> None:
    scores = await scorer.score(items("a", "bad", "a"))
    assert [score.error_kind for score in scores] == [None, RewardErrorKind.RAISED, None]
    assert (scores[1].reward, scores[1].components) == (None, {})
    assert scores[1].error is not None
    assert "KeyError: 'bad'" in scores[1].error[1]


async def test_calls_overlap_and_an_empty_batch_has_no_scores(scorer: Scorer) -> None:
    batches = await asyncio.gather(*(scorer.score(items(*["a"] * size)) for size in range(4)))
    assert [len(scores) for scores in batches] == [0, 1, 2, 3]
    assert {score.reward for scores in batches for score in scores} == {WEIGHT}


@pytest.mark.parametrize("started", [False, True])
async def test_what_was_closed_scores_no_more(new_scorer: Callable[[], Scorer], started: bool) -> None:
    """It may be closed twice, and without having been started."""
    scorer = new_scorer()
    if started:
        await scorer.start()
    await scorer.close()
    await scorer.close()
    with pytest.raises(RewardError) as caught:
        await scorer.score(items("a"))
    assert caught.value.kind is RewardErrorKind.UNAVAILABLE


async def test_each_item_has_the_reward_of_its_set(address: str) -> None:
    """Sets without a reward of their own, and unknown ones, have that of the run."""
    scorer = by_set(address)
    await scorer.start()
    sets = ["own", "", "ranked", "easy", "own", "ranked"]
    texts = ["a", "aa", "aaa", "aaaa", "bad", "a"]
    given = [
        replace(item, val_set=name, group="g" if name == "ranked" else "")
        for item, name in zip(items(*texts), sets, strict=True)
    ]
    scores = await scorer.score(given)
    await scorer.close()
    for name in ("", "own"):
        with pytest.raises(RewardError):
            await scorer.score([replace(items("a")[0], val_set=name)])
    assert [score.trajectory_id for score in scores] == [f"t{index}" for index in range(6)]
    assert [score.reward for score in scores] == [-1.0, 1.0, 1.0, 2.0, None, 0.0]
    assert [set(score.components) for score in scores[:3]] == [
        {"length_or_error"},
        {"length_or_error", "length"},
        {"rank"},
    ]


def test_the_queues_of_a_set_carry_its_name(address: str) -> None:
    scorer = by_set(address)
    assert isinstance(scorer, RewardBySet)
    assert scorer.queues() == [
        (0, {"scorer": name}) for name in ("length", "functions", "own: functions", "ranked: group functions")
    ]
