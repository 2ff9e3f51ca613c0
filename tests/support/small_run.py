"""A small run of `paceline train`, with which deployed forms of it are compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from support.training_run import Row, TrainingRun, tiny_config, training

METRICS_PORT: Final = 9480
SECTIONS: Final[dict[str, Any]] = {"trainer": {"total_steps": 3, "save_freq": 1}}


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """What the run did, undisturbed: its metrics, and the ports on which its processes listened meanwhile.

    `listening` has command, address and port; the metrics endpoints are at METRICS_PORT and behind.
    """

    metrics: list[Row]
    listening: list[tuple[str, str, int]]


def train_locally(inputs: Path, run_dir: Path) -> LocalRun:
    """Trains on the folder of `prepare_inputs`."""
    sections = SECTIONS | {"telemetry": {"prometheus_port": METRICS_PORT}}
    with training(tiny_config(inputs, **sections), run_dir) as run:
        run.wait_for(lambda event: event["event"] == "commit", timeout_s=400)
        ports = _listening(run)
        assert run.finish(timeout_s=400) == 0
    return LocalRun(metrics=run.metrics, listening=ports)


def _listening(run: TrainingRun) -> list[tuple[str, str, int]]:
    leaders = set(run.note["pids"].values())
    pids = leaders | {c.pid for pid in leaders for c in psutil.Process(pid).children(recursive=True)}
    return [
        (psutil.Process(c.pid).name(), c.laddr.ip, c.laddr.port)
        for c in psutil.net_connections(kind="tcp")
        if c.status == psutil.CONN_LISTEN and c.pid in pids
    ]
