"""The notebook of the first run without fakes: all its cells, one after the other, on a small run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.controller.verify.check import verify
from support.notebook import run_notebook
from support.training_run import REWARDS, ROOT, read_jsonl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_STEPS = 12


def test_its_cells_train_go_on_and_read_the_run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own configuration, made small by `overrides`, which a reader may set as well."""
    notebook, run_dir = ROOT / "docs" / "first-run.ipynb", tmp_path / "run"
    monkeypatch.chdir(notebook.parent)
    overrides = [
        f"trainer.run_dir={run_dir}",
        f"trainer.total_steps={NUM_STEPS}",
        "trainer.export_model=false",
        f"model.path={inputs / 'model'}",
        f"data.train_files={inputs / 'data/train.parquet'}",
        f"data.val_files={inputs / 'data/val.parquet'}",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=4",
        "rollout.max_num_seqs=16",
        # A random model is never right; its share of letters varies.
        f"reward.functions=[{{name: '{REWARDS}:letters'}}]",
    ]
    outputs = run_notebook(notebook, {"overrides": overrides})
    _, left, went_on, last, curve, samples = outputs
    log = (run_dir / "logs" / "launcher.log").read_text()
    assert "step 4: reward " in left.text, log
    assert "SIGINT: the run ends after this step" in left.text, log
    numbers = [int(word) for word in went_on.text.split()]
    # Step 5 was in progress when the loop was left, or a later one if this process stood still.
    assert numbers == list(range(numbers[0], NUM_STEPS + 1))
    assert numbers[0] >= 5
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
