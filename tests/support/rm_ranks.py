"""A few steps of `paceline rm` on the ranks of a group: `run_ranks("support.rm_ranks:steps", 2, CONFIG)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from paceline.config.load import parse
from paceline.config.tuning import RmRunConfig
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.folder import gathered_tensors
from paceline.learner.model.loading import Precision, load_critic
from paceline.learner.rm import RmTrainer, read_comparisons

NUM_STEPS = 6


def steps(ranks: Ranks, file: str) -> dict[str, Any]:
    """What each step says, the accuracy after them, and some weights; batches of five pairs."""
    config = parse(RmRunConfig, yaml.safe_load(Path(file).read_text()))
    pairs = read_comparisons(config, config.rm.train_files)[0]
    network = load_critic(config.model.path, ranks, Precision(compute=torch.float32), seed=0, has_bias=False)
    trainer = RmTrainer(config, network, ranks)
    told = [trainer.step(step, pairs[step % 3 :][:5]) for step in range(1, NUM_STEPS + 1)]
    weights = {name: tensor.flatten()[:8].tolist() for name, tensor in gathered_tensors(network, keep=True)}
    return {
        "losses": [progress["loss"] for progress in told],
        "grad_norms": [progress["grad_norm"] for progress in told],
        "accuracies": [progress["accuracy"] for progress in told],
        "after": trainer.accuracy(pairs),
        "weights": [value for _, values in sorted(weights.items()) for value in values],
    }
