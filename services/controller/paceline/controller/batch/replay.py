"""Replay: prompt groups of earlier steps that a step trains again (`algorithm.replay`).

trajectories/step_*.parquet of the last steps -> buffer -> draw -> blobs at the broker, rows for the learner

The files of trajectories are the buffer: nothing else is kept, so a resumed run draws what an undisturbed run
draws. Only files whose digest is in the journal count; if one of them is missing or changed, the run ends.

docs/decisions/0038-permissions-to-train-again.md
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.broker import names
from paceline.controller.progress import Run
from paceline.controller.standing import SavedFile
from paceline.controller.verify.files.trajectory_files import read_rows, trajectory_of
from paceline.core.digest import file_digest
from paceline.core.errors import CheckpointError
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyRange, PolicyTag, token_ages
from paceline.core.samples.replay import ReplayRule, TrainedGroup, groups_of
from paceline.core.samples.trajectory import Trajectory
from paceline.core.training import BatchRow
from paceline.wire import blob_digest, encode_trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The rows that a step trains again.

    Attributes:
        rows: the rows, sorted by prompt id and sample index.
        blobs: the rows' blobs, by key.
        metrics: share and age of the rows, and the size of the buffer.
    """

    rows: tuple[BatchRow, ...] = ()
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def listed(self) -> list[list[Any]]:
        """Returns the permissions for the journal: id, digest of the blob, reward."""
        return [[str(row.trajectory_id), row.blob_digest, row.reward] for row in self.rows]


class _SavedStep(NamedTuple):
    """A step's file, and its groups."""

    file: SavedFile
    groups: tuple[TrainedGroup, ...]


class ReplayBuffer:
    """Draws from the files of trajectories."""

    def __init__(self, run: Run) -> None:
        self._run, self._rule, self._journal = run, run.config.replay_rule, run.journal
        self._steps: dict[int, _SavedStep] = {}

    async def draw(self, step: int, rows: Sequence[BatchRow]) -> Replay:
        """Draws the rows that `step` trains again.

        Args:
            rows: the step's new rows, whose prompts are not drawn.

        Raises:
            CheckpointError: a file of trajectories is missing or was changed.
        """
        if self._rule is None:
            return Replay()
        return await asyncio.to_thread(self._draw, self._rule, step, rows)

    def _draw(self, rule: ReplayRule, step: int, rows: Sequence[BatchRow]) -> Replay:
        known = self._journal.standing.saved
        steps = [earlier for earlier in rule.steps_before(step) if earlier in known]
        self._steps = {earlier: self._saved(earlier, known[earlier]) for earlier in steps}
        groups = [group for saved in self._steps.values() for group in saved.groups]
        fresh = {row.trajectory_id.prompt_id for row in rows}
        drawn = rule.draw(groups, step, without=fresh)
        by_step: dict[int, set[int]] = {}
        for group in drawn:
            by_step.setdefault(group.step, set()).add(group.prompt_id)
        drawn_rows = [pair for of_step, chosen in by_step.items() for pair in self._read(of_step, chosen)]
        buffer = rule.buffer(groups, step, without=fresh)
        return self._replay(step, drawn_rows, len(rows), sum(group.num_rows for group in buffer))

    def _replay(
        self, step: int, drawn_rows: Iterable[tuple[Trajectory, float]], num_fresh: int, num_kept: int
    ) -> Replay:
        rows, blobs, parts = [], {}, list[PolicyRange]()
        for trajectory, reward in sorted(drawn_rows, key=lambda pair: pair[0].trajectory_id.place):
            key = names.blob(self._run.id, str(trajectory.trajectory_id), "replay", "0")
            blobs[key] = blob = encode_trajectory(trajectory)
            written = self._steps[trajectory.trajectory_id.step].file.digest
            rows.append(_row(trajectory, key, blob_digest(blob, like=written), reward))
            parts += trajectory.ranges or [
                PolicyRange(trajectory.policy, 0, len(trajectory.response_token_ids))
            ]
        metrics = {
            "replay/share": len(rows) / (len(rows) + num_fresh),
            "replay/buffer": float(num_kept),
        }
        if parts:
            mean, oldest = token_ages(parts, step)
            metrics |= {"replay/age/mean": mean, "replay/age/max": oldest}
        return Replay(rows=tuple(rows), blobs=blobs, metrics=metrics)

    def _written(self, step: int) -> Path:
        """Returns the file of a step's trajectories; raises CheckpointError if it was changed."""
        path = self._run.dir / "trajectories" / f"step_{step:06d}.parquet"
        try:
            recorded = self._journal.standing.saved[step].digest
            is_written = file_digest(path, like=recorded) == recorded
            fault = "" if is_written else "was changed after it was written"
        except OSError as error:
            fault = f"cannot be read ({error})"
        if fault:
            raise CheckpointError(
                f"{path} {fault}; later steps train its groups again (algorithm.replay). Restore it, or set "
                "trainer.resume: never to begin again"
            )
        return path

    def _saved(self, step: int, file: SavedFile) -> _SavedStep:
        """Returns the step's groups that have all their tokens; reads them once."""
        import pyarrow.parquet

        known = self._steps.get(step)
        if known is not None and known.file == file:
            return known
        path = self._written(step)
        columns = ["prompt_id", "policy_version"]
        table = pyarrow.parquet.read_table(path, columns=columns, use_threads=False).to_pydict()
        rows = zip(table["prompt_id"], table["policy_version"], strict=True)
        groups = groups_of(step, (row for row in rows if row[0] not in file.without_tokens))
        return _SavedStep(file, tuple(groups))

    def _read(self, step: int, prompts: Collection[int]) -> Iterable[tuple[Trajectory, float]]:
        """Reads the trajectories of these prompts of a step, with their rewards."""
        commits = self._journal.standing.commits
        for plain, arrays in read_rows(self._written(step), prompts):
            version = plain["policy_version"]
            ranges = tuple(
                PolicyRange.from_plain(part) for part in json.loads(plain.get("policy_ranges") or "[]")
            )
            key = TrajectoryId(
                step=step,
                purpose=plain["purpose"],
                prompt_id=plain["prompt_id"],
                sample_index=plain["sample_index"],
            )
            policy = PolicyTag(version=version, digest=commits[version])
            yield trajectory_of(self._run.id, key, policy, ranges, plain, arrays), plain["reward"]


def merged(fresh: Iterable[BatchRow], again: Iterable[BatchRow]) -> tuple[BatchRow, ...]:
    """Returns all rows of a step, sorted by prompt id and sample index."""
    return tuple(sorted([*fresh, *again], key=lambda row: row.trajectory_id.place))


def _row(trajectory: Trajectory, key: str, digest: str, reward: float) -> BatchRow:
    return BatchRow(
        trajectory_id=trajectory.trajectory_id,
        blob_key=key,
        blob_digest=digest,
        reward=reward,
        num_prompt_tokens=len(trajectory.prompt_token_ids),
        num_response_tokens=len(trajectory.response_token_ids),
        num_sampled_tokens=int(trajectory.response_mask.sum()),
    )
