#!/usr/bin/env python3
"""Writes docs/configuration.md from the configuration models; with --check, fails when the committed page differs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from paceline.config.load import section_types
from paceline.config.run import RunConfig, SftRunConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

*Generated from `src/paceline/config` by `tools/generate_config_docs.py`; do not edit.*

A configuration is a YAML file. Unknown keys are errors. Any value can be given on the command line as `dotted.key=value`
(`paceline train examples/arithmetic/ppo.yaml algorithm.kl_ctrl.target_kl=0.02`); members of a list go by number
(`reward.functions.0.weight=2`). `paceline train CONFIG --dry-run` prints what is in force; every run keeps it as
`config.resolved.yaml`.
"""


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parts = [
        HEAD,
        "## `paceline train`\n",
        *sections(RunConfig, ""),
        "## `paceline sft`\n",
        *sections(SftRunConfig, ""),
    ]
    text = "\n".join(parts)
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"stale: {PAGE.name}; run make generate")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


def sections(
    model: type[BaseModel], prefix: str, values: BaseModel | None = None, shown: dict[Any, str] | None = None
) -> list[str]:
    """A table for the model's own values, then one for each section below it; a model that has a table already is referred to.

    Args:
        values: an instance whose values are the defaults, where the section that holds it gives one.
        shown: tables so far: the path of each model.
    """
    shown = {} if shown is None else shown
    if model in shown:
        return [f"Keys as `{shown[model]}`{differing(model, values)}.", ""]
    if not any(section_of(field.annotation)[0] for field in model.model_fields.values()):
        shown[model] = prefix.removesuffix(".")
    out: list[str] = []
    rows, below = [], []
    for name, field in model.model_fields.items():
        inner, many = section_of(field.annotation)
        path = f"{prefix}{name}"
        if inner is not None:
            below.append((path + (".N" if many else ""), inner, field))
        if inner is None or (many and not section_types(field)):
            rows.append(
                f"| `{path}` | {kind(field.annotation)}{bounds(field)} | {default(field, name, values)} | {field.description or ''} |"
            )
    if rows:
        out += ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    for path, inner, field in below:
        if section_types(field):
            out += [f"### `{path.removesuffix('.N')}`\n", f"{field.description}\n", *choices(field)]
            continue
        given = field.default if isinstance(field.default, BaseModel) else None
        words = (
            field.description if given is not None and field.description else (inner.__doc__ or "").strip()
        )
        out += [f"### `{path}`\n", f"{words}\n", *sections(inner, path + ".", given, shown)]
    return out


def choices(field: FieldInfo) -> list[str]:
    """A table of the types that a section comes in, and one of their options."""
    types = section_types(field)
    out = ["| type | what it is |", "| --- | --- |"]
    holders: dict[str, list[str]] = {}
    options: dict[str, FieldInfo] = {}
    for word, model in types.items():
        start = " *(default)*" if isinstance(field.default, model) else ""
        out.append(f"| `{word}`{start} | {(model.__doc__ or '').strip()} |")
        for name, option in model.model_fields.items():
            if name != field.discriminator:
                holders.setdefault(name, []).append(word)
                options[name] = option
    out += ["", "| option | of | type | default | meaning |", "| --- | --- | --- | --- | --- |"]
    out += [
        f"| `{name}` | {', '.join(holders[name])} | {kind(option.annotation)}{bounds(option)} "
        f"| {default(option, name, None)} | {option.description} |"
        for name, option in options.items()
    ]
    return [*out, ""]


def differing(model: type[BaseModel], values: BaseModel | None) -> str:
    """The defaults that are another section's own."""
    if values is None:
        return ""
    own = [
        f"`{name}` {show(getattr(values, name))}"
        for name, field in model.model_fields.items()
        if getattr(values, name) != field.default
    ]
    return f"; defaults: {', '.join(own)}" if own else ""


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that an annotation is or lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part, True
    return None, False


def kind(annotation: Any) -> str:
    """A type in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kind(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
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
    """The limits on a value."""
    words = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        f"{words[k]} {v:g}" for m in field.metadata for k in words if (v := getattr(m, k, None)) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


def default(field: FieldInfo, name: str, values: BaseModel | None) -> str:
    """The value in force where none is given."""
    value = field.default if values is None else getattr(values, name)
    return "*required*" if value is PydanticUndefined else show(value)


def show(value: object) -> str:
    """A value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


if __name__ == "__main__":
    sys.exit(main())
