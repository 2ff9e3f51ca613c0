"""Checks that no phase outlasted its deadlines without an event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from paceline.config.run import RunConfig
from paceline.controller.phases import Phase
from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.term import Term

# A machine may be slow to wake a process, and a clock may be set.
_SLACK = 1.5
_SLACK_S = 30.0


def check(entries: Iterable[JournalEntry], config: RunConfig, findings: Findings) -> Iterator[JournalEntry]:
    """Compares the times between events with the deadlines of the phase they lie in; passes the events on.

    The time before a controller's start does not count, because no controller was running.
    """
    limits: Mapping[str, float] = {}
    phase, before = Phase.STARTING, None
    for entry in entries:
        if entry.kind == "run":
            limits = Term.read(entry, config).limits
            phase, before = Phase.STARTING, None
        if before is not None and phase.value in limits:
            seconds = float(entry["time"]) - float(before["time"])
            limit = limits[phase.value]
            if seconds > _SLACK * limit + _SLACK_S:
                findings.i5(
                    f"nothing happened for {seconds:.0f} s in phase {phase.value}, which has a deadline of "
                    f"{limit:.0f} s",
                    before,
                    entry,
                )
        if entry.kind == "phase":
            phase = Phase(entry["to"])
        before = entry
        yield entry
