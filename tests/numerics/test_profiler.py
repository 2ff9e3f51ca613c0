"""`trainer.profile`: chosen ranks record chosen steps, and a disk that refuses costs only the file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from paceline.config.services import ProfileConfig
from paceline.learner.train.profiler import StepProfiler

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
