#!/usr/bin/env python3
"""Writes pages of docs from code: configuration, gpus-and-memory, and the tables of from-verl-and-trl.

With --check, fails if they differ.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import memory_tables
import yaml
from marked_tables import page_with_tables
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from paceline.cli.convert.convert import TABLES
from paceline.cli.convert.rules import ConversionRule, Tree
from paceline.config.base import OneOf
from paceline.config.load import section_types
from paceline.config.reward import RewardConfig
from paceline.config.run import RunConfig
from paceline.config.tuning import DpoRunConfig, RmRunConfig, SftRunConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
PEERS = DOCS / "from-verl-and-trl.md"
EXAMPLES = Path(__file__).with_name("conversion_examples.yaml")
HEAD = """# Configuration

*Generated from `src/paceline/config` by `tools/generate_config_docs.py`; do not edit.*

A configuration is a YAML file. Unknown keys are errors. Any value can be given on the command line as
`dotted.key=value` (`paceline train examples/arithmetic/ppo.yaml algorithm.kl_ctrl.target_kl=0.02`); items of
lists are addressed by their index (`reward.functions.0.weight=2`). `paceline train CONFIG --dry-run` prints
the resulting values; every run keeps them as `config.resolved.yaml`.

A file may begin with `extends: other.yaml`, a path relative to the file. It then contains only differences:
its values replace those of the other file, key by key, and a list replaces the complete list. The other file
may extend a third file. All other paths in a file are relative to the working directory.

A file needs `data.train_files` or `data.train_sets`, `model.path`, `trainer.total_steps` or
`trainer.total_epochs`, and a scorer in `reward` unless a `rollout.environment` gives rewards.
"""
WIDTH = 120
SCORERS = {
    get_args(field.annotation)[0]: f"reward.{name}.N"
    for name, field in RewardConfig.model_fields.items()
    if get_origin(field.annotation) is tuple and get_args(field.annotation)[0] is not str
}


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parts = [
        HEAD,
        "## `paceline train`\n",
        *sections(RunConfig, ""),
        "## `paceline sft`\n",
        *sections(SftRunConfig, ""),
        "## `paceline rm`\n",
        *sections(RmRunConfig, ""),
        "## `paceline dpo`\n",
        *sections(DpoRunConfig, ""),
    ]
    pages = {
        DOCS / "configuration.md": "\n".join(parts),
        PEERS: page_with_tables(PEERS, comparison()),
        DOCS / "gpus-and-memory.md": memory_tables.page(),
    }
    stale = [
        path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"stale: {path.name}; run make generate")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    return 0


def comparison() -> dict[str, str]:
    """Returns the converter's tables of keys of verl and TRL, by the tables' names in the page."""
    names = {"trl": "TRL"}
    examples = yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))
    return {
        f"keys of {names.get(program, program)}": table(rules, names.get(program, program), examples[program])
        for program, rules in TABLES.items()
    }


def table(rules: tuple[ConversionRule, ...], program: str, examples: Mapping[str, Any]) -> str:
    """Returns every key as Markdown; several examples of a rule get separate rows."""
    lines = [f"| {program} | its default | for example | here |", "| --- | --- | --- | --- |"]
    for rule in rules:
        keys = ", ".join(f"`{key}`" for key in rule.keys)
        default = ", ".join(dict.fromkeys(f"`{value}`" for value in rule.defaults.values()))
        own = examples.get(rule.keys[0], ())
        if not own:
            lines.append(f"| {keys} | {default} | | {rule.ours} |")
            continue
        refused = all(ours is None for _, ours in own)
        if not refused and len(own) > 1:
            lines.append(f"| {keys} | {default} | | {rule.ours} |")
            keys = default = ""
        for theirs, ours in own[: 1 if refused else None]:
            lines.append(f"| {keys} | {default} | {values(theirs)} | {becomes(rule, ours, refused)} |")
    return "\n".join(lines)


def becomes(rule: ConversionRule, ours: Tree | None, always_refused: bool) -> str:
    """Returns the conversion of an example as text."""
    if ours is None:
        return f"cannot be: {rule.ours}" if always_refused else "cannot be"
    return values(ours) if ours else f"nothing: {rule.ours}"


def values(tree: Tree) -> str:
    """Lists keys with their values."""
    return ", ".join(f"`{key}: {value}`" for key, value in tree.items())


def sections(
    model: type[BaseModel], prefix: str, values: BaseModel | None = None, shown: dict[Any, str] | None = None
) -> list[str]:
    """Lists a model's own values, then its sections; a model that was listed before becomes a reference.

    Args:
        values: an instance with the defaults, if the parent section has an instance.
        shown: the path of each model listed so far; the models of scorers are listed under `reward`.
    """
    shown = dict(SCORERS) if shown is None else shown
    if shown.get(model, prefix.removesuffix(".")) != prefix.removesuffix("."):
        return [wrapped(f"Keys as `{shown[model]}`{differing(model, values)}."), ""]
    if not any(section_of(field.annotation)[0] for field in model.model_fields.values()):
        shown[model] = prefix.removesuffix(".")
    items, below = [], []
    for name, field in model.model_fields.items():
        inner, many = section_of(field.annotation)
        path = f"{prefix}{name}"
        if inner is not None:
            of_many = ".NAME" if get_origin(field.annotation) is dict else ".N"
            below.append((path + (of_many if many else ""), inner, field))
        if inner is None or (inner is not field.annotation and not section_types(field)):
            items.append(item(path, field, default(field, name, values)))
    out = [*items, ""] if items else []
    for path, inner, field in below:
        if section_types(field):
            words = wrapped(field.description or "")
            out += [f"### `{path.removesuffix('.N')}`\n", f"{words}\n", *choices(field)]
            continue
        given = field.default if isinstance(field.default, BaseModel) else None
        words = wrapped((given is not None and field.description) or inner.__doc__ or "")
        out += [f"### `{path}`\n", f"{words}\n", *sections(inner, path + ".", given, shown)]
    return out


def choices(field: FieldInfo) -> list[str]:
    """Returns two lists: the types that a section can have, and their options."""
    types = section_types(field)
    out = ["Types:\n"]
    holders: dict[str, list[str]] = {}
    options: dict[str, FieldInfo] = {}
    for word, model in types.items():
        start = " (default)" if isinstance(field.default, model) else ""
        out.append(wrapped(f"`{word}`{start}: {model.__doc__ or ''}", bullet="- "))
        for name, option in model.model_fields.items():
            if name != field.discriminator:
                holders.setdefault(name, []).append(f"`{word}`")
                options[name] = option
    out.append("\nOptions:\n")
    out += [
        item(name, option, default(option, name, None), of=f" of {', '.join(holders[name])}")
        for name, option in options.items()
    ]
    return [*out, ""]


def item(path: str, field: FieldInfo, value: str, *, of: str = "") -> str:
    """Returns the entry of one value."""
    meaning = f" {field.description}" if field.description else ""
    return wrapped(
        f"`{path}`{of}: {kind(field.annotation, field)}{bounds(field)}; {value}.{meaning}", bullet="- "
    )


def wrapped(text: str, *, bullet: str = "") -> str:
    """Wraps text to WIDTH columns; no line begins with a minus sign, which would be a bullet."""
    words = " ".join(text.split()).replace(" - ", "\0-\0")
    lines = textwrap.wrap(
        words,
        WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


def differing(model: type[BaseModel], values: BaseModel | None) -> str:
    """Returns the defaults that differ from those of the model."""
    if values is None:
        return ""
    own = [
        f"`{name}` {show(getattr(values, name))}"
        for name, field in model.model_fields.items()
        if getattr(values, name) != field.default
    ]
    return f"; defaults: {', '.join(own)}" if own else ""


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Returns an annotation's section type, and whether it holds several; (None, False) for a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in get_args(annotation):
        if get_origin(part) is Annotated:
            part = get_args(part)[0]
        if get_origin(part) is tuple:
            part = get_args(part)[0]
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part, NoneType not in get_args(annotation)
    return None, False


def kind(annotation: Any, field: FieldInfo | None = None) -> str:
    """Returns a type in words."""
    for names in (part.names for part in (field.metadata if field else ()) if isinstance(part, OneOf)):
        return f"one of {', '.join(f'`{name}`' for name in names)}"
    origin = get_origin(annotation)
    if origin is Annotated:
        return kind(get_args(annotation)[0])
    if origin is Literal:
        values = [f"`{value}`" for value in get_args(annotation)]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else kind(part) for part in get_args(annotation))
    if origin is tuple:
        inner = [part for part in get_args(annotation) if part is not ...]
        return f"list of {kind(inner[0])}"
    if origin is dict:
        return "mapping"
    names = {str: "text", bool: "true or false", int: "whole number", float: "number"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def bounds(field: FieldInfo) -> str:
    """Returns the limits on a value."""
    words = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    limits = [
        f"{words[k]} {v:g}" for m in field.metadata for k in words if (v := getattr(m, k, None)) is not None
    ]
    return f" ({', '.join(limits)})" if limits else ""


def default(field: FieldInfo, name: str, values: BaseModel | None) -> str:
    """Returns the value that applies if the file gives none."""
    value = field.default if values is None else getattr(values, name)
    return "required" if value is PydanticUndefined else f"default {show(value)}"


def show(value: object) -> str:
    """Returns a value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


if __name__ == "__main__":
    sys.exit(main())
