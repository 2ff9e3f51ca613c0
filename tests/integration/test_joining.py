"""Members started by hand join a run of `paceline train --open`, work in it, and leave when told to."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.controller.verify.check import verify
from support.training_run import MARK, PACELINE, prepare_inputs, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@contextmanager
def member(line: str, mark: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a printed command as a shell would."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec env {line}"],
            env=os.environ | {MARK: mark},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_a_rollout_server_and_a_reward_service_join_and_leave(tmp_path: Path) -> None:
    inputs = prepare_inputs(tmp_path / "inputs", num_train=16 * 30, num_val=8)
    config = tiny_config(inputs, trainer={"total_steps": 1000, "save_freq": 0}, learner={"world_size": 1})
    with training(config, tmp_path / "run", "--open", "trainer.val_before_train=false") as run:
        run.wait_for_phase("collect", 1)
        lines = re.findall(r"^.*PACELINE_TOKEN_FILE=.*$", run.output, flags=re.MULTILINE)
        assert [re.search(r"paceline\.(\w+)", line)[1] for line in lines] == ["rollout", "reward"]  # type: ignore[index]
        with (
            member(lines[0], run.mark, tmp_path / "rollout.log") as rollout,
            member(lines[1], run.mark, tmp_path / "reward.log") as reward,
        ):
            run.wait_for(
                lambda e: e["event"] == "trajectory" and e.get("server") == "rollout-1", timeout_s=250
            )
            run.wait_for_member("reward-1")
            drain = [str(PACELINE), "rollout", "drain", "rollout-1", str(run.run_dir), "--timeout", "60"]
            subprocess.run(drain, check=True, timeout=90, capture_output=True)
            assert rollout.wait(30) == 0
            reward.terminate()
            assert reward.wait(30) == 0
            assert run.process.poll() is None, "the run goes on without them"
        deadline = time.monotonic() + 60
        while "reward-1 has left" not in run.output and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "reward-1 has left" in run.output
        run.process.terminate()
        assert run.finish() == 143
        assert [str(breach) for breach in verify(run.run_dir).breaches] == []
