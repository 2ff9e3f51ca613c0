"""A controller that stands still for longer than a member may be silent, and is killed; a drained server."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.training_run import PACELINE, Row, prepare_inputs, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

# The launcher kills a controller that is silent for twice as long as a member may be.
DEAD_AFTER_S, PAUSE_S = 10.0, 12.0


def members(events: list[Row], what: str) -> list[tuple[str, str]]:
    return [(e["member"], e["reason"]) for e in events if e["event"] == "member" and e["what"] == what]


def test_a_paused_controller_takes_nobody_for_dead_and_servers_leave_in_order(tmp_path: Path) -> None:
    inputs = prepare_inputs(tmp_path, num_train=64, num_val=8)
    config = tiny_config(
        inputs,
        rollout={"replicas": 2},
        trainer={"total_steps": 1000},
        learner={"world_size": 1},
        service={"suspect_after_s": 4.0, "dead_after_s": DEAD_AFTER_S},
    )
    with training(config, tmp_path / "run") as run:
        run.wait_for_phase("collect", 1)
        controller = run.pid_of("controller")
        os.kill(controller, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(controller, signal.SIGCONT)

        run.wait_for_phase("collect", 2)
        run.look()
        # By name, since the run is not under runs/.
        command = [str(PACELINE), "rollout", "drain", "rollout-1", str(run.run_dir)]
        drained = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert (drained.returncode, drained.stdout.splitlines()[-1:]) == (0, ["rollout-1 has left"]), drained
        last = subprocess.run(
            [*command[:3], "rollout-0", str(run.run_dir)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert last.returncode == 2
        assert "rollout-0 is the last rollout member" in last.stderr

        with run.paused_in("collect") as killed_in:
            run.kill_group("controller")

        run.wait_for(lambda e: e["event"] == "step" and e["step"] == killed_in + 1)
        run.interrupt()
        assert run.finish() == 130, run.output
        events = run.events
        assert members(events, "dead") == []
        assert ("rollout-1", "drained") in members(events, "left")
        starts = [name for name, _ in members(events, "registered")]
        assert starts.count("rollout-1") == 1, "a drained server is not started again"
        # The other outlives the controller, and goes on with the policy that it holds.
        incarnations = {
            e["incarnation"] for e in events if e["event"] == "member" and e["member"] == "rollout-0"
        }
        assert (starts.count("rollout-0"), len(incarnations)) == (2, 1)
        assert sum(e["event"] == "commit" and e["version"] == killed_in - 1 for e in events) == 1
        assert not any(e["event"] == "newcomers" for e in events)
        last = run.metrics[-1]["step"]
        assert [row["step"] for row in run.metrics] == list(range(last + 1))
        last_step = f"train:{last}:"
        servers = {
            e["server"] for e in events if e["event"] == "trajectory" and e["id"].startswith(last_step)
        }
        assert servers == {"rollout-0"}
        log = (run.run_dir / "logs/controller.log").read_text()
        assert "this process did nothing for" in log
