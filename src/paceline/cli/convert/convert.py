"""Converts another program's configuration: a tree of ours, and what could not be taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.convert import trl, verl
from paceline.cli.convert.rules import ConversionRule, Convert, Tree
from paceline.config.load import sections_in
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

VERL, TRL = "verl", "trl"
_TABLES: Mapping[str, tuple[tuple[ConversionRule, ...], Mapping[str, Convert], Mapping[str, str]]] = {
    VERL: (verl.VERL, verl.MORE, verl.PREFIXES),
    TRL: (trl.TRL, trl.MORE, trl.PREFIXES),
}
_NO_KEY = "no such key here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """Holds a configuration that was made from another system's.

    Attributes:
        tree: nested, as a file holds it.
        left_out: their keys with their values, and why each is not in the tree.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def program_of(tree: Mapping[str, Any]) -> str:
    """Whose configuration a file is.

    Raises:
        ConfigError: neither program's.
    """
    if {"actor_rollout_ref", "reward_model"} & set(tree):
        return VERL
    if {
        "num_generations",
        "per_device_train_batch_size",
        "max_completion_length",
        "model_name_or_path",
    } & set(tree):
        return TRL
    if {"model", "reward"} <= set(tree) <= set(RunConfig.model_fields) | {"extends"}:
        raise ConfigError("the file is one of ours already; `paceline check FILE` looks at it")
    raise ConfigError(
        f"the file has the keys {', '.join(sorted(map(str, tree))[:8])}: neither verl's "
        "(actor_rollout_ref, ...) nor TRL's (num_generations, ...); name the program with --from"
    )


def convert(tree: Mapping[str, Any], program: str) -> Converted:
    """Takes over what the program's table has, and keys with verl's meaning and name."""
    rows, more, prefixes = _TABLES[program]
    rules: dict[str, ConversionRule | Convert] = {key: row for row in rows for key in row.keys}
    rules |= more
    flat, out = _flat(tree), Converted()
    for key, value in flat.items():
        if isinstance(value, str) and "${" in value:
            out.left_out[f"{key}: {value}"] = "refers to another key; write its value"
            continue
        rule = rules.get(key)
        if isinstance(rule, ConversionRule) and rule.convert is None:
            out.left_out[f"{key}: {value}"] = rule.ours
        elif rule is not None:
            change = rule.convert if isinstance(rule, ConversionRule) else rule
            assert change is not None
            try:
                _put(out.tree, change(value, flat))
            except ValueError as error:
                out.left_out[f"{key}: {value}"] = str(error)
        else:
            same = _same_key(key, prefixes)
            if same is None or value is None:
                out.left_out[f"{key}: {value}"] = _NO_KEY
            else:
                _put(out.tree, {same: value})
    return out


def _same_key(key: str, prefixes: Mapping[str, str]) -> str | None:
    for theirs, ours in prefixes.items():
        if key.startswith(theirs) and _is_key(same := ours + key.removeprefix(theirs)):
            return same
    return None


def _is_key(path: str) -> bool:
    """Whether a configuration of ours may hold a value there."""
    model: type[Any] = RunConfig
    names = path.split(".")
    for number, name in enumerate(names):
        field = model.model_fields.get(name)
        if field is None:
            return False
        if number == len(names) - 1:
            return not sections_in(field.annotation)
        below = sections_in(field.annotation)
        if not below:
            return False
        model = below[0]
    return False


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; a list is a value."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _put(tree: dict[str, Any], values: Tree) -> None:
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
