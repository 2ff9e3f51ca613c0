"""A process that imports the services' modules once and forks the services; for machines without a GPU.

Most of a service's start is spent on imports: torch, transformers and shared modules. `begin` forks this
process from the command before the command's own imports, while there are no threads. The process imports
while the command reads its configuration; then it starts services on the launcher's orders (`forking`):

    order: a line of JSON -> fork -> fork, so that the launcher becomes the parent -> `python -m MODULE`

A service that is restarted later, and every service on a machine with GPUs, is a separate interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.service.process import die_with
from paceline.sizing.machine import is_cpu_build, num_cores
from paceline.storage.cache import keep_kernels
from paceline.storage.hub import OFFLINE

SHARED: Final = (
    "paceline.service.member.bootstrap",
    "paceline.broker",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers:PreTrainedTokenizerFast",
    "transformers:AutoModelForCausalLM",
    "paceline.data.prompts",
)
"""What the server imports at its start: modules, or `module:attribute` for a lazily imported attribute."""

_PARENT_S = 10.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": _M_TRIM_THRESHOLD, "MALLOC_MMAP_THRESHOLD_": _M_MMAP_THRESHOLD}
_MOST_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Begun:
    """The launcher's connection to a running server."""

    pid: int
    orders: socket.socket


_begun: Begun | None = None


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Runs the server within the block, unless it is ended earlier. Call this before any thread exists."""
    begin()
    try:
        yield
    finally:
        end()


def begin() -> None:
    """Forks the server, if torch is built for CPUs and this process has no other thread."""
    global _begun
    if not is_cpu_build() or _num_threads() > 1:
        return
    ours, its = socket.socketpair()
    launcher, pid = os.getpid(), os.fork()
    if pid == 0:
        ours.close()
        try:
            _serve(its, launcher)
        finally:
            os._exit(1)
    its.close()
    _begun = Begun(pid, ours)


def begun() -> Begun | None:
    """Returns the server that `begin` has forked, until `end` is called."""
    return _begun


def end() -> None:
    """Ends the server, if there is one; the services that it has started go on."""
    global _begun
    server, _begun = _begun, None
    if server is not None:
        server.orders.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGKILL)
        os.waitpid(server.pid, 0)


def _serve(orders: socket.socket, launcher: int) -> None:
    die_with(launcher, signal.SIGKILL)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    _find_title()
    # Libraries read these variables when they are loaded. Each service gets its own environment afterwards.
    os.environ |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    keep_kernels()
    gc.disable()
    _import(SHARED)
    with orders.makefile("rwb") as lines:
        for line in lines:
            lines.write(json.dumps(_carry_out(json.loads(line), launcher, orders)).encode() + b"\n")
            lines.flush()
    os._exit(0)


def _import(names: Iterable[str]) -> None:
    """Imports a module; an error is ignored, because it occurs again in the service, which reports it."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            imported = importlib.import_module(module)
            if attribute:
                getattr(imported, attribute)
        except Exception:  # whatever an import raises
            logging.getLogger(__name__).debug("%s cannot be imported", name, exc_info=True)


def _carry_out(order: Mapping[str, Any], launcher: int, orders: socket.socket) -> dict[str, Any]:
    """Starts a service; returns its process id, or why it cannot be started here."""
    _import(order["imports"])
    if _num_threads() > 1:
        return {"error": "an import has started threads"}
    gc.freeze()  # garbage collection would write to shared pages
    pid_r, pid_w = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(pid_r)
        os.close(pid_w)
        return {"error": str(error)}
    if between == 0:
        try:
            pid = os.fork()
            if pid == 0:
                os.close(pid_r)
                os.close(pid_w)
                orders.close()
                _become(order, launcher)
            os.write(pid_w, str(pid).encode())
        finally:
            os._exit(0)
    os.close(pid_w)
    os.waitpid(between, 0)
    with os.fdopen(pid_r, "rb") as answer:
        pid = int(answer.read() or 0)
    return {"pid": pid} if pid else {"error": "cannot fork"}


def _become(order: Mapping[str, Any], launcher: int) -> None:
    """Runs the service as its interpreter would; never returns."""
    code = 1
    try:
        deadline = time.monotonic() + _PARENT_S
        while os.getppid() != launcher and time.monotonic() < deadline:
            time.sleep(0.001)
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        sys.stdout.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
        _take_environment(order["env"])
        module, *arguments = order["command"]
        _set_title(order["command"])
        sys.argv = [module, *arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        gc.enable()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  nothing is above this
        traceback.print_exc()
    finally:
        logging.shutdown()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_environment(environ: Mapping[str, str]) -> None:
    """Replaces the environment, also in libraries that have read the earlier one."""
    os.environ.clear()
    os.environ.update(environ)
    setattr(tempfile, "tempdir", None)  # noqa: B010  chosen by the earlier environment
    libc = ctypes.CDLL(None)
    for name, parameter in _MALLOPT.items():
        if environ.get(name, "").isdecimal():
            libc.mallopt(parameter, min(int(environ[name]), _MOST_BYTES))
    if environ.get(OFFLINE) == "1" and "huggingface_hub.constants" in sys.modules:
        constants: Any = sys.modules["huggingface_hub.constants"]
        constants.HF_HUB_OFFLINE = True
    if "torch" in sys.modules:
        wanted = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        sys.modules["torch"].set_num_threads(int(wanted) if wanted.isdecimal() else num_cores())


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _find_title() -> None:
    """Lets setproctitle find its memory while the environment is still the original one.

    It may not use the environment's memory, which is read to find a run's processes.
    """
    os.environ["SPT_NOENV"] = "1"
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


def _set_title(words: Iterable[str]) -> None:
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(" ".join(words))
