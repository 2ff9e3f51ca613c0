"""Imports vLLM before a rollout server knows its run: eight seconds of CPU time.

For GPUs, a thread imports it while the server waits for the controller.

For the CPU, it is also one import for all of an engine's processes. By default, the server, the engine core
and each worker import vLLM one after another. Here the server imports it first, while it has no threads. It
then forks multiprocessing's fork server; the engine core is forked from that, and the workers from the engine
core.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Final

from paceline.engines.vllm import VLLM
from paceline.rollout.engines.vllm.start import environment
from paceline.service.identity.credentials import TOKEN
from paceline.service.imports import without_collections

log = logging.getLogger(__name__)

MODULES: Final = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "paceline.rollout.engines.vllm.worker",
)
"""Modules that the engine's processes import; each process imports any others itself."""

_IN_SERVER: Final = ("vllm.engine.arg_utils", "vllm.v1.engine.async_llm")
_IMPORT_TIMEOUT_S: Final = 600.0
_importing: threading.Thread | None = None


def begin() -> None:
    """Begins to import vLLM, if it is installed; for the CPU, imports it and forks the fork server.

    Call it in a process that has no threads. If vLLM cannot be imported, it does nothing: the engine's start
    says why.
    """
    global _importing
    if VLLM.has_cpu_build:
        _can_be_titled()
        environment.prepare_import(on_cpu=True)
        if _imported((*MODULES, *_IN_SERVER)):
            _fork()
    elif VLLM.installed_build:
        environment.prepare_import(on_cpu=False)
        _importing = threading.Thread(
            target=_imported, args=(_IN_SERVER,), name="import of vLLM", daemon=True
        )
        _importing.start()


def complete() -> None:
    """Returns when the thread of `begin` has ended: a fork would take its locks along."""
    if _importing is not None:
        _importing.join(_IMPORT_TIMEOUT_S)


def _imported(modules: Sequence[str]) -> bool:
    try:
        with without_collections():
            for name in modules:
                importlib.import_module(name)
    except Exception:  # an import may raise anything
        log.debug("vLLM cannot be imported", exc_info=True)
        return False
    return True


def start() -> BaseContext:
    """Returns the context for the engine core; starts a fork server, without waiting, if there is none."""
    context = _Context()
    context.set_forkserver_preload(list(MODULES))
    forkserver.ensure_running()
    return context


def use(context: BaseContext) -> None:
    """Makes vLLM start the engine core in `context`, for which vLLM has no option."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: context


class _Context(ForkServerContext):
    """A context whose processes get the environment variables that this process had when it made the context.

    Later changes must not be passed on: vLLM sets variables that would start its workers as new interpreters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._environ = dict(os.environ)

    def Process(self, *, target: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> BaseProcess:  # type: ignore[override]
        arguments = {"environ": self._environ, "target": target, "arguments": kwargs}
        return super().Process(target=_run, name=name, kwargs=arguments)


def _run(environ: Mapping[str, str], target: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    _can_be_titled()
    os.environ.clear()
    os.environ.update(environ)
    environment.apply()
    target(**arguments)


def _can_be_titled() -> None:
    """Lets setproctitle find its buffer while the environment is still the one that the process started with.

    Without this, vLLM's processes would have no titles of their own.
    """
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


def _start_tracker() -> None:
    """Starts multiprocessing's tracker, an interpreter that needs no token in its environment."""
    token = os.environ.pop(TOKEN, None)
    try:
        resource_tracker.ensure_running()
    finally:
        if token is not None:
            os.environ[TOKEN] = token


def _fork() -> None:
    """Starts the server like `ForkServer.ensure_running`, but as a copy of this process."""
    gc.collect()
    gc.freeze()  # garbage collection would write to shared pages
    _start_tracker()
    with socket.socket(socket.AF_UNIX) as listener:
        address = os.path.join(util.get_temp_dir(), "engines")
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(SystemExit):
                os.close(alive_w)
                forkserver.main(listener.detach(), alive_r, [])
            os._exit(0)
        os.close(alive_r)
    server = {"_forkserver_address": address, "_forkserver_alive_fd": alive_w, "_forkserver_pid": pid}
    vars(forkserver._forkserver).update(server)
