"""Connects the ranks of a weight group: deadlines, store, process groups, and cancelling a join or push."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import (
    SOME_MEMBER,
    LocalPart,
    MemberKind,
    Peer,
    RankRef,
    peer_from_plain,
    peer_to_plain,
)
from paceline.service.addresses import is_wildcard, on_route_to
from paceline.service.ports import ports_to_try
from paceline.weights.plan.spec import WeightGroupSpec

_ABANDONED = "abandoned"
_HERE = "here/{rank}"
_NUM_HERE = "here"
_ALL_HERE = "all here"
_ASK_EVERY_S = 0.1
_LOOK_EVERY_S = 0.005, 0.05
_STORE = RankRef(MemberKind.LEARNER, 0)
_OWN_FAILURES: Final = ("out of memory", "can't allocate memory", "cuda error")
"""Texts in torch's errors that mean that the process itself, not a peer, has failed."""
_WITHOUT_WATCHDOG: Final = "TORCH_NCCL_BLOCKING_WAIT"


class Deadline:
    """The time by which a phase must end, and the errors to raise if it does not."""

    def __init__(self, phase: str, seconds: float) -> None:
        self.phase, self.seconds = phase, seconds
        self._end = time.monotonic() + seconds

    @property
    def has_passed(self) -> bool:
        """Whether there is no time left."""
        return self._end <= time.monotonic()

    def remaining(self, peer: Peer) -> timedelta:
        """Returns the time left; raises DeadlineError naming `peer` if there is none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error(peer)
        return timedelta(seconds=max(left, 0.001))

    def error(self, peer: Peer) -> DeadlineError:
        """Returns the error to raise if `peer` did not answer in time."""
        hint = "see the peer's log, then form a new weight group"
        return DeadlineError(phase=self.phase, peer=peer, seconds=self.seconds, hint=hint)

    def translate(self, error: RuntimeError, peer: Peer) -> DeadlineError | PeerLostError | WeightSyncError:
        """Tells timeouts, broken connections and failures of this process apart.

        torch's RuntimeErrors differ only in their text.
        """
        if any(words in str(error).lower() for words in _OWN_FAILURES):
            return WeightSyncError(f"{self.phase}: {LocalPart.DEVICE} failed: {str(error).splitlines()[0]}")
        if self.has_passed or "timed out" in str(error).lower():
            return self.error(peer)
        text = str(error).splitlines()[0]
        return PeerLostError(f"{self.phase}: lost the connection to {peer}: {text}", peer=peer)


def open_store(host: str, timeout_s: float, *, port: int = 0) -> TCPStore:
    """Opens a store that listens only on `host`, on `port` or, if that is 0, on a free port (`store.port`).

    Raises:
        OSError: the port is taken, no allowed port is free, or `host` is not this machine's.
    """
    with _listener(host, ports_to_try(port)) as listener:
        port = listener.getsockname()[1]
        # Given only a host name, the store would listen on every interface.
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _listener(host: str, ports: Sequence[int]) -> socket.socket:
    """Listens on the first of the ports that is free."""
    info = socket.getaddrinfo(host, ports[0], type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    family, place = info[0], info[4]
    both = is_wildcard(host) and family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    for port in ports:
        try:
            return socket.create_server((place[0], port), family=family, backlog=1024, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
    raise AssertionError("no port to try")


class Abandonment:
    """Polls the rendezvous store to see whether a join or push was cancelled.

    NCCL reports no error for a lost peer; the call just never finishes.

    Args:
        store: the store at which the epoch's ranks meet.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        self._store, self._next = epoch_store(store, epoch), 0.0

    def rest(self) -> None:
        """Delays the next poll: most pushes end before it."""
        self._next = time.monotonic() + _ASK_EVERY_S

    def check(self, phase: str) -> None:
        """Raises PeerLostError, naming the lost member, if the join or push was cancelled."""
        if time.monotonic() < self._next:
            return
        self.rest()
        try:
            if not self._store.check([_ABANDONED]):
                return
            lost = peer_from_plain(json.loads(self._store.get(_ABANDONED)))
        except RuntimeError as error:
            raise PeerLostError(f"{phase}: lost the connection to {_STORE}: {error}", peer=_STORE) from error
        raise PeerLostError(f"{phase}: cancelled, since {lost} went away", peer=lost)

    def report(self, rank: RankRef, error: BaseException) -> None:
        """Cancels the join or push for an error of `rank` itself, not for the loss of a peer."""
        if not isinstance(error, PeerLostError | DeadlineError) or isinstance(error.peer, LocalPart):
            self.call_off(rank)

    def call_off(self, lost: Peer) -> None:
        """Releases every rank that waits in the join or push; their errors name `lost`."""
        # If the store is gone, all ranks notice that themselves.
        with contextlib.suppress(RuntimeError):
            self._store.set(_ABANDONED, json.dumps(peer_to_plain(lost)))


def connect_store(spec: WeightGroupSpec, deadline: Deadline) -> TCPStore:
    """Connects to learner rank 0's store; raises DeadlineError or PeerLostError naming that rank."""
    try:
        return TCPStore(
            spec.store_host, spec.store_port, timeout=deadline.remaining(_STORE), wait_for_workers=False
        )
    except RuntimeError as error:
        raise deadline.translate(error, _STORE) from error


def abandon(host: str, port: int, *, epoch: int, lost: str, timeout_s: float) -> None:
    """Cancels the join or push of an epoch, from any thread or process.

    Args:
        lost: the member that went away.
    """
    store = TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    Abandonment(store, epoch).call_off(lost)


def epoch_store(store: Store, epoch: int) -> PrefixStore:
    """Returns an epoch's own part of the rendezvous store."""
    return PrefixStore(f"weights/{epoch}", store)


def await_all(spec: WeightGroupSpec, rank: int, store: Store, deadline: Deadline) -> None:
    """Waits until every rank has called this: the roll call before ranks connect.

    Raises:
        DeadlineError: a rank did not call; the error names it.
        PeerLostError: the join was cancelled because a member was lost.
    """
    here, called_off = epoch_store(store, spec.epoch), Abandonment(store, spec.epoch)
    pause_s, longest_s = _LOOK_EVERY_S
    try:
        here.set(_HERE.format(rank=rank), "1")
        # The last rank sets one key for all, so a poll is one small request for any number of ranks.
        if here.add(_NUM_HERE, 1) == spec.world_size:
            here.set(_ALL_HERE, "1")
        while not here.check([_ALL_HERE]):
            if deadline.has_passed:
                raise deadline.error(spec.rank_ref(_first_missing(here, spec.world_size)))
            called_off.check(deadline.phase)
            time.sleep(pause_s)
            pause_s = min(longest_s, 1.2 * pause_s)
    except RuntimeError as error:
        raise deadline.translate(error, _STORE) from error


def _first_missing(here: Store, world_size: int) -> int:
    """Returns the lowest rank that has not called; 0 if all have by now."""
    return next((rank for rank in range(world_size) if not here.check([_HERE.format(rank=rank)])), 0)


def make_process_group(spec: WeightGroupSpec, rank: int, store: Store, deadline: Deadline) -> Any:
    """Makes the process group for weights, separate from torch's default group.

    All of `spec.wire_ranks`, which include `rank`, must call this. NCCL connects later, with the first
    messages.
    """
    store = epoch_store(store, spec.epoch)
    store.set_timeout(deadline.remaining(SOME_MEMBER))
    number, size = spec.wire_ranks.index(rank), len(spec.wire_ranks)
    if spec.backend == "nccl":
        return _nccl_group(spec, number, size, store)
    return _gloo_group(spec, number, size, store, deadline)


def make_signal_group(spec: WeightGroupSpec, rank: int, store: Store, deadline: Deadline) -> Any:
    """Makes a process group of all ranks, for small messages on the host."""
    store = PrefixStore("signals", epoch_store(store, spec.epoch))
    store.set_timeout(deadline.remaining(SOME_MEMBER))
    return _gloo_group(spec, rank, spec.world_size, store, deadline)


def _gloo_group(spec: WeightGroupSpec, rank: int, size: int, store: Store, deadline: Deadline) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = deadline.remaining(SOME_MEMBER)
    options._devices = [gloo.create_device(hostname=on_route_to(spec.store_host, spec.store_port))]
    return gloo(store, rank, size, options)


def _nccl_group(spec: WeightGroupSpec, rank: int, size: int, store: Store) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    # Transfers take precedence over packing and scattering, which would delay the next round.
    options.is_high_priority_stream = True
    # Also bounds an abort; our own deadlines pass before it.
    options._timeout = timedelta(seconds=10 * spec.timeout_s)
    # By default a group's watchdog, or the default group's monitor, ends the process when a network peer is
    # lost. A lost rollout server must not end the learner, so this group has no watchdog. torch has no option
    # for that: it reads the variable when a group is made.
    before = os.environ.get(_WITHOUT_WATCHDOG)
    os.environ[_WITHOUT_WATCHDOG] = "1"
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_WITHOUT_WATCHDOG]
        else:
            os.environ[_WITHOUT_WATCHDOG] = before
