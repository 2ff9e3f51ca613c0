"""The processes that an engine has started, and their end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from multiprocessing import forkserver

import psutil

_ROUNDS = 3
_WAIT_S = 1.0


class EngineProcesses:
    """The processes of one engine among the children of this process. Make it before the engine starts.

    Until `settle` is called, every new child counts as the engine's; later children do not.
    """

    def __init__(self) -> None:
        self._others = set(_children())
        self._settled: list[psutil.Process] | None = None

    def settle(self) -> None:
        """The engine has started: children that come from now on are not its own."""
        self._settled = self.children()

    def children(self) -> list[psutil.Process]:
        """The processes that the engine has started, themselves or through multiprocessing's fork server."""
        if self._settled is not None:
            return self._settled
        return [child for child in _children() if child not in self._others]

    def descendants(self) -> list[psutil.Process]:
        """Returns all processes below the engine's own."""
        below: list[psutil.Process] = []
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                below += child.children(recursive=True)
        return below


def end_all_children() -> None:
    """Kills all processes below this one, also those that another thread starts meanwhile."""
    for _ in range(_ROUNDS):
        children = [child for child in psutil.Process().children(recursive=True) if not _is_tracker(child)]
        if not children:
            return
        kill(children)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kills those that still run and waits for them for a second."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not _is_tracker(process):
                process.kill()
    psutil.wait_procs(processes, timeout=_WAIT_S)


def _children() -> list[psutil.Process]:
    """Of this process, and of multiprocessing's fork server in its place.

    The server outlives an engine: the next one is forked from it, too.
    """
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    children: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            children += child.children() if child.pid == server else [child]
    return children


def _is_tracker(process: psutil.Process) -> bool:
    """multiprocessing's tracker ends by itself and unlinks the shared memory of killed processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return True
