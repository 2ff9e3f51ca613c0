"""A step that is collected again after a restart may admit other samples than before."""

from __future__ import annotations

import pytest

from paceline.controller.verify.findings import Findings, Invariant, JournalEntry
from paceline.controller.verify.journal.steps.collection import Collection, Wanted
from paceline.controller.verify.journal.steps.step import StepHistory
from paceline.controller.verify.journal.term import Term
from paceline.controller.verify.journal.versions import Versions
from paceline.core.ids import TrajectoryId
from support.journals import admission


@pytest.mark.parametrize(("is_void", "breaches"), [(False, 1), (True, 0)])
def test_a_void_sample_may_differ(is_void: bool, breaches: int) -> None:
    name, findings = "train:1:4:0", Findings()
    key, first = TrajectoryId.parse(name), admission(1, name)
    dispatch = {"event": "dispatch", "step": 1, "policy": first["policy"], "prompts": [4]}
    wanted = Wanted.of(JournalEntry(line=1, event=dispatch), 1)
    step = StepHistory(
        wanted=wanted,
        collections=[Collection(wanted, findings)],
        before={key: JournalEntry(line=2, event=first)},
    )
    if is_void:
        step.recollect(JournalEntry(line=3, event={"event": "recollect", "step": 1}), findings)
    again = JournalEntry(line=4, event={**first, "digest": "another"})
    term = Term(num_samples=1, on_cpu=True, save_trajectories=False, limits={})
    step.admit(key, again, term, Versions(findings), findings)
    assert sum(breach.invariant is Invariant.I3 for breach in findings.breaches) == breaches
