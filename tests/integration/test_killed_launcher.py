"""The launcher is killed while the services start: no process of the run is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.training_run import tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_all_processes_end_if_the_launcher_is_killed_during_the_start(
    inputs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The engine and the ranks are still starting; if the launcher is killed, all must end by themselves."""
    with training(tiny_config(inputs), tmp_path / "run") as run:
        for name in ("reward-0", "learner-0", "rollout-0"):
            run.wait_for_member(name)
        run.look()
        os.kill(run.pid_of("launcher"), number)
        code = run.process.wait(120)
        run.wait_until_nothing_is_left(timeout_s=120)
        assert code == (143 if number == signal.SIGTERM else -number)
