"""Kills processes of a training run by their names."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

from paceline.runs import run_dir as run_dirs
from support.training_run import TrainingRun


def kill(run: TrainingRun, name: str) -> None:
    """Kills the process that has the name now; a fault that cannot happen is an error."""
    deadline = time.monotonic() + 60
    while True:
        note = run_dirs.read_note(run.run_dir)
        pid = note.pids.get(name) if note is not None else None
        with contextlib.suppress(psutil.NoSuchProcess):
            if pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                os.kill(pid, signal.SIGKILL)
                return
        assert time.monotonic() < deadline, f"there is no {name} to kill"
        time.sleep(0.05)
