"""A row of a table of keys: what another program calls something, what it is here, and how values change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Tree = Mapping[str, Any]
"""Values by dotted key."""
Convert = Callable[[Any, Tree], Tree]
"""Of a value and the other file's values: ours, by dotted key; {} where nothing is to be set.

Raises:
    ValueError: why the value is left out.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRule:
    """Says what one of their settings becomes here.

    Attributes:
        theirs: how the page names their key.
        ours: what the page says of it.
        keys: their dotted keys; a row without keys is for readers alone.
        convert: None where there is nothing to set here: the converted file says so.
    """

    theirs: str
    ours: str
    keys: tuple[str, ...] = ()
    convert: Convert | None = None


By = Mapping[Any, Any] | Callable[[Any], Any] | None
"""What changes a value: a function, or a mapping where that has it."""


def to(key: str, *, by: By = None) -> Convert:
    """The value under another key, changed `by` something."""

    def convert(value: Any, tree: Tree) -> Tree:
        if callable(by):
            return {key: by(value)}
        return {key: by.get(value, value) if by is not None and isinstance(value, str | bool) else value}

    return convert


def renamed(key: str, ours: str, *, by: By = None, theirs: str = "", says: str = "") -> ConversionRule:
    """A row of one key that has another name here; the page has both names where it is not told others."""
    name = key.replace("actor_rollout_ref.actor", "actor..").removeprefix("actor_rollout_ref.")
    return ConversionRule(
        theirs=theirs or f"`{name}`", ours=says or f"`{ours}`", keys=(key,), convert=to(ours, by=by)
    )
