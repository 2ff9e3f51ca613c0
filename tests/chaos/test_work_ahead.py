"""A learner that works ahead of the barrier, a controller and a server are killed in the middle of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.kills import kill
from support.training_run import assert_sound, differences, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

NUM_STEPS = 9
KILLS = {2: "learner-0", 4: "controller", 6: "learner-1", 8: "rollout-0"}
"""By step, in its COLLECT."""


@pytest.fixture
def ahead(config: dict[str, object]) -> dict[str, object]:
    """GRPO with a reference in a single mini-batch, prompts one after the other on two places."""
    changes: dict[str, dict[str, object]] = {
        "data": {"train_batch_size": 8, "max_response_length": 16},
        "algorithm": {
            "adv_estimator": "grpo",
            "use_kl_in_reward": False,
            "kl_ctrl": {"type": "fixed", "kl_coef": 0.01},
        },
        "actor": {"ppo_mini_batch_size": 8, "use_kl_loss": True},
        "barrier": {"work_ahead": "gradients", "prompts_per_chunk": 1},
        "rollout": {"n": 2, "max_num_seqs": 2},
        "trainer": {"total_steps": NUM_STEPS, "test_freq": 0},
    }
    sections: dict[str, object] = dict(config)
    for name, values in changes.items():
        given = sections.get(name, {})
        assert isinstance(given, dict)
        sections[name] = {**given, **values}
    return sections


def test_kills_in_the_middle_of_work_ahead_change_no_number(ahead: dict[str, object], tmp_path: Path) -> None:
    with training(ahead, tmp_path / "undisturbed") as run:
        assert run.finish() == 0, run.output
        undisturbed = run.metrics
    assert any(row["ahead/scored_share"] > 0 for row in undisturbed[1:]), "the test shows nothing"
    with training(ahead, tmp_path / "run") as run:
        for step, victim in KILLS.items():
            run.wait_for_phase("collect", step)
            run.wait_for(
                lambda e, step=step: e["event"] == "trajectory" and e["id"].startswith(f"train:{step}:")
            )
            kill(run, victim)
            run.look()
        assert run.finish(timeout_s=600) == 0, run.output
        assert differences(run.metrics, undisturbed) == {}
        for name in ("ahead/scored_share", "ahead/gradient_share"):
            # A step that begins again finds its trajectories in the log, and has little time.
            assert sum(row[name] for row in run.metrics[1:]) > 0
        assert_sound(run)
        assert run.output.count(" again (") >= len(KILLS), run.output
