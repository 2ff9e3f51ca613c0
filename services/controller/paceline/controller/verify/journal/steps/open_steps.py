"""The steps of the journal that are dispatched, but not finished."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.steps.collection import Wanted
from paceline.controller.verify.journal.steps.step import Finished, StepHistory, asked_digest


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
                self._findings.i2(f"step {wanted.step} was dispatched twice", before[1], wanted.entry)
        else:
            step = StepHistory()
        if before is not None and before[0] != asked_digest(wanted):
            self._findings.i2(f"step {wanted.step} first asked for other prompts", before[1], wanted.entry)
        step.wanted = wanted
        if is_ahead:
            self.ahead[wanted.step] = step
        else:
            self.current = step
        return step

    def validated(self) -> StepHistory:
        """Returns the step that a validation belongs to; step 0 has no dispatch."""
        if self.current is None:
            self.current = StepHistory()
        return self.current

    def withdraw(self, entry: JournalEntry) -> None:
        """Makes the trajectories of a step that was dispatched ahead and has no batch void."""
        number = int(entry["step"])
        if self.current is not None and self.current.number == number and self.current.batch is None:
            self._void(self.current)
            self.current = None
        elif number in self.ahead:
            self._void(self.ahead.pop(number))
        else:
            self._findings.i2(f"step {number} was withdrawn, but was not dispatched ahead", entry)
        if not entry.get("reason"):
            self._findings.i2(f"step {number} was withdrawn without a reason", entry)

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
