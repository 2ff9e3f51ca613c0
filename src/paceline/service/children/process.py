"""The parent's view of a child process that runs a user's code: starts, feeds, observes and kills it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline.core.errors import ConfigError, DeadlineError, PeerLostError
from paceline.service.children import frames
from paceline.service.children.progress import ItemProgress

_log = logging.getLogger(__name__)

_EXIT_DEADLINE_S = 10.0
_PIPES_DEADLINE_S = 1.0
_STREAM_LIMIT_BYTES = 1024 * 1024
_MAX_OUTPUT_BYTES = 256 * 1024
_OUTPUT_SPAN_S = 60.0
_KILL_ROUNDS = 5
# Variables of this process's environment that a user's code may see; others may hold secrets.
_PASSED = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "LD_LIBRARY_PATH",
))  # fmt: skip
_PASSED_PREFIXES = (
    "LC_", "PYTHON", "OMP_", "MKL_", "CUDA_", "NVIDIA_", "XDG_", "TOKENIZERS_", "HF_HUB_OFFLINE",
)  # fmt: skip
_MARK = "PACELINE_CHILD_MARK"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildLimits:
    """What a child process may use.

    Args:
        memory_bytes: bytes of the child and of each process that it starts; None: no limit.
        start_s: how long the import of the user's code may take.
        pass_env: further variables of this process's environment that the child sees.
    """

    memory_bytes: int | None = None
    start_s: float = 60.0
    pass_env: Sequence[str] = ()


class ChildProcess:
    """A process in its own session, so that a kill also ends what its functions have started.

    `description` is what the child reported about itself when it was ready.
    """

    description: Any = None

    def __init__(
        self, process: asyncio.subprocess.Process, progress: ItemProgress, role: str, mark: str
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._role = process, role
        self._stdin, self._stdout = process.stdin, process.stdout
        self._progress, self._mark = progress, mark
        self._output = asyncio.create_task(_pass_on(process.stderr, role), name=f"{role} output")

    @classmethod
    async def start(
        cls, module: str, setup: object, *, role: str, imports: str, limits: ChildLimits = ChildLimits()
    ) -> Self:
        """Starts `python -m MODULE` and waits until it has imported the user's code.

        Args:
            module: the module; it calls `paceline.service.children.pipes.serve`.
            setup: the first message to the process.
            role: the process's role, for errors: "reward", "tool".
            imports: the user's code, for errors.
            limits: what the process may use.

        Raises:
            ConfigError: the code cannot be found or imported.
            DeadlineError: the import takes longer than allowed.
            PeerLostError: the process died while importing.
        """
        child = await cls._spawn(module, role, limits)
        try:
            async with asyncio.timeout(limits.start_s):
                await child.send(frames.encode(setup))
                answer, message = await child.receive()
        except TimeoutError:
            await child.stop()
            raise DeadlineError(
                phase=f"{role.upper()} START",
                peer=f"a {role} process that imports {imports}",
                seconds=limits.start_s,
                hint=f"the import of a {role} function hangs or is slow: move slow work into its first call",
            ) from None
        except (EOFError, ConnectionError):
            await child.stop()
            raise PeerLostError(
                f"a {role} process died while importing {imports}: {child.describe_exit()}; its output is in "
                "the service's log",
                peer=f"{role} process",
            ) from None
        except BaseException:
            await child.stop()
            raise
        if answer != "ready":
            await child.stop()
            raise ConfigError(message)
        child.description = message
        return child

    @classmethod
    async def _spawn(cls, module: str, role: str, limits: ChildLimits) -> Self:
        page = os.memfd_create(f"paceline-{role}-progress")
        mark = uuid.uuid4().hex
        try:
            os.ftruncate(page, ItemProgress.SIZE_BYTES)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(os.getpid()),
                str(page),
                str(limits.memory_bytes or 0),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**_environment(limits.pass_env), _MARK: mark},
                pass_fds=(page,),
                start_new_session=True,
                limit=_STREAM_LIMIT_BYTES,
            )
            return cls(process, ItemProgress(page), role, mark)
        finally:
            os.close(page)

    @property
    def exited(self) -> bool:
        """Whether the process is known to have ended."""
        return self._process.returncode is not None

    def progress(self) -> tuple[int, float]:
        """Returns the number of the last item begun, and its start (CLOCK_MONOTONIC, seconds)."""
        return self._progress.read()

    async def send(self, frame: bytes) -> None:
        """Writes one frame (see `frames.encode`). The caller sets the deadline.

        Raises:
            ConnectionError: the process is gone.
        """
        self._stdin.write(frame)
        await self._stdin.drain()

    async def receive(self) -> Any:
        """Returns the next message of the process. The caller sets the deadline.

        Raises:
            EOFError: the process is gone (asyncio.IncompleteReadError is one).
            ProtocolError: the bytes are not a message.
        """
        return await frames.receive(self._stdout)

    def kill(self) -> None:
        """Kills the process and all that it started; what it has already written can still be received."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for _ in range(_KILL_ROUNDS):  # a killed process may just have started another one
            left = _marked(self._mark)
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                return

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Ends the process and waits: closes its input, and kills it if it takes longer than `grace_s`.

        Raises:
            DeadlineError: the process does not end although it was killed.
        """
        self._stdin.close()
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        self.kill()
        try:
            async with asyncio.timeout(_EXIT_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            raise DeadlineError(
                phase=f"{self._role.upper()} STOP",
                peer=f"killed {self._role} process {self._process.pid}",
                seconds=_EXIT_DEADLINE_S,
            ) from None
        # Reading to the end lets asyncio close its side of the pipes.
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_PIPES_DEADLINE_S):
                while await self._stdout.read(_STREAM_LIMIT_BYTES):
                    pass
                await asyncio.wait({self._output})
                await self._stdin.wait_closed()
        self._output.cancel()

    def release(self) -> None:
        """Unmaps the shared page; call it last."""
        self._progress.close()

    def describe_exit(self) -> str:
        """Describes how the process ended."""
        code = self._process.returncode
        if code is None:
            return "still running"
        if code == frames.OUT_OF_MEMORY_EXIT:
            return "out of memory"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


def _environment(pass_env: Sequence[str]) -> Mapping[str, str]:
    """Returns the child's environment: the import path and common variables, but no secrets."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key in _PASSED or key in pass_env or key.startswith(_PASSED_PREFIXES)
    }
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))
    return environment


def _marked(mark: str) -> list[int]:
    """Returns a child's running descendants, in any session, and the child itself if it runs."""
    pids = []
    wanted = f"{_MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            environment = Path("/proc", entry, "environ").read_bytes()
            if wanted in environment.split(b"\0"):
                pids.append(int(entry))
    return pids


async def _pass_on(output: asyncio.StreamReader, role: str) -> None:
    """Passes on a child's output, up to a limit per minute, to keep the service's log small."""
    room, until = _MAX_OUTPUT_BYTES, time.monotonic() + _OUTPUT_SPAN_S
    while text := await output.read(_STREAM_LIMIT_BYTES):
        if time.monotonic() >= until:
            room, until = _MAX_OUTPUT_BYTES, time.monotonic() + _OUTPUT_SPAN_S
        if room > 0:
            sys.stderr.write(text[:room].decode(errors="backslashreplace"))
            sys.stderr.flush()
            if len(text) >= room:
                _log.warning("a %s process prints too much: the rest of this minute is dropped", role)
        room -= len(text)
