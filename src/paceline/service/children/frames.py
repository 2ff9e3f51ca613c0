"""The pipe protocol between a process and its children: a length, then that many bytes of msgpack.

It is not part of `paceline.wire`, which imports numpy and would add 0.15 s to the start of every child.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, BinaryIO

import msgpack

from paceline.core.errors import ProtocolError

OUT_OF_MEMORY_EXIT = 97
"""The exit code of a child process that ran out of memory."""

_MAX_FRAME_BYTES = 256 * 1024 * 1024
# Limits of a child's messages, which a user's code may have written.
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_CONTAINERS = 100_000
_LENGTH = struct.Struct("<I")


def encode(message: object) -> bytes:
    """Encodes a message as one frame.

    Numpy values become plain numbers and lists. Lone surrogates, as in some decoded responses, are allowed.

    Raises:
        TypeError, OverflowError, ValueError: msgpack has no form for a part of the message.
    """
    payload: bytes = msgpack.packb(message, use_bin_type=True, unicode_errors="surrogatepass", default=_plain)
    if len(payload) > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes exceeds the limit of {_MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes) -> Any:
    """Decodes the message of a frame's payload.

    Raises:
        ProtocolError: the payload is not msgpack.
    """
    return _decode(payload, object_pairs_hook=None, list_hook=None)


def _decode(payload: bytes, **hooks: Any) -> Any:
    try:
        return msgpack.unpackb(payload, unicode_errors="surrogatepass", strict_map_key=False, **hooks)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a child process wrote something other than msgpack: {error}") from error


def read(stream: BinaryIO) -> Any | None:
    """Returns the next message of a blocking stream; None at its end or after an incomplete frame."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(header)
    payload = stream.read(size)
    return decode(payload) if len(payload) == size else None


async def receive(stream: asyncio.StreamReader) -> Any:
    """Returns the next message of an asyncio stream. The caller sets the deadline.

    Raises:
        asyncio.IncompleteReadError: the stream ended.
        ProtocolError: the bytes are not a frame.
    """
    (size,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if size > _MAX_ANSWER_BYTES:
        raise ProtocolError(f"a child process announced a frame of {size} bytes, over {_MAX_ANSWER_BYTES}")
    count = _Count()
    return _decode(await stream.readexactly(size), object_pairs_hook=count.pairs, list_hook=count.items)


class _Count:
    """Bounds the maps and lists of a message: an empty one takes 1 byte in the frame and 64 in memory."""

    def __init__(self) -> None:
        self._left = _MAX_CONTAINERS

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._use()
        return dict(pairs)

    def items(self, items: list[Any]) -> list[Any]:
        self._use()
        return items

    def _use(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"over {_MAX_CONTAINERS} maps and lists")


def _plain(value: object) -> object:
    convert = getattr(value, "tolist", None)  # numpy scalars and arrays, without importing numpy
    if convert is None:
        raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a child process")
    return convert()
