"""Converts training orders and results to protobuf and back; the learner's ranks use gRPC's messages."""

from __future__ import annotations

import math

from paceline.core.errors import InvalidMessageError
from paceline.core.guard import RULES, Adjustments, Reading
from paceline.core.ids import TrajectoryId
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder, TrainResult
from paceline.rpc.v1 import learner_pb2
from paceline.wire.calls.protobuf import policy_tag_from_proto, policy_tag_to_proto
from paceline.wire.fields import reject
from paceline.wire.parts import BLOB_DIGEST


def order_to_proto(order: TrainOrder) -> learner_pb2.TrainStepRequest:
    """Writes a training order as a message."""
    return learner_pb2.TrainStepRequest(
        step=order.step,
        policy=policy_tag_to_proto(order.policy),
        rows=[_row_to_proto(row) for row in order.rows],
        adjustments=_adjustments_to_proto(order.adjustments),
        digest=order.digest,
    )


def order_from_proto(message: learner_pb2.TrainStepRequest) -> TrainOrder:
    """Reads a training order; without adjustments the configuration applies unchanged.

    Raises:
        InvalidMessageError: the step is below 1, a policy tag, row or adjustment is malformed, or the digest
            does not match the rows.
    """
    if message.step < 1:
        reject("TrainStepRequest", "out_of_range", f"step {message.step}, steps count from 1")
    adjusted = message.HasField("adjustments")
    order = TrainOrder(
        step=message.step,
        policy=policy_tag_from_proto(message.policy),
        rows=tuple(_row_from_proto(row) for row in message.rows),
        adjustments=_adjustments_from_proto(message.adjustments) if adjusted else Adjustments(),
    )
    if message.digest != order.digest:
        detail = f"the digest is {message.digest[:64]!r}, the rows of step {order.step} have {order.digest!r}"
        reject("TrainStepRequest", "wrong_digest", detail)
    return order


def chunk_to_proto(order: ChunkOrder) -> learner_pb2.WorkAheadRequest:
    """Writes an order for a chunk as a message."""
    return learner_pb2.WorkAheadRequest(
        step=order.step,
        policy=policy_tag_to_proto(order.policy),
        rows=[_row_to_proto(row) for row in order.rows],
        adjustments=_adjustments_to_proto(order.adjustments),
        first_row=order.first_row,
        with_gradient=order.with_gradient,
    )


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
    adjusted = message.HasField("adjustments")
    return ChunkOrder(
        step=message.step,
        policy=policy_tag_from_proto(message.policy),
        first_row=message.first_row,
        rows=tuple(_row_from_proto(row) for row in message.rows),
        with_gradient=message.with_gradient,
        adjustments=_adjustments_from_proto(message.adjustments) if adjusted else Adjustments(),
    )


def decode_chunk(data: bytes) -> ChunkOrder:
    """Reads the bytes of a `WorkAheadRequest`; raises as `chunk_from_proto`."""
    return chunk_from_proto(learner_pb2.WorkAheadRequest.FromString(data))


def decode_order(data: bytes) -> TrainOrder:
    """Reads the bytes of a `TrainStepRequest`; raises as `order_from_proto`."""
    return order_from_proto(learner_pb2.TrainStepRequest.FromString(data))


def result_to_proto(result: TrainResult) -> learner_pb2.TrainStepResponse:
    """Writes a training result as a message."""
    return learner_pb2.TrainStepResponse(
        step=result.step,
        metrics=result.metrics,
        skip_reasons=result.skip_reasons,
        guard_readings=[_reading_to_proto(reading) for reading in result.readings],
    )


def result_from_proto(message: learner_pb2.TrainStepResponse) -> TrainResult:
    """Reads the result of a training step. Metrics may be NaN or infinite; the guard counts such values.

    Raises:
        InvalidMessageError: a reading names an unknown rule, or is not finite.
    """
    return TrainResult(
        step=message.step,
        metrics=dict(message.metrics),
        skip_reasons=tuple(message.skip_reasons),
        readings=tuple(_reading_from_proto(reading) for reading in message.guard_readings),
    )


def _row_to_proto(row: BatchRow) -> learner_pb2.BatchRow:
    return learner_pb2.BatchRow(
        trajectory_id=str(row.trajectory_id),
        blob_key=row.blob_key,
        blob_digest=row.blob_digest,
        reward=row.reward,
        num_prompt_tokens=row.num_prompt_tokens,
        num_response_tokens=row.num_response_tokens,
        num_sampled_tokens=row.num_sampled_tokens,
        greedy_score=row.greedy_score,
        token_rewards=[
            learner_pb2.TokenReward(position=position, reward=part) for position, part in row.token_rewards
        ],
        num_patches=row.num_patches,
        num_greedy_tokens=row.num_greedy_tokens,
    )


def _row_from_proto(message: learner_pb2.BatchRow) -> BatchRow:
    """Checks ids, finiteness and lengths."""
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
    if not BLOB_DIGEST.fullmatch(message.blob_digest):
        reject(
            "BatchRow", "out_of_range", f"{trajectory_id} has the blob_digest {message.blob_digest[:40]!r}"
        )
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
    return BatchRow(
        trajectory_id=trajectory_id,
        blob_key=message.blob_key,
        blob_digest=message.blob_digest,
        reward=message.reward,
        num_prompt_tokens=message.num_prompt_tokens,
        num_response_tokens=message.num_response_tokens,
        num_sampled_tokens=message.num_sampled_tokens,
        greedy_score=greedy_score,
        token_rewards=_token_rewards_from_proto(message),
        num_patches=message.num_patches,
        num_greedy_tokens=message.num_greedy_tokens,
    )


def _token_rewards_from_proto(message: learner_pb2.BatchRow) -> tuple[tuple[int, float], ...]:
    pairs = tuple((part.position, part.reward) for part in message.token_rewards)
    for position, part in pairs:
        if not 0 <= position < message.num_response_tokens or not math.isfinite(part):
            detail = f"{message.trajectory_id} has the reward {part} at the response token {position}"
            reject("BatchRow", "out_of_range", detail)
    return pairs


def _adjustments_to_proto(adjustments: Adjustments) -> learner_pb2.GuardAdjustments:
    return learner_pb2.GuardAdjustments(
        lr_scale=adjustments.lr_scale,
        kl_scale=adjustments.kl_scale,
        clip_scale=adjustments.clip_scale,
        fixed_kl_coef=adjustments.fixed_kl_coef,
    )


def _adjustments_from_proto(message: learner_pb2.GuardAdjustments) -> Adjustments:
    """Checks ranges: scales in (0, 1], the KL's above 0, a fixed coefficient finite and not negative."""
    for name, scale in (("lr_scale", message.lr_scale), ("clip_scale", message.clip_scale)):
        if not 0.0 < scale <= 1.0:
            reject("GuardAdjustments", "out_of_range", f"{name} is {scale}, wanted (0, 1]")
    if not 0.0 < message.kl_scale < math.inf:
        reject("GuardAdjustments", "out_of_range", f"kl_scale is {message.kl_scale}, wanted a number above 0")
    fixed = message.fixed_kl_coef if message.HasField("fixed_kl_coef") else None
    if fixed is not None and not 0.0 <= fixed < math.inf:
        reject("GuardAdjustments", "out_of_range", f"fixed_kl_coef is {fixed}, wanted a number from 0 on")
    return Adjustments(
        lr_scale=message.lr_scale,
        kl_scale=message.kl_scale,
        clip_scale=message.clip_scale,
        fixed_kl_coef=fixed,
    )


def _reading_to_proto(reading: Reading) -> learner_pb2.GuardReading:
    return learner_pb2.GuardReading(
        rule=reading.rule,
        value=reading.value,
        network=reading.network,
        reference=reading.reference,
        num_skipped=reading.num_skipped,
    )


def _reading_from_proto(message: learner_pb2.GuardReading) -> Reading:
    if message.rule not in RULES:
        reject("GuardReading", "unknown_rule", f"there is no rule {message.rule[:80]!r}")
    if not (math.isfinite(message.value) and math.isfinite(message.reference)):
        reject("GuardReading", "not_finite", f"{message.rule}: {message.value} against {message.reference}")
    return Reading(
        rule=message.rule,
        value=message.value,
        network=message.network,
        reference=message.reference,
        num_skipped=message.num_skipped,
    )
