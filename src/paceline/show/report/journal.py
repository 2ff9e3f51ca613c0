"""Reads what a page shows of a run's journal: notes by step, the fleet, fired guard rules, verdicts."""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.service.process_ends import ProcessEnd
from paceline.show.report.firings import QUIET, fired_rules, ranges
from paceline.show.report.lines import last_lines

Row = Mapping[str, Any]

_SKIPPED = (
    "phase", "dispatch", "trajectory", "refill", "batch", "trained", "step", "guard_summary",
    "checkpoint_removed", "epoch",
)  # fmt: skip
_ROUTINE = ("commit", *_SKIPPED)
_QUIET_CHANGES = {"registered", "alive"}
_BAD = {"lost", "rewind", "recollect", "rollback", "group_dropped", "process"}
_READ = re.compile(rb'"event": ?"(?!(?:%s)")' % "|".join(_SKIPPED).encode())
_TRAJECTORY, _ADMITTED = b'"event":"trajectory"', b'"verdict":"admitted"'
_VERDICT = re.compile(rb'"event": ?"trajectory".*?"verdict": ?"(\w+)"')
_COMMIT = re.compile(rb'commit".*?"version": ?(\d+).*?"servers": ?(\[.*?\])')
_LAST = re.compile(rb'"event": ?"(run|end)"')
_STEP = re.compile(rb'"step": ?(\d+)')
_END_BYTES = 2**18
_MAX_NOTES = 3000
_MAX_FIRINGS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Holds an event that the report mentions.

    Attributes:
        level: "bad", "warn" or "info".
        quiet: shown at its step on the curves, but not in the list of events.
    """

    time: float
    step: int
    name: str
    text: str
    level: str
    quiet: bool = False


@dataclass(kw_only=True, slots=True)
class FleetMember:
    """What the journal last said about a member."""

    name: str
    engine: str = ""
    state: str = ""
    since: float = 0.0
    starts: int = 0
    deaths: int = 0
    version: int | None = None


def read_end(journal: Path) -> str | None:
    """Returns why a run ended; None while it goes on. Reads only the last lines of the journal.

    After a run's end, only its members' farewells are recorded.
    """
    lines = last_lines(journal, _END_BYTES)
    ends = list(_LAST.finditer(lines))
    if not ends or ends[-1][1] == b"run":
        return None
    first = lines.rfind(b"\n", 0, ends[-1].start()) + 1
    try:
        event = json.loads(lines[first : lines.index(b"\n", first)])
    except ValueError:
        return None
    return str(event.get("message", "ended"))


class JournalView:
    """Reads the journal's lines in their order and keeps what a page shows of them."""

    def __init__(self) -> None:
        self._notes: deque[Note] = deque(maxlen=_MAX_NOTES)
        self._firings: deque[Row] = deque(maxlen=_MAX_FIRINGS)
        self._verdicts: Counter[bytes] = Counter()
        self._commits: dict[bytes, bytes] = {}
        self._fleet: dict[str, FleetMember] = {}
        self._step, self._began = 0, 0.0

    def add(self, lines: bytes) -> None:
        """Takes the next complete lines; parses only the needed part of most events."""
        start = 0
        while start < len(lines) and not self._began:
            end = lines.index(b"\n", start) + 1
            self._take(lines[start:end])
            start = end
        self._count_verdicts(lines, start)
        for read in _READ.finditer(lines, start):
            if commit := _COMMIT.match(lines, read.end()):
                # The newest commit of these servers comes last.
                self._commits.pop(commit[2], None)
                self._commits[commit[2]] = commit[1]
                continue
            first, end = lines.rfind(b"\n", 0, read.start()) + 1, lines.index(b"\n", read.end()) + 1
            self._pass(lines, start, first)
            self._take(lines[first:end])
            start = end
        self._pass(lines, start, len(lines))

    def _count_verdicts(self, lines: bytes, start: int) -> None:
        # Two counts cost a quarter of what the regular expression costs.
        num_admitted = lines.count(_ADMITTED, start)
        if num_admitted and num_admitted == lines.count(_TRAJECTORY, start):
            self._verdicts[b"admitted"] += num_admitted
        else:
            self._verdicts.update(_VERDICT.findall(lines, start))

    def _pass(self, lines: bytes, start: int, end: int) -> None:
        """Notes the last step that a part of the lines names."""
        place = lines.rfind(b'"step":', start, end)
        if place >= 0 and (match := _STEP.match(lines, place)):
            self._step = int(match[1])

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line) if line else None
        except ValueError:
            return
        if not isinstance(event, dict):
            return
        name = str(event.get("event", ""))
        self._began = self._began or _time(event)
        if isinstance(event.get("step"), int):
            self._step = event["step"]
        if name == "trajectory":
            self._verdicts[str(event.get("verdict")).encode()] += 1
        elif name == "member":
            self._member(event)
        elif name == "commit":
            self._commit(event.get("servers") or (), event.get("version"))
        elif name == "guard":
            self._guard(event)
        if name and name not in _ROUTINE and name not in ("guard", "member"):
            level = "bad" if name in _BAD or event.get("ok") is False else "info"
            self._notes.append(_note(event, name, self._step, level, _details(event)))

    def content(self, ends: Iterable[ProcessEnd]) -> dict[str, Any]:
        """Returns values for JSON; `ends` are the processes' ends, which become notes, too."""
        for servers, version in self._commits.items():
            self._commit(json.loads(servers), int(version))
        self._commits.clear()
        notes = list(self._notes)
        notes += [
            Note(time=end.time, step=end.step, name="process", text=str(end), level="bad") for end in ends
        ]
        return {
            "began": self._began,
            "notes": [asdict(note) for note in sorted(notes, key=lambda note: note.time)],
            "fleet": [asdict(member) for member in sorted(self._fleet.values(), key=lambda m: m.name)],
            "verdicts": {verdict.decode(): count for verdict, count in sorted(self._verdicts.items())},
            "guard": [
                {**asdict(rule), "steps": ranges(rule.steps)} for rule in fired_rules(list(self._firings))
            ],
        }

    def _member(self, event: Row) -> None:
        member_id, what = str(event.get("member", "")), str(event.get("what", ""))
        member = self._fleet.setdefault(member_id, FleetMember(name=member_id))
        if what == "registered":
            member.starts, member.engine = member.starts + 1, str(event.get("engine", ""))
        elif what == "dead":
            member.deaths += 1
        if what.startswith("state:"):
            member.state, member.since = what.removeprefix("state:"), _time(event)
            return
        if what != "alive":
            member.state, member.since = what, _time(event)
        if what not in _QUIET_CHANGES or member.starts > 1:
            level = {"dead": "bad", "suspect": "warn"}.get(what, "info")
            text = " ".join(filter(None, (member_id, what, str(event.get("reason") or ""))))
            self._notes.append(_note(event, "member", self._step, level, text))

    def _commit(self, servers: Iterable[object], version: int | None) -> None:
        for server in servers:
            member = self._fleet.setdefault(str(server), FleetMember(name=str(server)))
            member.version = version

    def _guard(self, event: Row) -> None:
        self._firings.append(event)
        quiet = event.get("action") in QUIET
        text = str(event.get("message") or _details(event))
        level = "warn" if event.get("action") == "warn" else "bad"
        self._notes.append(_note(event, "guard", self._step, level, text, quiet=quiet))


def _note(event: Row, name: str, step: int, level: str, text: str, *, quiet: bool = False) -> Note:
    return Note(time=_time(event), step=step, name=name, text=text, level=level, quiet=quiet)


def _time(event: Row) -> float:
    time = event.get("time")
    return float(time) if isinstance(time, int | float) else 0.0


def _details(event: Row) -> str:
    left_out = ("n", "time", "event", "settings", "guard", "cursor")
    return ", ".join(
        f"{key} {_word(value)}"
        for key, value in event.items()
        if key not in left_out and value not in (None, "")
    )


def _word(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else text[:297] + "..."
