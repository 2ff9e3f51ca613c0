"""Clients score a run over streams of their own; one is killed and one comes while it trains."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.training_run import TRANSPORT, Row, assert_same_metrics, assert_sound, only, training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(580)]

NUM_STEPS = 16


@contextlib.contextmanager
def client(address: str, token: str, scored: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "support.attached_client", address, str(scored)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PACELINE_REWARD_TOKEN": token, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_it_scores(scored: Path) -> None:
    deadline = time.monotonic() + 200
    while not scored.exists() or scored.stat().st_size < 3:
        assert time.monotonic() < deadline, f"nothing was scored: {scored.name}"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_clients_that_come_and_go_change_nothing(
    config: dict[str, object], undisturbed: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference scored with the same function in a child process of the reward service, which lived."""
    port, token = free_port(), "a token that the clients know"
    monkeypatch.setenv("PACELINE_TOKEN", token)
    address = f"127.0.0.1:{port}"
    with_clients = {
        **config,
        "reward": {"attached": [{"name": "letters", "timeout_s": 20}]},
        "service": {**dict(config["service"]), "reward_port": port},  # type: ignore[call-overload]
    }
    scored = {name: tmp_path / name for name in ("lives", "killed", "late")}
    with (
        training(with_clients, tmp_path / "run") as run,
        client(address, token, scored["lives"]) as lives,
        client(address, token, scored["killed"]) as killed,
    ):
        wait_until_it_scores(scored["killed"])
        killed.kill()
        with client(address, token, scored["late"]) as late:
            wait_until_it_scores(scored["late"])
            assert run.finish(timeout_s=400) == 0, run.output
            # The run's end ends them.
            assert [process.wait(timeout=20) for process in (lives, late)] == [0, 0]
        assert all(path.stat().st_size > 0 for path in scored.values())
        assert only(run.events, "group_dropped") == []
        assert [row["step"] for row in run.metrics[-1:]] == [NUM_STEPS]
        assert_same_metrics(run.metrics, undisturbed, without=TRANSPORT)
        assert_sound(run)
