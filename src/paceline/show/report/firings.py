"""Lists the guard rules that fired in a run: when, how badly, and with what action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.guard import RULES, Action, Reading

Row = Mapping[str, Any]

QUIET = (Action.WARN.value, Action.SKIP.value)
"""Actions that a page shows only in the guard's table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FiredRule:
    """How one rule fired for one network during the run.

    `worst` and `threshold` belong to the worst step. `actions` counts how often each action was the strongest
    of a step.
    """

    name: str
    steps: Sequence[int]
    skipped: int
    worst: float
    worst_step: int
    threshold: float
    sense: str
    actions: Mapping[str, int]


def fired_rules(firings: Sequence[Row]) -> list[FiredRule]:
    """Returns the rules that fired, most often first; a step that was repeated after a crash counts once."""
    last: dict[tuple[str, str, int], Row] = {}
    for event in firings:
        if event.get("rule") in RULES:
            last[event["rule"], str(event.get("network", "")), int(event["step"])] = event
    by_rule: dict[tuple[str, str], list[Row]] = {}
    for (rule, network, _), event in sorted(last.items()):
        by_rule.setdefault((rule, network), []).append(event)
    fired = [_summary(rule, network, events) for (rule, network), events in by_rule.items()]
    return sorted(fired, key=lambda rule: (-len(rule.steps), rule.name))


def _summary(rule: str, network: str, events: Sequence[Row]) -> FiredRule:
    def badness(event: Row) -> float:
        return _reading(rule, event).badness

    worst = max(events, key=badness)
    return FiredRule(
        name=f"{rule} ({network})" if network else rule,
        steps=[int(event["step"]) for event in events],
        skipped=sum(int(event.get("skipped", 0)) for event in events),
        worst=float(worst["value"]),
        worst_step=int(worst["step"]),
        threshold=_reading(rule, worst).threshold(float(worst["bound"])),
        sense=RULES[rule].sense.value,
        actions=dict(Counter(str(event.get("action", "")) for event in events)),
    )


def _reading(rule: str, event: Row) -> Reading:
    return Reading(rule=rule, value=float(event["value"]), reference=float(event.get("reference", 0.0)))


def ranges(steps: Sequence[int]) -> str:
    """Writes 1, 2, 3, 7 as "1-3, 7"; shortens a long list."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    words = [f"{first}-{last}" if last > first else str(first) for first, last in parts]
    return ", ".join(words[:12]) + (f" and {len(words) - 12} more" if len(words) > 12 else "")
