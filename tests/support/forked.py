"""Python programs as forks of one process that has imported what they need: imports are most of their cost.

`Forked(["-m", "paceline.learner"])` is as `subprocess.Popen([sys.executable, "-m", "paceline.learner"])`, and
`run` as `subprocess.run`. The first call starts the server, which all processes of one pytest share; it ends
with pytest. Modules of `imports` are imported for the first program that names them, and stay imported.

    order: a connection, JSON, three descriptors -> fork: tells how the program ended -> fork: the program

Not for a test that sees what a program imports, or what the environment does while it is loaded. In /proc
such a program has the server's environment. Unless told otherwise it computes with one thread: where there is
a second one, `paceline train` forks no service.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

TESTS: Final = Path(__file__).resolve().parent.parent
PYTEST: Final = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
FOLDER: Final = Path(tempfile.gettempdir(), f"paceline-forks-{PYTEST}")
# As pytest began with it, whatever a test has patched when it is the first.
ENVIRON: Final = dict(os.environ)
IMPORTS: Final = (
    "paceline.learner.app",
    "paceline.checks.preflight",
    "paceline.controller.app",
    "paceline.launch.launcher",
    "paceline.launch.remote",
    "paceline.reward.app",
    "paceline.rollout.app",
    "paceline.show.live.view",
    "support.learner_scenarios",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers:AutoModelForCausalLM",
    "transformers:PreTrainedTokenizerFast",
    "transformers.models.qwen2.modeling_qwen2",
)

_START_S: Final = 500.0


class Forked(subprocess.Popen[str]):
    """A program that was started: arguments are those of the interpreter."""

    def __init__(self, words: Sequence[str | Path], *, imports: Sequence[str] = (), **options: Any) -> None:
        self._imports = imports
        super().__init__([str(word) for word in words], text=True, **options)

    def _execute_child(self, args: list[str], *others: Any) -> None:
        # As CPython 3.11 and 3.12 call it.
        (_, _, _, _, cwd, env, _, _, _, stdin, to_stdin, from_stdout, stdout, from_stderr, stderr, *_) = (
            others
        )
        order = {
            "words": args,
            "imports": self._imports,
            "cwd": str(cwd or Path.cwd()),
            "env": {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env)},
        }
        try:
            self._connection = _connect()
            data = json.dumps(order).encode()
            given = (stdin, stdout, stderr)
            descriptors = [own if number == -1 else number for own, number in enumerate(given)]
            socket.send_fds(self._connection, [len(data).to_bytes(4, "big")], descriptors)
            self._connection.sendall(data)
            self._said = self._connection.makefile("r")
            self.pid = int(self._said.readline())
        finally:
            self._close_pipe_fds(stdin, to_stdin, from_stdout, stdout, from_stderr, stderr)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            patience = None if timeout is None else 1000 * timeout
            waits = select.poll()
            waits.register(self._connection, select.POLLIN)
            if not waits.poll(patience):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._said.readline())
            self._said.close()
            self._connection.close()
        return self.returncode


def run(words: Sequence[str | Path], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end and returns what it wrote; kills it after so many seconds."""
    with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(FOLDER / "socket"))
    except (FileNotFoundError, ConnectionRefusedError):
        _start()
        connection.connect(str(FOLDER / "socket"))
    return connection


def _start() -> None:
    """Starts the server, unless another process of this pytest has; returns when it listens."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (FOLDER / "socket").exists():
            return
        path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        # One thread in each library, or there would be several when it forks.
        env = ENVIRON | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "support.forked", str(FOLDER), str(PYTEST)]
        with (FOLDER / "log").open("w") as log:
            _servers.append(
                subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            )
        deadline = time.monotonic() + _START_S
        while not (FOLDER / "socket").exists():
            assert _servers[-1].poll() is None, (FOLDER / "log").read_text()
            assert time.monotonic() < deadline, "the server of tests/support/forked.py does not start"
            time.sleep(0.05)


_servers: list[subprocess.Popen[bytes]] = []


def serve(folder: Path, pytest: int) -> None:
    """Imports, and forks programs until pytest ends. Returns in the processes that run one, with an order."""
    from paceline.launch.processes import fork_server

    fork_server._find_title()
    gc.disable()
    fork_server._import(IMPORTS)
    gc.freeze()  # a collection would write to pages that the processes share
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "part"))
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    (folder / "part").rename(folder / "socket")
    waits = select.poll()
    waits.register(listener, select.POLLIN)
    waits.register(os.pidfd_open(pytest), select.POLLIN)
    while [number for number, _ in waits.poll()] == [listener.fileno()]:
        connection, _ = listener.accept()
        size, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        if size:
            with connection.makefile("rb") as stream:
                order = json.loads(stream.read(int.from_bytes(size, "big")))
            _import_also(order["imports"])
            if os.fork() == 0:
                listener.close()
                _accompany(connection, order, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()
    for name in ("socket", "lock", "log"):
        (folder / name).unlink()
    folder.rmdir()


def _import_also(names: Sequence[str]) -> None:
    from paceline.launch.processes import fork_server

    if any(name.partition(":")[0] not in sys.modules for name in names):
        fork_server._import(names)
        gc.freeze()


def _accompany(connection: socket.socket, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Starts a program, tells its process id and its exit code; kills it if nobody waits for it any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(order, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(b"%d\n" % pid)
    waits, ended = select.poll(), os.pidfd_open(pid)
    waits.register(ended, select.POLLIN)
    waits.register(connection, select.POLLHUP)
    if ended not in [number for number, _ in waits.poll()]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % code)
    os._exit(0)


def _become(order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Runs the program as its interpreter would; never returns."""
    from paceline.launch.processes import fork_server

    code = 1
    try:
        os.setsid()
        for own, given in enumerate(descriptors):
            os.dup2(given, own)
            os.close(given)
        os.chdir(order["cwd"])
        fork_server._take_environment(order["env"])
        fork_server._set_title(order["words"])
        gc.enable()
        _interpret(order["words"], [*filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))])
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  nothing is above this
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _interpret(words: Sequence[str], path: Sequence[str]) -> None:
    sys.path[1:1] = [entry for entry in path if entry not in sys.path]
    option, *others = words
    if option == "-m":
        sys.argv, sys.path[0] = others, str(Path.cwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv, sys.path[0] = ["-c", *others[1:]], ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(others[0], main.__dict__)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(option).parent)
        runpy.run_path(option, run_name="__main__")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
