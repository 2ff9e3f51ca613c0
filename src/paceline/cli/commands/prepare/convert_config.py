"""`paceline convert-config`: a configuration of verl or TRL as ours, with what could not be taken over."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from paceline.cli.convert.convert import TRL, VERL, Converted, convert, program_of
from paceline.config.load import parse, parse_yaml
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

_REQUIRED = {
    ("trainer", "total_steps"): "trainer.total_steps: epochs times rows over data.train_batch_size",
    ("data", "train_files"): "data.train_files: parquet or JSONL",
    ("model", "path"): "model.path",
    ("reward", "functions"): "reward.functions, such as [{name: gsm8k}]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "file", type=Path, help="YAML of verl (composed, without defaults) or of TRL's GRPOConfig"
    )
    parser.add_argument(
        "--from", dest="program", choices=(VERL, TRL), help="whose it is (default: by its keys)"
    )
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")


def run(args: argparse.Namespace) -> int:
    """Prints or writes the configuration; returns the exit code."""
    tree = _read(args.file)
    converted = convert(tree, args.program or program_of(tree))
    text = _text(converted, args.file)
    if args.out is None:
        print(text, end="")
    elif args.out.exists():
        raise ConfigError(f"{args.out} exists; give another --out, or delete it")
    else:
        args.out.write_text(text, encoding="utf-8")
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    tree = parse_yaml(text, path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping of keys to values")
    return tree


def _text(converted: Converted, source: Path) -> str:
    missing = [
        words for (section, key), words in _REQUIRED.items() if key not in converted.tree.get(section, {})
    ]
    lines = [f"# From {source.name}, by paceline convert-config. Then: paceline check FILE\n"]
    lines += [f"# Missing: {words}\n" for words in missing]
    lines.append(yaml.safe_dump(converted.tree, sort_keys=False, allow_unicode=True))
    if converted.left_out:
        lines.append("\n# Not taken over:\n")
        lines += [f"#   {_line(key)}  ({why})\n" for key, why in converted.left_out.items()]
    if not missing:
        try:
            parse(RunConfig, converted.tree)
        except ConfigError as error:
            print(f"paceline convert-config: to mend before it runs: {error}", file=sys.stderr)
    return "".join(lines)


def _line(text: str) -> str:
    return " ".join(text.split())[:160]
