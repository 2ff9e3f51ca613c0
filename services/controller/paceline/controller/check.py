"""`python -m paceline.controller.check CONFIG` tries the dataflow of a run, in a process of its own.

It imports the user's file, which the launcher may not, and carries a step out against made-up samples.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.controller.batch.inputs import load_inputs
from paceline.controller.run.dataflow.dataflow import load_dataflow
from paceline.controller.run.dataflow.rehearsal import rehearse
from paceline.service.member.check import run_check


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 and prints what the dataflow did, or logs the first error and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.controller.check", description=__doc__)
    parser.add_argument("config", type=Path, help="resolved configuration of the run (YAML)")
    given = parser.parse_args(arguments)
    return run_check("controller", lambda: _check(given.config), level="WARNING")


def _check(path: Path) -> None:
    config = load(RunConfig, path)
    flow = load_dataflow(config)
    if config.data.train_files:
        print(asyncio.run(rehearse(flow, config, load_inputs(config))))
    else:
        print(f"{config.trainer.dataflow}, found; its prompts come with the environment")


if __name__ == "__main__":
    sys.exit(main())
