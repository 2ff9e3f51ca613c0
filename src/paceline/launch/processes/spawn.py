"""A local process: started in its own session with a log file, signalled as a group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.core.errors import EnvironmentLackError
from paceline.launch import remote
from paceline.launch.planning.plan import ProcessSpec
from paceline.launch.processes.forking import Forking
from paceline.service.process import DIE_WITH_PARENT, PARENT_PID, STARTED_AS

VMSTAT = Path("/proc/vmstat")
_FAMILY_S = 2.0
# asyncio's return code for a child if another part of the process has waited for its end.
_UNKNOWN = 255
_ERROR = re.compile(r"\s(ERROR|CRITICAL)\s\S+\s\S+: (?P<text>.*)")


@dataclass(slots=True)
class ManagedProcess:
    """Watches a process that the launcher started.

    `exited` gives its return code; a negative one is the number of a signal.

    `pid` is also the id of its group and session. `mark` is in its environment if it is a program, and in
    that of every program that it starts; its forks are in its session. A member's `mark` is also its
    incarnation. `oom_kills` counts the processes that the kernel had killed for lack of memory before this
    one began.
    """

    spec: ProcessSpec
    log_path: Path
    exited: asyncio.Task[int]
    pid: int
    _stdin: asyncio.StreamWriter | None
    log_start: int
    mark: str
    oom_kills: int

    @property
    def name(self) -> str:
        """The process's name in the run."""
        return self.spec.name

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self.exited.done()

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the process group, even if its leader has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill_family(self) -> None:
        """Kills its child processes in any group: a child that outlives it keeps ports and GPU memory."""
        self.signal_group(signal.SIGKILL)
        family = (p for p in descendants().values() if _session_of(p) == self.pid or _mark_of(p) == self.mark)
        kill_all(family, timeout_s=_FAMILY_S)

    def terminate(self) -> None:
        """Asks the process to end; the process must end its children itself."""
        if self._stdin is not None:
            self._stdin.close()
        elif self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def outcome(self) -> str:
        """Describes in words how the process ended."""
        if self.running:
            return "running"
        return outcome_of(self.exited.result())

    def last_error(self) -> str:
        """Returns the last error that the process logged since its start, else its last line, else "".

        A killed process had no time to log a reason, so its last line does not count.
        """
        lines = self.tail(200)
        for line in reversed(lines):
            error = _ERROR.search(line)
            if error:
                return error["text"].removeprefix("fatal: ")
        killed = not self.running and self.exited.result() < 0
        return lines[-1] if lines and not killed else ""

    def describe_end(self, verb: str) -> str:
        """Returns a sentence on the process's end: how it ended, its last error, and where its log is."""
        error = self.last_error()
        reason = f": {error}" if error else ""
        if not self.running and self.exited.result() == -signal.SIGKILL and _num_oom_kills() > self.oom_kills:
            reason = ": the kernel has killed processes for lack of memory since its start"
        return f"{self.name} {verb} ({self.outcome()}){reason} [log: {self.log_path}]"

    def tail(self, num_lines: int) -> list[str]:
        """Returns the last lines that the process has logged since its start."""
        with self.log_path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start, file.tell() - 200_000))
            text = file.read().decode("utf-8", errors="replace")
        return list(deque((line for line in text.splitlines() if line.strip()), num_lines))


def outcome_of(code: int) -> str:
    """Describes in words how a process with this return code ended."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


async def start(
    spec: ProcessSpec, log_path: Path, secret_env: Mapping[str, str], forking: Forking | None = None
) -> ManagedProcess:
    """Starts a process in its own session and appends its output to `log_path`; as a fork if `forking` can.

    Must be called from the main thread: PR_SET_PDEATHSIG follows the thread that forked.

    Raises:
        EnvironmentLackError: the program cannot be run.
    """
    mark = f"{spec.name}-{secrets.token_hex(8)}"
    own_env = dict(spec.env) | dict(secret_env) | {STARTED_AS: mark}
    env = os.environ | ({STARTED_AS: mark} if spec.shell else own_env)
    env |= {DIE_WITH_PARENT: "1", PARENT_PID: str(os.getpid())}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        start_at = log.tell()
        forked = None if forking is None else await forking.start(spec, log_path, env)
        if forked is not None:
            exited = asyncio.create_task(_exit_of(forked), name=f"exit of {spec.name}")
            return ManagedProcess(spec, log_path, exited, forked, None, start_at, mark, _num_oom_kills())
        try:
            process = await asyncio.create_subprocess_exec(
                *(spec.shell or spec.command),
                env=env,
                stdin=asyncio.subprocess.PIPE if spec.shell else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentLackError(
                f"cannot start {spec.name} ({' '.join(spec.command)}): {error}"
            ) from error
    if process.stdin is not None:
        # It stays open: its end is what ends the process on the other host.
        process.stdin.write(remote.order(spec.command, own_env))
    exited = asyncio.create_task(_exit_of_program(process), name=f"exit of {spec.name}")
    return ManagedProcess(
        spec, log_path, exited, process.pid, process.stdin, start_at, mark, _num_oom_kills()
    )


async def _exit_of_program(process: asyncio.subprocess.Process) -> int:
    """Returns a program's return code; a signal that ended it behind a remote shell counts as a local one."""
    code = await process.wait()
    number = code - remote.SIGNALLED
    return -number if process.stdin is not None and number in set(signal.Signals) else code


async def _exit_of(pid: int) -> int:
    """Waits for a child of the fork server to end; returns its return code."""
    await wait_for_exit(pid)
    return _reap(pid)


def _reap(pid: int) -> int:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return _UNKNOWN  # psutil has waited for it as well
    return os.waitstatus_to_exitcode(status)


def _num_oom_kills() -> int:
    """Returns the number of processes that the kernel has killed because memory ran out."""
    with contextlib.suppress(OSError):
        for line in VMSTAT.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(process.pid)
    return None


def _mark_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.environ().get(STARTED_AS)
    return None


def descendants() -> dict[int, psutil.Process]:
    """Returns all descendants of this process by pid; after `adopt_orphans`, also orphaned ones."""
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


def kill_all(processes: Iterable[psutil.Process], *, timeout_s: float = 5.0) -> list[str]:
    """Kills processes by pid and waits for their end; returns a description of each."""
    killed, ending = [], []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            if not is_zombie:
                killed.append(f"{process.pid} ({' '.join(process.cmdline()[:4])[:80]})")
                process.kill()
            ending.append(process)
    psutil.wait_procs(ending, timeout=timeout_s)
    return killed


async def wait_for_exit(pid: int | None) -> None:
    """Waits for the end of a process, which need not be a child of this one; forever if `pid` is None."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    if pid is None:
        await ended
        return
    descriptor = os.pidfd_open(pid)

    def on_end() -> None:
        loop.remove_reader(descriptor)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, on_end)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
