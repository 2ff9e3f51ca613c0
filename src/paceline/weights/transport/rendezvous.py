"""The rendezvous of a weight group: deadlines, store, process group, and calling off a join or push."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import DeadlineError, PeerLostError
from paceline.core.members import MemberKind, Peer, RankRef
from paceline.weights.plan.spec import WeightGroupSpec

_ABANDONED = "abandoned"
_HERE = "here/{rank}"
_ASK_EVERY_S = 0.1
_LOOK_EVERY_S = 0.005


class Deadline:
    """The time by which a phase must end, and the errors to raise if it does not."""

    def __init__(self, phase: str, seconds: float) -> None:
        self.phase, self.seconds = phase, seconds
        self._end = time.monotonic() + seconds

    def remaining(self, peer: Peer) -> timedelta:
        """The time left; raises DeadlineError naming `peer` if there is none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error(peer)
        return timedelta(seconds=max(left, 0.001))

    def error(self, peer: Peer) -> DeadlineError:
        """The error to raise if `peer` did not answer in time."""
        hint = "see the peer's log, then form a new weight group"
        return DeadlineError(phase=self.phase, peer=peer, seconds=self.seconds, hint=hint)

    def translate(self, error: RuntimeError, peer: Peer) -> DeadlineError | PeerLostError:
        """Tells timeouts from broken connections: torch's RuntimeErrors differ only in their text."""
        if self._end <= time.monotonic() or "timed out" in str(error).lower():
            return self.error(peer)
        text = str(error).splitlines()[0]
        return PeerLostError(f"{self.phase}: lost the connection to {peer}: {text}", peer=peer)


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Opens a rendezvous store that listens on `host` only, on a free port (`store.port`)."""
    with socket.create_server((host, 0), backlog=1024) as listener:
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


class Abandonment:
    """Polls the rendezvous store for whether a join or push was called off.

    NCCL reports no error for a lost peer; the call just never finishes.

    Args:
        store: the store at which the epoch's ranks meet.
        epoch: of the group.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        self._store, self._next = _epoch_store(store, epoch), 0.0

    def rest(self) -> None:
        """Delays the next poll: most pushes are over by then and need none."""
        self._next = time.monotonic() + _ASK_EVERY_S

    def check(self, phase: str) -> None:
        """Raises PeerLostError, naming the lost member, if the join or push was called off."""
        if time.monotonic() < self._next:
            return
        self.rest()
        try:
            if not self._store.check([_ABANDONED]):
                return
            lost = self._store.get(_ABANDONED).decode()
        except RuntimeError as error:
            first = RankRef(MemberKind.LEARNER, 0)
            raise PeerLostError(f"{phase}: lost the connection to {first}: {error}", peer=first) from error
        raise PeerLostError(f"{phase}: called off, since {lost} went away", peer=lost)


def abandon(host: str, port: int, *, epoch: int, lost: str, timeout_s: float) -> None:
    """Calls off the join or push of an epoch, from any thread or process.

    Args:
        host: of the rendezvous store.
        port: of the rendezvous store.
        epoch: of the group.
        lost: the member that went away.
        timeout_s: longest time to wait for the store.
    """
    store = TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    _epoch_store(store, epoch).set(_ABANDONED, lost)


def _epoch_store(store: Store, epoch: int) -> PrefixStore:
    return PrefixStore(f"weights/{epoch}", store)


def _await_all(spec: WeightGroupSpec, rank: int, store: Store, deadline: Deadline) -> None:
    """Returns when every rank has called it: NCCL, once it connects, waits for all without a deadline."""
    here, called_off = _epoch_store(store, spec.epoch), Abandonment(store, spec.epoch)
    here.set(_HERE.format(rank=rank), "1")
    missing = [other for other in range(spec.world_size) if other != rank]
    while True:
        missing = [other for other in missing if not here.check([_HERE.format(rank=other)])]
        if not missing:
            return
        deadline.remaining(spec.rank_ref(missing[0]))
        called_off.check(deadline.phase)
        time.sleep(_LOOK_EVERY_S)


def make_process_group(spec: WeightGroupSpec, rank: int, store: Store, deadline: Deadline) -> Any:
    """Waits for all ranks, then makes the process group of one epoch, separate from torch's default one.

    NCCL makes its connections later, with the first messages.

    Raises:
        DeadlineError: a rank did not come; the error names it.
        PeerLostError: the join was called off, since a member went away.
    """
    _await_all(spec, rank, store, deadline)
    members = "some member of the weight group"
    store = _epoch_store(store, spec.epoch)
    store.set_timeout(deadline.remaining(members))
    if spec.backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options: Any = ProcessGroupNCCL.Options()
        # Transfers take precedence over packing and scattering, which would occupy the device between two
        # rounds.
        options.is_high_priority_stream = True
        # The watchdog ends the process; our own deadlines must pass first.
        options._timeout = timedelta(seconds=10 * spec.timeout_s)
        return ProcessGroupNCCL(store, rank, spec.world_size, options)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = deadline.remaining(members)
    options._devices = [gloo.create_device(hostname=_own_address(spec.store_host, spec.store_port))]
    return gloo(store, rank, spec.world_size, options)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the route to `host`; a datagram socket finds it without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
