"""`paceline sft`: trains a starting model on prompt/answer pairs."""

from __future__ import annotations

import argparse

from paceline.cli.commands import arguments
from paceline.config.tuning import SftRunConfig
from paceline.launch import supervised


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_config(parser, description="configuration with an sft: section")
    arguments.add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Trains on all ranks and writes the model to sft.output."""
    config = arguments.load_config(SftRunConfig, args.config, args.overrides)
    return supervised.run(config, "sft", is_dry=args.dry_run)
