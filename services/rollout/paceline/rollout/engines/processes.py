"""Finds the processes that an engine has started, detects stopped ones, and kills them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from multiprocessing import forkserver

import psutil

# At most this much of the time between two checks counts, because this process may have been stopped and
# continued together with the engine's.
_STOPPED_S = 5.0
_LONGEST_LOOK_S = 2.0
_ROUNDS = 3
_WAIT_S = 1.0


class EngineProcesses:
    """The processes of one engine among the children of this process. Create it before the engine starts.

    Until `settle` is called, every new child counts as the engine's; later children do not.
    """

    def __init__(self) -> None:
        self._others = set(_children())
        self._settled: list[psutil.Process] | None = None
        self._watched: list[psutil.Process] | None = None
        self._looked, self._stopped_s = 0.0, dict[int, float]()

    def settle(self) -> None:
        """Notes that the engine has started; later children are not its own."""
        self._settled = self.children()
        self._watched = self._all()

    def stopped(self, now: float) -> str | None:
        """Names a process that a signal stopped seconds ago and that was not continued; None if there is
        none.

        Unlike a process that is only silent, a process stopped by SIGSTOP is certainly not at work. Debuggers
        do not count. While the engine starts, all its processes so far are checked.
        """
        elapsed_s, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        before, self._stopped_s = self._stopped_s, {}
        for process in self._all() if self._watched is None else self._watched:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    seconds = before[process.pid] + elapsed_s if process.pid in before else 0.0
                    self._stopped_s[process.pid] = seconds
                    if seconds >= _STOPPED_S:
                        return f"{process.pid} ({_title(process)})"
        return None

    def _all(self) -> list[psutil.Process]:
        return [*_fork_servers(), *self.children(), *self.descendants()]

    def children(self) -> list[psutil.Process]:
        """Returns the processes that the engine has started, directly or through the fork server."""
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
    """Kills the remaining processes and waits up to a second for their end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not _is_tracker(process):
                process.kill()
    psutil.wait_procs(processes, timeout=_WAIT_S)


def _fork_servers() -> list[psutil.Process]:
    """Returns the process of multiprocessing's fork server, if it runs."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return [child for child in psutil.Process().children() if child.pid == pid]


def _title(process: psutil.Process) -> str:
    """Returns a process's short name."""
    if process in _fork_servers():
        return "the fork server"
    return " ".join(process.cmdline())[:40].strip()


def _children() -> list[psutil.Process]:
    """Returns the children of this process, and in place of the fork server its children.

    The fork server outlives an engine, because the next one is also forked from it.
    """
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    children: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            children += child.children() if child.pid == server else [child]
    return children


def _is_tracker(process: psutil.Process) -> bool:
    """Returns whether this is multiprocessing's tracker, which ends by itself and unlinks shared memory."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return True
