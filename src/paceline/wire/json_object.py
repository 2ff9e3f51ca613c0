"""Reads and writes JSON objects in text fields; checks their limits before parsing.

Parsing can take over thirty times the text's bytes: an empty mapping is three bytes with its comma, but 64 in
memory, plus its slot in the list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from paceline.core.errors import InvalidMessageError
from paceline.wire.fields import LIMITS, plain_problem, reject

MAX_JSON_BYTES = 16 * 2**20
"""The largest UTF-8 size of one object's text, in bytes."""


def write_json_object(value: Mapping[str, object], subject: str) -> str:
    """Returns a JSON object as text that `read_json_object` accepts.

    Raises:
        InvalidMessageError: the object holds values that JSON cannot express, or is too large.
    """
    problem = plain_problem(dict(value), LIMITS.max_depth)
    if problem:
        reject(subject, problem[0], problem[1])
    text = json.dumps(value)
    check_json_text(text, subject)
    return text


def check_json_text(text: str, subject: str) -> int:
    """Refuses a text that would be large once it is parsed; returns a bound on the number of its values.

    Lists, mappings and their items all count as values.

    Raises:
        InvalidMessageError: the text has too many bytes or values, or nests too deeply.
    """
    num_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    if num_bytes > MAX_JSON_BYTES:
        reject(subject, "too_large", f"{num_bytes} bytes of JSON, at most {MAX_JSON_BYTES} are accepted")
    num_brackets = text.count("[") + text.count("{")
    num_values = num_brackets + text.count(",")
    if num_brackets <= LIMITS.max_depth and num_values <= LIMITS.max_values:
        return num_values
    return _count_values(text, subject)


def _count_values(text: str, subject: str) -> int:
    """Counts the values of a text; ignores commas and brackets inside strings."""
    most, deepest = LIMITS.max_values, LIMITS.max_depth
    escaped = text.encode(errors="surrogatepass")
    chars = np.frombuffer(escaped.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = chars[~np.logical_xor.accumulate(chars == ord('"'))]  # of strings
    opens = (outside == ord("[")) | (outside == ord("{"))
    num_values = int(np.count_nonzero(opens) + np.count_nonzero(outside == ord(",")))
    if num_values > most:
        reject(
            subject, "too_large", f"{num_values} values in lists and mappings, at most {most} are accepted"
        )
    closes = (outside == ord("]")) | (outside == ord("}"))
    steps = opens.astype(np.int8) - closes.astype(np.int8)
    if np.cumsum(steps[steps != 0], dtype=np.int32).max(initial=0) > deepest:
        reject(subject, "too_large", f"nested too deeply, at most {deepest} levels are accepted")
    return num_values


def read_json_object(text: str, subject: str) -> dict[str, object]:
    """Reads the text of a JSON object; an empty text gives an empty object.

    Raises:
        InvalidMessageError: the text is not a JSON object, is too large, or holds numbers that are not
            finite.
    """
    if not text:
        return {}
    check_json_text(text, subject)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError(
            f"invalid {subject}: it is not JSON ({error})", reason="not_json"
        ) from error
    if not isinstance(value, dict):
        reject(subject, "wrong_type", f"a {type(value).__name__} where a JSON object belongs")
    problem = plain_problem(value, LIMITS.max_depth)
    if problem:
        reject(subject, problem[0], problem[1])
    return value
