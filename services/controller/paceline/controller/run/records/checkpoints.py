"""The checkpoints of a run: the controller's part of the manifest, writing, removing old ones, rollbacks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.controller.fleet.clients import LearnerClient
from paceline.controller.fleet.membership import Member
from paceline.controller.progress import Run
from paceline.controller.verify.digests import digest_of
from paceline.core.errors import CheckpointError, DeadlineError, GuardError, PeerLostError
from paceline.core.run_record.manifest import MANIFEST, manifest_fields
from paceline.data.mixture import MixtureState
from paceline.service.tasks import cancel
from paceline.service.threads import in_thread
from paceline.storage.folder import Folder, reason

log = logging.getLogger(__name__)

_VOID = "void_"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """The metrics of the validation of a step's weights; the policy as text."""

    step: int
    policy: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """The controller's state at the end of a step, for a run that resumes from its checkpoint.

    Attributes:
        policy: the committed policy, whose weights the checkpoint has, as text; "" in old checkpoints.
        good: whether a rollback may return to these weights.
        metrics: the step's metrics up to its checkpoint, with which the step can be finished.
        unsure: the first step whose validation beside training is not judged, or requires a rollback that is
            due; None if there is none.
        validated: the results of validations beside training that came in during the step.
    """

    run_id: str
    step: int
    cursor: MixtureState
    policy: str = ""
    guard: Mapping[str, Any] = field(default_factory=dict)
    good: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    unsure: int | None = None
    validated: Sequence[ValidationResult] = ()

    def to_bytes(self) -> bytes:
        """Encodes the state as JSON text."""
        plain = {**asdict(self), "cursor": self.cursor.to_plain()}
        if not self.validated:
            del plain["validated"]
        if self.unsure is None:
            del plain["unsure"]
        return json.dumps(plain, sort_keys=True).encode()

    @classmethod
    def from_plain(cls, plain: Any) -> ControllerState:
        """Reads the parsed output of `to_bytes`; raises CheckpointError if it cannot be read."""
        known = {name: plain[name] for name in cls.__dataclass_fields__ if name in plain}
        try:
            known["validated"] = [ValidationResult(**result) for result in known.get("validated", ())]
            return cls(**{**known, "cursor": MixtureState.from_plain(plain["cursor"])})
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's controller state cannot be read: {error}; "
                "resume with the version of Paceline that wrote it"
            ) from error


def folder_of(root: Folder, step: int) -> Folder:
    """Returns the folder of a step's checkpoint."""
    return root.child(f"step_{step:06d}")


def of_step(root: Folder, run_id: str, step: int) -> ControllerState | None:
    """Returns the controller's state in a step's checkpoint; None if the checkpoint is missing or
    incomplete."""
    folder = folder_of(root, step)
    return next((s for f, s in complete(root) if f == folder and s.run_id == run_id), None)


def complete(root: Folder) -> Iterator[tuple[Folder, ControllerState]]:
    """Returns the checkpoints with an intact manifest, which is written last; the newest first."""
    for folder in _with_manifest(root):
        try:
            yield folder, _state_in(folder)
        except CheckpointError as error:
            log.warning("the checkpoint %s is passed over: %s", folder, error)


def candidates(root: Folder, run_id: str) -> Iterator[Folder]:
    """Returns the checkpoints that a learner of the run may try to load, the newest first.

    Damaged ones are included: the learner skips them, or ends if there is no other.
    """
    for folder in _with_manifest(root):
        try:
            if _state_in(folder).run_id == run_id:
                yield folder
        except CheckpointError:
            yield folder


def _steps(root: Folder, prefix: str = "step_") -> list[Folder]:
    """Returns the folders of steps, the oldest first."""
    try:
        return [root.child(name) for name in root.folders() if name.startswith(prefix)]
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {root} cannot be listed: {reason(error)}") from error


def _step_of(folder: Folder) -> int:
    return int(folder.name.rpartition("_")[2])


def _with_manifest(root: Folder) -> list[Folder]:
    return [folder for folder in reversed(_steps(root)) if folder.has(MANIFEST)]


def _state_in(folder: Folder) -> ControllerState:
    origin = f"{folder}/{MANIFEST}"
    try:
        text = folder.read(MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{origin} cannot be read: {reason(error)}") from error
    fields = manifest_fields(text, origin=origin)
    return ControllerState.from_plain(fields.get("controller_state"))


def _manifest_digest(folder: Folder) -> str:
    """Returns the digest of a checkpoint's manifest; "" if the storage does not provide it."""
    try:
        return digest_of(folder.read(MANIFEST))
    except OSError as error:
        log.warning("the manifest of %s cannot be read: %s", folder, reason(error))
        return ""


def outdated(root: Folder, keep: int, *, unsure: int | None = None) -> list[Folder]:
    """Returns the old checkpoints that may be removed.

    The newest `keep` complete checkpoints and the newest good one stay; so does the newest good one before
    the step `unsure`, whose weights may not be good. Incomplete and damaged ones stay only
    if they are newer than the newest complete one; they do not count. A void one stays until there is a
    complete one of its step or of a later step.
    """
    intact = list(complete(root))
    if not intact:
        return []
    good = [folder.name for folder, state in intact if state.good]
    kept = {*(folder.name for folder, _ in intact[:keep]), *good[:1]}
    if unsure is not None:
        kept |= set([f.name for f, state in intact if state.good and state.step < unsure][:1])
    newest = _step_of(intact[0][0])
    old = [f for f in _steps(root) if f.name not in kept and _step_of(f) < newest]
    return old + [f for f in _steps(root, f"{_VOID}step_") if _step_of(f) <= newest]


def remove(folders: Sequence[Folder]) -> None:
    """Removes the folders of checkpoints."""
    for folder in folders:
        # The manifest goes first: a folder that is half removed must not look complete.
        folder.remove(MANIFEST)
        folder.delete()


def later(root: Folder, last_step: int) -> list[Folder]:
    """Returns the checkpoints of steps after `last_step`, including incomplete ones."""
    return [folder for folder in _steps(root) if _step_of(folder) > last_step]


def set_aside(folders: Sequence[Folder]) -> None:
    """Makes sure that no run resumes from void checkpoints.

    They are renamed; in an object store, which has no renaming, they become incomplete.
    """
    for folder in folders:
        if folder.is_local:
            folder.rename(f"{_VOID}{folder.name}")
        else:
            folder.remove(MANIFEST)


class Checkpoints:
    """Owns the checkpoints of a run.

    A checkpoint is written while the run goes on; it counts when it is complete.
    """

    def __init__(self, run: Run, learner: LearnerClient) -> None:
        self._run, self._learner = run, learner
        self._writing: asyncio.Task[None] | None = None

    async def save(self, learner: Member, state: ControllerState) -> float:
        """Makes the learner begin to write a checkpoint; returns the seconds that this delays it."""
        await self.written()
        folder = folder_of(self._run.checkpoints, state.step)
        seconds = await self._learner.save(
            learner, step=state.step, folder=str(folder), controller_state=state.to_bytes()
        )
        self._writing = asyncio.create_task(self._complete(learner, folder, state), name="checkpoint")
        return seconds

    async def written(self) -> None:
        """Returns when the last checkpoint is complete, or has failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def abandon(self) -> None:
        """Stops waiting for the last checkpoint, because the learner is gone or the run ends."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await cancel(writing)

    async def _complete(self, learner: Member, folder: Folder, state: ControllerState) -> None:
        """Waits for a checkpoint and removes old ones. If a checkpoint fails, the run goes on without it."""
        journal = self._run.journal
        try:
            await self._learner.wait_checkpoint(learner, step=state.step)
        except (CheckpointError, PeerLostError, DeadlineError) as error:
            self._run.events.notice(f"step {state.step}: its checkpoint was not written: {error}")
            return
        manifest = await in_thread(_manifest_digest, folder)
        journal.record("checkpoint", step=state.step, folder=str(folder), good=state.good, manifest=manifest)
        try:
            keep = self._run.config.trainer.keep_checkpoints
            old = await in_thread(lambda: outdated(self._run.checkpoints, keep, unsure=state.unsure))
            # The journal comes first: if this task or process ends in between, the journal still explains the
            # missing checkpoint.
            for superseded in old:
                journal.record("checkpoint_removed", folder=str(superseded))
            await in_thread(remove, old)
        except (CheckpointError, OSError) as error:
            self._run.events.notice(f"step {state.step}: old checkpoints cannot be removed: {error}")

    async def roll_back(
        self, learner: Member, *, step: int, reason: str, before: int | None = None
    ) -> dict[str, float]:
        """Makes the learner load the last good weights as version `step`; returns metrics.

        If these are damaged, it loads the good ones before them.

        Args:
            before: only weights of steps before this one are good.

        Raises:
            CheckpointError: there are no good weights.
        """
        await self.written()
        last = step if before is None else min(step, before - 1)
        for folder, state in await in_thread(lambda: list(self._good(last))):
            self._run.journal.record(
                "rollback", step=step, to_step=state.step, folder=str(folder), reason=reason
            )
            try:
                seconds = await self._learner.load(learner, folder=str(folder), version=step)
            except CheckpointError as error:
                self._run.events.notice(
                    f"step {step}: the rollback passes over the checkpoint of step {state.step}: {error}"
                )
                continue
            return {"timing_s/rollback": seconds, "guard/rolled_back_to": float(state.step)}
        raise CheckpointError(
            f"step {step}: {reason}, but there is no checkpoint to go back to; set trainer.save_freq, "
            "or guard.RULE.rollback: null"
        )

    async def stopped(self, step: int, reason: str, *, is_published: bool = False) -> GuardError:
        """Returns the error with which the guard ends a run, for `is_published` after a validation."""
        # The checkpoint of a step may be older than the judgement of its validation.
        last_good = await in_thread(lambda: next(self._good(step - is_published), None))
        where = f"the last good checkpoint is {last_good[0]}" if last_good else "there is no good checkpoint"
        weights = "were published" if is_published else "were not published"
        return GuardError(
            f"step {step}: the guard ends the run: {reason}. The weights of this step {weights}; {where}. "
            "docs/guard-rails.md says what the sign usually means and what to change"
        )

    def _good(self, step: int) -> Iterator[tuple[Folder, ControllerState]]:
        """Yields the good checkpoints of this run up to `step`, the newest first."""
        for folder, state in complete(self._run.checkpoints):
            if state.run_id == self._run.id and state.step <= step and state.good:
                yield folder, state
