"""Local processes: each a session of its own with a log file, ended as a whole tree."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.cli.launch.plan import ProcessSpec
from paceline.core.errors import EnvironmentLackError
from paceline.service.process import DIE_WITH_PARENT, PARENT_PID

_ERROR = re.compile(r"\s(ERROR|CRITICAL)\s\S+\s\S+: (?P<text>.*)")


@dataclass(slots=True)
class ManagedProcess:
    """A started process. `exited` is done when it has ended, with its return code (negative: the signal's number)."""

    spec: ProcessSpec
    log_path: Path
    exited: asyncio.Task[int]
    _process: asyncio.subprocess.Process
    log_start: int

    @property
    def name(self) -> str:
        """The process's name in the run."""
        return self.spec.name

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's and its session's."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self.exited.done()

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the whole process group, also when its leader has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Asks the process itself to end; its children are its own to end."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def outcome(self) -> str:
        """How it ended, in words."""
        if self.running:
            return "running"
        code = self.exited.result()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def last_error(self) -> str:
        """The last error that it logged since it was started, else its last line, else "".

        A process that was killed had no last words: its last line tells nothing then.
        """
        lines = self.tail(200)
        for line in reversed(lines):
            found = _ERROR.search(line)
            if found:
                return found["text"].removeprefix("fatal: ")
        killed = not self.running and self.exited.result() < 0
        return lines[-1] if lines and not killed else ""

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of its log, of this start only."""
        with self.log_path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start, file.tell() - 200_000))
            text = file.read().decode("utf-8", errors="replace")
        return list(deque((line for line in text.splitlines() if line.strip()), num_lines))


async def start(spec: ProcessSpec, log_path: Path, secrets: Mapping[str, str]) -> ManagedProcess:
    """Starts a process in its own session, its output appended to `log_path`.

    It must be called from the main thread: PR_SET_PDEATHSIG looks at the thread that forked.

    Raises:
        EnvironmentLackError: the program cannot be run.
    """
    env = os.environ | dict(spec.env) | dict(secrets)
    env |= {DIE_WITH_PARENT: "1", PARENT_PID: str(os.getpid())}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        start_at = log.tell()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentLackError(
                f"cannot start {spec.name} ({' '.join(spec.command)}): {error}"
            ) from error
    exited = asyncio.create_task(process.wait(), name=f"exit of {spec.name}")
    return ManagedProcess(spec, log_path, exited, process, start_at)


def descendants() -> dict[int, psutil.Process]:
    """Everything below this process, by pid; with `adopt_orphans` also what lost its parent."""
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


def kill_all(processes: Iterable[psutil.Process], *, timeout_s: float = 5.0) -> list[str]:
    """SIGKILL by pid, and waits; returns what they were, in words."""
    killed, left = [], []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            if not is_zombie:
                killed.append(f"{process.pid} ({' '.join(process.cmdline()[:4])[:80]})")
                process.kill()
            left.append(process)
    psutil.wait_procs(left, timeout=timeout_s)
    return killed
