"""`paceline sft`, `paceline rm` and `paceline dpo`: train on pairs; each has a section of its name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from paceline.cli.commands import arguments
from paceline.config.tuning import DpoRunConfig, RmRunConfig, SftRunConfig, TuningRunConfig
from paceline.launch import supervised

_KINDS: Mapping[str, type[TuningRunConfig]] = {"sft": SftRunConfig, "rm": RmRunConfig, "dpo": DpoRunConfig}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of these commands."""
    section = parser.prog.rpartition(" ")[2]
    arguments.add_config(parser, description=f"configuration with the section {section}:")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration; start nothing"
    )
    parser.set_defaults(section=section)


def run(args: argparse.Namespace) -> int:
    """Trains on all ranks and writes the model to the section's output."""
    config = arguments.load_config(_KINDS[args.section], args.config, args.overrides)
    return supervised.run(config, args.section, is_dry=args.dry_run)
