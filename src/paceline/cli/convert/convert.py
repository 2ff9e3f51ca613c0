"""Converts another program's configuration, and reports what became of each of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.convert.interpolation import resolve
from paceline.cli.convert.rules import UNSET, Changed, ConversionRule, Tree
from paceline.cli.convert.trl.table import RULES as TRL_RULES
from paceline.cli.convert.verl.table import RULES as VERL_RULES
from paceline.config.load import sections_in
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

VERL, TRL = "verl", "trl"
TABLES: Mapping[str, tuple[ConversionRule, ...]] = {VERL: VERL_RULES, TRL: TRL_RULES}
_NO_KEY = "no such key is known; see docs/from-verl-and-trl.md, or leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """Holds a configuration converted from another program's, and the report about its keys.

    Attributes:
        tree: the configuration, nested as in a file.
        same: our key by the other program's key; "" if no number depends on the key.
        changed: the pair (our key, reason) by the other program's key.
        refused: for each of the other program's keys with its value, the reason why it is not in the tree.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def program_of(tree: Mapping[str, Any]) -> str:
    """Returns the program that a configuration file belongs to."""
    heads = {str(key).partition(".")[0] for key in tree}
    if {"actor_rollout_ref", "reward_model"} & heads:
        return VERL
    if {
        "num_generations",
        "per_device_train_batch_size",
        "max_completion_length",
        "model_name_or_path",
        "reward_funcs",
    } & heads:
        return TRL
    if {"model", "reward"} <= heads <= set(RunConfig.model_fields) | {"extends"}:
        raise ConfigError(
            "the file is a configuration of Paceline already; check it with `paceline check FILE`"
        )
    raise ConfigError(
        f"the file has the keys {', '.join(sorted(heads)[:8])}: neither verl's "
        "(actor_rollout_ref, ...) nor TRL's (num_generations, ...); name the program with --from"
    )


def convert(tree: Mapping[str, Any], program: str, facts: Tree | None = None) -> Converted:
    """Converts the keys in the program's table, and its defaults that differ from ours.

    Args:
        tree: the other program's configuration, nested or by dotted keys.
        program: a key of TABLES.
        facts: values of DEVICES and NUM_ROWS, if known.
    """
    rules, out = TABLES[program], Converted()
    flat = {key: value for key, value in flattened(tree).items() if value != "???"}
    given, unresolved = resolve(flat)
    for key in unresolved:
        given.pop(key)
        rule = _rule(rules, key)
        if rule is None or rule.convert is not None:
            out.refused[f"{key}: {flat[key]}"] = (
                "refers to a key that the file does not have; write its value"
            )
    given = {key: value for key, value in given.items() if not _is_unset(_rule(rules, key), value)}
    defaults = {key: one for rule in rules for key, one in rule.defaults.items()}
    values = defaults | given | dict(facts or {})
    for key, value in given.items():
        rule = _rule(rules, key)
        if rule is None:
            out.refused[f"{key}: {value}"] = _NO_KEY
        else:
            _take(out, rule, key, value, values, by_default=False)
    for key, value in defaults.items():
        if key not in given:
            rule = _rule(rules, key)
            assert rule is not None
            _take(out, rule, key, value, values, by_default=True)
    return out


def _rule(rules: tuple[ConversionRule, ...], key: str) -> ConversionRule | None:
    return next((rule for rule in rules if rule.covers(key)), None)


def _is_unset(rule: ConversionRule | None, value: Any) -> bool:
    return rule is not None and any(value is none or value == none for none in rule.unset)


def _take(
    out: Converted, rule: ConversionRule, key: str, value: Any, values: Tree, *, by_default: bool
) -> None:
    """Enters one key; enters a default only if it differs from ours."""
    label = f"{key}: {value}" + (" (its default)" if by_default else "")
    if rule.part_of:
        if not by_default:
            out.same[label] = f"with {rule.part_of}"
        return
    try:
        result = {} if rule.convert is None else rule.convert(value, values)
    except ValueError as error:
        out.refused[label] = str(error)
        return
    ours = dict(result.values if isinstance(result, Changed) else result)
    written = {path: one for path, one in ours.items() if not (by_default and _same(default_of(path), one))}
    _put(out.tree, written)
    words = ", ".join(f"{path}: {one}" for path, one in ours.items())
    if isinstance(result, Changed):
        out.changed[label] = (words, result.reason)
    elif written or not by_default:
        out.same[label] = words


def _same(default: Any, value: Any) -> bool:
    default = list(default) if isinstance(default, tuple) else default
    return bool(default == value) and isinstance(default, bool) == isinstance(value, bool)


def default_of(path: str) -> Any:
    """Returns our default of a dotted key; UNSET if it has none.

    Raises:
        KeyError: there is no such key.
    """
    model: type[Any] = RunConfig
    instance: Any = None
    *sections, name = path.split(".")
    for section in sections:
        entry = model.model_fields[section]
        instance = getattr(instance, section, None) if instance is not None else entry.default
        instance = instance if isinstance(instance, tuple(sections_in(entry.annotation))) else None
        model = type(instance) if instance is not None else sections_in(entry.annotation)[0]
    entry = model.model_fields[name]
    default = entry.default if instance is None else getattr(instance, name)
    required = instance is None and entry.is_required()
    return UNSET if required else default


def flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns values by dotted key; a list or an empty mapping is a value."""
    return dict(_leaves(tree, prefix))


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping) or not tree:
        if prefix:
            yield prefix, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def _put(tree: dict[str, Any], values: Tree) -> None:
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if isinstance(value, list) and isinstance(node.get(name), list):
            value = [*node[name], *(one for one in value if one not in node[name])]
        node[name] = value
