"""The checkpoints of a run: the controller's part of the manifest, resuming, removing old ones, rollbacks."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.run import RunConfig
from paceline.controller.batch.inputs import Inputs
from paceline.controller.fleet.clients import LearnerClient
from paceline.controller.fleet.membership import Member
from paceline.controller.progress import Run
from paceline.core.errors import CheckpointError, GuardError
from paceline.data.cursor import CursorState

MANIFEST = "manifest.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """The controller's state that a resumed run needs.

    Attributes:
        num_prompts: shows whether the data changed.
        guard: the state of the guard's policy.
        good: whether a rollback may return to these weights.
    """

    run_id: str
    step: int
    cursor: CursorState
    num_prompts: int
    seed: int
    guard: Mapping[str, Any] = field(default_factory=dict)
    good: bool = True

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_plain(cls, plain: Any) -> ControllerState:
        """Reads what `to_bytes` wrote, parsed; raises CheckpointError where it cannot be read."""
        try:
            return cls(**{**plain, "cursor": CursorState(**plain["cursor"])})
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's controller state cannot be read: {error}; "
                "resume with the version of Paceline that wrote it"
            ) from error


def folder_of(run_dir: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def newest(run_dir: Path) -> tuple[Path, ControllerState] | None:
    """The newest complete checkpoint; None where there is none."""
    return next(complete(run_dir), None)


def complete(run_dir: Path) -> Iterator[tuple[Path, ControllerState]]:
    """The checkpoints that have a manifest, which is written last; the newest first."""
    for folder in sorted((run_dir / "checkpoints").glob("step_*"), reverse=True):
        manifest = folder / MANIFEST
        if manifest.is_file():
            try:
                plain = json.loads(manifest.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise CheckpointError(
                    f"{manifest} is not JSON: {error}; remove {folder} to resume from an older one"
                ) from error
            state = plain.get("controller_state")
            yield folder, ControllerState.from_plain(json.loads(state) if isinstance(state, str) else state)


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Removes old checkpoints and returns their folders.

    The newest `keep` checkpoints and the newest good one stay. Incomplete ones stay only if they are newer
    than the newest complete one.
    """
    folders = sorted((run_dir / "checkpoints").glob("step_*"))
    finished = [folder for folder in folders if (folder / MANIFEST).is_file()]
    doomed = finished[:-keep]
    if doomed:
        good = next((folder for folder, state in complete(run_dir) if state.good), None)
        doomed = [folder for folder in doomed if folder != good]
    if finished:
        doomed += [folder for folder in folders if folder not in finished and folder < finished[-1]]
    for folder in doomed:
        # The manifest goes first: a folder that is half removed must not look complete.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return doomed


def resume(run_dir: Path, config: RunConfig, inputs: Inputs) -> tuple[Path, ControllerState] | None:
    """The newest checkpoint, with the cursor of `inputs` set to its position; None if the run starts afresh.

    Raises:
        CheckpointError: the checkpoint is of other data or of another seed.
    """
    resumed = newest(run_dir) if config.trainer.resume == "auto" else None
    if resumed is None:
        return None
    folder, state = resumed
    num_prompts, seed = len(inputs.train.prompts), config.trainer.seed
    if (state.num_prompts, state.seed) != (num_prompts, seed):
        raise CheckpointError(
            f"{folder} was written with {state.num_prompts} prompts and seed {state.seed}; now there are "
            f"{num_prompts} and {seed}. Resume with the same data and seed, or set trainer.resume: never and "
            "another trainer.run_dir"
        )
    inputs.cursor.restore(state.cursor)
    log.info("resuming run %s after step %d from %s", state.run_id, state.step, folder)
    return resumed


class Checkpoints:
    """Owns the folder `checkpoints` of a run directory."""

    def __init__(self, run: Run, learner: LearnerClient) -> None:
        self._run, self._learner = run, learner

    async def save(self, learner: Member, state: ControllerState) -> float:
        """Makes the learner write a checkpoint and removes old ones; returns the seconds of the former."""
        journal, folder = self._run.journal, folder_of(self._run.dir, state.step)
        seconds = await self._learner.save(
            learner, step=state.step, folder=str(folder), controller_state=state.to_bytes()
        )
        await self._learner.wait_checkpoint(learner, step=state.step)
        journal.record("checkpoint", step=state.step, folder=str(folder), good=state.good)
        for old in prune(self._run.dir, self._run.config.trainer.keep_checkpoints):
            journal.record("checkpoint_removed", folder=str(old))
        return seconds

    async def roll_back(self, learner: Member, *, step: int, reason: str) -> dict[str, float]:
        """Makes the learner load the last good weights as version `step`; returns metrics.

        Raises:
            CheckpointError: there is none.
        """
        last_good = self._last_good(step)
        if last_good is None:
            raise CheckpointError(
                f"step {step}: {reason}, but there is no checkpoint to go back to; set trainer.save_freq, "
                "or guard.RULE.rollback: null"
            )
        folder, state = last_good
        self._run.journal.record("rollback", step=step, to_step=state.step, folder=str(folder), reason=reason)
        seconds = await self._learner.load(learner, folder=str(folder), version=step)
        return {"timing_s/rollback": seconds, "guard/rolled_back_to": float(state.step)}

    def stopped(self, step: int, reason: str) -> GuardError:
        """The error that a run ends with when the guard stops it."""
        last_good = self._last_good(step)
        where = f"the last good checkpoint is {last_good[0]}" if last_good else "there is no good checkpoint"
        return GuardError(
            f"step {step}: the guard ends the run: {reason}. The weights of this step were not published; "
            f"{where}. docs/guard-rails.md says what the sign usually means and what to change"
        )

    def _last_good(self, step: int) -> tuple[Path, ControllerState] | None:
        """The newest good checkpoint of this run up to `step`."""
        for folder, state in complete(self._run.dir):
            if state.run_id == self._run.id and state.step <= step and state.good:
                return folder, state
        return None
