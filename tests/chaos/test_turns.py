"""A run in turns: members killed in their own turn and in the other's come back, and no metric changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kills import kill
from support.training_run import Row, differences, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

KILLS = (("rollout-0", "learn"), ("learner-1", "learn"), ("controller", "learn"))
NUM_STEPS = 7  # with a validation after the last one, as in the reference


def test_kills_in_every_turn_change_no_metric(
    config: dict[str, Any], undisturbed: list[Row], tmp_path: Path
) -> None:
    """On a CPU nothing is given up; orders, turns and the push through shared memory are those of a GPU."""
    sections = {
        "placement": "colocated",
        "rollout": {**config["rollout"], "sleep": "always"},
        "trainer": {**config["trainer"], "total_steps": NUM_STEPS},
    }
    with training({**config, **sections}, tmp_path / "run") as run:
        run.wait_for(lambda e: e["event"] == "step" and e["step"] == 1)
        resolved = yaml.safe_load((run.run_dir / "config.resolved.yaml").read_text())
        assert resolved["weights"]["backend"] == "shared"
        for number, (name, phase) in enumerate(KILLS):
            step = 2 + 2 * number
            run.wait_for_phase(phase, step)
            kill(run, name)
            run.look()
            run.wait_for(lambda e, step=step: e["event"] == "step" and e["step"] > step)
        code = run.finish(timeout_s=600)
        assert code == 0, run.output
        by_step = differences(run.metrics[: NUM_STEPS + 1], undisturbed[: NUM_STEPS + 1])
        assert not by_step, by_step
        holders = [event["holder"] for event in run.events if event["event"] == "turn"]
        assert holders[:5] == ["push", "rollout", "learner", "push", "rollout"]
        assert holders.count("learner") >= NUM_STEPS
