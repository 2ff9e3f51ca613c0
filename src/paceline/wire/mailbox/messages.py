"""Encodes prompt groups, trajectories, their headers and scored headers, and refusals as msgpack.

Every decoder guards a trust boundary: it returns a valid domain object or raises InvalidMessageError with a
reason, and never runs code that the bytes choose.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.errors import InvalidMessageError, RewardErrorKind
from paceline.core.samples.normalizing import Part
from paceline.core.samples.trajectory import (
    FinishReason,
    Float32Array,
    GroupRefusal,
    PromptGroup,
    SampleHeader,
    ScoredHeader,
    Trajectory,
    TrajectoryHeader,
)
from paceline.core.training import DIGEST_BYTES
from paceline.wire.fields import LIMITS, MAX_NAME_CHARS, Fields, pack, pack_array, unpack
from paceline.wire.parts import (
    pack_context,
    pack_episode,
    pack_images,
    pack_messages,
    pack_policy,
    pack_ranges,
    pack_sampling,
    pack_trajectory_id,
    read_blob_digest,
    read_choice,
    read_context,
    read_episode,
    read_images,
    read_messages,
    read_policy,
    read_purpose,
    read_ranges,
    read_sampling,
    read_trajectory_id,
)
from paceline.wire.records import values_of

PROMPT_GROUP, TRAJECTORY, HEADER, GROUP, SCORED, REFUSAL = (
    "prompt_group",
    "trajectory",
    "trajectory_header",
    "trajectory_group",
    "scored_header",
    "group_refusal",
)

LOG_PROB_TOLERANCE = 1e-3
"""A log-probability is at most 0; rounding may exceed that by this much."""

MAX_SEED = 2**63 - 1
"""The largest seed of a sample."""


def encode_prompt_group(group: PromptGroup) -> bytes:
    """Packs an order for samples."""
    return pack(
        PROMPT_GROUP,
        {
            **values_of(group),
            "purpose": str(group.purpose),
            "prompt_token_ids": pack_array("prompt_token_ids", group.prompt_token_ids, "<i4"),
            "sampling": pack_sampling(group.sampling),
            "policy": pack_policy(group.policy),
            "context": pack_context(group.context),
            "messages": pack_messages(group.messages),
            "images": pack_images(group.images),
        },
    )


def decode_prompt_group(data: bytes, *, vocab_size: int | None = None) -> PromptGroup:
    """Reads and checks an order for samples.

    Raises:
        InvalidMessageError: the message is invalid; `reason` is a short word for why.
    """
    fields = unpack(PROMPT_GROUP, data)
    seeds = fields.integers("seeds", max_items=LIMITS.max_samples, maximum=MAX_SEED)
    if not seeds:
        fields.reject("out_of_range", "seeds is empty: a group asks for at least one sample")
    return PromptGroup(
        run_id=fields.name("run_id"),
        step=fields.integer("step"),
        purpose=read_purpose(fields),
        prompt_id=fields.integer("prompt_id"),
        prompt_token_ids=fields.token_ids("prompt_token_ids", vocab_size),
        sampling=read_sampling(fields),
        seeds=seeds,
        policy=read_policy(fields),
        context=read_context(fields),
        messages=read_messages(fields),
        images=read_images(fields),
    )


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Packs a sample with its arrays as a blob."""
    return pack(
        TRAJECTORY,
        {
            "run_id": trajectory.run_id,
            "trajectory_id": pack_trajectory_id(trajectory.trajectory_id),
            "policy": pack_policy(trajectory.policy),
            "prompt_token_ids": pack_array("prompt_token_ids", trajectory.prompt_token_ids, "<i4"),
            "response_token_ids": pack_array("response_token_ids", trajectory.response_token_ids, "<i4"),
            "response_log_probs": pack_array("response_log_probs", trajectory.response_log_probs, "<f4"),
            "response_mask": pack_array("response_mask", trajectory.response_mask, "|u1"),
            "finish_reason": trajectory.finish_reason.value,
            "sampling": pack_sampling(trajectory.sampling),
            "seed": trajectory.seed,
            "segment_starts": list(trajectory.segment_starts),
            "images": pack_images(trajectory.images),
            **pack_ranges(trajectory.ranges),
        },
    )


def decode_trajectory(data: bytes, *, vocab_size: int | None = None) -> Trajectory:
    """Reads and checks a sample; its arrays are writable copies.

    Raises:
        InvalidMessageError: the message is invalid; `reason` is a short word for why.
    """
    fields = unpack(TRAJECTORY, data)
    response = fields.token_ids("response_token_ids", vocab_size)
    log_probs = fields.array("response_log_probs", "<f4", min_items=1)
    mask = fields.array("response_mask", "|u1", min_items=1)
    if not len(response) == len(log_probs) == len(mask):
        fields.reject(
            "unequal_lengths",
            f"{len(response)} response tokens, {len(log_probs)} log-probs, {len(mask)} mask values",
        )
    check_log_probs(fields, log_probs)
    largest = np.maximum.reduce(mask)
    if largest > 1:
        fields.reject("out_of_range", f"response_mask holds {largest}, allowed are 0 and 1")
    if np.minimum.reduce(mask) == 0 and log_probs[mask == 0].any():
        fields.reject("inconsistent", "response_log_probs is not 0.0 on a token that was not sampled")
    return Trajectory(
        run_id=fields.name("run_id"),
        trajectory_id=read_trajectory_id(fields),
        policy=read_policy(fields),
        prompt_token_ids=fields.token_ids("prompt_token_ids", vocab_size),
        response_token_ids=response,
        response_log_probs=log_probs,
        response_mask=mask,
        finish_reason=read_choice(fields, "finish_reason", FinishReason),
        sampling=read_sampling(fields),
        seed=fields.integer("seed", maximum=MAX_SEED),
        segment_starts=_read_segment_starts(fields, mask),
        images=read_images(fields),
        ranges=read_ranges(fields, len(response)),
    )


def _read_segment_starts(fields: Fields, mask: Any) -> tuple[int, ...]:
    starts = fields.integers("segment_starts", max_items=LIMITS.max_items, minimum=1, maximum=len(mask) - 1)
    if any(second <= first for first, second in itertools.pairwise(starts)):
        fields.reject("inconsistent", f"segment_starts do not rise: {starts[:8]}")
    if any(mask[start] for start in starts):
        fields.reject("inconsistent", "a segment begins with a sampled token; it must begin with a prompt")
    return starts


def encode_log_probs(log_probs: Float32Array) -> bytes:
    """Packs the learner's log-probs of one sample as a blob."""
    return np.ascontiguousarray(log_probs, dtype="<f4").tobytes()


def decode_log_probs(data: bytes, num_tokens: int) -> Float32Array:
    """Reads the log-probs of a response of `num_tokens` tokens.

    Raises:
        InvalidMessageError: their number differs, or some are not finite.
    """
    if len(data) != 4 * num_tokens:
        raise InvalidMessageError(
            f"{len(data)} bytes of log-probs for {num_tokens} response tokens", reason="unequal_lengths"
        )
    log_probs = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(log_probs).all():
        raise InvalidMessageError("log-probs that are not finite", reason="not_finite")
    return log_probs


def blob_digest(blob: bytes) -> str:
    """Returns an encoded trajectory's digest, which headers carry: blake2b, 16 bytes, hexadecimal."""
    return hashlib.blake2b(blob, digest_size=DIGEST_BYTES).hexdigest()


def check_log_probs(fields: Fields, log_probs: Any) -> None:
    """Rejects `response_log_probs` that are not finite, or above 0."""
    # min and max propagate NaN, which fails every comparison: two passes find NaN, infinities and the range.
    # (Ufuncs, because calling a method takes longer than scanning such a short array.)
    if np.minimum.reduce(log_probs) > -np.inf and np.maximum.reduce(log_probs) <= LOG_PROB_TOLERANCE:
        return
    if not np.isfinite(log_probs).all():
        where = int(np.flatnonzero(~np.isfinite(log_probs))[0])
        fields.reject("not_finite", f"response_log_probs[{where}] is {log_probs[where]}")
    fields.reject(
        "out_of_range", f"response_log_probs holds {log_probs.max()}, a log-probability is at most 0"
    )


def encode_trajectory_header(header: TrajectoryHeader) -> bytes:
    """Packs a sample's header as bytes."""
    return pack(
        HEADER,
        {
            **_pack_header(header),
            "seconds": header.seconds,
            "context": pack_context(header.context),
            "episode": pack_episode(header.episode),
            "num_patches": header.num_patches or None,
        },
    )


def _pack_header(header: SampleHeader) -> dict[str, Any]:
    return {
        **values_of(header, of=SampleHeader, without=("episode", "num_patches", "ranges")),
        "trajectory_id": pack_trajectory_id(header.trajectory_id),
        "policy": pack_policy(header.policy),
        "finish_reason": header.finish_reason.value,
        **pack_ranges(header.ranges),
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
            "policy": pack_policy(first.policy),
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
    """Reads and checks a message of the mailbox `trajectories`: one header, or those of a group.

    Raises:
        InvalidMessageError: the message is invalid, or its headers are not exactly those of one group.
    """
    fields = unpack((HEADER, GROUP), data)
    if fields.kind == HEADER:
        return _read_header(fields)
    group = (fields.integer("step"), read_purpose(fields), fields.integer("prompt_id"))
    packed = fields.items("headers", max_items=LIMITS.max_samples)
    if not packed or any(type(header) is not bytes for header in packed):
        fields.reject("wrong_type", "headers must be a list of messages with at least one")
    headers = tuple(decode_trajectory_header(header) for header in packed)
    ids = [header.trajectory_id for header in headers]
    if any((key.step, key.purpose, key.prompt_id) != group for key in ids) or len(set(ids)) < len(ids):
        fields.reject("inconsistent", "headers holds one of another group, or one twice")
    return headers


def _read_header(fields: Fields) -> TrajectoryHeader:
    seconds, context = fields.number("seconds", minimum=0.0), read_context(fields)
    return TrajectoryHeader(**_read_sample(fields), seconds=seconds, context=context)


def _read_sample(fields: Fields) -> dict[str, Any]:
    """Reads what all headers have."""
    num_response_tokens = fields.integer("num_response_tokens", minimum=1, maximum=LIMITS.max_tokens)
    return {
        "run_id": fields.name("run_id"),
        "trajectory_id": read_trajectory_id(fields),
        "policy": read_policy(fields),
        "blob_key": fields.name("blob_key"),
        "blob_digest": read_blob_digest(fields),
        "num_prompt_tokens": fields.integer("num_prompt_tokens", minimum=1, maximum=LIMITS.max_tokens),
        "num_response_tokens": num_response_tokens,
        "num_sampled_tokens": fields.integer("num_sampled_tokens", minimum=0, maximum=LIMITS.max_tokens),
        "finish_reason": read_choice(fields, "finish_reason", FinishReason),
        "server_id": fields.name("server_id"),
        "episode": read_episode(fields),
        "num_patches": _read_num_patches(fields),
        "ranges": read_ranges(fields, num_response_tokens),
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
            "episode": pack_episode(header.episode),
            "token_rewards": [list(pair) for pair in header.token_rewards] or None,
            "normalized": [list(part) for part in header.normalized] or None,
            "num_patches": header.num_patches or None,
        },
    )


def encode_group_refusal(refusal: GroupRefusal) -> bytes:
    """Packs a group's refusal as bytes."""
    return pack(
        REFUSAL,
        {
            **values_of(refusal),
            "purpose": str(refusal.purpose),
            "policy": pack_policy(refusal.policy),
        },
    )


def refusal_of(
    message: bytes,
    *,
    server_id: str,
    reason: str,
    detail: str,
    deliveries: int,
) -> GroupRefusal | None:
    """Makes a refusal for the group of a message of the mailbox prompts or trajectories.

    The rest of the message may be invalid. Returns None if the group cannot be read.
    """
    try:
        fields = unpack((PROMPT_GROUP, HEADER, GROUP), message)
        if fields.kind == HEADER:
            sample = read_trajectory_id(fields)
            step, purpose, prompt_id = sample.step, sample.purpose, sample.prompt_id
        else:
            step, purpose = fields.integer("step"), read_purpose(fields)
            prompt_id = fields.integer("prompt_id")
        return GroupRefusal(
            run_id=fields.name("run_id"),
            step=step,
            purpose=purpose,
            prompt_id=prompt_id,
            policy=read_policy(fields),
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
        purpose=read_purpose(fields),
        prompt_id=fields.integer("prompt_id"),
        policy=read_policy(fields),
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
