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
        help="then upload the folder to the Hugging Face hub, with a model card; needs HF_TOKEN",
    )
    parser.add_argument(
        "--private", action="store_true", help="with --push-to-hub: a new repository is private"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the learner's exporter in another process, so that this one needs no torch."""
    folder = run_dirs.find(args.run_name)
    config, step = load(RunConfig, folder / run_dirs.RESOLVED), chosen_step(folder, args.step)
    if args.out.exists() and any(args.out.iterdir()):
        raise CheckpointError(f"{args.out} is not empty; give a new folder")
    code = export_step(folder, step, args.out)
    if code or not args.push_to_hub:
        return code
    (args.out / "README.md").write_text(model_card(config, folder, step), encoding="utf-8")
    message = f"Step {step} of {config.trainer.name}, trained with Paceline"
    address = push_model(args.out, args.push_to_hub, private=args.private, message=message)
    print(f"pushed: {address}")
    return 0


def chosen_step(folder: Path, step: str) -> int:
    """Returns the step of the checkpoint that `step` (a number or `latest`) names.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    config = load(RunConfig, folder / run_dirs.RESOLVED)
    try:
        steps = run_dirs.checkpoint_steps(config, folder)
    except OSError as error:
        raise CheckpointError(f"the checkpoints of {folder} cannot be read: {error.strerror}") from error
    number = steps[-1] if step == "latest" and steps else step
    if not str(number).isdigit() or int(number) not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{folder} has no complete checkpoint of step {step}; it has: {known}")
    return int(number)


def export_step(folder: Path, step: int, out: Path, *, says_so: bool = True) -> int:
    """Writes the checkpoint of a step as a model's folder, in another process; returns the exit code."""
    command = [sys.executable, "-m", "paceline.learner.export", str(folder), str(step), str(out)]
    return subprocess.run(command, check=False, stdout=None if says_so else subprocess.DEVNULL).returncode
