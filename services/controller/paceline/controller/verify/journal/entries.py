"""Reads events.jsonl event by event, because the file may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.core.errors import DataError


def read(path: Path, findings: Findings) -> Iterator[JournalEntry]:
    """Yields the journal's entries; notes lines that cannot be read and gaps in the numbers.

    A line that a crash cut off is allowed at the end of the file, or at the end of a term.

    Raises:
        DataError: the journal was written before events had terms.
    """
    before: JournalEntry | None = None
    has_run = has_gap = False
    for entry in _entries(path, findings):
        expected = 0 if before is None else int(before["n"]) + 1
        if entry["n"] != expected and not has_gap:
            findings.record(f"an event has the number {entry['n']} where {expected} is due", before, entry)
            has_gap = True
        if entry.kind == "run":
            has_run = True
            _check_age(path, entry.get("term") is not None)
        findings.counts["events"] += 1
        before = entry
        yield entry
    _check_age(path, has_run)


def _entries(path: Path, findings: Findings) -> Iterator[JournalEntry]:
    """Yields the entries of the lines that can be read."""
    torn: int | None = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line == b"\n":
                continue
            event = parse(line)
            if event is None:
                torn = torn or number
                continue
            entry = JournalEntry(line=number, event=event)
            if torn is not None and entry.kind != "run":
                findings.record(f"line {torn} cannot be read, and it is not the last of its term", entry)
            torn = None
            yield entry


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns the event of a line; None if the line is incomplete or no event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("n"), int) and line.endswith(b"\n")
    return event if is_event else None


def _check_age(path: Path, has_term: bool) -> None:
    if not has_term:
        raise DataError(
            f"{path} cannot be verified: a start of the controller has no term, so the run is from a version "
            "of Paceline that did not record what verify reads"
        )
