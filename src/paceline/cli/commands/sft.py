"""`paceline sft`: trains a starting model on prompt/answer pairs, in the learner's ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.commands import arguments
from paceline.cli.launch.machine import Machine
from paceline.cli.launch.memory_choice import LEAST
from paceline.cli.launch.placement import settle_model
from paceline.cli.launch.ranks import run_ranks
from paceline.config.load import dump_yaml
from paceline.config.run import SftRunConfig
from paceline.core.errors import DataError, ModelError
from paceline.data.hub import local_files
from paceline.service.process import write_atomically
from paceline.storage.models import local_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    arguments.add_config(parser, description="configuration with an sft: section")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration; start nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Trains on all ranks and writes the model to sft.output."""
    config = arguments.load_config(SftRunConfig, args.config, args.overrides)
    config = _settled(config)
    if args.dry_run:
        print(dump_yaml(config), end="")
        return 0
    for file in config.sft.train_files:
        if not Path(file).is_file():
            raise DataError(f"data file {file} does not exist; correct sft.train_files")
    if not (Path(config.model.path) / "config.json").is_file():
        raise ModelError(f"{config.model.path} is not a model folder (no config.json); correct model.path")
    output = Path(config.sft.output)
    logs = output.with_name(output.name + ".logs")
    resolved = logs / "config.resolved.yaml"
    write_atomically(resolved, dump_yaml(config))
    run_ranks(
        "paceline.learner.sft",
        ["--config", str(resolved)],
        world_size=config.learner.world_size,
        num_threads=config.learner.threads,
        log_dir=logs,
    )
    print(f"model: {output}")
    return 0


def _settled(config: SftRunConfig) -> SftRunConfig:
    """With the data type that the devices want, local files, and not more ranks than there are GPUs."""
    machine, learner = Machine.here(), config.learner
    gpus = () if learner.device == "cpu" else machine.gpus
    model, words = settle_model(config.model, on_gpus=bool(gpus))
    if words:
        print(words)
    if gpus and learner.devices is None and learner.world_size > len(gpus):
        print(f"learner.world_size={len(gpus)}: there are no more GPUs")
        learner = learner.model_copy(update={"world_size": len(gpus)})
    memory = config.sft.memory.with_rest_of(LEAST) if gpus else config.sft.memory
    files = tuple(map(str, local_files(config.sft.train_files, "train")))
    sft = config.sft.model_copy(update={"memory": memory, "train_files": files})
    return config.model_copy(update={"model": local_model(model, "learner"), "learner": learner, "sft": sft})
