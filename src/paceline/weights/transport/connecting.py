"""Connects the ranks of a group in a thread that can be abandoned at a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from paceline.core.members import SOME_MEMBER
from paceline.weights.transport.rendezvous import Abandonment, Deadline

_LOOK_EVERY_S = 0.005


class Connecting:
    """Runs `connect` in a thread, on the calling thread's stream.

    If a rank dies while NCCL connects, the others wait inside NCCL forever. The waiting thread is then
    abandoned with its process group; nothing else in the process waits for it.
    """

    def __init__(self, connect: Callable[[], None], device: torch.device) -> None:
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                # Device and stream are per thread: without setting them, the thread would use device 0.
                if stream is not None:
                    torch.cuda.set_device(device)
                with torch.cuda.stream(stream):
                    connect()
            except BaseException as error:  # noqa: BLE001  raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="weight group connects", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Returns whether the thread still connects."""
        return self._thread.is_alive()

    def wait(self, deadline: Deadline, abandonment: Abandonment) -> None:
        """Waits until the group is connected.

        Raises:
            DeadlineError: the deadline passed.
            PeerLostError: the join was cancelled.
            BaseException: what `connect` raised.
        """
        while self._thread.is_alive():
            self._thread.join(_LOOK_EVERY_S)
            if self._thread.is_alive():
                deadline.remaining(SOME_MEMBER)
                abandonment.check(deadline.phase)
        if self._error is not None:
            raise self._error
