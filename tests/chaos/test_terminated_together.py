"""SIGTERM to every service at once, as from `helm uninstall` or an engine that ends: the step in progress is
finished and saved, and the next start goes on after it. First the members alone, as compose does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.broker.redis.redis_server import RedisServer
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.verify.check import verify
from paceline.launch.planning import plan
from paceline.runs import run_dir as run_dirs
from paceline.service.identity.credentials import TOKEN
from paceline.service.member.runtime import EXIT_INTERRUPTED, STOP_GRACE
from paceline.service.process import BROKER_URL
from paceline.sizing.machine import Machine, free_port
from support.forked import Forked
from support.training_run import TRANSPORT, Row, assert_same_metrics, only, read_jsonl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

NUM_STEPS = 7  # with a validation after the last one, as in the reference
HANG_S = 600.0


class Services:
    """The processes of one start, each as its container would run it."""

    def __init__(self, config: RunConfig, run_dir: Path, broker_url: str) -> None:
        self.run_dir, self.journal = run_dir, run_dir / "events.jsonl"
        self._read = self.journal.stat().st_size if self.journal.exists() else 0
        address = f"127.0.0.1:{config.service.controller_port}"
        specs = [
            plan.controller(config, run_dir, run_dir / "controller.address"),
            *plan.members(config, Machine.here(), controller_address=address, master_port=free_port()),
        ]
        common = {TOKEN: "secret", BROKER_URL: broker_url, STOP_GRACE: "900", "OMP_NUM_THREADS": "1"}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for spec in specs:
            with (run_dir / "logs" / f"{spec.name}.log").open("a") as log:
                self.processes[spec.name] = Forked(
                    spec.command[1:],
                    env={**os.environ, **spec.env, **common},
                    cwd=run_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    @property
    def events(self) -> list[Row]:
        return read_jsonl(self.journal)

    def wait_for_phase(self, phase: str, step: int) -> None:
        deadline = time.monotonic() + HANG_S
        while not any(e["to"] == phase and e["step"] == step for e in only(self.events, "phase")):
            assert time.monotonic() < deadline, self.logs()
            assert all(process.poll() is None for process in self.processes.values()), self.logs()
            time.sleep(0.01)

    def terminate(self, *names: str) -> int:
        """SIGTERM to these services while the controller stands still; returns the step in progress."""
        controller = self.processes["controller"]
        controller.send_signal(signal.SIGSTOP)
        try:
            for name in names:
                self.processes[name].send_signal(signal.SIGTERM)
            return int(max(event["step"] for event in only(self.events, "phase")))
        finally:
            controller.send_signal(signal.SIGCONT)

    def codes(self, *names: str) -> list[int]:
        """The exit codes, once all have ended."""
        try:
            return [self.processes[name].wait(HANG_S) for name in names]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended:\n{self.logs()}") from None

    def logs(self) -> str:
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)


@contextlib.contextmanager
def started(config: RunConfig, run_dir: Path, broker_url: str) -> Iterator[Services]:
    services = Services(config, run_dir, broker_url)
    try:
        yield services
    finally:
        for process in services.processes.values():
            process.kill()
            process.wait()


def test_nothing_is_lost_where_every_service_is_told_to_end_in_the_middle_of_a_step(
    config: dict[str, Any], undisturbed: list[Row], tmp_path: Path
) -> None:
    trainer = {
        **config["trainer"],
        "total_steps": NUM_STEPS,
        "save_freq": 0,
        "run_dir": str(tmp_path / "run"),
    }
    service = {**config["service"], "controller_port": free_port()}
    prepared = run_dirs.prepare(parse(RunConfig, {**config, "trainer": trainer, "service": service}))
    with RedisServer.start(tmp_path / "redis") as redis:

        def start() -> contextlib.AbstractContextManager[Services]:
            return started(prepared.config, prepared.run_dir, redis.url)

        with start() as run:
            run.wait_for_phase("collect", 2)
            step = run.terminate(*run.processes)
            assert set(run.codes(*run.processes)) == {EXIT_INTERRUPTED}
            assert (
                only(run.events, "end")[-1]["message"] == f"stopped after step {step} of {NUM_STEPS}: SIGTERM"
            )
            assert [event["step"] for event in only(run.events, "checkpoint")] == [step]

        with start() as run:
            run.wait_for_phase("learn", step + 2)
            # The learner by its second rank, which may be another host's.
            members = [name for name in run.processes if name != "controller"]
            step = run.terminate(*(name for name in members if name != "learner-0"))
            assert set(run.codes(*members)) == {EXIT_INTERRUPTED}
            assert only(run.events, "checkpoint")[-1]["step"] == step
            run.processes["controller"].send_signal(signal.SIGTERM)
            assert run.codes("controller") == [EXIT_INTERRUPTED]

        with start() as run:
            assert run.codes(*run.processes) == [0] * len(run.processes), run.logs()
        assert not only(run.events, "rewind"), "no step was done twice"
        assert [event["step"] for event in only(run.events, "step")] == list(range(NUM_STEPS + 1))
        assert_same_metrics(
            read_jsonl(run.run_dir / "metrics.jsonl"), undisturbed[: NUM_STEPS + 1], without=TRANSPORT
        )
        assert [str(breach) for breach in verify(run.run_dir).breaches] == []
