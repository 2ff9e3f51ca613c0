"""Clients score a run over streams of their own; one is killed and one comes while it trains."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.sizing.machine import free_port
from support.training_run import TRANSPORT, Row, assert_same_metrics, assert_sound, only, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

# With the validation of the reference.
NUM_STEPS = 7


@contextlib.contextmanager
def client(address: str, token_file: Path, scored: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "support.attached_client", address, str(scored)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PACELINE_REWARD_TOKEN_FILE": str(token_file), "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(path: Path, num_bytes: int) -> None:
    deadline = time.monotonic() + 200
    while not path.exists() or path.stat().st_size < num_bytes:
        assert time.monotonic() < deadline, f"nothing is written: {path.name}"
        time.sleep(0.01)


def test_clients_that_come_and_go_change_nothing(
    config: dict[str, Any], undisturbed: list[Row], tmp_path: Path
) -> None:
    """The reference scored with the same function in a child process of the reward service, which lived."""
    port = free_port()
    address, token = f"127.0.0.1:{port}", tmp_path / "run" / "token"
    with_clients = {
        **config,
        # It goes on until the client that comes late has scored something, whenever that is.
        "trainer": {**config["trainer"], "total_steps": 1000},
        "reward": {"attached": [{"name": "letters", "timeout_s": 60}]},
        "service": {**config["service"], "reward_port": port},
    }
    scored = {name: tmp_path / name for name in ("lives", "killed", "late")}
    with contextlib.ExitStack() as open_things:
        run = open_things.enter_context(training(with_clients, tmp_path / "run", "--open"))
        wait_for(token, 1)
        lives, killed = (
            open_things.enter_context(client(address, token, scored[name])) for name in ("lives", "killed")
        )
        wait_for(scored["killed"], 3)
        killed.kill()
        with client(address, token, scored["late"]) as late:
            wait_for(scored["late"], 3)
            run.wait_for(lambda e: e["event"] == "step" and e["step"] == NUM_STEPS)
            run.interrupt()
            assert run.finish() == 130, run.output
            # The run's end ends them.
            assert [process.wait(timeout=60) for process in (lives, late)] == [0, 0]
        assert only(run.events, "group_dropped") == []
        assert_same_metrics(run.metrics[: NUM_STEPS + 1], undisturbed[: NUM_STEPS + 1], without=TRANSPORT)
        assert "val/reward/mean" in undisturbed[NUM_STEPS]
        assert_sound(run)
