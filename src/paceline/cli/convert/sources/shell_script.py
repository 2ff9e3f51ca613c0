"""Reads the settings of a shell script that starts verl: its words `a.b=c`, with variables filled in.

The script is not run. Assignments at its top level, arrays and `$((...))` are evaluated; commands inside
`if`, `case` and loops are not.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from paceline.cli.convert.sources.settings import ScriptSettings
from paceline.core.errors import ConfigError

_BRACES = r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}"
_WORD = re.compile(
    rf"""(?:'[^']*' | {_BRACES} | "(?:\\.|{_BRACES}|[^"\\])*" | \$\(\(.*?\)\) | \$\([^()]*\) | \\.
    | [^\s'"\\;&|()<>])+""",
    re.VERBOSE | re.DOTALL,
)
_TOKEN = re.compile(
    rf"(?P<word>{_WORD.pattern})|(?P<end>[;&|\n])|(?P<other>[()<>])|\s", re.VERBOSE | re.DOTALL
)
_ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+-\w+\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PIECE = re.compile(
    rf"""'(?P<single>[^']*)' | "(?P<double>(?:\\.|{_BRACES}|[^"\\])*)" | \\(?P<escaped>.)
    | (?P<bare>(?:{_BRACES}|[^'"\\])+)""",
    re.VERBOSE | re.DOTALL,
)
_VARIABLE = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)|\$\{(?P<braced>[A-Za-z_]\w*|\d)(?::?(?P<op>[-=+])(?P<word>(?:[^{}]|\$\{[^{}]*\})*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*|\d)|(?P<command>\$\(|`)|(?P<odd>\$\{)",
    re.DOTALL,
)
_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_BARE_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")


class _UnknownValueError(Exception):
    """Raised for a variable without a value, and for values that only running the script would show."""


def read_script(text: str, environment: Mapping[str, str] | None = None) -> ScriptSettings:
    """Returns the settings of the command that starts verl's trainer.

    Args:
        environment: variables that the script does not set (default: those of this process).

    Raises:
        ConfigError: no command of the script starts a trainer of verl.
    """
    variables = dict(os.environ if environment is None else environment)
    arrays: dict[str, list[str]] = {}
    depth, trainer_words = 0, None
    for words in _commands(text):
        depth += sum(word in _OPENS for word in words[:1]) - sum(word in _CLOSES for word in words[:1])
        opened = words[0] in (*_OPENS, *_CLOSES, "then", "else", "do")
        if depth > 0 or opened or not _assign(words, variables, arrays):
            start = _trainer(words)
            trainer_words = trainer_words if start is None else words[start:]
    if trainer_words is None:
        raise ConfigError(
            "the script has no command `python3 -m verl.trainer.main_ppo a.b=c ...`, which starts verl's "
            "trainer; convert the YAML that verl prints with `--cfg job` instead"
        )
    script = ScriptSettings()
    for word in trainer_words:
        _setting(word, variables, arrays, script)
    return script


def _commands(text: str) -> list[list[str]]:
    """Returns the words of each command, quotes kept; an array's words follow its name, in `(` and `)`."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", text)
    commands: list[list[str]] = [[]]
    inside = 0  # an array
    for token in _TOKEN.finditer(text):
        if token["other"] == "(" and commands[-1] and commands[-1][-1].endswith("="):
            inside = 1
            commands[-1].append("(")
        elif token["other"] == ")" and inside:
            inside = 0
            commands[-1].append(")")
        elif token["end"] and not inside:
            commands.append([])
        elif token["word"]:
            commands[-1].append(token["word"])
    return [command for command in commands if command]


def _assign(words: list[str], variables: dict[str, str], arrays: dict[str, list[str]]) -> bool:
    """Carries out the command if it is an assignment; returns whether it is one."""
    if words[0] in ("export", "declare", "readonly", "local"):
        words = [word for word in words[1:] if not word.startswith("-")]
    match = _ASSIGNMENT.fullmatch(words[0]) if words else None
    if match is None or (len(words) > 1 and words[1] != "(" and _ASSIGNMENT.fullmatch(words[-1]) is None):
        return not words
    if len(words) > 1 and words[1] == "(":
        arrays[match[1]] = words[2:-1]
        return True
    for word in words:
        if (assignment := _ASSIGNMENT.fullmatch(word)) is not None:
            try:
                variables[assignment[1]] = _expand(assignment[2], variables)
            except _UnknownValueError:
                variables.pop(assignment[1], None)
    return True


def _trainer(words: list[str]) -> int | None:
    """Returns the index of the trainer's first argument; None if the command starts no trainer."""
    for place, word in enumerate(words[:-1]):
        if word == "-m" and re.match(r"(verl|recipe)\.\S*main", words[place + 1]):
            return place + 2
    return None


def _setting(
    word: str, variables: Mapping[str, str], arrays: Mapping[str, list[str]], script: ScriptSettings
) -> None:
    if (array := _ARRAY.fullmatch(word)) is not None:
        for element in arrays.get(array[1], []):
            _setting(element, variables, arrays, script)
        return
    if word.strip('"') in ("$@", "$*", "${@}", "${*}") or word.startswith((">", "2>")):
        return
    try:
        plain = _expand(word, variables)
    except _UnknownValueError as unknown:
        script.refused[word] = str(unknown)
        return
    # An unquoted variable becomes several words.
    for setting in plain.split() if _BARE_VARIABLE.fullmatch(word) else [plain]:
        _enter(setting, script)


def _enter(plain: str, script: ScriptSettings) -> None:
    """Applies an argument of the trainer: `a.b=c`, `+a.b=c`, `~a.b`, or an option of Hydra."""
    key, equals, value = plain.partition("=")
    if key.startswith("~"):
        script.settings.pop(key[1:], None)
    elif key.startswith("--"):
        if key in ("--config-path", "--config-name", "--config-dir") and value not in ("", "ppo_trainer"):
            script.refused[plain] = "settings of another file are not read; convert that file, too"
    elif equals and "@" in key:
        script.settings["model_engine"] = value  # a config group of Hydra, which names the engine
    elif equals:
        script.settings[key.strip().lstrip("+")] = _value(value)


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value):
        return float(value)
    return value


def _expand(word: str, variables: Mapping[str, str]) -> str:
    """Removes a word's quotes and fills in variables; raises _UnknownValueError."""
    parts = []
    for piece in _PIECE.finditer(word):
        if piece["single"] is not None:
            parts.append(piece["single"])
        elif piece["double"] is not None:
            parts.append(re.sub(r'\\(["\\$`])', r"\1", _filled(piece["double"], variables)))
        elif piece["escaped"] is not None:
            parts.append(piece["escaped"])
        else:
            parts.append(_filled(piece["bare"], variables))
    return "".join(parts)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def fill(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return str(_number(_filled(match["sum"], variables), variables))
        name = match["braced"] or match["plain"]
        if name is None:
            raise _UnknownValueError("only running the script would show the value; write it")
        value = variables.get(name)
        if match["op"] == "+":
            return _expand(match["word"], variables) if value else ""
        if value:
            return value
        if match["op"] is not None:
            return _expand(match["word"], variables)
        if value is None:
            raise _UnknownValueError(
                f"the script does not set {name}, and the environment has none; write its value"
            )
        return value

    return _VARIABLE.sub(fill, text)


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _number(text: str, variables: Mapping[str, str]) -> int:
    """Evaluates an expression of `$((...))` to an integer; raises _UnknownValueError."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and variables.get(node.id, "").lstrip("-").isdigit():
            return int(variables[node.id])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise _UnknownValueError(f"$(({text})) cannot be computed; write its value")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        raise _UnknownValueError(f"$(({text})) cannot be computed; write its value") from None
