"""All validations of the journal: those between two steps, and those beside training."""

from __future__ import annotations

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.beside import ValidationsBeside
from paceline.controller.verify.journal.steps.open_steps import OpenSteps
from paceline.controller.verify.journal.term import Term
from paceline.controller.verify.journal.validation import ValidationCheck
from paceline.controller.verify.journal.versions import Versions
from paceline.core.ids import TrajectoryId


class Validations:
    """Gives each event of a validation to the step that it follows, or to the validations beside training.

    Attributes:
        beside: the validations on servers of their own.
    """

    def __init__(self, findings: Findings, versions: Versions, steps: OpenSteps) -> None:
        self._findings, self._versions, self._steps = findings, versions, steps
        self.beside = ValidationsBeside(findings, versions)

    def begin(self, entry: JournalEntry, term: Term) -> None:
        """Takes the event `validate`, which begins a validation."""
        if entry.get("beside"):
            self.beside.begin(entry, term)
            return
        self._versions.check_policy(str(entry["policy"]), f"step {entry['step']} was validated with", entry)
        step = self._steps.validated()
        if step.number >= 0 and step.number != int(entry["step"]):
            self._findings.i2(
                f"a validation of step {entry['step']} in step {step.number}", step.dispatch, entry
            )
        step.validation = ValidationCheck(entry, term, self._findings, before=step.validation)

    def admit(self, key: TrajectoryId, entry: JournalEntry, term: Term | None) -> None:
        """Takes an answer that was admitted between two steps."""
        self._versions.check_policy(str(entry.get("policy")), f"{key} was admitted with", entry)
        step = self._steps.current
        if step is not None and step.validation is not None:
            step.validation.admit(key, entry)
        elif term is not None and term.is_recorded:
            self._findings.i2(f"{key} was admitted, but no validation was asked for", entry)

    def drop(self, entry: JournalEntry) -> None:
        """Takes a prompt without answers."""
        if self.beside.drop(entry):
            return
        step = self._steps.current
        if step is not None and step.validation is not None:
            step.validation.drop(entry)

    def note_saved(self, entry: JournalEntry) -> None:
        """Takes the file of a step's trajectories, or of a validation's answers."""
        if not self.beside.note_saved(entry):
            self._steps.validated().saved[str(entry["file"])] = entry
