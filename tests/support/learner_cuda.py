"""The learner on a GPU and on the CPU; `python -m support.learner_cuda` prints its findings as JSON."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.config.run import RunConfig
from paceline.learner.checkpoint.load import load
from paceline.learner.distributed.ranks import RankEnvironment, Ranks, form_group, leave_group, open_store
from paceline.learner.train.state.learner import Learner
from support.learner_fakes import run_config, write_model
from support.learner_scenarios import save, take_step, train


@contextmanager
def group_on(device: str) -> Iterator[Ranks]:
    """The process group on one kind of device."""
    environment = RankEnvironment.read()
    place = torch.device(device, environment.local_rank) if device == "cuda" else torch.device(device)
    try:
        yield form_group(environment, open_store(environment, 60), place, 60)
    finally:
        leave_group()


def steps_on(device: str, config: RunConfig) -> list[dict[str, float]]:
    """Three training steps."""
    with group_on(device) as ranks:
        return train(Learner.build(config, ranks), 1, 3)


def sharing(config: RunConfig) -> RunConfig:
    """The run with shared prompts; it ends if the learner's own check finds a difference."""
    return config.model_copy(update={"actor": config.actor.model_copy(update={"shared_prompts": "on"})})


def offloading(config: RunConfig) -> RunConfig:
    """The run with averages and reference model in host memory."""
    memory = config.actor.memory.model_copy(update={"offload": True, "offload_reference": True})
    return config.model_copy(update={"actor": config.actor.model_copy(update={"memory": memory})})


def findings(folder: Path) -> dict[str, Any]:
    """Losses on both devices and in both precisions, those of a repeat, and a resumed run."""
    # Heads of 8: what the variable-length kernels take.
    model = write_model(folder / "model", hidden_size=32)
    exact = run_config(model)
    half = run_config(model, model={"dtype": "bfloat16"}, actor={"memory": {"recompute": "full"}})
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "cpu": steps_on("cpu", exact),
        "cuda": steps_on("cuda", exact),
        "again": steps_on("cuda", exact),
        "offloaded": steps_on("cuda", offloading(exact)),
        "half": steps_on("cuda", half),
        "shared": steps_on("cuda", sharing(exact)),
        "half_shared": steps_on("cuda", sharing(half)),
    }
    with group_on("cuda") as ranks:
        learner = Learner.build(half, ranks)
        train(learner, 1, 2)
        save(learner, folder / "step", step=2)
        third = train(learner, 3, 3)
        resumed = Learner.build(half, ranks)
        load(resumed, folder / "step")
        results["resumed_equals"] = train(resumed, 3, 3) == third
        began = time.monotonic()
        take_step(resumed, 4)
        results["step_s"] = time.monotonic() - began
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(findings(Path(temporary))), flush=True)
