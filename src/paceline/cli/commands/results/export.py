"""`paceline export`: writes a checkpoint as a folder that transformers and vLLM can load."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.core.errors import CheckpointError
from paceline.runs import run_dir as run_dirs
from paceline.show.model_card import model_card
from paceline.storage.hub import push_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("run_name", metavar="RUN", help="run directory, or its name under runs/")
    parser.add_argument("step", metavar="STEP", help="step of the checkpoint, or `latest`")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; new or empty")
    parser.add_argument(
        "--push-to-hub",
        metavar="ORG/NAME",
        help="then upload it to the Hugging Face hub, with a model card; HF_TOKEN is needed",
    )
    parser.add_argument(
        "--private", action="store_true", help="a model that --push-to-hub creates is private"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the learner's exporter in another process, so that this one needs no torch."""
    folder = run_dirs.find(args.run_name)
    config = load(RunConfig, folder / run_dirs.RESOLVED)
    try:
        steps = run_dirs.checkpoint_steps(config, folder)
    except OSError as error:
        raise CheckpointError(f"the checkpoints of {folder} cannot be read: {error.strerror}") from error
    step = steps[-1] if args.step == "latest" and steps else args.step
    if not str(step).isdigit() or int(step) not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{folder} has no complete checkpoint of step {args.step}; it has: {known}")
    if args.out.exists() and any(args.out.iterdir()):
        raise CheckpointError(f"{args.out} is not empty; give a new folder")
    command = [sys.executable, "-m", "paceline.learner.export", str(folder), str(int(step)), str(args.out)]
    code = subprocess.run(command, check=False).returncode
    if code or not args.push_to_hub:
        return code
    (args.out / "README.md").write_text(model_card(config, folder, int(step)), encoding="utf-8")
    message = f"Step {int(step)} of {config.trainer.name}, trained with Paceline"
    address = push_model(args.out, args.push_to_hub, private=args.private, message=message)
    print(f"pushed: {address}")
    return 0
