"""Events for the clients that follow a run: phases, steps, notices, the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping

from paceline.core.run_record.run_events import (
    EndEvent,
    NoticeEvent,
    PhaseEvent,
    RunEvent,
    StepEvent,
    ValidationEvent,
)

_MAX_QUEUED = 4096
_MAX_UNHEARD = 64


class EventHub:
    """Hands every event to every follower.

    A new follower first gets the steps that it missed. A follower that falls behind is cut off.
    """

    def __init__(self) -> None:
        self._steps: list[StepEvent] = []
        self._validations: list[ValidationEvent] = []
        self._phase: PhaseEvent | None = None
        self._end: EndEvent | None = None
        self._unheard: deque[NoticeEvent] = deque(maxlen=_MAX_UNHEARD)
        self._queues: set[asyncio.Queue[RunEvent | None]] = set()

    def phase(self, *, step: int, phase: str, admitted: int = 0, wanted: int = 0) -> None:
        """Announces the phase, and how far a collection is."""
        self._phase = PhaseEvent(step=step, phase=phase, admitted=admitted, wanted=wanted)
        self._announce(self._phase)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Announces a finished step's metrics."""
        event = StepEvent(step=step, metrics=dict(metrics))
        self._steps.append(event)
        self._announce(event)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Announces the validation of a step that came in while later steps were trained."""
        event = ValidationEvent(step=step, metrics=dict(metrics))
        self._validations.append(event)
        self._announce(event)

    def notice(self, message: str) -> None:
        """Announces a message for people; without a follower, it waits for the first one."""
        event = NoticeEvent(message=message)
        if not self._queues:
            self._unheard.append(event)
        self._announce(event)

    def end(self, *, ok: bool, message: str) -> None:
        """Announces that the run is over; only the first call counts."""
        if self._end is None:
            self._end = EndEvent(ok=ok, message=message)
            self._announce(self._end)

    async def follow(self, from_step: int) -> AsyncIterator[RunEvent]:
        """Yields events from `from_step` on until the run ends, and all validations beside training."""
        queue: asyncio.Queue[RunEvent | None] = asyncio.Queue(_MAX_QUEUED)
        # There is no await between reading missed events and adding the queue, so no event is repeated or
        # lost.
        missed: list[RunEvent] = [*self._unheard, *(e for e in self._steps if e.step >= from_step)]
        missed += self._validations
        self._unheard.clear()
        missed += [event for event in (self._phase, self._end) if event is not None]
        self._queues.add(queue)
        try:
            for event in missed:
                yield event
                if isinstance(event, EndEvent):
                    return
            while (new := await queue.get()) is not None:
                yield new
                if isinstance(new, EndEvent):
                    return
        finally:
            self._queues.discard(queue)

    def _announce(self, event: RunEvent) -> None:
        for queue in list(self._queues):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._queues.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)
