"""A step that was dispatched ahead is only withdrawn with a reason."""

from __future__ import annotations

import pytest

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.steps.collection import Wanted
from paceline.controller.verify.journal.steps.open_steps import OpenSteps


@pytest.mark.parametrize(
    ("reason", "sentences"), [("kl", []), ("", ["step 2 was withdrawn without a reason"])]
)
def test_a_step_is_withdrawn_with_a_reason(reason: str, sentences: list[str]) -> None:
    findings = Findings()
    steps = OpenSteps(findings)
    dispatch = {"event": "dispatch", "step": 2, "policy": "v0@0000000000000000", "prompts": [4]}
    steps.dispatch(Wanted.of(JournalEntry(line=1, event=dispatch), 1), is_ahead=True)
    steps.withdraw(JournalEntry(line=2, event={"event": "withdrawn", "step": 2, "reason": reason}))
    assert [breach.sentence for breach in findings.breaches] == sentences
