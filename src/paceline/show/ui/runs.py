"""The served runs: their records, and what each is doing now."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.runs import run_dir as run_dirs
from paceline.runs.controller_client import ControllerClient, RunStatus
from paceline.show.live.view import phase_words
from paceline.show.report.content import RunContent, is_run
from paceline.show.ui.machine import MachineUsage

_STATUS_S = 1.0
_ANSWER_S = 8.0


class ServedRun:
    """Serves one run directory; thread-safe. Asks the run's controller at most once a second.

    Args:
        loop: loop of the thread that talks to controllers.
    """

    def __init__(self, folder: Path, machine: MachineUsage, loop: asyncio.AbstractEventLoop) -> None:
        self._folder, self._machine, self._loop = folder, machine, loop
        self._content, self._lock = RunContent(folder), threading.Lock()
        self._asked_at, self._now = float("-inf"), dict[str, Any]()

    def head(self) -> dict[str, Any]:
        """Returns the run's summary for the list of runs: name, state, duration, progress, rewards."""
        note = run_dirs.read_note(self._folder)
        with self._lock:
            return {**self._content.head(), "state": "running" if note and note.alive else ""}

    def get(self, path: Sequence[str]) -> Any:
        """Returns the part of the page's data that a path names; None if there is no such part."""
        match path:
            case ["metrics", generation, start] if generation.isdecimal() and start.isdecimal():
                return self._locked(lambda c: c.metrics(generation=int(generation), start=int(start)))
            case ["journal"]:
                return self._locked(RunContent.journal)
            case ["timeline", step] if step.isdecimal():
                return self._content.timelines({int(step)}).get(int(step), [])
            case ["samples"]:
                return self._content.samples.names()
            case ["samples", name]:
                return self._content.samples.rows(name)
            case ["samples", name, row] if row.isdecimal():
                return self._content.samples.details(name, [int(row)]).get(int(row))
            case ["config"]:
                return self._content.config()
            case ["now"]:
                return self._locked(lambda _: self._news())
            case _:
                return None

    def _locked(self, read: Callable[[RunContent], Any]) -> Any:
        with self._lock:
            return read(self._content)

    def _news(self) -> dict[str, Any]:
        if time.monotonic() - self._asked_at > _STATUS_S:
            call = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
            self._now = call.result(_ANSWER_S)
            self._asked_at = time.monotonic()
        return self._now

    async def _ask(self) -> dict[str, Any]:
        note = run_dirs.read_note(self._folder)
        if note is None or not note.alive:
            return {}
        usage = {"processes": self._machine.processes(note.pids), "gpus": self._machine.gpus()}
        if not note.controller:
            return {"state": "starting", "line": "its services", **usage}
        try:
            async with ControllerClient.of_run(note) as controller:
                return {**_status(await controller.status()), **usage}
        except PacelineError as error:
            return {"state": "no answer", "line": str(error), **usage}


class ServedRuns:
    """Finds the run in a folder, or all runs below it, including those that begin later."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.folder, self._loop, self._machine = folder, loop, MachineUsage()
        self._known, self._lock = dict[str, ServedRun](), threading.Lock()

    def by_name(self) -> Mapping[str, ServedRun]:
        """Returns the runs that exist now."""
        if is_run(self.folder):
            folders = [self.folder]
        else:
            folders = sorted(filter(is_run, self.folder.iterdir())) if self.folder.is_dir() else []
        with self._lock:
            self._known = {
                path.name: self._known.get(path.name) or ServedRun(path, self._machine, self._loop)
                for path in folders
                if not path.is_symlink()
            }
            return self._known


def _status(status: RunStatus) -> dict[str, Any]:
    now = status.now
    words = phase_words(now.phase, now.admitted, now.wanted)
    return {
        "state": "training",
        "line": f"step {now.step}/{status.total_steps}: {words}, {status.seconds_in_phase:.0f} s",
        "members": [
            {
                "name": member.member_id,
                "state": member.state,
                "in_flight": member.in_flight,
                **({"version": member.policy.version} if member.policy else {}),
            }
            for member in status.members
        ],
    }
