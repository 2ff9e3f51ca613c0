"""Converts the events of a run to the protobuf messages of ControllerService.Watch, and back."""

from __future__ import annotations

from typing import Any

from paceline.core.run_record.run_events import (
    EndEvent,
    NoticeEvent,
    PhaseEvent,
    RunEvent,
    StepEvent,
    ValidationEvent,
)
from paceline.rpc.v1 import controller_pb2
from paceline.wire.records import from_proto, to_proto

_KINDS: tuple[tuple[str, Any, type[Any]], ...] = (
    ("phase", controller_pb2.PhaseEvent, PhaseEvent),
    ("step", controller_pb2.StepEvent, StepEvent),
    ("validation", controller_pb2.ValidationEvent, ValidationEvent),
    ("notice", controller_pb2.NoticeEvent, NoticeEvent),
    ("end", controller_pb2.EndEvent, EndEvent),
)


def run_event_to_proto(event: RunEvent) -> controller_pb2.WatchEvent:
    """Writes the event as a message."""
    name, kind, _ = next(row for row in _KINDS if isinstance(event, row[2]))
    return controller_pb2.WatchEvent(**{name: to_proto(event, kind)})


def run_event_from_proto(message: controller_pb2.WatchEvent) -> RunEvent | None:
    """Returns the event of a message; None if only newer versions know this kind of event."""
    given = message.WhichOneof("event")
    kinds = (of for name, _, of in _KINDS if name == given)
    return next((from_proto(getattr(message, str(given)), of) for of in kinds), None)
