"""Converts between records and messages whose fields have the same names; the caller converts the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

R = TypeVar("R")
M = TypeVar("M")


def values_of(record: Any, *, of: Any = None, without: Collection[str] = ()) -> dict[str, Any]:
    """Returns a record's values by field, unconverted; with `of`, only the fields of this base class."""
    names = [field.name for field in fields(of or record) if field.name not in without]
    return {name: getattr(record, name) for name in names}


def to_proto(record: Any, kind: Callable[..., M], *, without: Collection[str] = (), **converted: Any) -> M:
    """Makes a protobuf message from a record's fields.

    Args:
        without: fields that the message does not have.
        converted: values that differ from the record's, by the message's field.
    """
    own = values_of(record, without=(*without, *converted))
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in own.items()}
    return kind(**plain, **converted)


def from_proto(message: Any, kind: Callable[..., R], **converted: Any) -> R:
    """Makes a record from a protobuf message's fields; optional fields that are not set are None.

    Args:
        message: a message that has the record's fields, apart from `converted`.
        converted: values that differ from the message's, by the record's field.
    """
    record: Any = kind
    names = [field.name for field in fields(record) if field.init and field.name not in converted]
    known = message.DESCRIPTOR.fields_by_name
    return kind(**{name: _value(message, name) for name in names if name in known}, **converted)


def _value(message: Any, name: str) -> Any:
    if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name):
        return None
    value = getattr(message, name)
    if isinstance(value, str | bytes | int | float):
        return value
    return dict(value) if isinstance(value, Mapping) else tuple(value)
