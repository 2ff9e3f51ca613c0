"""The journal's record of one step: complete until the step is finished, reduced afterwards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from paceline.controller.verify.digests import digest_of
from paceline.controller.verify.findings import Findings, Invariant, JournalEntry
from paceline.controller.verify.journal import recomputed_metrics
from paceline.controller.verify.journal.collection import Collection, Wanted
from paceline.controller.verify.journal.term import Shape, Term
from paceline.controller.verify.journal.validation import ValidationCheck
from paceline.controller.verify.rows.trajectory_row import TrajectoryRow, oldest_of, ranges_of
from paceline.core.ids import TrajectoryId
from paceline.core.training import BatchRow


class Finished(NamedTuple):
    """The record of a finished step, reduced because a long run has many steps."""

    line: int
    n: int
    num_rows: int
    num_again: int
    num_dropped: int
    batch: str
    asked: str
    cursor: Mapping[str, int]
    guard: str

    def entry(self, number: int) -> JournalEntry:
        """Returns the step's dispatch, without the prompts."""
        return JournalEntry(line=self.line, event={"n": self.n, "event": "dispatch", "step": number})


@dataclass(kw_only=True, slots=True)
class StepHistory:
    """The journal's record of one step.

    Attributes:
        collections: the collections of its samplings, in order; the last is open until the batch is complete.
        samplings: the events of samplings after its dispatch, by number, since trajectories were void.
        before: the admissions before the controller restarted, by trajectory.
        term: the settings with which its batch was made; None without a batch.
        rows: the rows of the last batch.
        metrics: the expected metrics of the step.
        num_again: number of rows of that batch that were trained before.
        num_dropped: number of prompts that the last collection dropped.
        shapes: how scorers enter the reward, in the terms of its collection; None if this changed between
            them.
        validation: the validation that followed the step.
        saved: events of the files of its trajectories, by name.
    """

    wanted: Wanted | None = None
    collections: list[Collection] = field(default_factory=list)
    samplings: dict[int, JournalEntry] = field(default_factory=dict)
    before: Mapping[TrajectoryId, JournalEntry] | None = None
    batch: JournalEntry | None = None
    trained: JournalEntry | None = None
    commit: JournalEntry | None = None
    term: Term | None = None
    rows: Sequence[TrajectoryRow] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    num_again: int = 0
    num_dropped: int = 0
    shapes: Mapping[str, Shape] | None = None
    validation: ValidationCheck | None = None
    saved: dict[str, JournalEntry] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The step; -1 before its dispatch."""
        return self.wanted.step if self.wanted is not None else -1

    @property
    def dispatch(self) -> JournalEntry | None:
        """The event of its dispatch."""
        return self.wanted.entry if self.wanted is not None else None

    @property
    def collection(self) -> Collection | None:
        """The collection that is open."""
        return self.collections[-1] if self.collections else None

    @property
    def admitted(self) -> dict[TrajectoryId, JournalEntry]:
        """The admissions of all collections."""
        return {key: entry for collection in self.collections for key, entry in collection.admitted.items()}

    def kept_rows(self) -> list[TrajectoryRow]:
        """Returns the rows of the groups whose tokens are all in the file of trajectories."""
        saved = self.saved.get(f"step_{self.number:06d}.parquet")
        gone = set() if saved is None else set(saved.get("without_tokens") or ())
        return [row for row in self.rows if row.key.prompt_id not in gone]

    def begin_sampling(self, entry: JournalEntry, findings: Findings) -> None:
        """Takes a further sampling of a step that has a dispatch."""
        assert self.wanted is not None
        number, step = int(entry["number"]), entry["step"]
        if number != len(self.collections) + 1:
            findings.add(
                Invariant.I2,
                f"sampling {number} of step {step} follows {len(self.collections)} others",
                entry,
            )
        if entry["policy"] != self.wanted.policy:
            findings.add(
                Invariant.I1,
                f"step {step} samples from {entry['policy']}, but was dispatched for {self.wanted.policy}",
                self.wanted.entry,
                entry,
            )
        before = self.samplings.setdefault(number, entry)
        if before["digest"] != entry["digest"]:
            findings.add(
                Invariant.I2,
                f"sampling {number} of step {step} differs from its first request",
                before,
                entry,
            )
        self.collections.append(Collection(Wanted.of(entry, 0), findings))

    def note_batch(
        self, entry: JournalEntry, rows: Sequence[BatchRow], again: Sequence[BatchRow], term: Term
    ) -> None:
        """Takes the rows of a complete batch and recomputes their metrics.

        Args:
            again: the rows that were trained before.
        """
        self.batch, self.term, admitted = entry, term, self.admitted
        self.rows = [
            TrajectoryRow(
                key=row.trajectory_id,
                digest=row.blob_digest,
                reward=row.reward,
                raw_reward=float(admitted[row.trajectory_id].get("reward") or 0.0),
                policy=oldest_of(admitted[row.trajectory_id]),
                ranges=ranges_of(admitted[row.trajectory_id]),
            )
            for row in rows
        ]
        groups: dict[int, list[float]] = {}
        for row in rows:
            groups.setdefault(row.trajectory_id.prompt_id, []).append(row.reward)
        reasons = [reason for collection in self.collections for reason in collection.drop_reasons]
        verdicts = sum((collection.verdicts for collection in self.collections), Counter[str]())
        self.num_again, self.num_dropped = len(again), len(reasons)
        self.metrics = recomputed_metrics.of_barrier(verdicts, reasons) | recomputed_metrics.of_rewards(
            groups
        )
        if term.replay is not None:
            self.metrics["replay/share"] = len(again) / (len(again) + len(rows))
        if again and rows:
            # The learner's mean is over all rows that it trains.
            self.metrics["critic/score/mean"] = fmean(row.reward for row in [*rows, *again])
        policies = {row.policy for row in self.rows if row.policy is not None}
        if term.max_staleness and policies:
            oldest = max(policy.staleness_in(self.number) for policy in policies)
            self.metrics["barrier/staleness/max"] = float(oldest)

    def finished(self, entry: JournalEntry) -> Finished:
        """Returns the reduced record that is kept after the event `step`."""
        first, batch = self.dispatch or entry, self.batch
        return Finished(
            line=first.line,
            n=int(first["n"]),
            num_rows=len(self.rows),
            num_again=self.num_again,
            num_dropped=self.num_dropped,
            batch=str(batch["digest"]) if batch is not None else "",
            asked=asked_digest(self.wanted) if self.wanted is not None else "",
            cursor=entry.get("cursor") or {},
            guard=plain_digest(entry.get("guard")),
        )


class OpenSteps:
    """The dispatched but unfinished steps: the one in progress and, with a bound, those after it.

    Attributes:
        current: the step in progress; None between steps.
        ahead: the steps after it that are dispatched, by number.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.current: StepHistory | None = None
        self.ahead: dict[int, StepHistory] = {}
        self._void_asked: dict[int, tuple[str, JournalEntry]] = {}

    @property
    def all(self) -> list[StepHistory]:
        """Returns all open steps, the step in progress first."""
        return [*([] if self.current is None else [self.current]), *self.ahead.values()]

    def dispatch(self, wanted: Wanted, *, is_ahead: bool) -> StepHistory:
        """Takes the dispatch of a new step, or a repeated dispatch, which must have the same request."""
        before = self._void_asked.pop(wanted.step, None)
        step = self.ahead.get(wanted.step) if is_ahead else self.current
        if step is not None and step.wanted is not None and step.number == wanted.step:
            before = asked_digest(step.wanted), step.wanted.entry
            if step.admitted or step.batch:
                self._add(f"step {wanted.step} was dispatched twice", before[1], wanted.entry)
        else:
            step = StepHistory()
        if before is not None and before[0] != asked_digest(wanted):
            self._add(f"step {wanted.step} first asked for other prompts", before[1], wanted.entry)
        step.wanted = wanted
        if is_ahead:
            self.ahead[wanted.step] = step
        else:
            self.current = step
        return step

    def withdraw(self, number: int, entry: JournalEntry) -> None:
        """Makes the trajectories of a step that was dispatched ahead and has no batch void."""
        if self.current is not None and self.current.number == number and self.current.batch is None:
            self._void(self.current)
            self.current = None
        elif number in self.ahead:
            self._void(self.ahead.pop(number))
        else:
            self._add(f"step {number} was withdrawn, but was not dispatched ahead", entry)

    def void_ahead(self) -> None:
        """Makes the trajectories of all steps after the one in progress void."""
        for step in self.ahead.values():
            self._void(step)
        self.ahead.clear()

    def rewind(self, to_step: int, finished: Mapping[int, Finished]) -> None:
        """Makes all open steps void, and the finished steps after `to_step`."""
        for number, step in finished.items():
            if number > to_step and step.asked:
                self._void_asked[number] = step.asked, step.entry(number)
        if self.current is not None and self.current.number > to_step:
            self._void(self.current)
        self.current = None
        self.void_ahead()

    def finish(self, number: int) -> None:
        """Goes on with the step after this one, if it is dispatched."""
        self.current = self.ahead.pop(number + 1, None)

    def _void(self, step: StepHistory) -> None:
        if step.wanted is not None:
            self._void_asked[step.number] = asked_digest(step.wanted), step.wanted.entry

    def _add(self, words: str, *entries: JournalEntry) -> None:
        self._findings.add(Invariant.I2, words, *entries)


def plain_digest(plain: object) -> str:
    """Returns the digest of a value that JSON can express."""
    return digest_of(json.dumps(plain, sort_keys=True).encode())


def asked_digest(wanted: Wanted) -> str:
    """Returns the digest of a step's first request."""
    return plain_digest([wanted.prompts, wanted.counts])
