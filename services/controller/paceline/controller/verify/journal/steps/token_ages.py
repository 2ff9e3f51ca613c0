"""Checks I1 by token range: which policies sampled an admitted trajectory's tokens, and how old they were."""

from __future__ import annotations

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.journal.steps.collection import Wanted
from paceline.controller.verify.journal.term import Term
from paceline.controller.verify.journal.versions import Versions
from paceline.controller.verify.rows.trajectory_row import oldest_of, ranges_of
from paceline.core.ids import TrajectoryId
from paceline.core.policy import range_fault


def check_policies(
    key: TrajectoryId, entry: JournalEntry, wanted: Wanted, term: Term, versions: Versions, findings: Findings
) -> None:
    """Notes tokens of an admitted trajectory whose policy is not allowed.

    The policy that its step was dispatched for is allowed; with in-flight pushes, so are the versions that
    were committed after it, up to the version that the step trains.
    """

    def breach(what: str) -> None:
        findings.i1(f"{key} {what}", wanted.entry, entry)

    if not term.mixes_versions:
        if entry.get("policy") != wanted.policy or entry.get("ranges"):
            breach(f"of {entry.get('policy')} was admitted in a step of {wanted.policy}")
        return
    oldest, ranges = oldest_of(entry), ranges_of(entry)
    fault = range_fault(ranges) if ranges else ""
    if fault or (ranges and ranges[0].policy != oldest):
        breach(f"was admitted with {oldest}, but {fault or f'its ranges begin with {ranges[0].policy}'}")
    for policy in [part.policy for part in ranges] or [oldest]:
        age, bound = policy.staleness_in(wanted.step), term.max_staleness
        if not 0 <= age <= bound:
            breach(
                f"has tokens of {policy}, {age} versions older than the weights that step {wanted.step} "
                f"trained; barrier.max_staleness is {bound}"
            )
        if policy.version < wanted.tag.version:
            breach(f"has tokens of {policy}, but its prompt was dispatched for {wanted.policy}")
        if policy.digest != versions.digest(policy.version):
            committed = versions.digest(policy.version) or "nothing"
            breach(f"has tokens of {policy}, but version {policy.version} was committed as {committed}")
