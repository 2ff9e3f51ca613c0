"""`paceline chaos`: trains while it injects faults, then checks what the run has written."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys

from rich.console import Console

from paceline.cli.chaos.conduct import Plan, conduct
from paceline.cli.chaos.record import table
from paceline.cli.commands import arguments
from paceline.cli.commands.train import log_to, make_view
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.launch.preflight import quick_check
from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

# A fault costs about two steps, and there are some between faults.
_STEPS_PER_FAULT = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    arguments.add_config(
        parser,
        description="configuration of the run; it begins anew, with enough restarts allowed, and with "
        f"{_STEPS_PER_FAULT} steps per fault unless trainer.total_steps is given here",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults' order and instants (default: 0)")
    parser.add_argument("--faults", type=int, default=20, help="how many (default: 20)")
    parser.add_argument(
        "--interval", type=float, default=2.0, help="mean seconds from a recovery to the next fault"
    )
    parser.add_argument("--plain", action="store_true", help="print plain lines even on a terminal")


def run(args: argparse.Namespace) -> int:
    """Trains under faults; returns 0 if the run reached its last step after all of them and is sound."""
    forced = ["trainer.resume=never", f"service.max_restarts={args.faults + 5}"]
    if not any(word.startswith("trainer.total_steps=") for word in args.overrides):
        forced.append(f"trainer.total_steps={_STEPS_PER_FAULT * (args.faults + 1)}")
    config = load(RunConfig, args.config, [*args.overrides, *forced])
    if config.broker.url is not None:
        raise ConfigError(
            "chaos restarts, fills and empties the run's own Redis server: leave out broker.url"
        )
    quick_check(config)
    prepared = run_dirs.prepare(config)
    config, run_dir = prepared.config, prepared.run_dir
    log_to(run_dir / "logs" / "launcher.log")
    view = make_view(config, run_dir, plain=args.plain)
    plan = Plan(seed=args.seed, num_faults=args.faults, interval_s=args.interval)
    try:
        outcome, record, reason = asyncio.run(conduct(config, run_dir, view, plan))
    finally:
        view.close()
    Console(highlight=False).print(table(record.outages))
    recoveries = [outage.recovery_s for outage in record.outages if outage.recovery_s is not None]
    print(
        f"{len(record.outages)} of {args.faults} faults (seed {args.seed}); longest recovery "
        f"{max(recoveries, default=0.0):.1f} s; {len(record.outages) - len(recoveries)} hangs"
    )
    print(outcome.message, flush=True)
    verify = [sys.executable, "-m", "paceline.controller.verify", str(run_dir)]
    sound = subprocess.run(verify, check=False).returncode == 0
    if not outcome.ok or reason:
        print(f"paceline chaos: {reason or outcome.message}", file=sys.stderr)
    return 0 if outcome.ok and sound and not reason else 1
