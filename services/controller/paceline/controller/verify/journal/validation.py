"""One validation, from the journal: which answers it requested, and which came in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.term import Shape, Term
from paceline.controller.verify.rows.trajectory_row import Admissions, TrajectoryRow
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.samples.evaluation import EvaluatedAnswer, evaluate


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedSet:
    """A set of held-out prompts, as a validation requested it.

    Attributes:
        name: name of the set; "" for that of data.val_files.
        right_above: rewards above it count as right; None in journals that are older than named sets.
    """

    name: str
    prompts: frozenset[int]
    num_samples: int
    right_above: float | None

    @classmethod
    def of(cls, name: str, asked: Mapping[str, Any]) -> AskedSet:
        """Reads a set of the event `validate`; "" names that of data.val_files."""
        return cls(
            name=name,
            prompts=frozenset(asked["prompts"]),
            num_samples=int(asked["num_samples"]),
            right_above=asked.get("right_above"),
        )

    @property
    def prefix(self) -> str:
        """Prefix of its metrics' names."""
        return f"val/{self.name}/" if self.name else "val/"

    def metrics(self, rows: Sequence[TrajectoryRow], num_dropped: int) -> dict[str, float]:
        """Returns the set's metrics, as far as they follow from the journal."""
        metrics = {
            f"{self.prefix}num_prompts": float(len({row.key.prompt_id for row in rows})),
            f"{self.prefix}groups_dropped": float(num_dropped),
        }
        if rows and self.right_above is None:
            metrics[f"{self.prefix}reward/mean"] = fmean(row.reward for row in rows)
        elif rows and self.right_above is not None:
            answers = [
                EvaluatedAnswer(
                    prompt=row.key.prompt_id, reward=row.reward, final=None, num_tokens=0, is_cut=False
                )
                for row in rows
            ]
            above = self.right_above
            result = evaluate(answers, num_asked=0, right_above=above, with_intervals=False)
            metrics |= {self.prefix + name: value for name, value in result.of_rewards().items()}
        return metrics


class ValidationCheck:
    """The answers of one validation.

    Args:
        term: the settings with which it was made.
        before: the same validation before it began again, perhaps in an earlier term.

    Attributes:
        saved: the event of the file of answers, of a validation beside training.
    """

    def __init__(
        self, entry: JournalEntry, term: Term, findings: Findings, before: ValidationCheck | None = None
    ) -> None:
        self.entry, self.term, self._findings = entry, term, findings
        self.saved: JournalEntry | None = None
        self.step, self.policy = int(entry["step"]), str(entry["policy"])
        asked = entry.get("sets") or {"": entry}
        self.sets = [AskedSet.of(name, of_set) for name, of_set in asked.items()]
        self._shapes = {of.name: term.val_shapes.get(of.name, term.shapes) for of in self.sets}
        if before is not None:
            # Answers that were scored before it began again count, too.
            self._shapes = {
                name: shapes if before._shapes.get(name) == shapes else {}
                for name, shapes in self._shapes.items()
            }
        self._wanted = {prompt: of.num_samples for of in self.sets for prompt in of.prompts}
        self._admitted = Admissions()
        self._dropped: set[int] = set()

    def admit(self, key: TrajectoryId, entry: JournalEntry) -> None:
        """Notes an answer that was admitted."""
        findings = self._findings
        is_wanted = 0 <= key.sample_index < self._wanted.get(key.prompt_id, 0)
        if key.step != self.step or not is_wanted:
            findings.i2(
                f"{key} was admitted, but the validation of step {self.step} did not ask for it",
                self.entry,
                entry,
            )
        self._admitted.add(key, entry, findings)

    def drop(self, entry: JournalEntry) -> None:
        """Notes a group without an answer."""
        prompt = int(entry["prompt"])
        if prompt not in self._wanted or not entry.get("reason"):
            self._findings.i2(
                f"the validation of step {self.step} dropped prompt {prompt} without a reason, or without "
                "having asked for it",
                self.entry,
                entry,
            )
        self._dropped.add(prompt)

    def close(self, entry: JournalEntry) -> None:
        """Notes prompts whose end the journal lacks; `entry` is the entry of the finished step."""
        for prompt in sorted(self._wanted.keys() - self._dropped):
            wanted = self._wanted[prompt]
            count = sum(self._key(prompt, index) in self._admitted.entries for index in range(wanted))
            if count != wanted:
                self._findings.i2(
                    f"prompt {prompt} of the validation of step {self.step} has {count} of {wanted} answers",
                    self.entry,
                    entry,
                )

    def rows(self) -> Iterator[TrajectoryRow]:
        """Yields the answers, in the order of the file."""
        for key, entry in sorted(self._admitted.entries.items()):
            if key.prompt_id not in self._dropped:
                reward = float(entry.get("reward") or 0.0)
                yield TrajectoryRow(
                    key=key, digest=str(entry.get("digest")), reward=reward, raw_reward=reward
                )

    def shapes(self) -> dict[int, Mapping[str, Shape]]:
        """Returns how components make up the rewards, by prompt; empty shapes if that is not known."""
        return {prompt: self._shapes[of.name] for of in self.sets for prompt in of.prompts}

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of its sets, as far as they follow from the journal."""
        rows, metrics = list(self.rows()), dict[str, float]()
        for of in self.sets:
            own = [row for row in rows if row.key.prompt_id in of.prompts]
            metrics |= of.metrics(own, len(self._dropped & of.prompts))
        return metrics

    def _key(self, prompt: int, index: int) -> TrajectoryId:
        return TrajectoryId(
            step=self.step, purpose=Purpose.VALIDATE.value, prompt_id=prompt, sample_index=index
        )
