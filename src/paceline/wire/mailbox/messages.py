"""Encodes prompt groups and trajectories as msgpack.

Every decoder guards a trust boundary: it returns a valid domain object or raises InvalidMessageError with a
reason, and never runs code that the bytes choose.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgpack
import numpy as np

from paceline.core.digest import SHA_256_128, content_digest
from paceline.core.errors import InvalidMessageError
from paceline.core.samples.expert_choices import ExpertChoices, choices_digest
from paceline.core.samples.trajectory import FinishReason, Float32Array, PromptGroup, Trajectory
from paceline.wire import parts
from paceline.wire.fields import LIMITS, Fields, pack, pack_array, unpack
from paceline.wire.records import values_of

PROMPT_GROUP, TRAJECTORY = "prompt_group", "trajectory"

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
            "sampling": values_of(group.sampling),
            "policy": parts.pack_policy(group.policy),
            "context": parts.pack_context(group.context),
            "messages": parts.pack_messages(group.messages),
            "images": parts.pack_images(group.images),
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
        purpose=parts.read_purpose(fields),
        prompt_id=fields.integer("prompt_id"),
        prompt_token_ids=fields.token_ids("prompt_token_ids", vocab_size),
        sampling=parts.read_sampling(fields),
        seeds=seeds,
        policy=parts.read_policy(fields),
        context=parts.read_context(fields),
        messages=parts.read_messages(fields),
        images=parts.read_images(fields),
    )


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Packs a sample with its arrays as a blob.

    The engine's choices of experts follow the message, which has their digest. So the blob's digest covers
    them, and can be computed without them.
    """
    choices = trajectory.expert_choices
    packed = pack(
        TRAJECTORY,
        {
            "run_id": trajectory.run_id,
            "trajectory_id": parts.pack_trajectory_id(trajectory.trajectory_id),
            "policy": parts.pack_policy(trajectory.policy),
            "prompt_token_ids": pack_array("prompt_token_ids", trajectory.prompt_token_ids, "<i4"),
            "response_token_ids": pack_array("response_token_ids", trajectory.response_token_ids, "<i4"),
            "response_log_probs": pack_array("response_log_probs", trajectory.response_log_probs, "<f4"),
            "response_mask": pack_array("response_mask", trajectory.response_mask, "|u1"),
            "finish_reason": trajectory.finish_reason.value,
            "sampling": values_of(trajectory.sampling),
            "seed": trajectory.seed,
            "segment_starts": list(trajectory.segment_starts),
            "images": parts.pack_images(trajectory.images),
            **parts.pack_ranges(trajectory.ranges),
            **({} if choices is None else {"expert_choices": choices.to_plain()}),
        },
    )
    if choices is None or choices.array is None:
        return packed
    return packed + choices.array.astype(f"<u{choices.item_bytes}", copy=False).tobytes()


def _message_bytes(blob: bytes) -> int:
    """Returns the size of the message at the beginning of a blob; all of it if there is no message."""
    unpacker = msgpack.Unpacker(max_buffer_size=LIMITS.max_bytes)
    try:
        unpacker.feed(blob)
        unpacker.skip()
    except (ValueError, msgpack.UnpackException, msgpack.BufferFull):
        return len(blob)
    return int(unpacker.tell())


def decode_trajectory(data: bytes, *, vocab_size: int | None = None) -> Trajectory:
    """Reads and checks a sample; its arrays are writable copies.

    Raises:
        InvalidMessageError: the message is invalid; `reason` is a short word for why.
    """
    end = _message_bytes(data)
    fields = unpack(TRAJECTORY, data[:end])
    prompt = fields.token_ids("prompt_token_ids", vocab_size)
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
        trajectory_id=parts.read_trajectory_id(fields),
        policy=parts.read_policy(fields),
        prompt_token_ids=prompt,
        response_token_ids=response,
        response_log_probs=log_probs,
        response_mask=mask,
        finish_reason=parts.read_choice(fields, "finish_reason", FinishReason),
        sampling=parts.read_sampling(fields),
        seed=fields.integer("seed", maximum=MAX_SEED),
        segment_starts=_read_segment_starts(fields, mask),
        images=parts.read_images(fields),
        ranges=parts.read_ranges(fields, len(response)),
        expert_choices=_read_expert_choices(fields, data[end:], len(prompt) + len(response)),
    )


def _read_expert_choices(fields: Fields, data: bytes, num_tokens: int) -> ExpertChoices | None:
    """Reads the choices of experts from the bytes behind the message."""
    if fields.missing("expert_choices"):
        if data:
            fields.reject("not_msgpack", f"{len(data)} bytes behind the message")
        return None
    nested = fields.nested("expert_choices")
    item_bytes = nested.integer("item_bytes", minimum=1, maximum=2)
    shape = (
        num_tokens,
        nested.integer("num_layers", minimum=1, maximum=LIMITS.max_items),
        nested.integer("num_chosen", minimum=2, maximum=LIMITS.max_items),
    )
    if len(data) != math.prod(shape) * item_bytes:
        nested.reject(
            "unequal_lengths", f"{len(data)} bytes for an array of shape {shape} x {item_bytes} bytes"
        )
    if choices_digest(data) != nested.name("digest"):
        nested.reject("inconsistent", "the bytes behind the message are not those of its digest")
    array = np.frombuffer(data, dtype=f"<u{item_bytes}").astype(f"u{item_bytes}").reshape(shape)
    return ExpertChoices.of(array)


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
        InvalidMessageError: the number of log-probs differs, or some are not finite.
    """
    if len(data) != 4 * num_tokens:
        raise InvalidMessageError(
            f"{len(data)} bytes of log-probs for {num_tokens} response tokens", reason="unequal_lengths"
        )
    log_probs = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(log_probs).all():
        raise InvalidMessageError("log-probs that are not finite", reason="not_finite")
    return log_probs


def blob_digest(blob: bytes, *, like: str = SHA_256_128) -> str:
    """Returns an encoded trajectory's digest, which headers carry; of the kind of the digest `like`.

    It is that of the message, which has a digest of what follows it (`decode_trajectory` compares).
    """
    return content_digest(memoryview(blob)[: _message_bytes(blob)], like=like)


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
