"""A few steps of `paceline dpo` on a group's ranks: `run_ranks("support.dpo_ranks:steps", 2, CONFIG)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from paceline.config.load import parse
from paceline.config.tuning import DpoRunConfig
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.dpo import DpoTrainer, read_preferences
from paceline.learner.model.folder import gathered_tensors
from paceline.learner.model.loading import Precision, load_policy

NUM_STEPS = 4


def steps(ranks: Ranks, file: str) -> dict[str, Any]:
    """What each step says, the accuracy after them, and some weights; batches of five pairs."""
    config = parse(DpoRunConfig, yaml.safe_load(Path(file).read_text()))
    pairs = read_preferences(config, config.dpo.train_files)[0]
    batches = [[(3 * step + place) % len(pairs) for place in range(5)] for step in range(NUM_STEPS)]
    network = load_policy(config.model.path, ranks, Precision(compute=torch.float32))
    trainer = DpoTrainer(config, network, ranks, pairs, batches, range(len(pairs)))
    told = [trainer.step(number, batch) for number, batch in enumerate(batches, 1)]
    weights = {name: tensor.flatten()[:8].tolist() for name, tensor in gathered_tensors(network, keep=True)}
    return {
        "losses": [progress["loss"] for progress in told],
        "grad_norms": [progress["grad_norm"] for progress in told],
        "margins": [progress["margin"] for progress in told],
        "after": trainer.accuracy(range(len(pairs))),
        "weights": [value for _, values in sorted(weights.items()) for value in values],
    }
