"""Codecs: msgpack for the mailboxes, protobuf for the calls, with validation at the door of both."""

from paceline.wire.fields import DEFAULT_LIMITS, Limits
from paceline.wire.messages import (
    decode_prompt_group,
    decode_scored_header,
    decode_trajectory,
    decode_trajectory_header,
    encode_prompt_group,
    encode_scored_header,
    encode_trajectory,
    encode_trajectory_header,
)

__all__ = [
    "DEFAULT_LIMITS",
    "Limits",
    "decode_prompt_group",
    "decode_scored_header",
    "decode_trajectory",
    "decode_trajectory_header",
    "encode_prompt_group",
    "encode_scored_header",
    "encode_trajectory",
    "encode_trajectory_header",
]
