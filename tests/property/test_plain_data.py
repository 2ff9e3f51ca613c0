"""What a data file holds is refused when it is read, or passes every message and the reward child."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError, RewardErrorKind
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import PromptGroup, RewardContext, SamplingSpec, ScoredHeader
from paceline.core.scoring import ScoreItem
from paceline.core.text import encodable
from paceline.data.plain import plain_value
from paceline.reward.functions.pool import FunctionPool
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.scoring.scores import failed
from paceline.wire import decode_prompt_group, decode_scored, encode_prompt_group, encode_scored_header
from paceline.wire.calls.protobuf import score_item_from_proto, score_item_to_proto, score_result_to_proto
from support.headers import scored

any_text = st.text() | st.lists(st.integers(0, 0x10FFFF).map(chr), max_size=8).map("".join)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.decimals(allow_nan=True)
    | any_text
    | st.binary(max_size=8)
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.floats(width=32).map(np.float32)
    | st.integers(-(2**63), 2**63 - 1).map(np.int64)
    | st.lists(st.floats(), max_size=3).map(np.array)
    | st.just(object())
    | st.just(1j)
    | st.dates().map(np.datetime64)
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(any_text | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def plain_or_none(value: object) -> Any:
    try:
        return plain_value(value)
    except DataError:
        return None


def context_of(extra: object, text: str) -> RewardContext:
    return RewardContext(ground_truth=text, data_source=text, prompt_text=text, extra={"column": extra})


@given(anything, any_text)
@settings(max_examples=150)
def test_plain_data_passes_every_message_unchanged(value: object, text: str) -> None:
    extra = plain_or_none(value)
    assert json.loads(json.dumps(extra, allow_nan=False)) == extra
    assert plain_value(extra) == extra
    group = PromptGroup(
        run_id="r",
        step=1,
        purpose=Purpose.TRAIN,
        prompt_id=0,
        prompt_token_ids=np.array([1], np.int32),
        sampling=SamplingSpec(temperature=1.0, max_tokens=1),
        seeds=(0,),
        policy=PolicyTag(version=0, digest="0" * 16),
        context=context_of(extra, text),
    )
    arrived = decode_prompt_group(encode_prompt_group(group)).context
    assert arrived == context_of(extra, encodable(text))
    item = ScoreItem(
        trajectory_id="t",
        prompt=arrived.prompt_text,
        response=arrived.prompt_text,
        ground_truth=arrived.ground_truth,
        extra=arrived.extra,
        val_set=arrived.prompt_text,
    )
    assert score_item_from_proto(score_item_to_proto(item)) == item


@given(any_text)
def test_every_error_text_reaches_the_barrier_and_a_caller(text: str) -> None:
    header = scored(1, reward_error=("raised", text))
    arrived = decode_scored(encode_scored_header(header))
    assert isinstance(arrived, ScoredHeader)
    assert arrived.reward_error == ("raised", encodable(text))
    score = failed("t", RewardErrorKind.RAISED, text)
    assert score_result_to_proto(score.to_result()).error


@given(st.lists(st.tuples(anything, any_text), min_size=30, max_size=60))
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
def test_any_text_and_extra_pass_the_reward_child(values: list[tuple[object, str]]) -> None:
    echo = FunctionSpec(name="echo", reference="support.reward_functions:raises_its_arguments")
    items = [
        ScoreItem(
            trajectory_id=str(i), prompt="", response=text, ground_truth=text, extra={"c": plain_or_none(v)}
        )
        for i, (v, text) in enumerate(values)
    ]

    async def score() -> None:
        async with FunctionPool([echo], num_processes=1, timeout_s=10) as pool:
            for item, result in zip(items, await pool.score(items), strict=True):
                said = f"echo raised ValueError: {item.response} {item.extra['c']!r}"
                assert result == failed(item.trajectory_id, RewardErrorKind.RAISED, said, result.seconds)
            assert pool.num_replaced == 0

    asyncio.run(score())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.inf, "holds an infinity"),
        (2**64, "needs over 64 bits"),
        (b"\xff", "holds 1 bytes that are not text in UTF-8"),
        (object(), "holds a object, which has no form in JSON"),
        ([[[[[[[[1]]]]]]]], "is nested more than 7 levels deep"),
    ],
)
def test_what_has_no_plain_form_is_named(value: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        plain_value({"deep": [value]} if not isinstance(value, list) else value)


def test_plain_forms() -> None:
    value = {
        1: (np.float32(0.5), np.array([1, 2]), uuid.UUID(int=5)),
        "time": datetime.time(1, 2),
    }
    assert plain_value(value) == {
        "1": [0.5, [1, 2], "00000000-0000-0000-0000-000000000005"],
        "time": "01:02:00",
    }
