"""An answer of a validation that nobody asked for."""

from __future__ import annotations

import pytest

from paceline.controller.verify.findings import Findings, Invariant
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
