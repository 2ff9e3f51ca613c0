"""Arguments that several sub-commands share."""

from __future__ import annotations

import argparse
import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.config.base import Section
from paceline.config.load import load, top_level_keys
from paceline.config.run import RunConfig
from paceline.config.tuning import DpoRunConfig, RmRunConfig, SftRunConfig
from paceline.core.errors import ConfigError
from paceline.launch.planning.hosts import Hosts
from paceline.runs import run_dir as run_dirs
from paceline.service.identity.credentials import Credentials
from paceline.storage.hub import OFFLINE

S = TypeVar("S", bound=Section)


def add_config(parser: argparse.ArgumentParser, *, description: str) -> None:
    """Adds CONFIG.yaml as `config` and the dotted overrides as `overrides`."""
    parser.add_argument("config", metavar="CONFIG.yaml", help=description)
    add_overrides(parser, of="the file")
    add_offline(parser)


def add_overrides(parser: argparse.ArgumentParser, *, of: str) -> None:
    """Adds the dotted overrides as `overrides`."""
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="dotted.key=value", help=f"override a value of {of}"
    )


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--offline` to a command's parser."""
    parser.add_argument(
        "--offline",
        action=_Offline,
        nargs=0,
        help="read models and data sets of the hub from the cache; download nothing",
    )


class _Offline(argparse.Action):
    """Sets the variable that huggingface_hub reads on import, here and in every process started."""

    def __call__(self, *args: object, **keywords: object) -> None:
        os.environ[OFFLINE] = "1"


def load_config(kind: type[S], path: str | Path, overrides: Sequence[str]) -> S:
    """Reads a configuration, with its overrides.

    Raises:
        ConfigError: the file cannot be used. If it belongs to another command, the error names that command.
    """
    fitting, sections = _COMMANDS[kind], top_level_keys(path)
    if _MARKS[fitting] not in sections:
        other = next((name for name, section in _MARKS.items() if section in sections), None)
        if other is not None:
            raise ConfigError(
                f"{path} is a configuration of `paceline {other}`: run `paceline {other} {path}`"
            )
    return load(kind, path, overrides)


_COMMANDS: Mapping[type[Section], str] = {
    RunConfig: "train",
    SftRunConfig: "sft",
    RmRunConfig: "rm",
    DpoRunConfig: "dpo",
    Hosts: "up",
}
# The section that shows to which command a file belongs.
_MARKS: Mapping[str, str] = {"up": "hosts", "sft": "sft", "rm": "rm", "dpo": "dpo", "train": "trainer"}


class Form(enum.Enum):
    """How a command shows a run."""

    AUTO = "auto"
    PLAIN = "plain"
    JSON = "json"


def add_form(parser: argparse.ArgumentParser) -> None:
    """Adds `--plain` and `--json` as `form`, a Form."""
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--plain",
        dest="form",
        action="store_const",
        const=Form.PLAIN,
        default=Form.AUTO,
        help="print plain lines even on a terminal",
    )
    forms.add_argument(
        "--json",
        dest="form",
        action="store_const",
        const=Form.JSON,
        help="print a JSON object per line: milestones, notes, steps with all their metrics, the end",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds an optional RUN as `run_name`."""
    parser.add_argument(
        "run_name",
        nargs="?",
        metavar="RUN",
        help="run directory, or its name under runs/ (default: the latest run)",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerAddress:
    """Holds the address of a running controller, and the credentials to call it with."""

    address: str
    credentials: Credentials


def add_controller(parser: argparse.ArgumentParser) -> None:
    """Adds RUN and `--controller`, one of which `find_controller` needs."""
    add_run(parser)
    parser.add_argument(
        "--controller",
        metavar="HOST:PORT",
        help="ask this controller instead; the credentials are read from PACELINE_TOKEN and PACELINE_TLS_DIR",
    )


def find_controller(args: argparse.Namespace) -> ControllerAddress | None:
    """Returns the controller that the arguments name; if there is none, prints why.

    Raises:
        ConfigError: there is no such run, or it was not started by `paceline train`.
    """
    if args.controller:
        return ControllerAddress(address=args.controller, credentials=Credentials.from_env())
    folder = run_dirs.find(args.run_name)
    note = run_dirs.read_note(folder)
    if note is None:
        raise ConfigError(
            f"{folder} was not started by `paceline train`; give --controller HOST:PORT and set "
            "PACELINE_TOKEN"
        )
    if note.alive and note.controller:
        credentials = Credentials.from_env().for_own_machine().with_token(note.token)
        return ControllerAddress(address=note.controller, credentials=credentials)
    last = note.message or ("starting" if note.alive else "its launcher is gone")
    print(f"{folder}: {'not up yet' if note.alive else 'not running'} ({last})")
    return None
