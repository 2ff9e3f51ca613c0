"""How return values are checked and scores are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.core.text import MAX_MESSAGE_CHARS
from paceline.reward.functions.spec import FunctionSpec, combine
from paceline.reward.scoring.cached import Cached
from paceline.reward.scoring.scores import Score, failed, score_of
from paceline.reward.scoring.shape import Shape
from paceline.reward.weighted_sum import add_scores, check_names
from support.reward_functions import RETURNED

SPEC = FunctionSpec(name="f", reference="exact_match")
ITEM = ScoreItem(
    trajectory_id="t", prompt="", response="r", ground_truth="", extra={"level": 2, "hard": True}
)


def test_weights_combine_values_and_extra_keys_become_components() -> None:
    functions = [
        FunctionSpec(name="right", reference="exact_match", shape=Shape(weight=2.0)),
        FunctionSpec(name="style", reference="m:f", shape=Shape(weight=-0.5)),
    ]
    reward, components = combine(functions, [1, {"score": 0.5, "length": 7, "share": 0.25}], ITEM)
    assert reward == 2.0 * 1 - 0.5 * 0.5
    assert components == {"right": 1.0, "style": 0.5, "style/length": 7.0, "style/share": 0.25}
    assert all(type(value) is float for value in components.values())


def test_reward_key_counts_as_value_only_where_there_is_no_score() -> None:
    assert combine([SPEC], [{"reward": 0.25}], ITEM) == (0.25, {"f": 0.25})
    assert combine([SPEC], [{"reward": 0.25, "score": 1.0}], ITEM) == (1.0, {"f": 1.0, "f/reward": 0.25})


@pytest.mark.parametrize(
    ("what", "kind", "sentence"),
    [
        ("nan", RewardErrorKind.NOT_FINITE, "f returned nan"),
        ("inf", RewardErrorKind.NOT_FINITE, "f returned -inf"),
        ("huge", RewardErrorKind.NOT_FINITE, "f returned inf"),
        ("nan_component", RewardErrorKind.NOT_FINITE, "f/share returned nan"),
        ("str", RewardErrorKind.WRONG_TYPE, "f returned str: return a float, or a dict of floats"),
        ("none", RewardErrorKind.WRONG_TYPE, "f returned NoneType: return a float, or a dict of floats"),
        ("bool", RewardErrorKind.WRONG_TYPE, "f returned bool: return a float, or a dict of floats"),
        ("list", RewardErrorKind.WRONG_TYPE, "f returned list: return a float, or a dict of floats"),
        ("empty_dict", RewardErrorKind.WRONG_TYPE, 'holds nothing: put its value under "score"'),
        ("no_score", RewardErrorKind.WRONG_TYPE, "holds 'length': put its value under \"score\""),
        ("bad_component", RewardErrorKind.WRONG_TYPE, "f/note returned str"),
    ],
)
def test_refused_values(what: str, kind: RewardErrorKind, sentence: str) -> None:
    with pytest.raises(RewardError) as caught:
        combine([SPEC], [RETURNED[what]], ITEM)
    assert caught.value.kind is kind
    assert sentence in str(caught.value)


def test_a_weighted_sum_that_overflows_is_not_finite() -> None:
    spec = FunctionSpec(name="f", reference="exact_match", shape=Shape(weight=10.0))
    with pytest.raises(RewardError, match="weighted sum of f is inf") as caught:
        combine([spec], [RETURNED["big"]], ITEM)
    assert caught.value.kind is RewardErrorKind.NOT_FINITE


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["f", "g", "f"], "two scorers are named 'f'"),
        (["f", "reward"], "no scorer can be named 'reward'"),
        (["a/b"], "hold no slash"),
        ([""], "non-empty"),
    ],
)
def test_names_that_make_components_ambiguous(names: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_names(names)


def test_a_dict_of_too_many_values_or_too_long_a_key_is_refused() -> None:
    many = {"score": 1.0, **{f"c{index}": 0.0 for index in range(300)}}
    with pytest.raises(RewardError, match="a dict of 301 values, at most 256"):
        combine([SPEC], [many], ITEM)
    with pytest.raises(RewardError, match="a key of 300 characters"):
        combine([SPEC], [{"score": 1.0, "x" * 300: 0.0}], ITEM)


def score(reward: float | None, **components: float) -> Score:
    error = None if reward is not None else (RewardErrorKind.TIMEOUT, "late")
    return Score(
        trajectory_id="t", reward=reward, components=components, error=error, seconds=len(components)
    )


def test_the_scores_of_several_scorers_add_up() -> None:
    total = add_scores([score(0.5, a=1.0), score(-2.0, b=4.0, c=1.0)], minimum=-10, maximum=10)
    assert (total.reward, total.components, total.error) == (-1.5, {"a": 1.0, "b": 4.0, "c": 1.0}, None)
    assert total.seconds == 2


def test_an_error_of_one_scorer_is_the_result() -> None:
    total = add_scores([score(0.5, a=1.0), score(None), score(1.0)], minimum=-10, maximum=10)
    assert (total.reward, total.components, total.error) == (None, {}, (RewardErrorKind.TIMEOUT, "late"))


@pytest.mark.parametrize(("value", "allowed"), [(-0.01, False), (0.0, True), (1.0, True), (1.01, False)])
def test_the_range_of_the_sum_is_inclusive(value: float, allowed: bool) -> None:
    total = add_scores([score(value, a=value)], minimum=0.0, maximum=1.0)
    if allowed:
        assert total.reward == value
        return
    assert total.reward is None
    assert total.error is not None
    assert total.error[0] is RewardErrorKind.OUT_OF_RANGE
    assert f"the reward {value:g} lies outside" in total.error[1]


def test_error_messages_are_one_bounded_line() -> None:
    result = failed("t", RewardErrorKind.RAISED, "first\n  second\t" + "x" * 10_000)
    assert result.error is not None
    message = result.error[1]
    assert message.startswith("first second x")
    assert len(message) == MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("where", "takes"),
    [
        ({"level": ("1", "2")}, True),
        ({"level": ("3",)}, False),
        ({"hard": ("true",), "level": ("2",)}, True),
        ({"hard": ("true",), "level": ("1",)}, False),
        ({"absent": ("x",)}, False),
    ],
)
def test_rows_are_chosen_by_any_column(where: dict[str, tuple[str, ...]], takes: bool) -> None:
    assert Shape(where=where).takes(ITEM) is takes


def test_a_column_may_weight_each_row() -> None:
    shape = Shape(weight=0.25, weight_key="level", maximum=3.0)
    assert shape.contribution(4.0, ITEM) == 0.25 * 2 * 3.0
    result = ScoreResult(trajectory_id="t", reward=4.0, placed=((1, 1.0),))
    score = score_of(ITEM, result, name="f", shape=shape, seconds=0.0)
    assert (score.reward, score.placed, dict(score.components)) == (1.5, ((1, 0.5),), {"f": 4.0})
    for key in ("absent", "hard"):
        failed_score = score_of(ITEM, result, name="f", shape=Shape(weight_key=key), seconds=0.0)
        assert failed_score.error_kind is RewardErrorKind.WRONG_TYPE
        assert failed_score.error is not None
        assert "add the column to data.extra_keys" in failed_score.error[1]


@pytest.mark.parametrize("placed", [((2, 1.0),), ((0, 1.0),), tuple((1, 0.0) for _ in range(1025))])
def test_parts_outside_the_response_or_too_many_are_refused(placed: tuple[tuple[int, float], ...]) -> None:
    result = ScoreResult(trajectory_id="t", reward=1.0, placed=placed)
    score = score_of(ITEM, result, name="f", shape=Shape(), seconds=0.0)
    assert score.error_kind is RewardErrorKind.WRONG_TYPE


def test_parts_of_several_scorers_come_together_and_go_with_an_error() -> None:
    parts = [Score(trajectory_id="t", reward=1.0, placed=pairs) for pairs in (((5, 1.0),), ((3, 0.5),))]
    assert add_scores(parts, minimum=-10, maximum=10).placed == ((3, 0.5), (5, 1.0))
    assert add_scores([*parts, score(None)], minimum=-10, maximum=10).placed == ()


async def test_a_score_that_was_computed_while_the_version_changed_is_not_remembered() -> None:
    """It may be the later version's, and the earlier one may come back."""

    class Replaced:
        names = ("f",)
        version: str | None = "1"
        num_asked = 0

        async def start(self) -> None: ...
        async def close(self) -> None: ...

        async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
            self.num_asked += 1
            if self.num_asked == 1:
                self.version = "2"
            return [Score(trajectory_id=item.trajectory_id, reward=float(self.num_asked)) for item in items]

    scorer = Replaced()
    cached = Cached(scorer, 10)
    assert [score.reward for score in await cached.score([ITEM])] == [1.0]
    scorer.version = "1"
    assert [score.reward for score in await cached.score([ITEM, ITEM])] == [2.0, 2.0]
    assert [score.reward for score in await cached.score([ITEM])] == [2.0]


async def test_the_scores_of_one_set_are_not_remembered_for_another() -> None:
    class Counting:
        names = ("f",)
        num_asked = 0

        async def start(self) -> None: ...
        async def close(self) -> None: ...

        async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
            self.num_asked += len(items)
            return [Score(trajectory_id=item.trajectory_id, reward=float(self.num_asked)) for item in items]

    cached = Cached(Counting(), 10)
    for expected in ((1.0, 2.0), (1.0, 2.0)):
        for name, reward in zip(("", "hard"), expected, strict=True):
            (score,) = await cached.score([replace(ITEM, val_set=name)])
            assert score.reward == reward
