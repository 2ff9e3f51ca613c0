"""Converts the events of a run to the protobuf messages of ControllerService.Watch, and back."""

from __future__ import annotations

from paceline.core.run_record.run_events import EndEvent, NoticeEvent, PhaseEvent, RunEvent, StepEvent
from paceline.rpc.v1 import controller_pb2


def run_event_to_proto(event: RunEvent) -> controller_pb2.WatchEvent:
    """Writes the event as a message."""
    match event:
        case PhaseEvent():
            phase = controller_pb2.PhaseEvent(
                step=event.step, phase=event.phase, admitted=event.admitted, wanted=event.wanted
            )
            return controller_pb2.WatchEvent(phase=phase)
        case StepEvent():
            step = controller_pb2.StepEvent(step=event.step, metrics=event.metrics)
            return controller_pb2.WatchEvent(step=step)
        case NoticeEvent():
            return controller_pb2.WatchEvent(notice=controller_pb2.NoticeEvent(message=event.message))
        case EndEvent():
            return controller_pb2.WatchEvent(end=controller_pb2.EndEvent(ok=event.ok, message=event.message))


def run_event_from_proto(message: controller_pb2.WatchEvent) -> RunEvent | None:
    """Returns the event of a message; None if only newer versions know this kind of event."""
    match message.WhichOneof("event"):
        case "phase":
            now = message.phase
            return PhaseEvent(step=now.step, phase=now.phase, admitted=now.admitted, wanted=now.wanted)
        case "step":
            return StepEvent(step=message.step.step, metrics=dict(message.step.metrics))
        case "notice":
            return NoticeEvent(message=message.notice.message)
        case "end":
            return EndEvent(ok=message.end.ok, message=message.end.message)
        case _:
            return None
