"""`paceline chaos`: trains while it injects faults, then checks what the run has written."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from paceline.chaos.conduct import Plan, conduct
from paceline.chaos.faults import deck
from paceline.chaos.record import SUMMARY, RecoveryTally, summary, table
from paceline.checks.preflight import quick_check
from paceline.cli.commands import arguments
from paceline.cli.commands.start.train import log_to, make_view
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.data.reading.epochs import with_epochs_counted
from paceline.runs import run_dir as run_dirs
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle

# More steps than all faults take, because the run ends after the last recovery.
_MANY_STEPS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_config(
        parser,
        description="configuration of the run. The run starts from scratch, is allowed enough restarts, and "
        "ends after the last recovery, or after trainer.total_steps if the command line sets it",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the faults' order and times (default: 0)"
    )
    parser.add_argument("--faults", type=int, default=20, help="number of faults (default: 20)")
    parser.add_argument(
        "--rate",
        type=float,
        default=20.0,
        metavar="PER_MINUTE",
        help="faults a minute, on average (default: 20)",
    )
    parser.add_argument(
        "--overlap",
        type=int,
        default=3,
        help="most faults at a time from which the run has not recovered yet (default: 3)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only faults of this kind and target, such as 'kill rollout-*'; may be repeated (default: all)",
    )
    arguments.add_form(parser)


def run(args: argparse.Namespace) -> int:
    """Trains under faults; returns 0 if the run recovered from all, ended in order and passed `verify`."""
    if args.rate <= 0 or args.overlap < 1 or args.faults < 1:
        raise ConfigError("--rate, --overlap and --faults must be positive")
    until_done = not any(word.startswith("trainer.total_steps=") for word in args.overrides)
    forced = ["trainer.resume=never", f"service.max_restarts={args.faults + 5}"]
    if until_done:
        forced += [f"trainer.total_steps={_MANY_STEPS}", "trainer.total_epochs=null"]
    config = arguments.load_config(RunConfig, args.config, [*args.overrides, *forced])
    if config.broker.url is not None:
        raise ConfigError(
            "chaos restarts, fills and empties the run's own Redis server: leave out broker.url"
        )
    config = settle(config, Machine.here()).config
    deck(config, args.only)
    quick_check(config)
    config, _ = with_epochs_counted(config, print)
    prepared = run_dirs.prepare(config)
    config, run_dir = prepared.config, prepared.run_dir
    log_to(run_dir / "logs" / "launcher.log")
    view = make_view(config, run_dir, form=args.form)
    plan = Plan(
        seed=args.seed,
        num_faults=args.faults,
        per_minute=args.rate,
        overlap=args.overlap,
        stop=until_done,
        only=tuple(args.only),
    )
    began = time.monotonic()
    try:
        outcome, record, reason = asyncio.run(conduct(config, run_dir, view, plan))
    finally:
        view.close()
    minutes = (time.monotonic() - began) / 60
    sound, verified = _verify(run_dir)
    told = summary(record, verified)
    told |= {
        "seed": args.seed,
        "minutes": round(minutes, 1),
        "sound": sound,
        "ended": reason or outcome.message,
    }
    (run_dir / SUMMARY).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    Console(highlight=False, markup=False).print(table(record.outages))
    print(
        f"{len(record.outages)} of {args.faults} faults (seed {args.seed}) in {minutes:.1f} min; "
        f"{told['steps']} steps, {told['rewinds']} rewinds, {told['dropped_groups']} groups dropped; "
        f"breaches: {told['lost']} lost, {told['twice']} twice, {told['off_policy']} off-policy, "
        f"{told['other_breaches']} other; {RecoveryTally.of(record.outages).hangs} hangs"
    )
    print(outcome.message, "sound" if sound else "not sound", sep="\n", flush=True)
    if not outcome.ok or reason:
        print(f"paceline chaos: {reason or outcome.message}", file=sys.stderr)
    return 0 if outcome.ok and sound and not reason else 1


def _verify(run_dir: Path) -> tuple[bool, dict[str, dict[str, int]]]:
    """Runs `paceline verify`; returns whether it passed, and its counts. Prints all but the last line."""
    file = run_dir / "verify.json"
    command = [sys.executable, "-m", "paceline.controller.verify", str(run_dir), "--json", str(file)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    print("\n".join(done.stdout.splitlines()[:-1]))
    return done.returncode == 0, json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
