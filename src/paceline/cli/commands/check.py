"""`paceline check`: reports every fault of a configuration before anything is started."""

from __future__ import annotations

import argparse

from paceline.cli.commands import arguments
from paceline.cli.launch.machine import Machine
from paceline.cli.launch.placement import settle
from paceline.cli.launch.preflight import PARTS, PARTS_ELSEWHERE, PARTS_HERE, notes
from paceline.config.run import RunConfig
from paceline.core.errors import ModelError, PacelineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    arguments.add_config(parser, description="configuration of a run")
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="the run will start on another machine: leave out GPUs and reward services",
    )


def run(args: argparse.Namespace) -> int:
    """Prints a line per part; returns 2 if a part has a fault."""
    config = arguments.load_config(RunConfig, args.config, args.overrides)
    print(f"ok    configuration: {args.config}")
    settled = settle(config, Machine.here())
    config = config if args.elsewhere else settled.config
    num_faults, model_is_bad = 0, False
    for name, check in (*PARTS, *(PARTS_ELSEWHERE if args.elsewhere else PARTS_HERE)):
        try:
            print(f"ok    {name}: {check(config)}")
        except PacelineError as error:
            if isinstance(error, ModelError) and model_is_bad:
                print(f"-     {name}: not checked, as the model has a fault")
                continue
            model_is_bad |= isinstance(error, ModelError)
            num_faults += 1
            print(f"FAULT {name}: {error}")
    for remark in () if args.elsewhere else settled.remarks:
        print(f"note  {remark}")
    for remark in () if num_faults else notes(config):
        print(f"note  {remark}")
    if num_faults:
        print(f"{num_faults} fault(s); nothing was started")
        return 2
    print("no faults; `paceline train` can start")
    return 0
