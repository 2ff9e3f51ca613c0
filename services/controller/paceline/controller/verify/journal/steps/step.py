"""The journal's record of one step: complete until the step is finished, reduced afterwards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from paceline.controller.verify.digests import digest_of
from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.steps import recomputed_metrics
from paceline.controller.verify.journal.steps.chosen_rows import rows_of
from paceline.controller.verify.journal.steps.collection import Collection, Wanted
from paceline.controller.verify.journal.steps.token_ages import check_policies
from paceline.controller.verify.journal.term import Shape, Term
from paceline.controller.verify.journal.validation import ValidationCheck
from paceline.controller.verify.journal.versions import Versions
from paceline.controller.verify.rows.replays import Replays
from paceline.controller.verify.rows.trajectory_row import TrajectoryRow, oldest_of, ranges_of
from paceline.core.ids import TrajectoryId
from paceline.core.training import BatchRow, batch_digest


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
        samplings: the events of samplings after its dispatch, by number; void ones are left out.
        before: the admissions before the controller restarted, by trajectory.
        term: the settings with which its batch was made; None without a batch.
        rows: the rows of the last batch.
        num_again: number of rows of the last batch that were trained before.
        num_dropped: number of prompts that the last collection dropped.
        shapes: how scorers enter the reward; None if this changed between the terms of its collection.
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
            findings.i2(f"sampling {number} of step {step} follows {len(self.collections)} others", entry)
        if entry["policy"] != self.wanted.policy:
            findings.i1(
                f"step {step} samples from {entry['policy']}, but was dispatched for {self.wanted.policy}",
                self.wanted.entry,
                entry,
            )
        before = self.samplings.setdefault(number, entry)
        if before["digest"] != entry["digest"]:
            findings.i2(f"sampling {number} of step {step} differs from its first request", before, entry)
        self.collections.append(Collection(Wanted.of(entry, 0), findings))

    def recollect(self, entry: JournalEntry, findings: Findings) -> None:
        """Makes the step's trajectories void, because its collection begins again."""
        assert self.wanted is not None
        if self.trained is not None:
            findings.i2(
                f"step {self.wanted.step} was collected again after it was trained", self.trained, entry
            )
        self.before = self.batch = None
        self.samplings.clear()

    def admit(
        self, key: TrajectoryId, entry: JournalEntry, term: Term, versions: Versions, findings: Findings
    ) -> None:
        """Takes an admitted trajectory; one that was admitted before a restart must be the same."""
        assert self.collection is not None
        check_policies(key, entry, self.collection.wanted, term, versions, findings)
        self.collection.admit(key, entry)
        # With in-flight pushes, a sample that was lost and is drawn again may differ.
        before = None if term.mixes_versions else (self.before or {}).get(key)
        if before is not None and any(
            before.get(f) != entry.get(f) for f in ("digest", "reward", "policy", "ranges")
        ):
            findings.i3(f"{key} differs from what it was before the controller was restarted", before, entry)

    def take_batch(self, entry: JournalEntry, replays: Replays, term: Term, findings: Findings) -> None:
        """Checks a batch against the dispatch and the admitted trajectories, and keeps its rows."""
        assert self.wanted is not None
        rows = rows_of(self.collections, entry, findings)
        self._check_age(entry, term, findings)
        if entry.get("policy") != self.wanted.policy:
            findings.i1(
                f"the batch of step {self.wanted.step} is of {entry.get('policy')}, but its prompts were "
                f"dispatched for {self.wanted.policy}",
                self.wanted.entry,
                entry,
            )
        again = replays.rows(entry, rows, term.replay_rule)
        trained = sorted([*rows, *again], key=lambda row: row.trajectory_id.place) if again else rows
        digest = batch_digest(self.wanted.tag, trained)
        if (entry["digest"], entry["num_rows"]) != (digest, len(trained)):
            findings.i3(
                f"the batch of step {self.wanted.step} has {entry['num_rows']} rows and the digest "
                f"{entry['digest']}; the admitted trajectories make {len(trained)} rows and {digest}",
                self.wanted.entry,
                entry,
            )
        for earlier in (self.batch, self.trained):
            if earlier is not None and earlier["digest"] != entry["digest"]:
                findings.i3(f"step {self.wanted.step} has two batches", earlier, entry)
        self._note_batch(entry, rows, again, term)

    def train(self, entry: JournalEntry, findings: Findings) -> None:
        """Takes the event `trained`, which must be of the step's only batch."""
        assert self.wanted is not None
        for earlier in (self.batch, self.trained):
            if earlier is not None and earlier["digest"] != entry["digest"]:
                findings.i3(
                    f"step {self.wanted.step} trained the batch {entry['digest']}, not {earlier['digest']}",
                    earlier,
                    entry,
                )
        if self.batch is None:
            findings.i2(f"step {self.wanted.step} was trained without a batch", entry)
        self.trained = entry

    def check_complete(self, entry: JournalEntry, findings: Findings) -> None:
        """Notes each event that a finished step lacks."""
        for what, event in (("batch", self.batch), ("training", self.trained), ("commit", self.commit)):
            if event is None:
                findings.i2(f"step {self.number} was finished without a {what}", self.dispatch, entry)

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

    def _check_age(self, entry: JournalEntry, term: Term, findings: Findings) -> None:
        """Checks I1: what a step trains is no older than the bound allows."""
        wanted = self.wanted
        assert wanted is not None
        staleness, bound = wanted.tag.staleness_in(wanted.step), term.max_staleness
        if not 0 <= staleness <= bound:
            findings.i1(
                f"step {wanted.step} trained tokens of {wanted.policy}, {staleness} versions older than the "
                f"weights that it trained; barrier.max_staleness is {bound}",
                wanted.entry,
                entry,
            )

    def _note_batch(
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


def plain_digest(plain: object) -> str:
    """Returns the digest of a value that JSON can express."""
    return digest_of(json.dumps(plain, sort_keys=True).encode())


def asked_digest(wanted: Wanted) -> str:
    """Returns the digest of a step's first request."""
    return plain_digest([wanted.prompts, wanted.counts])
