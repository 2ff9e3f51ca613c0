"""`paceline train`: runs a training run as local processes, shows it live and writes its report."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from paceline.cli.commands import arguments
from paceline.cli.launch import dry_run
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.launch.launcher import Planner, launch
from paceline.cli.launch.machine import Machine
from paceline.cli.launch.placement import settle
from paceline.cli.launch.preflight import notes, quick_check
from paceline.cli.live.table import LiveView
from paceline.cli.live.view import PlainView, View
from paceline.cli.report.summary import closing_lines
from paceline.config.run import RunConfig
from paceline.core.errors import EXIT_FAILED
from paceline.service.grpc_server import check_port
from paceline.service.logs import LineFormatter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    arguments.add_config(parser, description="configuration of the run")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the command and resolved configuration of every service; start nothing",
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="let others join: keep the run's token in RUN_DIR/token and print the commands with which "
        "further rollout servers and reward services join",
    )
    parser.add_argument("--plain", action="store_true", help="print plain lines even on a terminal")


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    config = arguments.load_config(RunConfig, args.config, args.overrides)
    settled = settle(config, Machine.here())
    config = settled.config
    if args.dry_run:
        print(dry_run.describe(config))
        return 0
    quick_check(config)
    for remark in (*settled.remarks, *notes(config)):
        print(remark)
    return train(config, plain=args.plain, is_open=args.open)


def train(config: RunConfig, *, plain: bool, is_open: bool = False, planner: Planner | None = None) -> int:
    """Runs a training run to its end; returns the exit code."""
    check_port(config.service.host, config.service.controller_port, "service.controller_port")
    prepared = run_dirs.prepare(config)
    config, run_dir = prepared.config, prepared.run_dir
    log_to(run_dir / "logs" / "launcher.log")
    for remark in prepared.remarks:
        print(remark)
    view = make_view(config, run_dir, plain=plain)
    try:
        outcome = asyncio.run(launch(config, run_dir, view, planner=planner, is_open=is_open))
    finally:
        view.close()
    if not outcome.began and outcome.exit_code != EXIT_FAILED:
        # It was refused or stopped before it began: the message is all that there is to say.
        prepared.undo()
        print(f"paceline train: {outcome.message}", file=sys.stderr)
        return outcome.exit_code
    if outcome.ok:
        print(outcome.message)
    for line in closing_lines(run_dir):
        print(line)
    if not outcome.ok:
        print(f"paceline train: {outcome.message}", file=sys.stderr)
        step = run_dirs.newest_checkpoint(config, run_dir)
        if step is not None:
            print(
                f"the same command goes on after step {step}, whose checkpoint is the newest", file=sys.stderr
            )
    return outcome.exit_code


def make_view(config: RunConfig, run_dir: Path, *, plain: bool) -> View:
    """A live table on a terminal, else plain lines."""
    total_steps = config.trainer.total_steps
    if plain or not sys.stdout.isatty():
        print(f"run directory: {run_dir}", flush=True)
        return PlainView(total_steps)
    return LiveView(f"paceline  {config.model.path}  {run_dir}", total_steps)


def log_to(file: Path) -> None:
    """Sends the launcher's log to a file, as the view uses the screen."""
    handler = logging.FileHandler(file)
    handler.setFormatter(LineFormatter("launcher"))
    logging.basicConfig(handlers=[handler], force=True, level="WARNING")
    logging.getLogger("paceline").setLevel("INFO")
