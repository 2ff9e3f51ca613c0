"""Runs a program in a confinement, with a deadline, and returns its output."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import DeadlineError, EnvironmentLackError
from paceline.core.text import one_line
from paceline.service.confinement import inside
from paceline.service.tasks import cancel

_READ_BYTES = 64 * 1024
_EXIT_S = 5.0
_PROBE_S = 20.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfinedLimits:
    """What a program may use.

    Args:
        seconds: time from start to end.
        memory_bytes, disk_bytes: memory of each process; size of its /tmp, which is in memory.
        max_processes: most processes and threads at a time.
        max_output_bytes: most bytes of output; a program that prints more is ended.
    """

    seconds: float = 10.0
    memory_bytes: int = 512 << 20
    disk_bytes: int = 32 << 20
    max_processes: int = 8
    max_output_bytes: int = 256 << 10


class Ending(enum.Enum):
    """Says how a confined program ended."""

    EXITED = "exited"
    TIMED_OUT = "timed out"
    PRINTED_TOO_MUCH = "printed too much"
    NOT_STARTED = "not started"
    """The confinement was set up, but the command is not an executable program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """The result of a program: `code` is its exit code, or 128 plus the number of the signal that ended it.

    If it was not started, `stderr` says why.
    """

    ending: Ending
    code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Says which program to run, and within which limits.

    Args:
        words: absolute path and arguments.
        files: name and text of files to write into its working directory, /tmp.
        read_only: folders that it can read besides the system's and Python's.
    """

    words: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    read_only: Sequence[str] = ()
    limits: ConfinedLimits = field(default_factory=ConfinedLimits)


async def run_confined(command: Command) -> CommandResult:
    """Runs a program and waits for its end, which also ends everything that it started.

    Raises:
        EnvironmentLackError: the confinement could not be built; nothing was run.
        DeadlineError: building it took as long as the program may run; nothing was run.
        OSError: no further process, file or pipe is possible at the moment.
    """
    report, theirs = os.pipe()
    try:
        outcome = await _run(command, theirs)
        os.set_blocking(report, False)  # every process that has the other end was killed
        with contextlib.suppress(BlockingIOError):
            return _checked(outcome, os.read(report, _READ_BYTES), command)
        return _checked(outcome, b"", command)
    finally:
        os.close(report)


async def _run(command: Command, report: int) -> CommandResult:
    """Runs the command to its end; closes `report`, which the builder writes to."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, report)
        # Only a mount point for the in-memory root; nothing is written there.
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-root-"))
        spec = os.memfd_create("paceline-command")
        try:
            os.write(spec, json.dumps(_spec(command, root)).encode())
            os.lseek(spec, 0, os.SEEK_SET)
            process = await asyncio.create_subprocess_exec(
                python(), "-I", "-S", inside.__file__, str(spec), str(report),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={},
                pass_fds=(spec, report),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(spec)
        try:
            return await _follow(process, command)
        finally:
            await _end(process)


def _checked(outcome: CommandResult, report: bytes, command: Command) -> CommandResult:
    """Returns the outcome if the builder reported the program's start."""
    if report == inside.STARTED:
        return outcome
    reason = report.removeprefix(inside.STARTED).decode(errors="replace")
    if report.startswith(inside.STARTED):
        return CommandResult(ending=Ending.NOT_STARTED, code=-1, stdout=b"", stderr=reason.encode())
    if not reason and outcome.ending is Ending.TIMED_OUT:
        raise DeadlineError(
            phase="CONFINE",
            peer="the builder of a program's confinement",
            seconds=command.limits.seconds,
            hint="this machine has too much to do: run fewer programs at a time, or allow each more time",
        )
    reason = (
        reason
        or f"its builder ended with {outcome.code}: {one_line(outcome.stderr.decode(errors='replace'))}"
    )
    raise EnvironmentLackError(
        f"code cannot be confined on this machine ({reason}): allow user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1; in a container, seccomp and AppArmor profiles that "
        "let unshare and mount pass: confined.yaml of docs/deploy.md), on Linux 5.12 or newer"
    )


async def why_not_confined() -> str:
    """Returns why this machine cannot confine programs; "" if it can."""
    limits = ConfinedLimits(seconds=_PROBE_S)
    try:
        outcome = await run_confined(Command(words=["/bin/true"], limits=limits))
    except (EnvironmentLackError, DeadlineError, OSError) as error:
        return str(error)
    if (outcome.ending, outcome.code) != (Ending.EXITED, 0):
        return f"/bin/true {outcome.ending.value} with {outcome.code}: {outcome.stderr[:200]!r}"
    return ""


def python() -> str:
    """Returns the Python of confined programs: this one, without its packages."""
    return os.path.realpath(sys.executable)


def _spec(command: Command, root: str) -> dict[str, object]:
    limits = command.limits
    return {
        "root": root,
        "command": list(command.words),
        "files": dict(command.files),
        "read_only": [*_SYSTEM, sys.base_prefix, *command.read_only],
        "other_user": os.getuid() == 0,
        "disk_bytes": limits.disk_bytes,
        "environment": {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
        "limits": {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NPROC": limits.max_processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CPU": int(limits.seconds) + 2,
        },
    }


async def _follow(process: asyncio.subprocess.Process, command: Command) -> CommandResult:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    until = time.monotonic() + command.limits.seconds
    reading = [
        asyncio.create_task(_read(stream, command.limits.max_output_bytes), name="confined output")
        for stream in (process.stdout, process.stderr)
    ]
    writing = asyncio.create_task(_write(process.stdin, command.stdin), name="confined input")
    try:
        _, late = await asyncio.wait(reading, timeout=until - time.monotonic(), return_when="FIRST_EXCEPTION")
        too_much = any(task.done() and task.exception() is not None for task in reading)
        if late or too_much:
            ending = Ending.PRINTED_TOO_MUCH if too_much else Ending.TIMED_OUT
            return CommandResult(ending=ending, code=-1, stdout=b"", stderr=b"")
        try:
            async with asyncio.timeout(max(0.1, until - time.monotonic())):
                code = await process.wait()
        except TimeoutError:
            return CommandResult(ending=Ending.TIMED_OUT, code=-1, stdout=b"", stderr=b"")
        return CommandResult(
            ending=Ending.EXITED, code=code, stdout=reading[0].result(), stderr=reading[1].result()
        )
    finally:
        await cancel(*reading, writing)


async def _read(stream: asyncio.StreamReader, limit: int) -> bytes:
    parts, size = [], 0
    while part := await stream.read(_READ_BYTES):
        size += len(part)
        if size > limit:
            raise OverflowError(f"over {limit} bytes")
        parts.append(part)
    return b"".join(parts)


async def _write(stream: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(text)
        await stream.drain()
        stream.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills the process; its namespaces end with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    async with asyncio.timeout(_EXIT_S):
        await process.communicate()  # reads to the end, so that asyncio closes the pipes
