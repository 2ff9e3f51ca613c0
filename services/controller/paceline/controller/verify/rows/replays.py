"""Checks invariant I2 for replay: a step trains a trajectory again only with a permission, and then once.

A step's draw gives permissions: it selects which trajectories of earlier steps the step trains again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.rows.trajectory_row import TrajectoryRow
from paceline.core.ids import TrajectoryId
from paceline.core.samples.replay import ReplayRule, TrainedGroup, groups_of
from paceline.core.training import BatchRow


class Replays:
    """Repeats the draw of each step from what the steps before it trained."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._trained: dict[int, Mapping[TrajectoryId, TrajectoryRow]] = {}

    def finish(
        self, step: int, rows: Iterable[TrajectoryRow], rule: ReplayRule | None, targets: Iterable[int]
    ) -> None:
        """Takes the new rows that a step trained; forgets rows that no step can train again.

        Args:
            targets: the steps to which the run may go back.
        """
        if rule is None:
            self._trained.clear()
            return
        self._trained[step] = {row.key: row for row in rows}
        kept = {t for end in (step, *targets) for t in rule.steps_before(end + 1)}
        self._trained = {number: rows for number, rows in self._trained.items() if number in kept}

    def rows(self, entry: JournalEntry, fresh: Sequence[BatchRow], rule: ReplayRule | None) -> list[BatchRow]:
        """Returns the rows that an event `batch` lists as trained again; notes those without permission."""
        step, listed = int(entry["step"]), entry.get("again") or []
        allowed = self._allowed(step, fresh, rule)
        rows: dict[TrajectoryId, BatchRow] = {}
        for text, digest, reward in listed:
            key = TrajectoryId.parse(text)
            if key in rows:
                self._findings.i2(f"step {step} trained {key} again twice", entry)
                continue
            known = self._trained.get(key.step, {}).get(key)
            if known is None:
                self._findings.i2(f"step {step} trained {key} again, which no step before it trained", entry)
                continue
            self._check(step, known, (digest, reward), rule, entry)
            if key not in allowed:
                self._findings.i2(f"step {step} trained {key} again without permission: not drawn", entry)
            rows[key] = _row(known)
        for key in sorted(allowed - rows.keys()):
            self._findings.i2(f"step {step} was to train {key} again, but did not", entry)
        return list(rows.values())

    def _allowed(self, step: int, fresh: Iterable[BatchRow], rule: ReplayRule | None) -> set[TrajectoryId]:
        if rule is None:
            return set()
        without = {row.trajectory_id.prompt_id for row in fresh}
        groups = [group for number in rule.steps_before(step) for group in self._groups(number)]
        drawn = {(group.step, group.prompt_id) for group in rule.draw(groups, step, without=without)}
        steps = {number for number, _ in drawn}
        return {key for n in steps for key in self._trained[n] if (key.step, key.prompt_id) in drawn}

    def _groups(self, step: int) -> list[TrainedGroup]:
        known = self._trained.get(step, {})
        return groups_of(step, ((key.prompt_id, _oldest(row)) for key, row in known.items()))

    def _check(
        self,
        step: int,
        known: TrajectoryRow,
        stated: tuple[str, float],
        rule: ReplayRule | None,
        entry: JournalEntry,
    ) -> None:
        """Checks that a row's content is what was admitted, and the age of its oldest token."""
        if stated != (known.digest, known.reward):
            self._findings.i3(
                f"step {step} trained {known.key} again with the digest {stated[0]} and the reward "
                f"{stated[1]}; at first they were {known.digest} and {known.reward}",
                entry,
            )
        age, bound = step - 1 - _oldest(known), 0 if rule is None else rule.max_age
        if not 0 <= age <= bound:
            self._findings.i1(
                f"step {step} trained {known.key} again with tokens {age} versions older than the weights "
                f"that it trained; algorithm.replay.max_age is {bound}",
                entry,
            )


def _oldest(row: TrajectoryRow) -> int:
    assert row.policy is not None, "rows of a step name the policy of their first tokens"
    return row.policy.version


def _row(known: TrajectoryRow) -> BatchRow:
    """Returns a row with the fields that enter the digest of a batch."""
    return BatchRow(
        trajectory_id=known.key,
        blob_key="",
        blob_digest=known.digest,
        reward=known.reward,
        num_prompt_tokens=1,
        num_response_tokens=1,
        num_sampled_tokens=1,
    )
