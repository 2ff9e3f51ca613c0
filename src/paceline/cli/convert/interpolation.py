"""Resolves references in an OmegaConf configuration to its own keys and to the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEPTH = 20


def resolve(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replaces `${a.b}`, `${.b}`, `${oc.select:a.b,default}` and `${oc.env:NAME,default}` by their values.

    Args:
        values: values by dotted key.

    Returns:
        The values, and the keys whose reference leads nowhere.
    """
    resolved = dict(values)
    unresolved = []
    for key in resolved:
        try:
            resolved[key] = _value(resolved[key], key, values)
        except KeyError:
            unresolved.append(key)
    return resolved, unresolved


def _value(value: Any, key: str, values: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_value(item, key, values) for item in value]
    for _ in range(_DEPTH):
        if not isinstance(value, str) or (reference := _INNERMOST.search(value)) is None:
            return value
        named = _named(reference[1], key, values)
        value = named if reference[0] == value else value.replace(reference[0], str(named))
    raise KeyError(key)


def _named(reference: str, key: str, values: Mapping[str, Any]) -> Any:
    """Returns the value that a reference names; raises KeyError if there is none."""
    kind, colon, rest = reference.partition(":")
    if not colon:
        return values[_absolute(reference.strip(), key)]
    name, comma, default = (part.strip() for part in rest.partition(","))
    if kind == "oc.env":
        named = os.environ.get(name)
    elif kind == "oc.select":
        named = values.get(_absolute(name, key))
    else:
        raise KeyError(reference)
    if named is None and not comma and kind == "oc.env":
        raise KeyError(reference)
    return _plain(default) if named is None else named


def _absolute(name: str, key: str) -> str:
    return f"{key.rpartition('.')[0]}{name}" if name.startswith(".") else name


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
