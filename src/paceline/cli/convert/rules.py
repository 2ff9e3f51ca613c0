"""Rules that convert keys: the other program's key, our key, and how values change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

Tree = Mapping[str, Any]
"""Values by dotted key."""

UNSET: Final = object()
"""Stands for a missing default: a key that the file leaves out then has no value."""

DEVICES, NUM_ROWS = "paceline.devices", "paceline.num_rows"
"""Keys that no file has: the number of training processes, and of training rows if known."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Holds values of ours whose meaning differs slightly.

    Attributes:
        values: values by dotted key; {} if nothing is set here.
        reason: how the meaning differs.
    """

    values: Tree
    reason: str


Convert = Callable[[Any, Tree], Tree | Changed]
"""Returns our values by dotted key ({} if none is needed), given a value and the other file's values with
defaults.

Raises:
    ValueError: we have no counterpart; the message says why and what to do.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRule:
    """Says what becomes of keys of another program.

    Attributes:
        keys: the other program's dotted keys; a key that ends in `.*` stands for all below it.
        ours: what a value is converted to, in words, for the docs.
        convert: None if no number of a run depends on the value.
        default: the other program's default; a mapping by key if a rule has several keys.
        unset: values that mean the same as a missing key.
        part_of: the key whose rule reads these keys.
    """

    keys: tuple[str, ...]
    ours: str
    convert: Convert | None = None
    default: Any = UNSET
    unset: tuple[Any, ...] = ()
    part_of: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the rule's keys; keys without a default are left out."""
        if self.default is UNSET:
            return {}
        return dict(self.default) if isinstance(self.default, dict) else {self.keys[0]: self.default}

    def covers(self, key: str) -> bool:
        """Returns whether the rule applies to this key."""
        return any(
            key == own or (own.endswith(".*") and key.startswith(own.removesuffix("*"))) for own in self.keys
        )


By = Mapping[Any, Any] | Callable[[Any], Any]
"""Converts a value: a function, or a mapping that leaves values unchanged that are not among its keys."""


def renamed(
    key: str, ours: str, *, default: Any = UNSET, by: By | None = None, unset: tuple[Any, ...] = (None,)
) -> ConversionRule:
    """Makes a rule for a key with another name here; `by` converts its value."""

    def convert(value: Any, tree: Tree) -> Tree:
        if callable(by):
            return {ours: by(value)}
        return {ours: by.get(value, value) if by is not None and isinstance(value, str | bool) else value}

    return ConversionRule(keys=(key,), ours=f"`{ours}`", convert=convert, default=default, unset=unset)


def same(section: str, ours: str, defaults: Mapping[str, Any]) -> tuple[ConversionRule, ...]:
    """Makes a rule per key of `defaults` (the other program's), for keys of the same name in our section."""
    return tuple(
        renamed(f"{section}.{name}", f"{ours}.{name}", default=default) for name, default in defaults.items()
    )


def no_effect(ours: str, keys: str) -> ConversionRule:
    """Makes a rule for keys on which no number of a run depends; `ours` says what takes their place."""
    return ConversionRule(keys=tuple(keys.split()), ours=ours)


def only(ours: str, keys: str, *, neutral: Collection[Any] = (None, False, "", 0)) -> ConversionRule:
    """Makes a rule for keys without a counterpart; values in `neutral` have no effect."""

    def convert(value: Any, tree: Tree) -> Tree:
        if value in ([], {}) or any(value is one or value == one for one in neutral):
            return {}
        raise ValueError(ours)

    return ConversionRule(keys=tuple(keys.split()), ours=ours, convert=convert)


def options(key: str, ours: str) -> ConversionRule:
    """Makes a rule for keyword arguments that both programs pass on unchanged."""

    def convert(value: Any, tree: Tree) -> Tree:
        given = {
            name.removeprefix(f"{key}."): one for name, one in tree.items() if name.startswith(f"{key}.")
        }
        return {ours: given}

    return ConversionRule(keys=(key, f"{key}.*"), ours=f"`{ours}`", convert=convert)


def part(keys: str, of: str, default: Any = UNSET, unset: tuple[Any, ...] = (None,)) -> ConversionRule:
    """Makes a rule for keys that another key's rule reads."""
    return ConversionRule(
        keys=tuple(keys.split()), ours=f"with `{of}`", default=default, unset=unset, part_of=of
    )


def rule(
    keys: str, ours: str, convert: Convert, *, default: Any = UNSET, unset: tuple[Any, ...] = (None,)
) -> ConversionRule:
    """Makes the rule of one or several keys, which are separated by spaces."""
    return ConversionRule(keys=tuple(keys.split()), ours=ours, convert=convert, default=default, unset=unset)


def optimizer(ours: str, *, exact: Collection[str], compact: Collection[str]) -> Convert:
    """Returns a function that converts the type of an optimizer.

    Args:
        exact: the other program's names of AdamW with averages in float32.
        compact: its names of AdamW with averages in 8 bits.
    """

    def convert(value: Any, tree: Tree) -> Tree | Changed:
        if value in exact:
            return {f"{ours}.type": "adamw"}
        if value in compact:
            return Changed(
                {f"{ours}.type": "adamw_8bit"},
                "a block of 256 averages lies within one row, and the squares' average is not rounded to 0",
            )
        raise ValueError(f"there is no optimizer {value}; see {ours}.type")

    return convert


def trackers(value: Any, *, silent: Collection[str]) -> Tree:
    """Returns the trackers that Paceline has, too; names in `silent` stand for none.

    Raises:
        ValueError: it has no such tracker.
    """
    names = [value] if isinstance(value, str) else list(value or [])
    known = ("wandb", "tensorboard", "mlflow", "trackio")
    if unknown := [name for name in names if name not in (*known, *silent)]:
        raise ValueError(f"trainer.loggers takes {', '.join(known)}; leave {unknown[0]} out")
    return {"trainer.loggers": [name for name in names if name in known]}


def number(value: Any) -> float:
    """Returns a number that may be written as text, as YAML reads 1e-6."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None
