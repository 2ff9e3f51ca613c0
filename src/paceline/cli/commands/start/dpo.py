"""`paceline dpo`: trains a policy on pairs of answers."""

from __future__ import annotations

import argparse

from paceline.cli.commands import arguments
from paceline.config.tuning import DpoRunConfig
from paceline.launch import supervised


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_config(parser, description="configuration with a dpo: section")
    arguments.add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Trains on all ranks and writes the model to dpo.output."""
    config = arguments.load_config(DpoRunConfig, args.config, args.overrides)
    return supervised.run(config, "dpo", is_dry=args.dry_run)
