"""Follows a run through the controller's events to its end; reconnects after a lost connection."""

from __future__ import annotations

import asyncio

from paceline.cli.controller_client import ControllerClient
from paceline.cli.live.view import View
from paceline.core.errors import PeerLostError
from paceline.core.run_events import EndEvent, NoticeEvent, PhaseEvent, StepEvent

_RETRY_S = 0.5


async def follow(address: str, token: str, view: View, *, patience_s: float = 15.0) -> EndEvent:
    """Shows every event until the run ends.

    Raises:
        PeerLostError: the controller could not be reached for `patience_s` seconds.
    """
    next_step = 0
    silent_since: float | None = None
    loop = asyncio.get_running_loop()
    async with ControllerClient(address, token) as controller:
        while True:
            try:
                async for event in controller.watch(from_step=next_step):
                    silent_since = None
                    if isinstance(event, EndEvent):
                        return event
                    if isinstance(event, StepEvent):
                        next_step = event.step + 1
                    _show(event, view)
            except PeerLostError:
                silent_since = loop.time() if silent_since is None else silent_since
                if loop.time() - silent_since > patience_s:
                    raise
            # The stream ended early: the connection was lost, or this client read too slowly.
            await asyncio.sleep(_RETRY_S)


def _show(event: PhaseEvent | StepEvent | NoticeEvent, view: View) -> None:
    match event:
        case PhaseEvent():
            view.phase(step=event.step, phase=event.phase, admitted=event.admitted, wanted=event.wanted)
        case StepEvent():
            view.step(event.step, event.metrics)
        case NoticeEvent():
            view.notice(event.message)
