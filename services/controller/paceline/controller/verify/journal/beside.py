"""Validations beside training, from the journal: begun, answered while later steps are trained, then over.

    validate -> trajectories, drops, saved -> validated -> (step) | validation_skipped

`validated` takes effect with the next `step`. If a controller is killed before that, what it had collected is
void, and the next one begins the validation again. A rewind makes the validations of later steps void; that
of its target begins again if its result came in later.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.term import Term
from paceline.controller.verify.journal.validation import ValidationCheck
from paceline.controller.verify.journal.versions import Versions
from paceline.core.ids import TrajectoryId


class ValidationsBeside:
    """Follows the validations on validation servers.

    Attributes:
        over: by validated step, the step with which its validation was over.
    """

    def __init__(self, findings: Findings, versions: Versions) -> None:
        self._findings, self._versions = findings, versions
        self._open: dict[int, ValidationCheck] = {}
        self._closing: list[JournalEntry] = []
        self._again: set[int] = set()
        self.over: dict[int, int] = {}

    @property
    def unfinished(self) -> set[int]:
        """The steps whose validations may have a line of metrics, but need not have one."""
        return {*self._open, *self._again}

    def begin(self, entry: JournalEntry, term: Term) -> None:
        """Takes the event `validate`; a repeated one makes the answers so far void."""
        step, policy = int(entry["step"]), str(entry["policy"])
        self._versions.check_policy(policy, f"step {step} was validated with", entry, of_step=step)
        before = self._open.get(step)
        check = self._open[step] = ValidationCheck(entry, term, self._findings, before=before)
        if before is not None and before.sets != check.sets:
            self._findings.i2(
                f"the validation of step {step} first asked for other answers", before.entry, entry
            )
        self._again.discard(step)

    def admit(self, key: TrajectoryId, entry: JournalEntry) -> None:
        """Checks that an answer is of exactly the version that is validated."""
        check = self._open.get(int(entry["beside"]))
        if check is None:
            self._findings.i2(f"{key} was admitted, but no validation was asked for", entry)
            return
        if entry.get("policy") != check.policy or entry.get("ranges"):
            self._findings.i1(
                f"{key} was admitted with {entry.get('policy')}, but {check.policy} is validated",
                check.entry,
                entry,
            )
        check.admit(key, entry)

    def drop(self, entry: JournalEntry) -> bool:
        """Takes a prompt without answers; returns whether the validation is beside training."""
        check = self._open.get(int(entry["step"]))
        if check is not None:
            check.drop(entry)
        return check is not None

    def note_saved(self, entry: JournalEntry) -> bool:
        """Takes a file of answers; returns whether the validation is beside training."""
        check = self._open.get(int(entry["step"]))
        if check is None or not str(entry["file"]).startswith("val_"):
            return False
        check.saved = entry
        return True

    def validated(self, entry: JournalEntry) -> None:
        """Takes a result, which counts with the next finished step."""
        check = self._open.get(int(entry["step"]))
        if check is None:
            self._findings.i2(f"the validation of step {entry['step']} ended, but had not begun", entry)
            return
        if entry["policy"] != check.policy:
            self._findings.i1(
                f"the validation of step {entry['step']} is of {entry['policy']}, but asked {check.policy}",
                check.entry,
                entry,
            )
        self._closing.append(entry)

    def skipped(self, entry: JournalEntry) -> None:
        """Notes a validation that was given up."""
        step = int(entry["step"])
        if self._open.pop(step, None) is None and step not in self._again:
            self._findings.i2(f"the validation of step {step} was left out, but had not begun", entry)
        if not entry.get("reason"):
            self._findings.i2(f"the validation of step {step} was left out without a reason", entry)
        self._again.discard(step)

    def restart(self) -> None:
        """Makes results without a finished step void, as a new term begins."""
        self._closing.clear()

    def finish(self, number: int) -> Iterator[tuple[ValidationCheck, JournalEntry]]:
        """Yields the validations that are over with a finished step, each with its event `validated`."""
        for entry in self._closing:
            step = int(entry["step"])
            if (check := self._open.pop(step, None)) is not None:
                check.close(entry)
                self.over[step] = number
                yield check, entry
        self._closing.clear()

    def rewind(self, to_step: int) -> None:
        """Makes the validations of later steps void."""
        self._closing.clear()
        self._open = {step: check for step, check in self._open.items() if step <= to_step}
        self._again = {step for step in self._again if step <= to_step}
        if self.over.get(to_step, to_step) > to_step:
            self._again.add(to_step)
        self.over = {s: end for s, end in self.over.items() if s <= to_step and s not in self._again}

    def end(self, entry: JournalEntry) -> None:
        """Notes validations without a result when a run has ended whose steps are all done."""
        for step in sorted(self.unfinished):
            check = self._open.get(step)
            self._findings.i2(
                f"the run ended well, but the validation of step {step} has no result",
                None if check is None else check.entry,
                entry,
            )
