"""The events of a run that its followers see: phases, steps, validations, notices, the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEvent:
    """The run is in a phase; `admitted` of `wanted` trajectories have arrived (0 of 0 if none is wanted)."""

    step: int
    phase: str
    admitted: int = 0
    wanted: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """Says that a step is finished."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationEvent:
    """Holds the results of a step's validation, which arrived while later steps were trained."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeEvent:
    """Holds a message for the user."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent:
    """The run is over; no event follows."""

    ok: bool
    message: str


RunEvent = PhaseEvent | StepEvent | ValidationEvent | NoticeEvent | EndEvent
