"""`paceline convert-config`: converts a configuration of verl or TRL, and reports what became of each key."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.cli.convert.convert import TABLES, Converted, convert, program_of
from paceline.cli.convert.report import fault, missing_keys, text_of
from paceline.cli.convert.rules import DEVICES, NUM_ROWS
from paceline.cli.convert.sources import python_script, shell_script
from paceline.cli.convert.sources.settings import ScriptSettings
from paceline.config.load import parse_yaml
from paceline.core.errors import ConfigError
from paceline.data.rows import count_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "file",
        type=Path,
        help="YAML of verl (composed, without defaults) or of TRL's GRPO script, a shell script (.sh) that "
        "starts verl, or a Python script (.py) with TRL's GRPOConfig(...); scripts are read, never run",
    )
    parser.add_argument(
        "--from",
        dest="program",
        choices=tuple(TABLES),
        help="program that the file belongs to (default: recognised by its keys)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="number of processes that TRL was started with; its batch sizes are per process (default: 1)",
    )
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")


def run(args: argparse.Namespace) -> int:
    """Prints or writes the configuration; returns the exit code."""
    if args.devices < 1:
        raise ConfigError(f"--devices {args.devices}: TRL trains with at least one process")
    converted = _converted(args.file, args.program, args.devices)
    text = text_of(converted, args.file.name)
    if args.out is None:
        print(text, end="")
    elif args.out.exists():
        raise ConfigError(f"{args.out} exists; give another --out, or delete it")
    else:
        args.out.write_text(text, encoding="utf-8")
    if not missing_keys(converted.tree) and (why := fault(converted.tree)):
        print(f"paceline convert-config: before the configuration can run, fix this: {why}", file=sys.stderr)
    return 0


def _converted(file: Path, program: str | None, devices: int) -> Converted:
    """Reads and converts the file; counts the training rows if their files are on this machine."""
    script = _read(file)
    if not isinstance(script, dict):
        tree, program = script.settings, "verl" if file.suffix == ".sh" else "trl"
    else:
        tree, program = script, program or program_of(script)
    facts: dict[str, Any] = {DEVICES: devices}
    files = convert(tree, program, facts).tree.get("data", {}).get("train_files") or []
    files = [files] if isinstance(files, str) else files
    if files and all(Path(one).is_file() for one in files):
        facts[NUM_ROWS] = count_rows(files, sys.maxsize)
    converted = convert(tree, program, facts)
    if not isinstance(script, dict):
        converted.refused.update(script.refused)
        converted.changed.update({key: ("", how) for key, how in script.changed.items()})
    return converted


def _read(path: Path) -> dict[str, Any] | ScriptSettings:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if path.suffix == ".sh":
        return shell_script.read_script(text)
    if path.suffix == ".py":
        return python_script.read_script(path, text)
    tree = parse_yaml(text, path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping of keys to values")
    return tree
