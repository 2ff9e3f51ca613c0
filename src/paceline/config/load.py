"""Builds a checked configuration from YAML and dotted overrides, with errors that say what to write."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from paceline.config.base import Section
from paceline.core.errors import ConfigError

try:  # this loader is written in C and needs a twentieth of the time
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # a build of PyYAML without libyaml
    from yaml import SafeLoader  # type: ignore[assignment]

S = TypeVar("S", bound=Section)


def load(kind: type[S], path: str | Path, overrides: Iterable[str] = ()) -> S:
    """Reads `path`, applies `dotted.key=value` overrides and checks the result.

    A file may begin with `extends: other.yaml`, a path relative to that file. The file's keys then override
    those of the other file, section by section; a list replaces the other list as a whole. All other paths
    stay relative to the working directory.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, or a value is not allowed; one line
            per fault.
    """
    source = Path(path)
    in_file = _read(source)
    try:
        return kind.model_validate(with_overrides(in_file, overrides))
    except ValidationError as error:
        faults = _explain_all(kind, error)
    # Faults that the file has without the overrides are blamed on the file, the others on the command line.
    own = [fault for fault in faults if fault in _faults(kind, in_file)]
    added = [fault for fault in faults if fault not in own]
    origins = {str(source): own, "the command line": added}
    raise ConfigError("\n".join(_blame(origin, lines) for origin, lines in origins.items() if lines))


def with_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Returns a copy of a tree with `dotted.key=value` overrides applied; raises ConfigError for a malformed
    override."""
    changed = copy.deepcopy(dict(tree))
    for override in overrides:
        _override(changed, override)
    return changed


def top_level_keys(path: str | Path) -> set[str]:
    """Returns the sections of a file and of the files that it extends; raises ConfigError like `load`."""
    return set(_read(Path(path)))


def parse(kind: type[S], tree: Mapping[str, Any], origin: str = "configuration") -> S:
    """Checks a tree of plain values against `kind`; raises ConfigError with one line per fault."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_blame(origin, _explain_all(kind, error))) from None


def _faults(kind: type[Section], tree: Mapping[str, Any]) -> list[str]:
    try:
        kind.model_validate(tree)
    except ValidationError as error:
        return _explain_all(kind, error)
    return []


def _explain_all(kind: type[BaseModel], error: ValidationError) -> list[str]:
    return [_explain(kind, dict(fault)) for fault in error.errors()]


def _blame(origin: str, faults: Sequence[str]) -> str:
    return f"{origin}: " + "\n  ".join(faults)


def dump_yaml(config: Section) -> str:
    """Returns the resolved configuration as YAML, with every key and the value in force."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(source: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a file's tree, merged over the tree of the file that it extends; `below` are the files that
    extend this one."""
    if source.resolve() in below:
        raise ConfigError(f"{source} extends itself by way of {', '.join(map(str, below))}; break the circle")
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        named = f", which {below[-1]} extends" if below else ""
        where = "give the path of a YAML file, or write one with `paceline init FILE.yaml`"
        if source.parts[0] == "examples" and not Path("examples").is_dir():
            where = "change to the folder of the clone, or let `paceline examples` write the examples here"
        raise ConfigError(f"cannot read configuration {source}{named}: {error.strerror}; {where}") from error
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source} must hold a mapping of sections (data:, model:, ...), found {type(tree).__name__}"
        )
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(
            f"{source}: extends={base!r} must be the path of one YAML file, relative to this one"
        )
    return _over(_read(source.parent / base, (*below, source.resolve())), tree)


class _Loader(SafeLoader):
    """Refuses a key that occurs twice in a mapping; YAML's own loader silently takes the last."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Checks the keys as they are written, before YAML merge keys add others."""
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"the key {key.value} is in line {lines[key.value]} and again in line {line}; "
                    "keep one of them"
                )
            lines[key.value] = line
        super().flatten_mapping(node)


def parse_yaml(text: str, source: Path) -> Any:
    """Parses YAML text; raises ConfigError if it is not YAML or has a key twice in a mapping."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _over(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Returns `tree` laid over `base`: mappings are merged, any other value replaces the one below."""
    merged = dict(base)
    for key, value in tree.items():
        under = merged.get(key)
        both = isinstance(under, dict) and isinstance(value, dict)
        merged[key] = _over(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"override {override!r} must look like dotted.key=value, such as trainer.total_steps=10"
        )
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error
    if isinstance(value, str):
        value = _number(value)
    node: Any = tree
    *parents, last = key.strip().split(".")
    for parent in parents:
        if isinstance(node, list):
            node = node[_index(node, parent, override)]
            continue
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    else:
        node[last] = value


def _index(node: list[Any], word: str, override: str) -> int:
    if not word.isdigit() or int(word) >= len(node):
        raise ConfigError(f"override {override!r}: {word!r} is not an index into a list of {len(node)}")
    return int(word)


def _number(text: str) -> object:
    """Reads a number such as 1e-4, which YAML 1.1 takes for a string."""
    try:
        return float(text)
    except ValueError:
        return text


def _explain(kind: type[BaseModel], fault: dict[str, Any]) -> str:
    path, section = _place(kind, fault["loc"])
    where = ".".join(path) or "(whole)"
    if fault["type"] == "extra_forbidden":
        return f"unknown key {where}; {_hint(kind, fault['loc'])}"
    if fault["type"] == "missing":
        return f"{where} is required; add it"
    if fault["type"] == "union_tag_not_found":
        return f"{where} lacks its type; add type: NAME, such as {where}={{type: {_types(kind, path)[0]}}}"
    if fault["type"] == "union_tag_invalid":
        return f"{where}: {fault['ctx']['tag']!r} is not known; choose one of {', '.join(_types(kind, path))}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "tuple_type":
        message = f"must be a list, such as [{fault.get('input')}]"
    if fault["type"] == "model_type" and section is not None:
        message = f"must be a section, such as {_section_for(section, fault.get('input'))}"
    if where == "(whole)":
        return message
    # A message about a whole section names its keys; the section's other values would not help.
    return (
        f"{where}: {message}"
        if isinstance(fault.get("input"), Mapping)
        else f"{where}={fault.get('input')!r}: {message}"
    )


def _section_for(section: type[BaseModel], given: object) -> str:
    """Returns, as YAML, the section that was probably meant by a plain value in its place."""
    key = next((key for key in ("name", "path") if key in section.model_fields), None)
    if key is None or not isinstance(given, str):
        return f"{{{key or next(iter(section.model_fields))}: ...}}"
    return f"{{{key}: {given}}}"


def _hint(kind: type[BaseModel], loc: Sequence[str | int]) -> str:
    """Says what to write in place of an unknown key."""
    path, section = _place(kind, loc[:-1])
    fields, key = {} if section is None else section.model_fields, str(loc[-1])
    for name, field in fields.items():
        types = [word for word, choice in section_types(field).items() if key in choice.model_fields]
        if types:
            return f"it is an option of {'.'.join([*path, name])}={{type: {' or '.join(types)}, {key}: ...}}"
    close = difflib.get_close_matches(key, sorted(fields), n=1)
    known = f"known here: {', '.join(sorted(fields))}" if fields else "leave it out"
    return f"did you mean {close[0]!r}?" if close else known


def _place(kind: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str], type[BaseModel] | None]:
    """Returns the keys that lead to a fault, and the section there; None if a plain value is there.

    If a section has several types, pydantic puts the type between the section's key and its inner keys; the
    type is left out here.
    """
    path: list[str] = []
    section: type[BaseModel] | None = kind
    types: Mapping[str, type[BaseModel]] = {}
    for part in loc:
        if part in types:
            section, types = types[str(part)], {}
            continue
        path.append(str(part))
        if isinstance(part, int) or section is None:
            continue
        field = section.model_fields.get(str(part))
        types = section_types(field) if field else {}
        sections = sections_in(field.annotation) if field and not types else []
        section = sections[0] if sections else None
    return path, section


def _types(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Returns the types that the section at `path` may have."""
    _, parent = _place(kind, path[:-1])
    return [] if parent is None else list(section_types(parent.model_fields[path[-1]]))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the section classes in an annotation: a section, a list of sections or a choice of them."""
    parts = [annotation, *get_args(annotation)]
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def section_types(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """Returns, by `type`, the sections that a field can be; empty if it has no choice of types."""
    if not isinstance(field.discriminator, str):
        return {}
    return {
        section.model_fields[field.discriminator].default: section
        for section in sections_in(field.annotation)
    }
