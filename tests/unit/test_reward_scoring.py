"""How return values are checked and combined."""

from __future__ import annotations

import math

import pytest

from paceline.core.errors import ConfigError, InvalidMessageError, RewardError, RewardErrorKind
from paceline.reward.scoring import MAX_MESSAGE_CHARS, FunctionSpec, RewardItem, check_specs, combine, failed
from support.reward_functions import RETURNED

ONE = FunctionSpec(name="f", reference="exact_match")


def test_weights_combine_values_and_extra_keys_become_components() -> None:
    functions = [
        FunctionSpec(name="right", reference="exact_match", weight=2.0),
        FunctionSpec(name="style", reference="m:f", weight=-0.5),
    ]
    reward, components = combine(functions, [1, {"score": 0.5, "length": 7, "share": 0.25}])
    assert reward == 2.0 * 1 - 0.5 * 0.5
    assert components == {"right": 1.0, "style": 0.5, "style/length": 7.0, "style/share": 0.25}
    assert all(type(value) is float for value in components.values())


def test_reward_key_counts_as_value_only_where_there_is_no_score() -> None:
    assert combine([ONE], [{"reward": 0.25}]) == (0.25, {"f": 0.25})
    assert combine([ONE], [{"reward": 0.25, "score": 1.0}]) == (1.0, {"f": 1.0, "f/reward": 0.25})


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
        combine([ONE], [RETURNED[what]])
    assert caught.value.kind is kind
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("value", "allowed"), [(-0.01, False), (0.0, True), (1.0, True), (1.01, False)])
def test_range_is_inclusive(value: float, allowed: bool) -> None:
    spec = FunctionSpec(name="f", reference="exact_match", minimum=0.0, maximum=1.0)
    if allowed:
        assert combine([spec], [value])[0] == value
        return
    with pytest.raises(RewardError, match=r"outside its range \[0, 1\]") as caught:
        combine([spec], [{"score": value}])
    assert caught.value.kind is RewardErrorKind.OUT_OF_RANGE


def test_a_half_open_range() -> None:
    spec = FunctionSpec(name="f", reference="exact_match", maximum=1.0)
    assert combine([spec], [-1e9])[0] == -1e9
    with pytest.raises(RewardError, match=r"\[-inf, 1\]"):
        combine([spec], [2.0])


def test_a_weighted_sum_that_overflows_is_not_finite() -> None:
    spec = FunctionSpec(name="f", reference="exact_match", weight=10.0)
    with pytest.raises(RewardError, match="weighted sum of f is inf") as caught:
        combine([spec], [RETURNED["big"]])
    assert caught.value.kind is RewardErrorKind.NOT_FINITE


@pytest.mark.parametrize(
    ("functions", "sentence"),
    [
        ([], "name at least one function"),
        ([ONE, ONE], "two functions are named 'f'"),
        ([FunctionSpec(name="a/b", reference="exact_match")], "hold no slash"),
        ([FunctionSpec(name="", reference="exact_match")], "non-empty"),
        ([FunctionSpec(name="f", reference="exact_match", weight=math.nan)], "weight of 'f' is nan"),
        ([FunctionSpec(name="f", reference="exact_match", minimum=1.0, maximum=0.0)], "from 1 to 0"),
    ],
)
def test_configurations_that_make_no_sense(functions: list[FunctionSpec], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_specs(functions)


def test_an_item_may_not_shadow_its_own_fields() -> None:
    with pytest.raises(InvalidMessageError, match="may not be named ground_truth, prompt") as caught:
        RewardItem(
            trajectory_id="t", response="", ground_truth="", extra={"prompt": 1, "ground_truth": 2, "x": 3}
        )
    assert caught.value.reason == "reserved_extra_name"


def test_error_messages_are_one_bounded_line() -> None:
    result = failed("t", RewardErrorKind.RAISED, "first\n  second\t" + "x" * 10_000)
    assert result.error is not None
    message = result.error[1]
    assert message.startswith("first second x")
    assert len(message) == MAX_MESSAGE_CHARS
