"""The learner's ranks as one: rank 0 takes commands, all ranks run each of them together, and no rank is left waiting.

    rank 0's event loop --queue--> rank 0's training thread --broadcast--> every rank runs the command --status--> next

Commands are msgpack over a gloo group; arguments are plain values. After each command the ranks exchange their outcomes, so
that an error of one is known to all. An idle group exchanges a keep-alive every few seconds: a rank that died is noticed
there at the latest, and the wait for the next command is bounded.

Two kinds of errors. `CommandError` means that the command was refused or failed with nothing changed, on every rank alike (see
`agree`): the group goes on. Anything else may have left ranks in the middle of a collective: the rank writes its reason into
the group's store and dies, which breaks its peers' connections; they read the reason and die too.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from paceline.core import errors
from paceline.core.errors import PacelineError, PeerLostError
from paceline.core.members import MemberKind, RankRef
from paceline.learner.distributed.ranks import Ranks

log = logging.getLogger(__name__)

Arguments = Mapping[str, Any]
Handler = Callable[[Arguments], Any]
"""Runs on every rank; the result of rank 0 is the command's. It may be plain or any object: it does not travel."""

KEEP_ALIVE_S = 3.0
STOP = "stop"
KEEP_ALIVE = "keep-alive"
_REASON_KEYS = "paceline/failure/{rank}"


class CommandError(PacelineError):
    """Wraps an error after which every rank is as it was before the command; the group goes on."""

    def __init__(self, cause: PacelineError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pending:
    name: str
    arguments: Arguments
    future: Future[Any] = field(default_factory=Future)


class CommandQueue:
    """Where rank 0's event loop puts commands for the training thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[_Pending] = queue.Queue()
        self._closed: PacelineError | None = None
        self._lock = threading.Lock()

    def submit(self, name: str, arguments: Arguments) -> Future[Any]:
        """Hands a command over; the future carries rank 0's result or the error. After the end it fails at once."""
        pending = _Pending(name=name, arguments=arguments)
        with self._lock:
            if self._closed is not None:
                pending.future.set_exception(self._closed)
            else:
                self._queue.put(pending)
        return pending.future

    def take(self, timeout_s: float) -> _Pending | None:
        """The next command, or None after `timeout_s` seconds."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self, error: PacelineError) -> None:
        """Fails what waits and whatever comes."""
        with self._lock:
            self._closed = error
            while not self._queue.empty():
                _settle(self._queue.get_nowait().future, error=error)


class Group:
    """One rank's end of the command loop.

    Args:
        ranks: the group.
        prepare: called first, on every rank; gives the commands by name, the same on every rank.
        commands: rank 0's queue; None elsewhere.
        keep_alive_s: how often an idle group exchanges a sign of life.
    """

    def __init__(
        self,
        ranks: Ranks,
        prepare: Callable[[], Mapping[str, Handler]],
        commands: CommandQueue | None = None,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._ranks, self._prepare, self._commands = ranks, prepare, commands
        self._handlers: Mapping[str, Handler] = {}
        self._keep_alive_s = keep_alive_s

    def run(self) -> None:
        """Prepares, then serves commands until STOP; on every rank, in the thread that trains.

        Raises:
            PeerLostError: another rank died or failed; says which and why, as far as is known.
            Exception: this rank failed. Its reason is in the store.
        """
        try:
            self._handlers = self._prepare()
            while self._turn():
                pass
        except Exception as error:
            raised = self._explain(error)
            if self._commands is not None:
                self._commands.close(_typed(raised))
            if raised is error:
                raise
            raise raised from error
        if self._commands is not None:
            self._commands.close(
                PeerLostError("the learner group has stopped", peer=RankRef(MemberKind.LEARNER))
            )

    def _turn(self) -> bool:
        pending = None
        if self._commands is not None:
            pending = self._commands.take(self._keep_alive_s)
        name, arguments = self._exchange(pending)
        try:
            result = self._execute(name, arguments)
            if pending is not None:
                _settle(pending.future, result=result)
        except CommandError as error:
            if pending is not None:
                _settle(pending.future, error=error.cause)
        except Exception as error:
            if pending is not None:
                _settle(pending.future, error=_typed(self._explain(error)))
            raise
        return name != STOP

    def _exchange(self, pending: _Pending | None) -> tuple[str, Arguments]:
        """Rank 0's command on every rank."""
        if self._ranks.world_size == 1:
            return (KEEP_ALIVE, {}) if pending is None else (pending.name, pending.arguments)
        message = b""
        if self._ranks.rank == 0:
            message = msgpack.packb(
                [KEEP_ALIVE, {}] if pending is None else [pending.name, dict(pending.arguments)]
            )
        name, arguments = msgpack.unpackb(broadcast_bytes(message, self._ranks))
        return str(name), arguments

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

    def _explain(self, error: Exception) -> Exception:
        """The error to die of: a peer's reason where that is the cause, else this one, whose reason is left for the peers."""
        if isinstance(error, RuntimeError) and not isinstance(error, PacelineError):
            # A rank leaves its reason before its connections break: it is there now, or never.
            rank, reason = find_reason(self._ranks)
            if rank is not None:
                return PeerLostError(
                    f"learner rank {rank} failed: {reason}", peer=RankRef(MemberKind.LEARNER, rank)
                )
            if _is_broken_connection(error):
                return PeerLostError(
                    f"learner rank {self._ranks.rank} lost another rank ({_first_line(error)}); the log of the rank that is "
                    "gone says why; start the run again to go on from its last checkpoint",
                    peer=RankRef(MemberKind.LEARNER),
                )
        if not isinstance(error, PeerLostError):
            leave_reason(self._ranks, error)
        return error


def agree(ranks: Ranks, error: CommandError | None) -> None:
    """All ranks exchange whether they failed; if any did, all raise the error of the lowest rank that did.

    Call it at the same place on every rank, before anything is changed.

    Raises:
        CommandError: this rank's own error, or one of the same class and words from another rank.
    """
    if ranks.world_size > 1:
        note = b"" if error is None else msgpack.packb([type(error.cause).__name__, str(error)])
        notes = gather_bytes(note, ranks)
        for rank, other in enumerate(notes):
            if other and (error is None or rank < ranks.rank):
                name, words = msgpack.unpackb(other)
                raise CommandError(_rebuild(str(name), f"learner rank {rank}: {words}"))
    if error is not None:
        raise error


def attempt(ranks: Ranks, act: Callable[[], Any]) -> Any:
    """Runs something that may fail on some ranks but changes nothing, and agrees on the outcome.

    Raises:
        CommandError: a PacelineError was raised on some rank.
    """
    result: Any = None
    failure: CommandError | None = None
    try:
        result = act()
    except PacelineError as error:
        failure = CommandError(error)
    agree(ranks, failure)
    return result


def broadcast_bytes(data: bytes, ranks: Ranks) -> bytes:
    """Rank 0's bytes, on every rank, over the control group."""
    length = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(length, 0, group=ranks.control)
    payload = torch.empty(int(length.item()), dtype=torch.uint8)
    if ranks.rank == 0:
        payload = _tensor(data)
    dist.broadcast(payload, 0, group=ranks.control)
    return payload.numpy().tobytes()


def gather_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    """Every rank's bytes, on every rank, over the control group."""
    if ranks.world_size == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world_size)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=ranks.control)
    lengths = [int(size.item()) for size in sizes]
    if not any(lengths):
        return [b""] * ranks.world_size
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(data)] = _tensor(data)
    parts = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(parts, mine, group=ranks.control)
    return [part[:size].numpy().tobytes() for part, size in zip(parts, lengths, strict=True)]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def leave_reason(ranks: Ranks, error: BaseException) -> None:
    """Writes why this rank ends where its peers will look for it."""
    with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
        ranks.store.set(_REASON_KEYS.format(rank=ranks.rank), f"{type(error).__name__}: {_first_line(error)}")


def find_reason(ranks: Ranks) -> tuple[int | None, str]:
    """The rank that failed first, as far as reasons were left, and its reason; (None, "") where none was."""
    for rank in range(ranks.world_size):
        key = _REASON_KEYS.format(rank=rank)
        with contextlib.suppress(RuntimeError):  # the store went with rank 0
            if rank != ranks.rank and ranks.store.check([key]):
                return rank, ranks.store.get(key).decode(errors="replace")
    return None, ""


def _is_broken_connection(error: Exception) -> bool:
    """gloo and NCCL report a dead peer as a RuntimeError with these words."""
    words = str(error).lower()
    signs = ("connection closed", "connection reset", "broken pipe", "timed out", "socket", "remote process")
    return isinstance(error, RuntimeError) and any(sign in words for sign in signs)


def _typed(error: Exception) -> PacelineError:
    return error if isinstance(error, PacelineError) else PacelineError(f"{type(error).__name__}: {error}")


def _rebuild(name: str, words: str) -> PacelineError:
    kind = getattr(errors, name, PacelineError)
    try:
        rebuilt = kind(words)
    except TypeError:  # a class with more to it than words
        rebuilt = PacelineError(words)
    return rebuilt if isinstance(rebuilt, PacelineError) else PacelineError(words)


def _settle(future: Future[Any], *, result: Any = None, error: PacelineError | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller gave up waiting and cancelled it
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
