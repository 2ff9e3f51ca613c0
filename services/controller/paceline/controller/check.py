"""`python -m paceline.controller.check NAME ...` checks in a separate process what a step will do."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.controller.batch.inputs import load_inputs
from paceline.controller.run.dataflow.dataflow import load_dataflow
from paceline.controller.run.dataflow.rehearsal import rehearse
from paceline.service.member.check import ServiceChecks, run_check


def _dataflow(path: str) -> str:
    """Imports the user's dataflow and runs a step on made-up samples; returns what the step did."""
    config = load(RunConfig, Path(path))
    flow = load_dataflow(config)
    if config.data.training_sets:
        return asyncio.run(rehearse(flow, config, load_inputs(config)))
    return f"{config.trainer.dataflow}, found; its prompts come with the environment"


CHECKS: ServiceChecks = {"dataflow": _dataflow}


if __name__ == "__main__":
    sys.exit(run_check("controller", CHECKS))
