"""`paceline chaos` on a small run: every fault is injected, the run recovers from each, and it is sound."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from support.training_run import PACELINE, tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_FAULTS = 6
OF_STORES = ["--only", "kill blob-store-*", "--only", "pause blob-store-*"]


@pytest.mark.parametrize(("num_stores", "only"), [(0, []), (2, OF_STORES)])
def test_a_run_under_faults_is_sound(num_stores: int, only: list[str], inputs: Path, tmp_path: Path) -> None:
    config = tiny_config(
        inputs,
        broker={"blob_stores": num_stores},
        data={"train_batch_size": 4, "val_files": [], "max_response_length": 8},
        actor={"ppo_mini_batch_size": 2},
        rollout={"n": 2},
        trainer={"save_freq": 2, "test_freq": 0, "val_before_train": False},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = [str(PACELINE), "chaos", "run.yaml", "--seed", "2", "--faults", str(NUM_FAULTS), "--plain"]
    command += only
    done = subprocess.run(
        [*command, "trainer.run_dir=run"],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/chaos.jsonl").read_text().splitlines()]
    assert sorted(line["n"] for line in lines) == list(range(1, NUM_FAULTS + 1))
    assert all(line["recovery_s"] is not None for line in lines)
    told = json.loads((tmp_path / "run/chaos.json").read_text())
    assert (told["all"]["count"], told["all"]["hangs"], told["sound"]) == (NUM_FAULTS, 0, True)
    assert [told[name] for name in ("lost", "twice", "off_policy", "other_breaches")] == [0, 0, 0, 0]
    assert told["rows_trained"] == (told["steps"] - 1) * 8 > 0
    assert f"{NUM_FAULTS} of {NUM_FAULTS} faults (seed 2)" in done.stdout
    assert done.stdout.splitlines()[-1] == "sound"
