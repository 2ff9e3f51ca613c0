"""`paceline rm`: trains a reward model on pairs of answers."""

from __future__ import annotations

import argparse

from paceline.cli.commands import arguments
from paceline.config.tuning import RmRunConfig
from paceline.launch import supervised


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_config(parser, description="configuration with an rm: section")
    arguments.add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Trains on all ranks and writes the model to rm.output."""
    config = arguments.load_config(RmRunConfig, args.config, args.overrides)
    return supervised.run(config, "rm", is_dry=args.dry_run)
