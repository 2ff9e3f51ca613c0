"""Reads and writes a message's fields; checks type, range and size of every value that it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack
import numpy as np
import numpy.typing as npt

from paceline.core.errors import InvalidMessageError
from paceline.core.samples.trajectory import SCHEMA_VERSION

INT64_MAX = 2**63 - 1
MAX_NAME_CHARS = 512
"""Maximum number of characters of an id, key or other name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Holds the limits that decoders enforce.

    Args:
        max_bytes: largest number of bytes of a message or blob; larger ones are rejected unread.
        max_text_chars: largest number of characters of a text field: a response, a ground truth.
        max_items: largest number of items of any other list or mapping: stop tokens, reward components.
        max_depth: largest depth of nesting in a reward context's `extra`.
        max_values: largest number of values in a message, lists and mappings included: an empty mapping is
            one byte on the wire and 64 in memory.
    """

    max_bytes: int = 64 * 2**20
    max_tokens: int = 2**20
    max_text_chars: int = 2**20
    max_samples: int = 4096
    max_items: int = 1024
    max_depth: int = 8
    max_values: int = 2**20


LIMITS = Limits()


def pack(kind: str, fields: dict[str, Any]) -> bytes:
    """Packs a message: its schema version, its kind, its fields; lone surrogates in text are escaped.

    Raises:
        InvalidMessageError: a field holds a value that msgpack cannot express.
    """
    content = {"schema": SCHEMA_VERSION, "kind": kind, **fields}
    try:
        packed: bytes = msgpack.packb(content)
    except UnicodeEncodeError:
        # Lone surrogates, for example in a reward's error text, must not make the message unsendable.
        packed = msgpack.packb(content, unicode_errors="backslashreplace")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidMessageError(
            f"{kind} cannot be encoded: {error}; a message holds numbers, text, lists and mappings only",
            reason="not_encodable",
        ) from error
    return packed


def unpack(kinds: str | tuple[str, ...], data: bytes) -> Fields:
    """Unpacks a message of the given kind, or of one of the given kinds.

    Raises:
        InvalidMessageError: the message is too large, not msgpack, of another kind or of an unknown schema
            version.
    """
    allowed = (kinds,) if isinstance(kinds, str) else kinds
    kind = allowed[0]
    if len(data) > LIMITS.max_bytes:
        reject(kind, "too_large", f"{len(data)} bytes, at most {LIMITS.max_bytes} are accepted")
    count = _Count(LIMITS.max_values)
    try:
        content = msgpack.unpackb(
            data,
            raw=False,
            object_hook=count.mapping,
            list_hook=count.items,
            # msgpack allocates a list when it reads its length, before the items.
            max_array_len=LIMITS.max_values,
            max_map_len=LIMITS.max_values,
        )
    except _TooManyError:
        reject(kind, "too_large", f"over {LIMITS.max_values} values in its lists and mappings")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        reject(kind, "not_msgpack", f"{len(data)} bytes that are not one msgpack value ({error})")
    if not isinstance(content, dict):
        reject(kind, "not_msgpack", f"a {type(content).__name__} where a mapping belongs")
    version = content.get("schema")
    if type(version) is not int or version != SCHEMA_VERSION:
        reject(kind, "unknown_schema", f"schema version {version!r}, this build reads {SCHEMA_VERSION}")
    if content.get("kind") not in allowed:
        reject(kind, "wrong_kind", f"the message says that it is {content.get('kind')!r}")
    return Fields(content["kind"], content)


class _TooManyError(Exception):
    """A message holds more values than are accepted."""


class _Count:
    """Ends the decoding of a message that holds too many values."""

    __slots__ = ("_left",)

    def __init__(self, max_values: int) -> None:
        self._left = max_values

    def mapping(self, value: dict[Any, Any]) -> dict[Any, Any]:
        self._use(1 + len(value))
        return value

    def items(self, value: list[Any]) -> list[Any]:
        self._use(1 + len(value))
        return value

    def _use(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _TooManyError


def reject(kind: str, reason: str, detail: str) -> NoReturn:
    """Raises the typed rejection; `reason` is the short stable word that the journal records."""
    raise InvalidMessageError(f"invalid {kind}: {detail}", reason=reason)


class Fields:
    """The fields of one unpacked message; every getter returns a checked value or rejects the message."""

    __slots__ = ("_content", "_kind")

    def __init__(self, kind: str, content: Mapping[str, Any]) -> None:
        self._kind, self._content = kind, content

    @property
    def kind(self) -> str:
        """The kind that the message states, one of those allowed."""
        return self._kind

    def reject(self, reason: str, detail: str) -> NoReturn:
        """Raises the typed rejection of the message."""
        reject(self._kind, reason, detail)

    def _get(self, name: str) -> Any:
        try:
            return self._content[name]
        except KeyError:
            self.reject("missing_field", f"no field {name!r}")

    def _wrong_type(self, name: str, value: object, wanted: str) -> NoReturn:
        self.reject("wrong_type", f"{name} is a {type(value).__name__}, wanted {wanted}")

    def integer(self, name: str, *, minimum: int = 0, maximum: int = INT64_MAX) -> int:
        """Reads an integer in [minimum, maximum]; a bool is rejected."""
        return self._integer(name, self._get(name), minimum, maximum)

    def _integer(self, name: str, value: Any, minimum: int, maximum: int) -> int:
        if type(value) is not int:
            self._wrong_type(name, value, "a whole number")
        if not minimum <= value <= maximum:
            self.reject("out_of_range", f"{name} is {value}, allowed are {minimum} to {maximum}")
        return value

    def integers(
        self, name: str, *, max_items: int, minimum: int = 0, maximum: int = INT64_MAX
    ) -> tuple[int, ...]:
        """Reads a list of at most `max_items` integers."""
        values = self.items(name, max_items=max_items)
        return tuple(self._integer(name, value, minimum, maximum) for value in values)

    def number(self, name: str, *, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        """Reads a finite number in [minimum, maximum]."""
        return self._number(name, self._get(name), minimum, maximum)

    def _number(self, name: str, value: Any, minimum: float, maximum: float) -> float:
        if type(value) is not float and type(value) is not int:
            self._wrong_type(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.reject("not_finite", f"{name} is {value}")
        if not minimum <= number <= maximum:
            self.reject("out_of_range", f"{name} is {number}, allowed are {minimum} to {maximum}")
        return number

    def text(self, name: str) -> str:
        """Reads text within the limits, possibly empty."""
        return self._text(name, self._get(name), LIMITS.max_text_chars)

    def name(self, name: str) -> str:
        """Reads a short, non-empty text: an id or a key."""
        value = self._text(name, self._get(name), MAX_NAME_CHARS)
        if not value:
            self.reject("out_of_range", f"{name} is empty")
        return value

    def _text(self, name: str, value: Any, max_chars: int) -> str:
        if type(value) is not str:
            self._wrong_type(name, value, "text")
        if len(value) > max_chars:
            self.reject("too_large", f"{name} has {len(value)} characters, at most {max_chars} are accepted")
        return value

    def items(self, name: str, *, max_items: int) -> list[Any]:
        """Reads a list of at most `max_items` values, which the caller checks."""
        value = self._get(name)
        if type(value) is not list:
            self._wrong_type(name, value, "a list")
        if len(value) > max_items:
            self.reject("too_large", f"{name} has {len(value)} items, at most {max_items} are accepted")
        return value

    def missing(self, name: str) -> bool:
        """Returns whether an optional field is absent or nil."""
        return self._content.get(name) is None

    def _mapping(self, name: str) -> dict[Any, Any]:
        value = self._get(name)
        if type(value) is not dict:
            self._wrong_type(name, value, "a mapping")
        return value

    def nested(self, name: str) -> Fields:
        """Reads a nested mapping as `Fields`."""
        return Fields(f"{self._kind}.{name}", self._mapping(name))

    def mappings(self, name: str, *, max_items: int) -> list[Fields]:
        """Reads a list of mappings, each as `Fields`."""
        items = self.items(name, max_items=max_items)
        for item in items:
            if type(item) is not dict:
                self._wrong_type(name, item, "a mapping in each place")
        return [Fields(f"{self._kind}.{name}", item) for item in items]

    def numbers(self, name: str) -> dict[str, float]:
        """Reads a mapping of short names to finite numbers."""
        value = self._mapping(name)
        if len(value) > LIMITS.max_items:
            self.reject(
                "too_large", f"{name} has {len(value)} items, at most {LIMITS.max_items} are accepted"
            )
        return {
            self._text(name, key, MAX_NAME_CHARS): self._number(f"{name}[{key}]", item, -math.inf, math.inf)
            for key, item in value.items()
        }

    def plain(self, name: str) -> dict[str, object]:
        """Reads a mapping of JSON values: text keys; text, finite numbers, bools, None, lists, mappings."""
        value = self._mapping(name)
        problem = plain_problem(value, LIMITS.max_depth)
        if problem:
            self.reject(problem[0], f"{name}: {problem[1]}")
        return value

    def array(
        self, name: str, dtype: str, *, min_items: int, max_items: int = LIMITS.max_tokens
    ) -> npt.NDArray[Any]:
        """Reads a packed little-endian array (n,) within these limits, copied to native byte order."""
        value = self._get(name)
        if type(value) is not bytes:
            self._wrong_type(name, value, "bytes")
        packed, native = _DTYPES[dtype]
        num_items, rest = divmod(len(value), packed.itemsize)
        if rest:
            self.reject("unequal_lengths", f"{name} has {len(value)} bytes, no multiple of {packed.itemsize}")
        if num_items > max_items:
            self.reject("too_large", f"{name} has {num_items} items, at most {max_items} are accepted")
        if num_items < min_items:
            self.reject("out_of_range", f"{name} has {num_items} items, at least {min_items} are needed")
        return np.frombuffer(value, dtype=packed).astype(native)

    def token_ids(
        self, name: str, vocab_size: int | None, *, max_items: int = LIMITS.max_tokens
    ) -> npt.NDArray[np.int32]:
        """Reads token ids (n,), 1 <= n <= max_items, all in [0, 2**31) and below `vocab_size` if given."""
        ids: npt.NDArray[np.int32] = self.array(name, "<i4", min_items=1, max_items=max_items)
        # Read as unsigned, a negative id exceeds every allowed id, so one pass checks both bounds.
        limit = 2**31 if vocab_size is None else vocab_size
        largest = int(np.maximum.reduce(ids.view(np.uint32)))
        if largest >= limit:
            worst = largest if largest < 2**31 else largest - 2**32
            self.reject("out_of_range", f"{name} holds the id {worst}, allowed are 0 to {limit - 1}")
        return ids


def plain_problem(value: object, depth: int) -> tuple[str, str] | None:
    """Returns why a value is not plain data, (reason, detail), or None if it is."""
    if value is None or type(value) in (str, bool):
        return None
    if type(value) is int:
        return None if -(2**63) <= value <= 2**63 - 1 else ("out_of_range", f"{value} needs over 64 bits")
    if type(value) is float:
        return None if math.isfinite(value) else ("not_finite", f"{value} among the values")
    if depth == 0:
        return "too_large", "nested too deeply"
    if type(value) in (list, tuple):
        children: Any = value
    elif type(value) is dict:
        if any(type(key) is not str for key in value):
            return "wrong_type", "a key that is not text"
        children = value.values()
    else:
        return "wrong_type", f"a {type(value).__name__} where JSON has no such thing"
    return next(filter(None, (plain_problem(child, depth - 1) for child in children)), None)


_DTYPES = {name: (np.dtype(name), np.dtype(name).newbyteorder("=")) for name in ("<i4", "<f4", "|u1")}
"""The dtypes of arrays on the wire, each with the machine's own byte order."""


def pack_array(name: str, array: npt.NDArray[Any], dtype: str) -> bytes:
    """Packs an array of shape (n,) as little-endian bytes; its dtype must already be the one on the wire."""
    wanted, native = _DTYPES[dtype]
    if array.ndim != 1 or array.dtype != native:
        raise InvalidMessageError(
            f"{name} is an array of {array.dtype} with shape {array.shape}; "
            f"it must be {wanted.name} of shape (n,)",
            reason="wrong_type",
        )
    return array.astype(wanted, copy=False).tobytes()
