"""Reads events.jsonl as it lies on disk."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.controller.verify.findings import Entry, Findings, Invariant
from paceline.core.errors import DataError


def read(path: Path, findings: Findings) -> list[Entry]:
    """The journal's entries; notes lines that cannot be read and gaps in the numbers.

    A line that a crash cut off is allowed as the last of the file, or of a term.

    Raises:
        DataError: the journal was written before events had terms.
    """
    lines = path.read_bytes().split(b"\n")
    entries: list[Entry] = []
    torn: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        event = _parse(line)
        if event is None or number == len(lines):
            torn = torn or number
            continue
        entry = Entry(line=number, event=event)
        if torn is not None and entry.kind != "run":
            findings.add(
                Invariant.RECORD, f"line {torn} cannot be read, and it is not the last of its term", entry
            )
        torn = None
        entries.append(entry)
    _check_age(path, entries)
    _check_numbers(entries, findings)
    findings.counts["events"] = len(entries)
    return entries


def _parse(line: bytes) -> dict[str, object] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("n"), int) else None


def _check_age(path: Path, entries: list[Entry]) -> None:
    runs = [entry for entry in entries if entry.kind == "run"]
    if not runs or any(entry.get("term") is None for entry in runs):
        raise DataError(
            f"{path} cannot be verified: a start of the controller has no term, so the run is from before "
            "Paceline recorded what verify reads"
        )


def _check_numbers(entries: list[Entry], findings: Findings) -> None:
    for expected, entry in enumerate(entries):
        if entry["n"] != expected:
            before = entries[expected - 1] if expected else None
            findings.add(
                Invariant.RECORD,
                f"an event has the number {entry['n']} where {expected} is due",
                before,
                entry,
            )
            return
