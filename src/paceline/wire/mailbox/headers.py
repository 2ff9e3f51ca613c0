"""Encodes headers of samples, scored or not, and refusals of prompt groups as msgpack.

Every decoder guards a trust boundary, like those of `paceline.wire.mailbox.messages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.core.errors import InvalidMessageError, RewardErrorKind
from paceline.core.samples.normalizing import Part
from paceline.core.samples.trajectory import (
    FinishReason,
    GroupRefusal,
    SampleHeader,
    ScoredHeader,
    TrajectoryHeader,
)
from paceline.wire import parts
from paceline.wire.fields import LIMITS, MAX_NAME_CHARS, Fields, pack, unpack
from paceline.wire.mailbox.messages import PROMPT_GROUP
from paceline.wire.records import values_of

HEADER, GROUP, SCORED, REFUSAL = "trajectory_header", "trajectory_group", "scored_header", "group_refusal"


def encode_trajectory_header(header: TrajectoryHeader) -> bytes:
    """Packs a sample's header as bytes."""
    own = {"seconds": header.seconds, "context": parts.pack_context(header.context)}
    return pack(HEADER, {**_pack_header(header), **own})


def _pack_header(header: SampleHeader) -> dict[str, Any]:
    return {
        **values_of(header, of=SampleHeader, without=("ranges",)),
        "episode": parts.pack_episode(header.episode),
        "num_patches": header.num_patches or None,
        "trajectory_id": parts.pack_trajectory_id(header.trajectory_id),
        "policy": parts.pack_policy(header.policy),
        "finish_reason": header.finish_reason.value,
        **parts.pack_ranges(header.ranges),
    }


def encode_trajectory_group(headers: Sequence[TrajectoryHeader]) -> bytes:
    """Packs the headers of a prompt group in one message, for scorers that score whole groups."""
    first = headers[0]
    return pack(
        GROUP,
        {
            "run_id": first.run_id,
            "step": first.trajectory_id.step,
            "purpose": first.trajectory_id.purpose,
            "prompt_id": first.trajectory_id.prompt_id,
            "policy": parts.pack_policy(first.policy),
            "headers": [encode_trajectory_header(header) for header in headers],
        },
    )


def decode_trajectory_header(data: bytes) -> TrajectoryHeader:
    """Reads and checks a header.

    Raises:
        InvalidMessageError: the message is invalid; `reason` is a short word for why.
    """
    return _read_header(unpack(HEADER, data))


def decode_trajectory_headers(data: bytes) -> TrajectoryHeader | tuple[TrajectoryHeader, ...]:
    """Reads and checks a message of the mailbox `trajectories`: one header, or all headers of a group.

    Raises:
        InvalidMessageError: the message is invalid, or its headers are not exactly those of one group.
    """
    fields = unpack((HEADER, GROUP), data)
    if fields.kind == HEADER:
        return _read_header(fields)
    group = (fields.integer("step"), parts.read_purpose(fields), fields.integer("prompt_id"))
    packed = fields.items("headers", max_items=LIMITS.max_samples)
    if not packed or any(type(header) is not bytes for header in packed):
        fields.reject("wrong_type", "headers must be a list of messages with at least one")
    headers = tuple(decode_trajectory_header(header) for header in packed)
    ids = [header.trajectory_id for header in headers]
    if any((key.step, key.purpose, key.prompt_id) != group for key in ids) or len(set(ids)) < len(ids):
        fields.reject("inconsistent", "headers holds one of another group, or one twice")
    return headers


def _read_header(fields: Fields) -> TrajectoryHeader:
    seconds, context = fields.number("seconds", minimum=0.0), parts.read_context(fields)
    return TrajectoryHeader(**_read_sample(fields), seconds=seconds, context=context)


def _read_sample(fields: Fields) -> dict[str, Any]:
    num_response_tokens = fields.integer("num_response_tokens", minimum=1, maximum=LIMITS.max_tokens)
    return {
        "run_id": fields.name("run_id"),
        "trajectory_id": parts.read_trajectory_id(fields),
        "policy": parts.read_policy(fields),
        "blob_key": fields.name("blob_key"),
        "blob_digest": parts.read_blob_digest(fields),
        "num_prompt_tokens": fields.integer("num_prompt_tokens", minimum=1, maximum=LIMITS.max_tokens),
        "num_response_tokens": num_response_tokens,
        "num_sampled_tokens": fields.integer("num_sampled_tokens", minimum=0, maximum=LIMITS.max_tokens),
        "finish_reason": parts.read_choice(fields, "finish_reason", FinishReason),
        "server_id": fields.name("server_id"),
        "episode": parts.read_episode(fields),
        "num_patches": _read_num_patches(fields),
        "ranges": parts.read_ranges(fields, num_response_tokens),
    }


def _read_num_patches(fields: Fields) -> int:
    if fields.missing("num_patches"):
        return 0
    return fields.integer("num_patches", minimum=1, maximum=LIMITS.max_tokens)


def encode_scored_header(header: ScoredHeader) -> bytes:
    """Packs a scored header as bytes."""
    return pack(
        SCORED,
        {
            **_pack_header(header),
            "generation_s": header.generation_s,
            "reward": header.reward,
            "components": dict(header.components),
            "reward_error": header.reward_error,
            "scorer": header.scorer,
            "reward_s": header.reward_s,
            "text_key": header.text_key or None,
            "token_rewards": [list(pair) for pair in header.token_rewards] or None,
            "normalized": [list(part) for part in header.normalized] or None,
            "teacher_digest": header.teacher_digest or None,
        },
    )


def encode_group_refusal(refusal: GroupRefusal) -> bytes:
    """Packs a group's refusal as bytes."""
    return pack(
        REFUSAL,
        {**values_of(refusal), "purpose": str(refusal.purpose), "policy": parts.pack_policy(refusal.policy)},
    )


def refusal_of(
    message: bytes, *, server_id: str, reason: str, detail: str, deliveries: int
) -> GroupRefusal | None:
    """Makes a refusal for the group of a message in the mailbox `prompts` or `trajectories`.

    The rest of the message may be invalid. Returns None if the group cannot be read.
    """
    try:
        fields = unpack((PROMPT_GROUP, HEADER, GROUP), message)
        if fields.kind == HEADER:
            sample = parts.read_trajectory_id(fields)
            step, purpose, prompt_id = sample.step, sample.purpose, sample.prompt_id
        else:
            step, purpose = fields.integer("step"), parts.read_purpose(fields)
            prompt_id = fields.integer("prompt_id")
        return GroupRefusal(
            run_id=fields.name("run_id"),
            step=step,
            purpose=purpose,
            prompt_id=prompt_id,
            policy=parts.read_policy(fields),
            server_id=server_id,
            reason=reason,
            message=detail,
            deliveries=deliveries,
        )
    except InvalidMessageError:
        return None


def decode_scored(data: bytes) -> ScoredHeader | GroupRefusal:
    """Reads and checks a message of the mailbox `scored`: a scored header, or a group's refusal.

    Raises:
        InvalidMessageError: the message is invalid; `reason` is a short word for why.
    """
    fields = unpack((SCORED, REFUSAL), data)
    return _read_refusal(fields) if fields.kind == REFUSAL else _read_scored_header(fields)


def _read_refusal(fields: Fields) -> GroupRefusal:
    return GroupRefusal(
        run_id=fields.name("run_id"),
        step=fields.integer("step"),
        purpose=parts.read_purpose(fields),
        prompt_id=fields.integer("prompt_id"),
        policy=parts.read_policy(fields),
        server_id=fields.name("server_id"),
        reason=fields.name("reason"),
        message=fields.text("message"),
        deliveries=fields.integer("deliveries"),
    )


def _read_scored_header(fields: Fields) -> ScoredHeader:
    """Reads a header; exactly one of reward and reward error must be set."""
    reward = None if fields.missing("reward") else fields.number("reward")
    error = _read_reward_error(fields)
    if (reward is None) == (error is None):
        fields.reject("inconsistent", "exactly one of reward and reward_error must be set")
    teacher = "" if fields.missing("teacher_digest") else parts.read_blob_digest(fields, "teacher_digest")
    return ScoredHeader(
        **_read_sample(fields),
        generation_s=fields.number("generation_s", minimum=0.0),
        reward=reward,
        components=fields.numbers("components"),
        reward_error=error,
        scorer=fields.name("scorer"),
        reward_s=fields.number("reward_s", minimum=0.0),
        text_key="" if fields.missing("text_key") else fields.name("text_key"),
        token_rewards=_read_token_rewards(fields),
        normalized=_read_normalized(fields),
        teacher_digest=teacher,
    )


def _read_normalized(fields: Fields) -> tuple[Part, ...]:
    if fields.missing("normalized"):
        return ()
    parts = fields.items("normalized", max_items=LIMITS.max_items)
    if bad := [part for part in parts if not _is_part(part)]:
        fields.reject("out_of_range", f"normalized holds {bad[0]!r:.80}")
    return tuple((name, value, weight) for name, value, weight in parts)


def _is_part(part: object) -> bool:
    if type(part) is not list or len(part) != 3 or type(part[0]) is not str:
        return False
    return len(part[0]) <= MAX_NAME_CHARS and all(type(x) is float and math.isfinite(x) for x in part[1:])


def _read_token_rewards(fields: Fields) -> tuple[tuple[int, float], ...]:
    if fields.missing("token_rewards"):
        return ()
    largest = fields.integer("num_response_tokens", minimum=1, maximum=LIMITS.max_tokens) - 1
    pairs = fields.items("token_rewards", max_items=LIMITS.max_items)
    if bad := [pair for pair in pairs if not _is_token_reward(pair, largest)]:
        fields.reject("out_of_range", f"token_rewards holds {bad[0]!r:.80}")
    return tuple((position, float(part)) for position, part in pairs)


def _is_token_reward(pair: object, largest: int) -> bool:
    if type(pair) is not list or len(pair) != 2:
        return False
    position, part = pair
    if type(position) is not int or not 0 <= position <= largest:
        return False
    return type(part) is float and math.isfinite(part)


def _read_reward_error(fields: Fields) -> tuple[str, str] | None:
    if fields.missing("reward_error"):
        return None
    items = fields.items("reward_error", max_items=2)
    if len(items) != 2 or any(type(item) is not str for item in items):
        fields.reject("wrong_type", "reward_error must be a kind and a message in text")
    kind, message = items
    if kind not in {known.value for known in RewardErrorKind}:
        fields.reject("unknown_value", f"reward_error has the kind {kind[:40]!r}")
    return kind, message
