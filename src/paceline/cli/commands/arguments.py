"""Arguments that several sub-commands share."""

from __future__ import annotations

import argparse


def add_config(parser: argparse.ArgumentParser, *, description: str) -> None:
    """Adds CONFIG.yaml as `config` and the dotted overrides as `overrides`."""
    parser.add_argument("config", metavar="CONFIG.yaml", help=description)
    parser.add_argument(
        "overrides", nargs="*", metavar="dotted.key=value", help="override a value of the file"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds an optional RUN as `run_name`."""
    parser.add_argument(
        "run_name",
        nargs="?",
        metavar="RUN",
        help="run directory, or its name under runs/ (default: the latest run)",
    )
