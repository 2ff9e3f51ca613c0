"""`trainer.profile`: chosen ranks record chosen steps, and a disk that refuses costs only the file."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config.services import ProfileConfig
from paceline.core.training import TrainOrder, TrainResult
from paceline.learner import commands
from paceline.learner.train.profiler import StepProfiler
from paceline.wire.calls.training import order_to_proto
from support.learner_fakes import POLICY, make_batch, run_config

pytestmark = pytest.mark.torch


def test_chosen_steps_of_chosen_ranks_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ProfileConfig(steps=(2, 4), ranks=(1,))
    for rank in (0, 1):
        profiler = StepProfiler(config, tmp_path / "profile", rank)
        for step in (1, 2, 3):
            with profiler.recording(step):
                torch.ones(8, 8) @ torch.ones(8, 8)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step_000002.learner-1.json.gz"
    with gzip.open(path, "rt") as file:
        assert "aten::mm" in {event.get("name") for event in json.load(file)["traceEvents"]}
    (tmp_path / "file").write_text("")
    with StepProfiler(config, tmp_path / "file", 1).recording(4):
        pass
    assert "no profile of step 4" in caplog.text


def test_the_order_to_train_is_recorded_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, trainer={"profile": {"steps": [1], "ranks": [0]}})

    def train_step(learner: Any, order: TrainOrder, fetch: object, deposit: object) -> TrainResult:
        torch.ones(8, 8) @ torch.ones(8, 8)
        learner.version = order.step
        return TrainResult(step=order.step, metrics={}, skip_reasons=(), readings=())

    monkeypatch.setattr(commands, "train_step", train_step)
    monkeypatch.setattr(commands, "CheckpointWriter", lambda learner: None)
    ranks = SimpleNamespace(device=torch.device("cpu"))
    learner: Any = SimpleNamespace(version=0, config=config, ranks=ranks)
    profiler = StepProfiler(config.trainer.profile, tmp_path / "profile", 0)
    nothing: Any = None
    handlers = commands.Commands(learner, nothing, nothing, profiler).table
    rows, _ = make_batch(step=1, seed=1)
    for step in (1, 2):
        policy = replace(POLICY, version=step - 1)
        order = order_to_proto(TrainOrder(step=step, policy=policy, rows=rows)).SerializeToString()
        assert handlers[commands.TRAIN]({"order": order}).step == step
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step_000001.learner-0.json.gz"
    with gzip.open(path, "rt") as file:
        assert "aten::mm" in {event.get("name") for event in json.load(file)["traceEvents"]}
