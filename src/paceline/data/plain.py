"""Converts values of data files to plain data, which JSON can express: messages carry nothing else."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any
from uuid import UUID

from paceline.core.errors import DataError
from paceline.core.text import encodable
from paceline.wire.fields import LIMITS, plain_problem

_MAX_DEPTH = LIMITS.max_depth - 1
"""Deepest nesting of a value; the column's name is one more level of a message."""
_MAX_DIGITS = 18
"""Most digits of a decimal that becomes an integer."""


def plain_value(value: object) -> object:
    """Converts a value to plain data.

    Dates and times become ISO text, durations seconds, decimals numbers, NaN null, bytes UTF-8 text, numpy
    values Python values, tuples lists, keys text. Lone surrogates in text are escaped.

    Raises:
        DataError: the value has no such form.
    """
    result = _plain(value, _MAX_DEPTH)
    problem = plain_problem(result, _MAX_DEPTH)
    if problem:
        raise DataError(f"holds {problem[1]}")
    return result


def _plain(value: Any, depth: int) -> object:
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        return encodable(str(value))
    if isinstance(value, float | Decimal):
        return _number(value)
    if isinstance(value, dict | list | tuple):
        if depth == 0:
            raise DataError(f"is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            return {encodable(str(key)): _plain(item, depth - 1) for key, item in value.items()}
        return [_plain(item, depth - 1) for item in value]
    return _scalar(value, depth)


def _number(value: float | Decimal) -> float | int | None:
    if isinstance(value, Decimal):
        if value.is_nan():
            return None
        if value.is_finite() and value.adjusted() < _MAX_DIGITS and value == value.to_integral_value():
            return int(value)
    number = float(value)
    if math.isinf(number):
        raise DataError("holds an infinity")
    return None if math.isnan(number) else number


def _scalar(value: Any, depth: int) -> object:
    """Converts scalars of parquet and numpy that JSON lacks."""
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date too
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise DataError(f"holds {len(value)} bytes that are not text in UTF-8") from None
    convert = getattr(value, "tolist", None)
    plain = value if convert is None else convert()
    if type(plain) is type(value):
        raise DataError(f"holds a {type(value).__name__}, which has no form in JSON")
    return _plain(plain, depth)
