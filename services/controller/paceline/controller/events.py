"""What watchers of a run are told: phases, steps, notices, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from paceline.rpc.v1 import controller_pb2 as pb

_MAX_QUEUED = 4096


class EventHub:
    """Hands every event to every watcher. A newcomer first gets the steps that it missed; a watcher that falls behind is cut off."""

    def __init__(self) -> None:
        self._steps: list[pb.WatchEvent] = []
        self._phase: pb.WatchEvent | None = None
        self._end: pb.WatchEvent | None = None
        self._queues: set[asyncio.Queue[pb.WatchEvent | None]] = set()

    def phase(self, *, step: int, phase: str, admitted: int = 0, wanted: int = 0) -> None:
        """Tells the phase, and how far a collection is."""
        event = pb.WatchEvent(phase=pb.PhaseEvent(step=step, phase=phase, admitted=admitted, wanted=wanted))
        self._phase = event
        self._tell(event)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tells a finished step's metrics."""
        event = pb.WatchEvent(step=pb.StepEvent(step=step, metrics=dict(metrics)))
        self._steps.append(event)
        self._tell(event)

    def notice(self, message: str) -> None:
        """Tells a sentence for people."""
        self._tell(pb.WatchEvent(notice=pb.NoticeEvent(message=message)))

    def end(self, *, ok: bool, message: str) -> None:
        """Tells that the run is over; only the first call counts."""
        if self._end is None:
            self._end = pb.WatchEvent(end=pb.EndEvent(ok=ok, message=message))
            self._tell(self._end)

    async def watch(self, from_step: int) -> AsyncIterator[pb.WatchEvent]:
        """Events from `from_step` on until the run ends."""
        queue: asyncio.Queue[pb.WatchEvent | None] = asyncio.Queue(_MAX_QUEUED)
        # Missed events and the queue are taken in the same moment: nothing comes twice, nothing is lost.
        missed = [event for event in self._steps if event.step.step >= from_step]
        missed += [event for event in (self._phase, self._end) if event is not None]
        self._queues.add(queue)
        try:
            for event in missed:
                yield event
                if event.HasField("end"):
                    return
            while (new := await queue.get()) is not None:
                yield new
                if new.HasField("end"):
                    return
        finally:
            self._queues.discard(queue)

    def _tell(self, event: pb.WatchEvent) -> None:
        for queue in list(self._queues):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._queues.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)
