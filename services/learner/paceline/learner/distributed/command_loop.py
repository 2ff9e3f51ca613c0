"""The command loop: rank 0 takes commands, all ranks run each one together, and no rank is left waiting.

    rank 0's event loop --queue--> its training thread --broadcast--> every rank runs the command --outcome-->
    next

After each command the ranks exchange their outcomes, so all of them know of one rank's error. Idle ranks
exchange a keep-alive every few seconds, which notices a dead rank and bounds the wait for the next command.

There are two kinds of errors. `CommandError`: the command was refused, or failed with nothing changed, on
every rank alike (see `collectives.agree`); the loop goes on. Any other error may have left ranks in the
middle of a collective: the rank writes its reason into the group's store and dies. That breaks the
connections of its peers, which read the reason and die.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import msgpack

from paceline.core.errors import PacelineError, PeerLostError
from paceline.core.members import MemberKind, RankRef
from paceline.learner.distributed.collectives import CommandError, agree, broadcast_bytes
from paceline.learner.distributed.ranks import Ranks

Arguments = Mapping[str, Any]
Handler = Callable[[Arguments], Any]
"""Runs on every rank. Rank 0's result answers the command; it does not travel, so it may be any object."""

KEEP_ALIVE_S = 3.0
STOP = "stop"
KEEP_ALIVE = "keep-alive"
_REASON_KEYS = "paceline/failure/{rank}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Command:
    name: str
    arguments: Arguments
    future: Future[Any] = field(default_factory=Future)


class CommandQueue:
    """Where rank 0's event loop puts commands for the training thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[_Command] = queue.Queue()
        self._closed: PacelineError | None = None
        self._lock = threading.Lock()

    def submit(self, name: str, arguments: Arguments) -> Future[Any]:
        """Queues a command; the future carries rank 0's result or the error."""
        command = _Command(name=name, arguments=arguments)
        with self._lock:
            if self._closed is not None:
                command.future.set_exception(self._closed)
            else:
                self._queue.put(command)
        return command.future

    def take(self, timeout_s: float) -> _Command | None:
        """Returns the next command, or None after `timeout_s` seconds."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self, error: PacelineError) -> None:
        """Fails the commands that wait and all later ones with `error`."""
        with self._lock:
            self._closed = error
            while not self._queue.empty():
                _settle(self._queue.get_nowait().future, error=error)


class CommandLoop:
    """Runs the loop on one rank.

    Args:
        prepare: called first, on every rank; returns the handlers by name, the same on every rank.
        commands: rank 0's queue; None elsewhere.
        keep_alive_s: seconds between two keep-alives of idle ranks.
        find_silent: names the rank that went silent when a connection broke.

    Attributes:
        is_over: whether the STOP came because the run is over, not because the group restarts.
    """

    def __init__(
        self,
        ranks: Ranks,
        prepare: Callable[[], Mapping[str, Handler]],
        commands: CommandQueue | None = None,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        find_silent: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._ranks, self._prepare, self._commands = ranks, prepare, commands
        self._handlers: Mapping[str, Handler] = {}
        self._keep_alive_s, self._find_silent = keep_alive_s, find_silent
        self.is_over = False

    def run(self) -> None:
        """Prepares, then serves commands until STOP; every rank calls it, in the thread that trains.

        Raises:
            PeerLostError: another rank died or failed; names the rank and its reason as far as known.
            Exception: this rank failed. Its reason is in the store.
        """
        try:
            self._handlers = self._prepare()
            while self._turn():
                pass
        except Exception as error:
            cause = self._cause(error)
            if self._commands is not None:
                self._commands.close(_typed(cause))
            if cause is error:
                raise
            raise cause from error
        if self._commands is not None:
            self._commands.close(
                PeerLostError("the learner group has stopped", peer=RankRef(MemberKind.LEARNER))
            )

    def _turn(self) -> bool:
        command = None if self._commands is None else self._commands.take(self._keep_alive_s)
        name, arguments = self._exchange(command)
        try:
            result = self._execute(name, arguments)
            if command is not None:
                _settle(command.future, result=result)
        except CommandError as error:
            if command is not None:
                _settle(command.future, error=error.cause)
        except Exception as error:
            if command is not None:
                _settle(command.future, error=_typed(self._cause(error)))
            raise
        self.is_over = name == STOP and bool(arguments.get("over", True))
        return name != STOP

    def _exchange(self, command: _Command | None) -> tuple[str, Arguments]:
        """Returns rank 0's command on every rank; a keep-alive if rank 0 has none."""
        name, arguments = (KEEP_ALIVE, {}) if command is None else (command.name, command.arguments)
        if self._ranks.world.size == 1:
            return name, arguments
        message = msgpack.packb([name, dict(arguments)]) if self._ranks.world.rank == 0 else b""
        name, arguments = msgpack.unpackb(broadcast_bytes(message, self._ranks))
        return name, arguments

    def _execute(self, name: str, arguments: Arguments) -> Any:
        result: Any = None
        failure: CommandError | None = None
        if name not in (STOP, KEEP_ALIVE):
            try:
                result = self._handlers[name](arguments)
            except CommandError as error:
                failure = error
        agree(self._ranks, failure)
        return result

    def _cause(self, error: Exception) -> Exception:
        """Returns a peer's failure if it is the cause; else this error, after storing it for peers."""
        if isinstance(error, RuntimeError) and not isinstance(error, PacelineError):
            # A rank leaves its reason before its connections break: the reason is there now, or never.
            rank, reason = _find_reason(self._ranks)
            if rank is not None:
                return PeerLostError(
                    f"learner rank {rank} failed: {reason}", peer=RankRef(MemberKind.LEARNER, rank)
                )
            if _is_broken_connection(error):
                silent = self._find_silent()
                name = "another rank" if silent is None else f"rank {silent}"
                return PeerLostError(
                    f"learner rank {self._ranks.world.rank} lost {name} ({_first_line(error)}); its log says "
                    "why; the group continues from its newest checkpoint when it is started again",
                    peer=RankRef(MemberKind.LEARNER, silent),
                )
        if not isinstance(error, PeerLostError):
            _leave_reason(self._ranks, error)
        return error


def _leave_reason(ranks: Ranks, error: BaseException) -> None:
    """Writes why this rank ends where its peers look for it."""
    with contextlib.suppress(RuntimeError):  # rank 0 held the store, and may be gone
        ranks.store.set(
            _REASON_KEYS.format(rank=ranks.world.rank), f"{type(error).__name__}: {_first_line(error)}"
        )


def _find_reason(ranks: Ranks) -> tuple[int | None, str]:
    """Returns the lowest other rank that left a reason, and the reason; (None, "") if none did."""
    for rank in range(ranks.world.size):
        key = _REASON_KEYS.format(rank=rank)
        with contextlib.suppress(RuntimeError):  # rank 0 held the store, and is gone
            if rank != ranks.world.rank and ranks.store.check([key]):
                return rank, ranks.store.get(key).decode(errors="replace")
    return None, ""


def _is_broken_connection(error: Exception) -> bool:
    """Returns whether an error is a RuntimeError with which gloo or NCCL reports a dead peer."""
    message = str(error).lower()
    signs = ("connection closed", "connection reset", "broken pipe", "timed out", "socket", "remote process")
    return isinstance(error, RuntimeError) and any(sign in message for sign in signs)


def _typed(error: Exception) -> PacelineError:
    return error if isinstance(error, PacelineError) else PacelineError(f"{type(error).__name__}: {error}")


def _settle(future: Future[Any], *, result: Any = None, error: PacelineError | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller gave up waiting and cancelled it
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
