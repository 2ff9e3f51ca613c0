"""Follows a run through the controller's event stream to its end; reconnects after a lost connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.cli.live.view import View
from paceline.core.errors import PeerLostError
from paceline.rpc.v1 import controller_pb2, controller_pb2_grpc
from paceline.service import channels

_RETRY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """The controller's last event."""

    ok: bool
    message: str


async def follow(address: str, token: str, view: View, *, patience_s: float = 15.0) -> RunEnd:
    """Shows every event until the run ends.

    Raises:
        PeerLostError: the controller could not be reached for `patience_s` seconds.
    """
    next_step = 0
    silent_since: float | None = None
    loop = asyncio.get_running_loop()
    channel = channels.connect(address, token=token)
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    try:
        while True:
            try:
                request = controller_pb2.WatchRequest(from_step=next_step)
                async for event in channels.stream(stub.Watch, request, phase="WATCH", peer="controller"):
                    silent_since = None
                    kind = event.WhichOneof("event")
                    if kind == "end":
                        return RunEnd(ok=event.end.ok, message=event.end.message)
                    if kind == "step":
                        next_step = event.step.step + 1
                    _show(event, view)
            except PeerLostError:
                silent_since = loop.time() if silent_since is None else silent_since
                if loop.time() - silent_since > patience_s:
                    raise
            # The stream ended early: the connection was lost, or this client read too slowly.
            await asyncio.sleep(_RETRY_S)
    finally:
        await channel.close()


def _show(event: controller_pb2.WatchEvent, view: View) -> None:
    match event.WhichOneof("event"):
        case "phase":
            now = event.phase
            view.phase(step=now.step, phase=now.phase, admitted=now.admitted, wanted=now.wanted)
        case "step":
            view.step(event.step.step, dict(event.step.metrics))
        case "notice":
            view.notice(event.notice.message)
        case _:
            pass  # an event of a newer controller
