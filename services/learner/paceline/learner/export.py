"""`python -m paceline.learner.export RUN STEP OUT`: a checkpoint's policy as a Hugging Face folder.

It runs in one process without a GPU, and holds one layer and one file of weights in memory at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.core.errors import CheckpointError, PacelineError
from paceline.core.policy import TrainedVision
from paceline.learner.checkpoint import files
from paceline.learner.checkpoint.manifest import Base, Manifest
from paceline.learner.checkpoint.state import POLICY
from paceline.learner.model.folder import ADAPTERS, by_layer, write_adapters, write_folder
from paceline.learner.model.loading import digest_of_frozen, empty_lm, frozen, read_config, stored_tensors
from paceline.learner.model.lora import merged
from paceline.learner.train.state.learner import DTYPES, random_seed
from paceline.models.facts import family_of
from paceline.storage.folder import Folder
from paceline.storage.models import local_model
from paceline.storage.places import checkpoints_of


def export(run_dir: Path, step: int, out: Path, *, dtype: torch.dtype | None = None) -> Path:
    """Writes the policy of a checkpoint; adapters are merged, and written by themselves in `out`/adapter.

    Args:
        run_dir: directory of the run; its config.resolved.yaml names the model that the run started from.
        out: new or empty folder.
        dtype: data type of the weights written; None for the run's model.dtype.

    Returns:
        `out`.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or its base model is missing.
        ModelError: `out` is not empty.
    """
    config = load(RunConfig, run_dir / "config.resolved.yaml")
    folder = checkpoints_of(config, run_dir).child(f"step_{step:06d}")
    manifest = Manifest.read(folder.address)
    files.check(folder, manifest.files, manifest.files)
    lora = manifest.base.adapters
    # Checkpoints do not hold frozen weights; they are read from the starting model.
    model = local_model(config.model, "controller" if lora is None else "learner")
    source = Path(manifest.model_path)
    if not (source / "config.json").is_file():
        source = Path(model.path)  # the learner's folder is on another host
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"the checkpoint's model started from {source}, which is gone; put that folder back for its "
            "config and tokenizer"
        )
    vision = manifest.base.vision
    has_frozen = lora is None and vision != "all" and family_of(read_config(source).model_type).takes_images
    if has_frozen and source == Path(model.path):
        source = Path(local_model(config.model, "learner").path)
    tokenizer = Path(model.tokenizer_path) if model.tokenizer_path else None
    if manifest.base.digest:
        _require_base(config, manifest.base, source, folder)
    tensors, adapters = read_policy(folder), dict[str, Tensor]()
    if lora is not None:
        adapters = dict(tensors)
        tensors = merged(_base(config, source), adapters, lora)
    elif has_frozen:
        tensors = itertools.chain(tensors, _base(config, source, frozen_beside=vision))
    dtype = dtype or DTYPES[config.model.dtype]
    write_folder(out, tensors, source=source, tokenizer_source=tokenizer, dtype=dtype)
    if lora is not None:
        write_adapters(out / ADAPTERS, adapters, lora=lora, base=config.model.path)
    return out


def _require_base(config: RunConfig, base: Base, source: Path, folder: Folder) -> None:
    """Raises CheckpointError if `source` has other frozen weights than the run was trained on."""
    lm, seed = empty_lm(read_config(source), base.vision), random_seed(config)
    if base.adapters is not None:
        lm.requires_grad_(False)
    now = dataclasses.replace(base, digest=digest_of_frozen(source, frozen(lm.named_parameters()), seed))
    base.require(now, folder=folder.address, model_path=str(source))


def _base(
    config: RunConfig, source: Path, *, frozen_beside: TrainedVision | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of the starting model, as `stored_tensors` does, in the run's type."""
    for name, tensor in stored_tensors(source, random_seed(config), frozen_beside=frozen_beside):
        yield name, tensor.to(DTYPES[config.model.dtype])


def read_policy(folder: Folder) -> Iterator[tuple[str, Tensor]]:
    """Yields the policy's full tensors by Hugging Face name, read from a checkpoint a layer at a time.

    Raises:
        CheckpointError: the folder holds no policy.
    """
    entries: dict[str, Any] = files.reader(folder).read_metadata().state_dict_metadata
    prefix = f"{POLICY}."
    layers: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, entry in entries.items():
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            layers.setdefault(by_layer(name), {})[name] = entry
    if not layers:
        raise CheckpointError(f"{folder} holds no policy")
    return _read(folder, prefix, layers.values())


def _read(
    folder: Folder, prefix: str, layers: Iterable[Mapping[str, TensorStorageMetadata]]
) -> Iterator[tuple[str, Tensor]]:
    for entries in layers:
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()
        }
        with warnings.catch_warnings():
            # torch warns about loading in a single process even with no_dist=True.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load_shards(tensors, storage_reader=files.reader(folder), no_dist=True)
        for name in list(tensors):
            yield name.removeprefix(prefix), tensors.pop(name)


def main(argv: list[str] | None = None) -> int:
    """Reads the command line and exports; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.learner.export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("step", type=int, metavar="STEP", help="step of the checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, new or empty")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="type of the written weights; default: the run's model.dtype"
    )
    arguments = parser.parse_args(argv)
    try:
        dtype = DTYPES[arguments.dtype] if arguments.dtype else None
        out = export(arguments.run, arguments.step, arguments.out, dtype=dtype)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"model: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
