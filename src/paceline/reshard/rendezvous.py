"""How the ranks of a weight group find each other: deadlines, the rendezvous store, the process group."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import DeadlineError, PeerLostError
from paceline.reshard.spec import WeightGroupSpec


class Deadline:
    """A moment by which a phase must be over, and the words for when it is not."""

    def __init__(self, phase: str, seconds: float) -> None:
        self.phase, self.seconds = phase, seconds
        self._end = time.monotonic() + seconds

    def remaining(self, peer: str) -> timedelta:
        """Time left; raises DeadlineError naming `peer` where none is."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error(peer)
        return timedelta(seconds=max(left, 0.001))

    def error(self, peer: str) -> DeadlineError:
        """What to raise when `peer` did not come in time."""
        hint = "see the peer's log; the weight group must be formed anew"
        return DeadlineError(phase=self.phase, peer=peer, seconds=self.seconds, hint=hint)

    def translate(self, error: RuntimeError, peer: str) -> DeadlineError | PeerLostError:
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


def make_process_group(spec: WeightGroupSpec, rank: int, store: Store, deadline: Deadline) -> Any:
    """The connections of one epoch's group, outside of torch's default one; made as far as the backend makes them now."""
    members = "some member of the weight group"
    store = PrefixStore(f"weights/{spec.epoch}", store)
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
