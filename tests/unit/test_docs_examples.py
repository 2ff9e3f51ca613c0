"""Every example of the docs is one that works: configurations are valid, Python compiles, commands exist."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.main import COMMANDS, command_module
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.config.tuning import DpoRunConfig, RmRunConfig, SftRunConfig
from paceline.launch.planning.hosts import Hosts

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# What a whole configuration needs, under what an example says.
BASE: dict[str, dict[str, Any]] = {
    "data": {"train_files": "t.jsonl"},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 400},
}
KINDS = {"sft": SftRunConfig, "rm": RmRunConfig, "dpo": DpoRunConfig}


def blocks(page: Path, *languages: str) -> list[str]:
    """The page's examples in these languages, without the indentation of a list that holds them."""
    fences = re.finditer(
        r"^( *)```(\w*)\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(match[3]) for match in fences if match[2] in languages]


def examples(*languages: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, *languages))
    ]


@pytest.mark.parametrize("text", examples("yaml"))
def test_a_configuration_is_valid(text: str) -> None:
    tree = yaml.safe_load(text)
    kind = next((KINDS[name] for name in tree if name in KINDS), None)
    if "hosts" in tree:
        parse(Hosts, tree)
    elif kind:
        parse(kind, tree)
    else:
        parse(RunConfig, completed(tree))


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """The example with what it leaves out of a whole configuration."""
    config = {**BASE, **tree}
    for section in ("data", "model", "trainer"):
        config[section] = {**BASE[section], **tree.get(section, {})}
    if config["data"].get("train_sets"):
        del config["data"]["train_files"]
    return config


@pytest.mark.parametrize("text", examples("python"))
def test_python_compiles_and_imports_what_is_there(text: str) -> None:
    tree = ast.parse(text)
    compile(tree, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
            exec(ast.unparse(node), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_takes_what_an_example_gives_it(page: Path) -> None:
    for block in blocks(page, "", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if not (match := re.match(r"(?:\w+=\S* )*paceline (.*?)(?: [|&>].*|$)", line)):
                continue
            name, *words = shlex.split(match[1], comments=True)
            command = command_module(name)
            parser = argparse.ArgumentParser(prog=line, exit_on_error=False)
            command.add_arguments(parser)
            parser.parse_intermixed_args(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    """Those in the text, too."""
    named = re.findall(r"`paceline ([a-z][a-z-]*)", page.read_text(encoding="utf-8"))
    assert [name for name in named if name not in COMMANDS] == []
