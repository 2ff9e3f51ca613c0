"""Encodes a served teacher's likeliest tokens of one sample as a blob."""

from __future__ import annotations

import numpy as np

from paceline.core.samples.teacher_top_k import TeacherTopK
from paceline.core.samples.trajectory import UInt8Array
from paceline.wire.fields import LIMITS, Fields, pack, pack_array, unpack
from paceline.wire.mailbox.messages import LOG_PROB_TOLERANCE
from paceline.wire.parts import read_blob_digest

TEACHER = "teacher_top_k"


def encode_teacher(teacher: TeacherTopK, *, of: str) -> bytes:
    """Packs the tokens; `of` is the digest of the sample's own blob."""
    return pack(
        TEACHER,
        {
            "blob_digest": of,
            "top_k": teacher.token_ids.shape[1],
            "token_ids": pack_array("token_ids", teacher.token_ids.ravel(), "<i4"),
            "log_probs": pack_array("log_probs", teacher.log_probs.ravel(), "<f4"),
        },
    )


def decode_teacher(data: bytes, *, of: str, mask: UInt8Array, vocab_size: int | None = None) -> TeacherTopK:
    """Reads and checks the tokens of a sample.

    Args:
        mask: (R,), the sample's `response_mask`.
        vocab_size: size of the policy's vocabulary; None: not checked.

    Raises:
        InvalidMessageError: the message is invalid or of another sample; `reason` is a short word for why.
    """
    fields = unpack(TEACHER, data)
    if (given := read_blob_digest(fields)) != of:
        fields.reject("inconsistent", f"it belongs to the sample with the digest {given}, not {of}")
    top_k = fields.integer("top_k", minimum=1, maximum=LIMITS.max_items)
    most = len(mask) * top_k
    token_ids = fields.token_ids("token_ids", vocab_size, max_items=most)
    log_probs = fields.array("log_probs", "<f4", min_items=1, max_items=most)
    if not len(token_ids) == len(log_probs) == most:
        fields.reject(
            "unequal_lengths",
            f"{len(token_ids)} token ids, {len(log_probs)} log-probs for {len(mask)} x {top_k} places",
        )
    teacher = TeacherTopK(
        token_ids=token_ids.reshape(-1, top_k), log_probs=log_probs.reshape(-1, top_k).astype(np.float32)
    )
    _check(fields, teacher, mask != 0)
    return teacher


def _check(fields: Fields, teacher: TeacherTopK, sampled: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Rejects log-probs out of range, and tokens that occur twice at one place."""
    log_probs, ids = teacher.log_probs[sampled], np.sort(teacher.token_ids[sampled], axis=1)
    # A comparison with NaN is false.
    if not bool(np.all((log_probs > -np.inf) & (log_probs <= LOG_PROB_TOLERANCE))):
        fields.reject("out_of_range", "log_probs holds a value that is not finite, or above 0")
    if bool((ids[:, 1:] == ids[:, :-1]).any()):
        fields.reject("inconsistent", "token_ids holds a token twice at one place")
