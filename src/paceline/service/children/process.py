"""A child process that runs code of the user's, as its parent sees it: started, fed, observed, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Self

from paceline.core.errors import ConfigError, DeadlineError, PeerLostError
from paceline.service.children import frames
from paceline.service.children.progress import Progress

_START_DEADLINE_S = 60.0  # for importing the functions
_EXIT_DEADLINE_S = 10.0
_PIPES_DEADLINE_S = 1.0
_STREAM_LIMIT_BYTES = 1024 * 1024
_PRIVATE_PREFIX = "PACELINE_"


class ChildProcess:
    """A process in a session of its own, so that a kill ends what its functions started as well.

    `description` is what the child said of itself when it was ready.
    """

    description: Any = None

    def __init__(self, process: asyncio.subprocess.Process, progress: Progress, role: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._role = process, role
        self._stdin, self._stdout = process.stdin, process.stdout
        self._progress = progress

    @classmethod
    async def start(cls, module: str, setup: object, *, role: str, imports: str) -> Self:
        """Starts `python -m MODULE` and waits until it has imported the user's code.

        Args:
            module: calls `paceline.service.children.pipes.serve`.
            setup: the first message to it.
            role: what it is, for errors: "reward", "tool".
            imports: the user's code, for errors.

        Raises:
            ConfigError: the code cannot be found or imported.
            DeadlineError: the import takes longer than allowed.
            PeerLostError: the process died while importing.
        """
        child = await cls._spawn(module, role)
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                await child.send(frames.encode(setup))
                answer, message = await child.receive()
        except TimeoutError:
            await child.stop()
            raise DeadlineError(
                phase=f"{role.upper()} START",
                peer=f"a {role} process that imports {imports}",
                seconds=_START_DEADLINE_S,
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
    async def _spawn(cls, module: str, role: str) -> Self:
        page = os.memfd_create(f"paceline-{role}-progress")
        try:
            os.ftruncate(page, Progress.SIZE_BYTES)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(os.getpid()),
                str(page),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(),
                pass_fds=(page,),
                start_new_session=True,
                limit=_STREAM_LIMIT_BYTES,
            )
            return cls(process, Progress(page), role)
        finally:
            os.close(page)

    @property
    def exited(self) -> bool:
        """Whether the process is known to have ended."""
        return self._process.returncode is not None

    def progress(self) -> tuple[int, float]:
        """The number of the item taken up last and when (CLOCK_MONOTONIC, seconds)."""
        return self._progress.read()

    async def send(self, frame: bytes) -> None:
        """Writes one frame (see `frames.encode`). The caller sets the deadline.

        Raises:
            ConnectionError: the process is gone.
        """
        self._stdin.write(frame)
        await self._stdin.drain()

    async def receive(self) -> Any:
        """The process's next message. The caller sets the deadline.

        Raises:
            EOFError: the process is gone (asyncio.IncompleteReadError is one).
            ProtocolError: the bytes are not a message.
        """
        return await frames.receive(self._stdout)

    def kill(self) -> None:
        """Kills the process and all that it started; what it has already written can still be received."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Ends the process and waits: closes its input, and kills it when that takes longer than `grace_s`.

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
                await self._stdin.wait_closed()

    def release(self) -> None:
        """Unmaps the shared page; call it last."""
        self._progress.close()

    def describe_exit(self) -> str:
        """How the process ended, in words."""
        code = self._process.returncode
        if code is None:
            return "still running"
        if code == frames.OUT_OF_MEMORY_EXIT:
            return "out of memory"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


def _environment() -> Mapping[str, str]:
    """What the child inherits: this process's import path, but not Paceline's tokens and passwords."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_PRIVATE_PREFIX)}
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))
    return environment
