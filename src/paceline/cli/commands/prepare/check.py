"""`paceline check`: reports every fault of a configuration before anything is started."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.checks.machine_checks import require_packages
from paceline.checks.preflight import notes, parts
from paceline.checks.preflight_check import PreflightCheck
from paceline.cli.commands import arguments
from paceline.config.run import RunConfig
from paceline.core.errors import ModelError, PacelineError
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_config(parser, description="configuration of a run")
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="skip GPUs and reward services, because the run will start on another machine",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="skip the tests of the model and of the engine's log-probs, which take about 20 s",
    )


def run(args: argparse.Namespace) -> int:
    """Prints a line per part; returns 2 if a part has a fault."""
    config = arguments.load_config(RunConfig, args.config, args.overrides)
    require_packages(config, engine=not args.elsewhere)
    print(f"ok    configuration: {args.config}")
    settled = settle(config, Machine.here())
    config = config if args.elsewhere else settled.config
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        tests = None if args.quick else Path(folder)
        num_faults = _num_faults(config, parts(here=not args.elsewhere, tests=tests))
    for remark in () if args.elsewhere else settled.remarks:
        print(f"note  {remark}")
    for remark in () if num_faults else notes(config):
        print(f"note  {remark}")
    if num_faults:
        print(f"{num_faults} fault(s); nothing was started")
        return 2
    print("no faults; `paceline train` can start")
    return 0


def _num_faults(config: RunConfig, parts: Sequence[PreflightCheck]) -> int:
    """Prints the outcome of each part; returns how many have a fault."""
    num_faults, model_is_bad = 0, False
    for part in parts:
        if part.wait and not model_is_bad:
            print(f"...   {part.name}: {part.wait}", file=sys.stderr, flush=True)
        try:
            print(f"ok    {part.name}: {part.run(config)}", flush=True)
        except PacelineError as error:
            if isinstance(error, ModelError) and model_is_bad:
                print(f"-     {part.name}: not checked, because the model has a fault")
                continue
            model_is_bad |= isinstance(error, ModelError)
            num_faults += 1
            print(f"FAULT {part.name}: {error}")
    return num_faults
