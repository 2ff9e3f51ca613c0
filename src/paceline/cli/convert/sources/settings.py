"""The settings that a script of another program holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ScriptSettings:
    """Holds what a script sets.

    Attributes:
        settings: the other program's keys with their values.
        changed: by part of the script, what the user must change or move by hand.
        refused: what could not be read, with the reason.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
