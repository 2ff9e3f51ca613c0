"""The result of a check: breaches by invariant, each with the journal entries that show it, and counts."""

from __future__ import annotations

import enum
import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.service.process_ends import FILE as ENDS

_LONGEST = 320
_MOST_ENDS = 20


class Invariant(enum.Enum):
    """An invariant that must hold; the value is the printed text."""

    RECORD = (
        "the record: lines are numbered without gaps, terms increase, each step has one line of metrics "
        "that agrees with the journal, and no file was changed after it was written"
    )
    I1 = (
        "I1: every trained token was sampled from the version that its step trains, or from one that is at "
        "most barrier.max_staleness versions older, with the committed digest; a token that is trained "
        "again is at most algorithm.replay.max_age versions older"
    )
    I2 = (
        "I2: every prompt of a step is the next in order, and is trained once, dropped with a reason, or set "
        "aside; a sample is trained again once per permission; no step is lost"
    )
    I3 = "I3: the batch holds each trajectory once, in order; it is the batch that was trained and recorded"
    I4 = "I4: a version has one digest, and a rollback has the digest of the step it went back to"
    I5 = "I5: phases change only as allowed, and none outlasts its deadline"


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalEntry:
    """One event of the journal and its line number, counted from 1."""

    line: int
    event: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The name of the event; "None" if the line has none."""
        return str(self.event.get("event"))

    def __getitem__(self, key: str) -> Any:
        return self.event[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field, or `default` if the event lacks it."""
        return self.event.get(key, default)

    def __str__(self) -> str:
        return f"line {self.line} (n={self.get('n')}): {_cut(json.dumps(dict(self.event)))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Breach:
    """An invariant that does not hold."""

    invariant: Invariant
    sentence: str
    entries: tuple[JournalEntry, ...] = ()

    def __str__(self) -> str:
        return f"{self.invariant.name}: {self.sentence}"


def _cut(text: str) -> str:
    """Cuts text to a few lines of a terminal; a single dispatch may name thousands of prompts."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} ... (and {len(text) - _LONGEST:,} more characters)"


COUNTS = (
    "events",
    "controller restarts",
    "steps finished",
    "batches",
    "commits",
    "rollbacks",
    "rewinds",
    "re-collections",
    "pushes to newcomers",
    "checkpoints",
    "checkpoints on disk",
    "members lost",
    "processes that ended",
    "prompt groups dispatched",
    "prompt groups set aside",
    "prompt groups refused",
    "prompt groups dropped",
    "trajectories admitted",
    "rows trained",
    "rows in parquet files",
    "digests of trajectories recomputed",
)
"""The counts, in the order of the report; trajectories with other verdicts follow."""


NEVER = (
    "whether a reward is right, and a response's text that of its tokens",
    "the tensors in a checkpoint: files are compared with the manifest, and the manifest with the journal",
    "metrics other than counts, rewards, components and validation: only that their line is unchanged",
    "the learner's log-probs, texts and times in trajectories/: only that their file is unchanged",
    "logs/, spans.jsonl and the report",
    "a record that was forged entirely: journal, files and digests",
)
"""What is not checked in any run."""


class Findings:
    """Collects breaches and counts, and notes on ends of processes, user code and skipped checks.

    Attributes:
        record, i1, i2, i3, i4, i5: note a breach of that invariant: a sentence, and the entries that show it.
    """

    def __init__(self) -> None:
        self.breaches: list[Breach] = []
        self.ends: list[str] = []
        self.code: list[str] = []
        self.unseen = Counter[str]()
        self.counts = Counter[str]()
        self.record = functools.partial(self._add, Invariant.RECORD)
        self.i1 = functools.partial(self._add, Invariant.I1)
        self.i2 = functools.partial(self._add, Invariant.I2)
        self.i3 = functools.partial(self._add, Invariant.I3)
        self.i4 = functools.partial(self._add, Invariant.I4)
        self.i5 = functools.partial(self._add, Invariant.I5)

    def _add(self, invariant: Invariant, sentence: str, *entries: JournalEntry | None) -> None:
        shown = tuple(entry for entry in entries if entry is not None)
        self.breaches.append(Breach(invariant=invariant, sentence=sentence, entries=shown))

    def to_json(self) -> str:
        """Returns the counts, the number of breaches of each invariant, and the skipped checks."""
        breaches = Counter(breach.invariant.name for breach in self.breaches)
        plain = {
            "counts": self.counts,
            "breaches": {i.name: breaches[i.name] for i in Invariant},
            "code": self.code,
            "not_looked_at": [*self._unseen(), *NEVER],
        }
        return json.dumps(plain)

    def lines(self) -> Iterator[str]:
        """Yields the report: counts, then whether each invariant holds, with the first breach's entries."""
        for name in (*COUNTS, *sorted(self.counts.keys() - set(COUNTS))):
            yield f"{name:32}{self.counts[name]:>10,}"
        yield from (f"code      {code}" for code in self.code)
        yield from (f"ended     {end}" for end in self.ends[:_MOST_ENDS])
        if len(self.ends) > _MOST_ENDS:
            yield f"ended     {len(self.ends) - _MOST_ENDS} more, in {ENDS}"
        yield from (f"unseen    {sentence}" for sentence in (*self._unseen(), *NEVER))
        for invariant in Invariant:
            breaches = [breach for breach in self.breaches if breach.invariant is invariant]
            if not breaches:
                yield f"holds     {invariant.value}"
                continue
            yield f"BREACHED  {invariant.value}"
            yield f"          {len(breaches)} breach(es); the first: {_cut(breaches[0].sentence)}"
            yield from (f"            {entry}" for entry in breaches[0].entries)

    def _unseen(self) -> Iterator[str]:
        for what, count in self.unseen.items():
            yield what if count == 1 else f"{what} ({count:,} times)"
