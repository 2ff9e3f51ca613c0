"""Members started by hand join a run of `paceline train --open`, work in it, and leave when told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.joining import join_and_leave
from support.training_run import assert_sound, prepare_inputs, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_rollout_server_and_a_reward_service_join_and_leave(tmp_path: Path) -> None:
    inputs = prepare_inputs(tmp_path / "inputs", num_train=16 * 30, num_val=8)
    config = tiny_config(inputs, trainer={"total_steps": 1000, "save_freq": 0}, learner={"world_size": 1})
    with training(config, tmp_path / "run", "--open", "trainer.val_before_train=false") as run:
        join_and_leave(run, tmp_path)
        run.process.terminate()
        assert run.finish() == 143
    assert_sound(run)
