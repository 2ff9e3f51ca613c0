"""Answers that no validation asked for, and prompts that one dropped."""

from __future__ import annotations

import pytest

from paceline.controller.verify.findings import Findings, Invariant, JournalEntry
from paceline.controller.verify.journal.steps.open_steps import OpenSteps
from paceline.controller.verify.journal.term import Term
from paceline.controller.verify.journal.validations import Validations
from paceline.controller.verify.journal.versions import Versions
from paceline.core.ids import TrajectoryId


def _term(*, is_recorded: bool) -> Term:
    return Term(num_samples=1, on_cpu=True, save_trajectories=False, limits={}, is_recorded=is_recorded)


@pytest.mark.parametrize(("term", "breaches"), [(True, 1), (False, 0), (None, 0)])
def test_an_answer_that_no_validation_asked_for_is_a_breach_of_a_recorded_term(
    term: bool | None, breaches: int
) -> None:
    findings = Findings()
    validations = Validations(findings, Versions(findings), OpenSteps(findings))
    key = TrajectoryId.parse("validate:0:9:0")
    validations.admit(key, {"policy": "nothing"}, None if term is None else _term(is_recorded=term))
    assert sum(breach.invariant is Invariant.I2 for breach in findings.breaches) == breaches


@pytest.mark.parametrize(("prompt", "breaches"), [(1, 0), (2, 1)])
def test_a_validation_between_two_steps_drops_only_its_own_prompts(prompt: int, breaches: int) -> None:
    findings = Findings()
    validations = Validations(findings, Versions(findings), OpenSteps(findings))
    asked = {"event": "validate", "step": 0, "policy": "nothing", "prompts": [1], "num_samples": 1}
    validations.begin(JournalEntry(line=1, event=asked), _term(is_recorded=True))
    dropped = {"event": "group_dropped", "step": 0, "prompt": prompt, "reason": "reward:timeout"}
    validations.drop(JournalEntry(line=2, event=dropped))
    assert sum("dropped prompt" in breach.sentence for breach in findings.breaches) == breaches
