"""A row of a table of keys: what another program calls something, what it is here, and how values change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

Tree = Mapping[str, Any]
"""Values by dotted key."""

UNSET: Final = object()
"""In place of a default: a key that is not in the file says nothing."""

DEVICES, NUM_ROWS = "paceline.devices", "paceline.num_rows"
"""Keys that no file has: how many processes train there, and the rows of the training files, if known."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Values of ours that do not mean quite the same.

    Attributes:
        values: by dotted key; {} where nothing is set here.
        reason: what is different here.
    """

    values: Tree
    reason: str


Convert = Callable[[Any, Tree], Tree | Changed]
"""Of a value and the other file's values, defaults included: ours, by dotted key; {} where none is needed.

Raises:
    ValueError: why there is nothing of that meaning here, and what to do.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRule:
    """Says what their settings become here.

    Attributes:
        keys: their dotted keys; one that ends in `.*` stands for all below it.
        ours: what becomes of a value; the page says so.
        convert: None where no number of a run depends on the value.
        default: what the other program takes where the file does not say; by key where a rule has several.
        unset: values that mean the same as none.
        part_of: the key whose rule reads these.
        examples: their values with ours, which the page shows and the tests walk; None: it cannot be.
    """

    keys: tuple[str, ...]
    ours: str
    convert: Convert | None = None
    default: Any = UNSET
    unset: tuple[Any, ...] = ()
    part_of: str = ""
    examples: tuple[tuple[Tree, Tree | None], ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of its keys, as far as they have some."""
        if self.default is UNSET:
            return {}
        return dict(self.default) if isinstance(self.default, dict) else {self.keys[0]: self.default}

    def covers(self, key: str) -> bool:
        """Whether the rule is one of this key."""
        return any(
            key == own or (own.endswith(".*") and key.startswith(own.removesuffix("*"))) for own in self.keys
        )


By = Mapping[Any, Any] | Callable[[Any], Any]
"""What changes a value: a function, or a mapping where that has it."""


def renamed(
    key: str,
    ours: str,
    example: Any,
    *,
    default: Any = UNSET,
    by: By | None = None,
    becomes: Any = UNSET,
    unset: tuple[Any, ...] = (None,),
) -> ConversionRule:
    """A key that has another name here; `by` changes its value, and makes `becomes` of the example."""

    def convert(value: Any, tree: Tree) -> Tree:
        if callable(by):
            return {ours: by(value)}
        return {ours: by.get(value, value) if by is not None and isinstance(value, str | bool) else value}

    return ConversionRule(
        keys=(key,),
        ours=f"`{ours}`",
        convert=convert,
        default=default,
        unset=unset,
        examples=(({key: example}, {ours: example if becomes is UNSET else becomes}),),
    )


def same(section: str, ours: str, names: Mapping[str, tuple[Any, Any]]) -> tuple[ConversionRule, ...]:
    """Keys of a section that have the same name in a section here: an example each, and their default."""
    return tuple(
        renamed(f"{section}.{name}", f"{ours}.{name}", example, default=default)
        for name, (example, default) in names.items()
    )


def no_effect(ours: str, keys: str) -> ConversionRule:
    """Keys on which no number of a run depends; says what takes their place here."""
    return ConversionRule(keys=tuple(keys.split()), ours=ours)


def only(
    ours: str, keys: str, *, neutral: Collection[Any] = (None, False, "", 0), example: Any = True
) -> ConversionRule:
    """Keys of what is not here; values in `neutral` ask for nothing."""

    def convert(value: Any, tree: Tree) -> Tree:
        if value in ([], {}) or any(value is one or value == one for one in neutral):
            return {}
        raise ValueError(ours)

    return ConversionRule(
        keys=tuple(keys.split()),
        ours=ours,
        convert=convert,
        examples=tuple(({key.replace("*", "x"): example}, None) for key in keys.split()),
    )


def options(key: str, ours: str) -> ConversionRule:
    """Keyword arguments that both programs hand on as they are."""

    def convert(value: Any, tree: Tree) -> Tree:
        given = {
            name.removeprefix(f"{key}."): one for name, one in tree.items() if name.startswith(f"{key}.")
        }
        return {ours: given}

    return ConversionRule(
        keys=(key, f"{key}.*"),
        ours=f"`{ours}`",
        convert=convert,
        examples=(({f"{key}.x": True}, {ours: {"x": True}}),),
    )


def part(keys: str, of: str, default: Any = UNSET, unset: tuple[Any, ...] = (None,)) -> ConversionRule:
    """Keys that the rule of another one reads."""
    return ConversionRule(
        keys=tuple(keys.split()), ours=f"with `{of}`", default=default, unset=unset, part_of=of
    )


def rule(
    keys: str,
    ours: str,
    convert: Convert,
    *examples: tuple[Tree, Tree | None],
    default: Any = UNSET,
    unset: tuple[Any, ...] = (None,),
) -> ConversionRule:
    """Keys with a rule of their own; several are separated by spaces."""
    return ConversionRule(
        keys=tuple(keys.split()), ours=ours, convert=convert, default=default, unset=unset, examples=examples
    )


def optimizer(ours: str, *, exact: Collection[str], compact: Collection[str]) -> Convert:
    """The type of an optimizer.

    Args:
        ours: the section here.
        exact: their names of AdamW with averages in float32.
        compact: of those with averages in 8 bits.
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


def number(value: Any) -> float:
    """A number that may be written as text, as YAML reads 1e-6."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no number") from None
