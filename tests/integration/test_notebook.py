"""The notebook of the first run without fakes: all its cells, one after the other, on a small run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest

from paceline.api import process as api_process
from paceline.api.process import TrainProcess
from paceline.controller.verify.check import verify
from paceline.service.process import DIE_WITH_PARENT
from support.forked import Forked
from support.notebook import run_notebook
from support.training_rewards import WAITS_AT_MOST_S
from support.training_run import ENGINE, REWARDS, ROOT, read_jsonl

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(600)]

NUM_STEPS, NUM_PROMPTS = 8, 8
LAST = 6
"""The step that stays open until the launcher has heard that the loop was left."""


def truth_of(inputs: Path, step: int) -> str:
    """A ground truth of one prompt of this step, of no validation and of no earlier step; unshuffled."""
    train, val = (
        pyarrow.parquet.read_table(inputs / f"data/{split}.parquet")["ground_truth"].to_pylist()
        for split in ("train", "val")
    )
    first = (step - 1) * NUM_PROMPTS
    earlier = {*train[:first], *val}
    return next(truth for truth in train[first : first + NUM_PROMPTS] if truth not in earlier)


def forked(words: Sequence[str], *, env: dict[str, str], text: bool, **options: Any) -> Forked:
    """The run as a fork, which is no child of this process, but has the imports of its services."""
    del env[DIE_WITH_PARENT]
    return Forked(words[1:], env=env, imports=ENGINE, **options)


def test_its_cells_train_go_on_and_read_the_run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own configuration, made small by `overrides`, which a reader may set as well."""
    notebook, run_dir = ROOT / "docs" / "first-run.ipynb", tmp_path / "run"
    monkeypatch.chdir(notebook.parent)
    released = tmp_path / "released"
    kwargs = f"{{late: '{truth_of(inputs, LAST)}', until: '{released}'}}"
    overrides = [
        f"trainer.run_dir={run_dir}",
        f"trainer.total_steps={NUM_STEPS}",
        "trainer.export_model=false",
        f"model.path={inputs / 'model'}",
        f"data.train_files={inputs / 'data/train.parquet'}",
        f"data.val_files={inputs / 'data/val.parquet'}",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.shuffle=false",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=4",
        "rollout.max_num_seqs=16",
        # A random model is never right; its share of letters varies.
        f"reward.functions=[{{name: '{REWARDS}:letters', kwargs: {kwargs}}}]",
        f"reward.timeout_s={2 * WAITS_AT_MOST_S}",
    ]
    end = TrainProcess.end

    def releasing(process: TrainProcess, tell: Callable[[str], object]) -> None:
        end(process, lambda text: (released.touch() if "SIGINT" in text else None, tell(text)))

    monkeypatch.setattr(TrainProcess, "end", releasing)
    monkeypatch.setattr(api_process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": forked}))
    outputs = run_notebook(notebook, {"overrides": overrides})
    _, left, went_on, last, curve, samples = outputs
    log = (run_dir / "logs" / "launcher.log").read_text()
    assert "step 4: reward " in left.text, log
    assert "SIGINT: the run ends after this step" in left.text, log
    numbers = [int(word) for word in went_on.text.split()]
    # Step 5 was in progress when the loop was left, or the next one if this process stood still; the
    # controller may have heard of it when that one's end was decided.
    assert numbers == list(range(numbers[0], NUM_STEPS + 1))
    assert 5 <= numbers[0] <= LAST + 2
    assert [event["step"] for event in read_jsonl(run_dir / "events.jsonl") if event["event"] == "run"] == [
        0,
        numbers[0] - 1,
    ]
    assert last.value["step"] == NUM_STEPS
    assert last.value["critic/score/mean"] > 0
    assert curve.value._repr_svg_().count("<polyline") == 1
    assert samples.text.count("  learner [") == 3
    assert 0 <= samples.value < 1e-4
    assert [str(breach) for breach in verify(run_dir).breaches] == []
