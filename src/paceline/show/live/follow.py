"""Follows a run through the controller's events to its end; reconnects after a lost connection."""

from __future__ import annotations

import asyncio

from paceline.core.errors import PeerLostError
from paceline.core.run_record.run_events import EndEvent, NoticeEvent, PhaseEvent, StepEvent, ValidationEvent
from paceline.runs.controller_client import ControllerClient
from paceline.service.identity.credentials import Credentials
from paceline.show.live.signs import Signs
from paceline.show.live.view import View

_RETRY_S = 0.5


async def follow(address: str, credentials: Credentials, view: View, *, patience_s: float) -> EndEvent:
    """Shows every event until the run ends, each finished step and each validation once.

    Raises:
        PeerLostError: the controller could not be reached for `patience_s` seconds.
    """
    news, signs = _News(), Signs()
    silent_since: float | None = None
    loop = asyncio.get_running_loop()
    async with ControllerClient(address, credentials) as controller:
        while True:
            try:
                async for event in controller.watch(from_step=news.next_step):
                    if silent_since is not None:
                        silent_since = None
                        view.notice("the controller is back")
                    if isinstance(event, EndEvent):
                        return event
                    if news.is_new(event):
                        _show(event, view, signs)
            except PeerLostError:
                if silent_since is None:
                    silent_since = loop.time()
                    view.notice("the controller is away")
                if loop.time() - silent_since > patience_s:
                    raise
            # The stream ended early: the connection was lost, or this client read too slowly.
            await asyncio.sleep(_RETRY_S)


class _News:
    """Recognises events shown before: after a rewind or a new connection the controller repeats some."""

    def __init__(self) -> None:
        self.next_step, self._validated = 0, set[int]()

    def is_new(self, event: PhaseEvent | StepEvent | ValidationEvent | NoticeEvent) -> bool:
        """Returns whether an event is to be shown, and notes it."""
        if isinstance(event, StepEvent):
            is_new, self.next_step = event.step >= self.next_step, max(self.next_step, event.step + 1)
            return is_new
        if isinstance(event, ValidationEvent):
            is_new = event.step not in self._validated
            self._validated.add(event.step)
            return is_new
        return True


def _show(event: PhaseEvent | StepEvent | ValidationEvent | NoticeEvent, view: View, signs: Signs) -> None:
    match event:
        case PhaseEvent():
            view.phase(step=event.step, phase=event.phase, admitted=event.admitted, wanted=event.wanted)
        case StepEvent():
            view.step(event.step, event.metrics)
            for sentence in signs.look(event.step, event.metrics):
                view.notice(sentence)
        case ValidationEvent():
            view.validation(event.step, event.metrics)
        case NoticeEvent():
            view.notice(event.message)
