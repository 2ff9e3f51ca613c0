"""Converts training orders and results to protobuf and back; the learner's ranks use gRPC's messages."""

from __future__ import annotations

import math
from typing import Any

from paceline.core.digest import DIGEST
from paceline.core.errors import InvalidMessageError
from paceline.core.guard import RULES, Adjustments, Reading
from paceline.core.ids import TrajectoryId
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder, TrainResult
from paceline.rpc.v1 import learner_pb2
from paceline.wire.calls.protobuf import policy_tag_from_proto, policy_tag_to_proto
from paceline.wire.fields import reject
from paceline.wire.records import from_proto, to_proto


def order_to_proto(order: TrainOrder) -> learner_pb2.TrainStepRequest:
    """Writes a training order as a message."""
    return to_proto(order, learner_pb2.TrainStepRequest, **_parts_of(order))


def order_from_proto(message: learner_pb2.TrainStepRequest) -> TrainOrder:
    """Reads a training order; without adjustments the configuration applies unchanged.

    Raises:
        InvalidMessageError: the step is below 1, a policy tag, row or adjustment is malformed, or the digest
            does not match the rows.
    """
    if message.step < 1:
        reject("TrainStepRequest", "out_of_range", f"step {message.step}, steps count from 1")
    order = from_proto(message, TrainOrder, **_parts_in(message))
    if message.digest != order.digest:
        detail = f"the digest is {message.digest[:64]!r}, the rows of step {order.step} have {order.digest!r}"
        reject("TrainStepRequest", "wrong_digest", detail)
    return order


def chunk_to_proto(order: ChunkOrder) -> learner_pb2.WorkAheadRequest:
    """Writes an order for a chunk as a message."""
    return to_proto(order, learner_pb2.WorkAheadRequest, **_parts_of(order))


def chunk_from_proto(message: learner_pb2.WorkAheadRequest) -> ChunkOrder:
    """Reads an order for a chunk.

    Raises:
        InvalidMessageError: the step is below 1, the place below 0, there are no rows, or a policy tag, row
            or adjustment is malformed.
    """
    if message.step < 1:
        reject("WorkAheadRequest", "out_of_range", f"step {message.step}, steps count from 1")
    if message.first_row < 0 or not message.rows:
        detail = f"{len(message.rows)} rows from place {message.first_row} on"
        reject("WorkAheadRequest", "out_of_range", detail)
    return from_proto(message, ChunkOrder, **_parts_in(message))


def _parts_of(order: TrainOrder | ChunkOrder) -> dict[str, Any]:
    return {
        "policy": policy_tag_to_proto(order.policy),
        "rows": [_row_to_proto(row) for row in order.rows],
        "adjustments": to_proto(order.adjustments, learner_pb2.GuardAdjustments),
    }


def _parts_in(message: learner_pb2.TrainStepRequest | learner_pb2.WorkAheadRequest) -> dict[str, Any]:
    adjusted = message.HasField("adjustments")
    return {
        "policy": policy_tag_from_proto(message.policy),
        "rows": tuple(_row_from_proto(row) for row in message.rows),
        "adjustments": _adjustments_from_proto(message.adjustments) if adjusted else Adjustments(),
    }


def decode_chunk(data: bytes) -> ChunkOrder:
    """Reads the bytes of a `WorkAheadRequest`; raises the same errors as `chunk_from_proto`."""
    return chunk_from_proto(learner_pb2.WorkAheadRequest.FromString(data))


def decode_order(data: bytes) -> TrainOrder:
    """Reads the bytes of a `TrainStepRequest`; raises the same errors as `order_from_proto`."""
    return order_from_proto(learner_pb2.TrainStepRequest.FromString(data))


def result_to_proto(result: TrainResult) -> learner_pb2.TrainStepResponse:
    """Writes a training result as a message."""
    readings = [to_proto(one, learner_pb2.GuardReading, without=("detail",)) for one in result.readings]
    return to_proto(result, learner_pb2.TrainStepResponse, without=("readings",), guard_readings=readings)


def result_from_proto(message: learner_pb2.TrainStepResponse) -> TrainResult:
    """Reads the result of a training step. Metrics may be NaN or infinite; the guard counts such values.

    Raises:
        InvalidMessageError: a reading names an unknown rule, or is not finite.
    """
    readings = tuple(_reading_from_proto(reading) for reading in message.guard_readings)
    return from_proto(message, TrainResult, readings=readings)


def _row_to_proto(row: BatchRow) -> learner_pb2.BatchRow:
    placed = [learner_pb2.TokenReward(position=place, reward=part) for place, part in row.token_rewards]
    return to_proto(row, learner_pb2.BatchRow, trajectory_id=str(row.trajectory_id), token_rewards=placed)


def _row_from_proto(message: learner_pb2.BatchRow) -> BatchRow:
    try:
        trajectory_id = TrajectoryId.parse(message.trajectory_id)
    except ValueError as error:
        raise InvalidMessageError(
            f"invalid BatchRow: trajectory_id {message.trajectory_id[:80]!r} "
            "is not PURPOSE:STEP:PROMPT:SAMPLE",
            reason="out_of_range",
        ) from error
    if not message.blob_key:
        reject("BatchRow", "missing_field", f"{trajectory_id} has no blob_key")
    digests = {"blob_digest": message.blob_digest, "teacher_digest": message.teacher_digest}
    for name, digest in digests.items():
        is_left_out = name == "teacher_digest" and not digest
        if not is_left_out and not DIGEST.fullmatch(digest):
            reject("BatchRow", "out_of_range", f"{trajectory_id} has the {name} {digest[:40]!r}")
    if not math.isfinite(message.reward):
        reject("BatchRow", "not_finite", f"{trajectory_id} has the reward {message.reward}")
    greedy_score = message.greedy_score if message.HasField("greedy_score") else None
    if greedy_score is not None and not math.isfinite(greedy_score):
        reject("BatchRow", "not_finite", f"{trajectory_id} has the greedy score {greedy_score}")
    if message.num_prompt_tokens < 1 or message.num_response_tokens < 1:
        lengths = f"{message.num_prompt_tokens} prompt and {message.num_response_tokens} response tokens"
        reject("BatchRow", "out_of_range", f"{trajectory_id} has {lengths}")
    if not 1 <= message.num_sampled_tokens <= message.num_response_tokens:
        counts = f"{message.num_sampled_tokens} sampled of {message.num_response_tokens} response tokens"
        reject("BatchRow", "out_of_range", f"{trajectory_id} has {counts}")
    if message.num_patches < 0 or message.num_greedy_tokens < 0:
        counts = f"{message.num_patches} patches and {message.num_greedy_tokens} greedy tokens"
        reject("BatchRow", "out_of_range", f"{trajectory_id} has {counts}")
    placed = _token_rewards_from_proto(message)
    return from_proto(message, BatchRow, trajectory_id=trajectory_id, token_rewards=placed)


def _token_rewards_from_proto(message: learner_pb2.BatchRow) -> tuple[tuple[int, float], ...]:
    pairs = tuple((part.position, part.reward) for part in message.token_rewards)
    for position, part in pairs:
        if not 0 <= position < message.num_response_tokens or not math.isfinite(part):
            detail = f"{message.trajectory_id} has the reward {part} at the response token {position}"
            reject("BatchRow", "out_of_range", detail)
    return pairs


def _adjustments_from_proto(message: learner_pb2.GuardAdjustments) -> Adjustments:
    """Checks ranges: scales in (0, 1], the KL scale above 0, a fixed coefficient finite and not negative."""
    for name, scale in (("lr_scale", message.lr_scale), ("clip_scale", message.clip_scale)):
        if not 0.0 < scale <= 1.0:
            reject("GuardAdjustments", "out_of_range", f"{name} is {scale}, wanted (0, 1]")
    if not 0.0 < message.kl_scale < math.inf:
        reject("GuardAdjustments", "out_of_range", f"kl_scale is {message.kl_scale}, wanted a number above 0")
    fixed = message.fixed_kl_coef if message.HasField("fixed_kl_coef") else None
    if fixed is not None and not 0.0 <= fixed < math.inf:
        reject("GuardAdjustments", "out_of_range", f"fixed_kl_coef is {fixed}, wanted a number of at least 0")
    return from_proto(message, Adjustments)


def _reading_from_proto(message: learner_pb2.GuardReading) -> Reading:
    if message.rule not in RULES:
        reject("GuardReading", "unknown_rule", f"there is no rule {message.rule[:80]!r}")
    if not (math.isfinite(message.value) and math.isfinite(message.reference)):
        reject("GuardReading", "not_finite", f"{message.rule}: {message.value} against {message.reference}")
    return from_proto(message, Reading)
