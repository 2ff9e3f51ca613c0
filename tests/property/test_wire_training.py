"""Training orders and results through protobuf and back, and what is refused when they arrive."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InvalidMessageError
from paceline.core.guard import RULES, Adjustments, Reading
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder, TrainResult, batch_digest
from paceline.rpc.v1 import learner_pb2
from paceline.wire.calls import training
from support import domain

lengths = st.integers(1, 2**31 - 1)
steps = st.integers(1, 2**63 - 1)
scales = st.floats(0.0, 1.0, exclude_min=True)


@st.composite
def batch_rows(draw: st.DrawFn) -> BatchRow:
    """Rows with at most as many sampled tokens as response tokens."""
    num_sampled = draw(lengths)
    return BatchRow(
        trajectory_id=draw(domain.trajectory_ids),
        blob_key=draw(domain.names),
        blob_digest=draw(domain.blob_digests),
        reward=draw(domain.finite),
        num_prompt_tokens=draw(lengths),
        num_response_tokens=draw(st.integers(num_sampled, 2**31 - 1)),
        num_sampled_tokens=num_sampled,
        greedy_score=draw(st.none() | domain.finite),
        token_rewards=draw(st.lists(st.tuples(st.just(0), domain.finite), max_size=2).map(tuple)),
        num_patches=draw(st.integers(0, 2**31 - 1)),
        num_greedy_tokens=draw(st.integers(0, 2**31 - 1)),
        teacher_digest=draw(st.just("") | domain.blob_digests),
    )


rows = batch_rows()
adjustments = st.builds(
    Adjustments,
    lr_scale=scales,
    kl_scale=st.floats(0.0, exclude_min=True, allow_infinity=False),
    clip_scale=scales,
    fixed_kl_coef=st.none() | st.floats(0.0, allow_nan=False, allow_infinity=False),
)
orders = st.builds(
    TrainOrder,
    step=steps,
    policy=domain.policies,
    rows=st.lists(rows, max_size=3).map(tuple),
    adjustments=adjustments,
)
readings = st.builds(
    Reading,
    rule=st.sampled_from(sorted(RULES)),
    value=domain.finite,
    network=st.sampled_from(["", "actor", "critic"]),
    reference=domain.finite,
    num_skipped=st.integers(0, 2**31 - 1),
)
results = st.builds(
    TrainResult,
    step=steps,
    metrics=st.dictionaries(domain.names, st.floats(allow_nan=False), max_size=3),
    skip_reasons=st.lists(domain.texts, max_size=2).map(tuple),
    readings=st.lists(readings, max_size=3).map(tuple),
)
ORDER = TrainOrder(
    step=3,
    policy=PolicyTag(version=2, digest="0123456789abcdef"),
    rows=(
        BatchRow(
            trajectory_id=TrajectoryId(step=3, purpose="train", prompt_id=7, sample_index=1),
            blob_key="k",
            blob_digest="0123456789abcdef" * 2,
            reward=0.5,
            num_prompt_tokens=2,
            num_response_tokens=4,
            num_sampled_tokens=3,
        ),
    ),
)


@given(orders, results)
@settings(max_examples=60)
def test_what_goes_comes_back(order: TrainOrder, result: TrainResult) -> None:
    assert training.decode_order(training.order_to_proto(order).SerializeToString()) == order
    sent = training.result_to_proto(result).SerializeToString()
    assert training.result_from_proto(learner_pb2.TrainStepResponse.FromString(sent)) == result


@given(
    st.builds(
        ChunkOrder,
        step=steps,
        policy=domain.policies,
        first_row=st.integers(0, 2**63 - 1),
        rows=st.lists(rows, min_size=1, max_size=3).map(tuple),
        with_gradient=st.booleans(),
        adjustments=adjustments,
    )
)
@settings(max_examples=60)
def test_orders_for_chunks_come_back(order: ChunkOrder) -> None:
    assert training.decode_chunk(training.chunk_to_proto(order).SerializeToString()) == order


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"step": 0}, "step 0, steps count from 1"),
        ({"first_row": -1}, "1 rows from place -1 on"),
        ({"rows": ()}, "0 rows from place 4 on"),
    ],
)
def test_rejected_orders_for_chunks(fields: dict[str, Any], says: str) -> None:
    order = ChunkOrder(step=3, policy=ORDER.policy, first_row=4, rows=ORDER.rows)
    with pytest.raises(InvalidMessageError, match=says):
        training.chunk_from_proto(training.chunk_to_proto(dataclasses.replace(order, **fields)))


def refusal(message: learner_pb2.TrainStepRequest) -> InvalidMessageError:
    with pytest.raises(InvalidMessageError) as caught:
        training.order_from_proto(message)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trajectory_id": "train:3:7"}, "out_of_range"),
        ({"trajectory_id": "Play:3:7:1"}, "out_of_range"),
        ({"trajectory_id": "train:3:seven:1"}, "out_of_range"),
        ({"blob_key": ""}, "missing_field"),
        ({"num_patches": -1}, "out_of_range"),
        ({"num_greedy_tokens": -1}, "out_of_range"),
        ({"blob_digest": ""}, "out_of_range"),
        ({"blob_digest": "0123456789ABCDEF" * 2}, "out_of_range"),
        ({"teacher_digest": "0123456789ABCDEF" * 2}, "out_of_range"),
        ({"reward": float("nan")}, "not_finite"),
        ({"reward": float("inf")}, "not_finite"),
        ({"greedy_score": float("nan")}, "not_finite"),
        ({"num_prompt_tokens": 0}, "out_of_range"),
        ({"num_response_tokens": -1}, "out_of_range"),
    ],
)
def test_rejected_batch_rows(fields: dict[str, Any], reason: str) -> None:
    message = training.order_to_proto(ORDER)
    for name, value in fields.items():
        setattr(message.rows[0], name, value)
    assert refusal(message).reason == reason


def test_rejected_steps_and_policies() -> None:
    message = training.order_to_proto(ORDER)
    message.step = 0
    assert "step 0, steps count from 1" in str(refusal(message))
    message = training.order_to_proto(ORDER)
    message.policy.digest = "abc"
    assert "wanted 16 lower-case hexadecimal digits" in str(refusal(message))


def test_a_digest_that_is_not_that_of_the_rows_is_rejected() -> None:
    message = training.order_to_proto(ORDER)
    message.rows[0].reward = 0.75
    changed = dataclasses.replace(ORDER, rows=(dataclasses.replace(ORDER.rows[0], reward=0.75),))
    assert refusal(message).reason == "wrong_digest"
    assert f"'{ORDER.digest}', the rows of step 3 have '{changed.digest}'" in str(refusal(message))
    message.digest = changed.digest
    assert training.order_from_proto(message) == changed


def test_a_batch_digest_by_hand_and_what_it_depends_on() -> None:
    (row,), policy = ORDER.rows, ORDER.policy
    row = dataclasses.replace(row, blob_digest="ab" * 16)
    by_hand = f"v2@0123456789abcdef\ntrain:3:7:1\t{'ab' * 16}\t0.5\tNone\n"
    digest = batch_digest(policy, [row])
    assert digest == hashlib.blake2b(by_hand.encode(), digest_size=16).hexdigest()
    changes: list[dict[str, Any]] = [
        {"reward": math.nextafter(0.5, 1)},
        {"greedy_score": 0.5},
        {"blob_digest": "ac" * 16},
        {"trajectory_id": dataclasses.replace(row.trajectory_id, sample_index=2)},
    ]
    others = [batch_digest(policy, [dataclasses.replace(row, **change)]) for change in changes]
    others += [batch_digest(PolicyTag(version=2, digest="f" * 16), [row]), batch_digest(policy, [row, row])]
    assert len({digest, *others}) == 1 + len(others)
    # Keys hold a server's name; the batch is the same whoever sampled it.
    assert batch_digest(policy, [dataclasses.replace(row, blob_key="other")]) == digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr_scale": 2.0}, "lr_scale is 2.0, wanted (0, 1]"),
        ({"kl_scale": 0.0}, "kl_scale is 0.0, wanted a number above 0"),
        ({"clip_scale": 1.5}, "clip_scale is 1.5, wanted (0, 1]"),
        ({"fixed_kl_coef": -1.0}, "fixed_kl_coef is -1.0, wanted a number of at least 0"),
        ({"fixed_kl_coef": math.inf}, "fixed_kl_coef is inf, wanted a number of at least 0"),
    ],
)
def test_rejected_adjustments(fields: dict[str, float], message: str) -> None:
    order = training.order_to_proto(ORDER)
    for name, value in fields.items():
        setattr(order.adjustments, name, value)
    assert message in str(refusal(order))


def test_an_order_without_adjustments_leaves_the_configuration_as_it_is() -> None:
    message = training.order_to_proto(ORDER)
    message.ClearField("adjustments")
    assert training.order_from_proto(message).adjustments == Adjustments()


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"value": math.nan}, "nan against 0.25"), ({"rule": "no such"}, "there is no rule 'no such'")],
)
def test_rejected_readings(fields: dict[str, Any], message: str) -> None:
    reading = Reading(rule="grad_norm", network="critic", value=3.5, reference=0.25, num_skipped=2)
    result = training.result_to_proto(TrainResult(step=1, metrics={}, readings=(reading,)))
    for name, value in fields.items():
        setattr(result.guard_readings[0], name, value)
    with pytest.raises(InvalidMessageError, match=message):
        training.result_from_proto(result)


def test_a_metric_that_is_not_a_number_reaches_the_guard() -> None:
    result = training.result_to_proto(TrainResult(step=1, metrics={"actor/loss": math.nan}))
    assert math.isnan(training.result_from_proto(result).metrics["actor/loss"])
