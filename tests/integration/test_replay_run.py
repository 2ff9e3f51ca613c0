"""`paceline train` without fakes: steps that train prompt groups of earlier ones again, through a kill."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.controller.verify.check import verify
from support.training_run import assert_sound, only, read_jsonl, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(900)]


def test_a_run_with_replay_is_sound_and_goes_on_after_a_kill_of_its_controller(
    inputs: Path, tmp_path: Path
) -> None:
    algorithm = {
        "adv_estimator": "grpo",
        "use_kl_in_reward": False,
        "kl_ctrl": {"type": "fixed"},
        "rollout_correction": {"method": "tis"},
        "replay": {"prompts_per_step": 8, "filter_probability": 0.8, "max_age": 2},
    }
    config = tiny_config(
        inputs,
        algorithm=algorithm,
        barrier={"mode": "bounded", "max_staleness": 1},
        trainer={"total_steps": 4, "save_freq": 0, "test_freq": 0, "val_before_train": False},
        learner={"world_size": 1},
    )
    with training(config, tmp_path / "run") as run:
        run.wait_for_phase("learn", 3)
        run.kill_group("controller")
        assert run.finish() == 0, run.output
        assert_sound(run)
        batches = {e["step"]: e.get("again", []) for e in only(run.events, "batch")}
    assert [len(batches[step]) for step in (2, 3, 4)] == [32, 32, 32]
    assert batches[1] == []
    assert verify(tmp_path / "run").counts["rows trained again"] == 96
    lines = {line["step"]: line for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")}
    assert [lines[step]["replay/share"] for step in (1, 2, 3, 4)] == [0.0, 32 / 96, 32 / 96, 32 / 96]
    assert all(lines[step]["actor/first_ppo_kl"] == 0.0 for step in (2, 3, 4))
    assert all(math.isfinite(lines[step]["actor/grad_norm"]) for step in (2, 3, 4))
    assert max(lines[step]["replay/age/max"] for step in (3, 4)) == 2.0
