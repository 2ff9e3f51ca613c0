"""One validation, read from the journal: which answers it asked for, and which came in."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from paceline.controller.verify.findings import Findings, Invariant, JournalEntry
from paceline.controller.verify.journal.term import Term
from paceline.controller.verify.journal.trajectory_row import TrajectoryRow
from paceline.core.ids import Purpose, TrajectoryId


class ValidationCheck:
    """The answers of one validation.

    Args:
        entry: the event `validate`.
        term: the settings with which it was made.
    """

    def __init__(self, entry: JournalEntry, term: Term, findings: Findings) -> None:
        self.entry, self.term, self._findings = entry, term, findings
        self.step, self.policy = int(entry["step"]), str(entry["policy"])
        self._num_samples = int(entry["num_samples"])
        self._prompts = set(entry["prompts"])
        self._admitted: dict[TrajectoryId, JournalEntry] = {}
        self._digests: dict[str, TrajectoryId] = {}
        self._dropped: set[int] = set()

    def admit(self, key: TrajectoryId, entry: JournalEntry) -> None:
        """Notes an answer that was admitted."""
        findings = self._findings
        is_wanted = key.prompt_id in self._prompts and 0 <= key.sample_index < self._num_samples
        if key.step != self.step or not is_wanted:
            findings.add(
                Invariant.I2,
                f"{key} was admitted, but the validation of step {self.step} did not ask for it",
                self.entry,
                entry,
            )
        if key in self._admitted:
            findings.add(Invariant.I3, f"{key} was admitted twice", self._admitted[key], entry)
        elif (twin := self._digests.get(str(entry.get("digest")))) is not None:
            findings.add(
                Invariant.I3, f"{key} is the trajectory that was {twin}", self._admitted[twin], entry
            )
        if not entry.get("digest") or entry.get("reward") is None:
            findings.add(Invariant.I3, f"{key} was admitted without a digest or a reward", entry)
        self._admitted.setdefault(key, entry)
        self._digests.setdefault(str(entry.get("digest")), key)

    def drop(self, entry: JournalEntry) -> None:
        """Notes a group without an answer."""
        prompt = int(entry["prompt"])
        if prompt not in self._prompts or not entry.get("reason"):
            self._findings.add(
                Invariant.I2,
                f"the validation of step {self.step} dropped prompt {prompt} without a reason, or without "
                "having asked for it",
                self.entry,
                entry,
            )
        self._dropped.add(prompt)

    def close(self, entry: JournalEntry) -> None:
        """Notes prompts without an end; `entry` is that of the finished step."""
        for prompt in sorted(self._prompts - self._dropped):
            count = sum(self._key(prompt, index) in self._admitted for index in range(self._num_samples))
            if count != self._num_samples:
                self._findings.add(
                    Invariant.I2,
                    f"prompt {prompt} of the validation of step {self.step} has {count} of "
                    f"{self._num_samples} answers",
                    self.entry,
                    entry,
                )

    def rows(self) -> Iterator[TrajectoryRow]:
        """The answers, in the order of the file."""
        for key in sorted(self._admitted):
            if key.prompt_id not in self._dropped:
                entry = self._admitted[key]
                reward = float(entry.get("reward") or 0.0)
                yield TrajectoryRow(
                    key=key, digest=str(entry.get("digest")), reward=reward, raw_reward=reward
                )

    def metrics(self) -> dict[str, float]:
        """What metrics.jsonl should say of it."""
        rows = list(self.rows())
        metrics = {
            "val/num_prompts": float(len({row.key.prompt_id for row in rows})),
            "val/groups_dropped": float(len(self._dropped)),
        }
        return metrics | ({"val/reward/mean": fmean(row.reward for row in rows)} if rows else {})

    def _key(self, prompt: int, index: int) -> TrajectoryId:
        return TrajectoryId(
            step=self.step, purpose=Purpose.VALIDATE.value, prompt_id=prompt, sample_index=index
        )
