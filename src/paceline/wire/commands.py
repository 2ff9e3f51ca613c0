"""Encodes the commands between the learner's ranks as bytes; the receiver checks their contents."""

from __future__ import annotations

from collections.abc import Mapping

import msgpack


def encode_command(name: str, arguments: Mapping[str, object]) -> bytes:
    """Packs a command's name and its arguments: numbers, text and bytes by name."""
    packed: bytes = msgpack.packb([name, dict(arguments)])
    return packed


def decode_command(data: bytes) -> tuple[str, dict[str, object]]:
    """Reads the bytes that `encode_command` made."""
    name, arguments = msgpack.unpackb(data)
    return name, arguments
