"""The guard's readings and adjustments <-> generated protobuf messages."""

from __future__ import annotations

import math

from paceline.core.guard import RULES, Adjustments, Reading
from paceline.rpc.v1 import learner_pb2
from paceline.wire.fields import reject


def adjustments_to_proto(adjustments: Adjustments) -> learner_pb2.GuardAdjustments:
    """As a message."""
    return learner_pb2.GuardAdjustments(
        lr_scale=adjustments.lr_scale,
        kl_scale=adjustments.kl_scale,
        fixed_kl_coef=adjustments.fixed_kl_coef,
    )


def adjustments_from_proto(message: learner_pb2.GuardAdjustments) -> Adjustments:
    """Reads what `adjustments_to_proto` made.

    Raises:
        InvalidMessageError: a scale outside (0, 1], a coefficient below 0 or not finite.
    """
    for name in ("lr_scale", "kl_scale"):
        if not 0.0 < getattr(message, name) <= 1.0:
            reject("GuardAdjustments", "out_of_range", f"{name} is {getattr(message, name)}, wanted (0, 1]")
    fixed = message.fixed_kl_coef if message.HasField("fixed_kl_coef") else None
    if fixed is not None and not 0.0 <= fixed < math.inf:
        reject("GuardAdjustments", "out_of_range", f"fixed_kl_coef is {fixed}, wanted a number from 0 on")
    return Adjustments(lr_scale=message.lr_scale, kl_scale=message.kl_scale, fixed_kl_coef=fixed)


def reading_to_proto(reading: Reading) -> learner_pb2.GuardReading:
    """As a message."""
    return learner_pb2.GuardReading(
        rule=reading.rule,
        value=reading.value,
        network=reading.network,
        reference=reading.reference,
        num_skipped=reading.num_skipped,
    )


def reading_from_proto(message: learner_pb2.GuardReading) -> Reading:
    """Reads what `reading_to_proto` made.

    Raises:
        InvalidMessageError: a rule that does not exist, a number that is not finite.
    """
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
