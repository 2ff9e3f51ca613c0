"""Codecs: msgpack for the mailboxes, protobuf for the calls, both validated on receipt."""

from paceline.wire.fields import LIMITS
from paceline.wire.mailbox.headers import (
    decode_scored,
    decode_trajectory_header,
    decode_trajectory_headers,
    encode_group_refusal,
    encode_scored_header,
    encode_trajectory_group,
    encode_trajectory_header,
    refusal_of,
)
from paceline.wire.mailbox.images import image_of, pack_pixels, unpack_pixels
from paceline.wire.mailbox.messages import (
    blob_digest,
    decode_log_probs,
    decode_prompt_group,
    decode_trajectory,
    encode_log_probs,
    encode_prompt_group,
    encode_trajectory,
)
from paceline.wire.mailbox.progress import decode_progress, encode_progress
from paceline.wire.mailbox.teacher import decode_teacher, encode_teacher

__all__ = [
    "LIMITS",
    "blob_digest",
    "decode_log_probs",
    "decode_progress",
    "decode_prompt_group",
    "decode_scored",
    "decode_teacher",
    "decode_trajectory",
    "decode_trajectory_header",
    "decode_trajectory_headers",
    "encode_group_refusal",
    "encode_log_probs",
    "encode_progress",
    "encode_prompt_group",
    "encode_scored_header",
    "encode_teacher",
    "encode_trajectory",
    "encode_trajectory_group",
    "encode_trajectory_header",
    "image_of",
    "pack_pixels",
    "refusal_of",
    "unpack_pixels",
]
