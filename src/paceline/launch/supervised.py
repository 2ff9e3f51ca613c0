"""Runs `paceline sft`, `rm` and `dpo`: settles the configuration, checks it, trains in all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from paceline.config.load import dump_yaml
from paceline.config.training.tuning import TuningConfig
from paceline.config.tuning import TuningRunConfig
from paceline.core.errors import DataError, ModelError
from paceline.data.hub import local_files
from paceline.launch.processes.ranks import run_ranks
from paceline.service.process import write_atomically
from paceline.sizing.machine import Machine
from paceline.sizing.memory_choice import LEAST
from paceline.sizing.placement import settle_model
from paceline.storage.demo_inputs import how_to_make
from paceline.storage.models import local_model

C = TypeVar("C", bound=TuningRunConfig)


def run(config: TuningRunConfig, section: str, *, is_dry: bool) -> int:
    """Trains on all ranks and writes the model to the section's `output`.

    Args:
        config: configuration of `paceline sft`, `paceline rm` or `paceline dpo`.
        section: the key of its own section, which is also the name of the learner's module.
        is_dry: print the resolved configuration and start nothing.

    Raises:
        DataError, ModelError: a file is missing.
        PeerLostError: a rank failed.
    """
    config = _settled(config, section)
    if is_dry:
        print(dump_yaml(config), end="")
        return 0
    own: TuningConfig = getattr(config, section)
    for key, files in _files(own).items():
        for file in files:
            if not Path(file).is_file():
                remedy = how_to_make(Path(file)) or f"correct {section}.{key}"
                raise DataError(f"data file {file} does not exist; {remedy}")
    model = Path(config.model.path)
    if not (model / "config.json").is_file():
        remedy = how_to_make(model) or "correct model.path"
        raise ModelError(f"{model} is not a model folder (no config.json); {remedy}")
    output = Path(own.output)
    logs = output.with_name(output.name + ".logs")
    resolved = logs / "config.resolved.yaml"
    write_atomically(resolved, dump_yaml(config))
    print(f"starting {config.learner.world_size} rank(s); logs in {logs}", flush=True)
    run_ranks(
        f"paceline.learner.{section}",
        ["--config", str(resolved)],
        world_size=config.learner.world_size,
        num_threads=config.learner.threads,
        log_dir=logs,
    )
    print(f"model: {output}")
    return 0


def _files(own: TuningConfig) -> dict[str, Sequence[str]]:
    return {key: getattr(own, key, ()) for key in ("train_files", "val_files")}


def _settled(config: C, section: str) -> C:
    """Returns the configuration with a data type for the devices, local files, and at most a rank per GPU."""
    machine, learner = Machine.here(), config.learner
    gpus = () if learner.device == "cpu" else machine.gpus
    model, words = settle_model(config.model, on_gpus=bool(gpus))
    if words:
        print(words)
    if gpus and learner.devices is None and learner.world_size > len(gpus):
        print(f"learner.world_size={len(gpus)}: there are no more GPUs")
        learner = learner.model_copy(update={"world_size": len(gpus)})
    own: TuningConfig = getattr(config, section)
    splits = {"train_files": "train", "val_files": "val"}
    files = {
        key: tuple(map(str, local_files(names, splits[key]))) for key, names in _files(own).items() if names
    }
    memory = own.memory.with_rest_of(LEAST) if gpus else own.memory
    own = own.model_copy(update={"memory": memory, **files})
    return config.model_copy(
        update={"model": local_model(model, "learner"), "learner": learner, section: own}
    )
