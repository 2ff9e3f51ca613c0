"""How the ranks of a weight group find each other, and hear that one is lost: deadlines, the rendezvous store, the process group."""

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
    """A moment by which a phase must be over, and the words for when it is not."""

    def __init__(self, phase: str, seconds: float) -> None:
        self.phase, self.seconds = phase, seconds
        self._end = time.monotonic() + seconds

    def remaining(self, peer: Peer) -> timedelta:
        """Time left; raises DeadlineError naming `peer` where none is."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error(peer)
        return timedelta(seconds=max(left, 0.001))

    def error(self, peer: Peer) -> DeadlineError:
        """What to raise when `peer` did not come in time."""
        hint = "see the peer's log; the weight group must be formed anew"
        return DeadlineError(phase=self.phase, peer=peer, seconds=self.seconds, hint=hint)

    def translate(self, error: RuntimeError, peer: Peer) -> DeadlineError | PeerLostError:
        """torch reports time-outs and broken connections as RuntimeErrors that only their text tells apart."""
        if self._end <= time.monotonic() or "timed out" in str(error).lower():
            return self.error(peer)
        text = str(error).splitlines()[0]
        return PeerLostError(f"{self.phase}: lost the connection to {peer}: {text}", peer=peer)


def open_store(host: str, timeout_s: float) -> TCPStore:
    """A rendezvous store that listens on `host` only, on a free port (`store.port`)."""
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
    """Whether a join or push was called off, asked of the rendezvous store now and then: over NCCL a peer that is lost is only never done.

    Args:
        store: the one that the epoch's ranks meet at.
        epoch: of the group.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        self._store, self._next = _epoch_store(store, epoch), 0.0

    def rest(self) -> None:
        """The next question comes after a pause: most pushes are over by then, and cost none."""
        self._next = time.monotonic() + _ASK_EVERY_S

    def check(self, phase: str) -> None:
        """Raises PeerLostError, naming the member that was lost, where the push was called off."""
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
    """Calls off what goes on in an epoch, from any thread or process.

    Args:
        host: of the rendezvous store.
        port: likewise.
        epoch: of the group.
        lost: the member that went away.
        timeout_s: longest to wait for the store.
    """
    store = TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    _epoch_store(store, epoch).set(_ABANDONED, lost)


def _epoch_store(store: Store, epoch: int) -> PrefixStore:
    return PrefixStore(f"weights/{epoch}", store)


def _await_all(spec: WeightGroupSpec, rank: int, store: Store, deadline: Deadline) -> None:
    """Returns when every rank has come this far. NCCL, once it connects, waits for all without a deadline."""
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
    """The connections of one epoch's group, outside of torch's default one, once all ranks are there; made as far as the backend makes
    them now.

    Raises:
        DeadlineError: a rank did not come; it is named.
        PeerLostError: the join was called off, since a member went away.
    """
    _await_all(spec, rank, store, deadline)
    members = "some member of the weight group"
    store = _epoch_store(store, spec.epoch)
    store.set_timeout(deadline.remaining(members))
    if spec.backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options: Any = ProcessGroupNCCL.Options()
        # Transfers go before packing and scattering, which would take all of the device between two rounds.
        options.is_high_priority_stream = True
        # The watchdog ends the whole process; our own deadlines come first.
        options._timeout = timedelta(seconds=10 * spec.timeout_s)
        return ProcessGroupNCCL(store, rank, spec.world_size, options)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = deadline.remaining(members)
    options._devices = [gloo.create_device(hostname=_own_address(spec.store_host, spec.store_port))]
    return gloo(store, rank, spec.world_size, options)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`; a datagram socket finds it without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
