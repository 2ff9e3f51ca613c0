"""The run's checkpoints as the loop uses them: write one, keep the right ones, go back to the last good one."""

from __future__ import annotations

from pathlib import Path

from paceline.config.run import RunConfig
from paceline.controller.fleet.clients import Peers
from paceline.controller.fleet.membership import Member
from paceline.controller.journal import Journal
from paceline.controller.run import checkpoints
from paceline.controller.run.checkpoints import ControllerState
from paceline.core.errors import CheckpointError, GuardError


class Keeper:
    """Owns the folder `checkpoints` of a run directory."""

    def __init__(self, config: RunConfig, run_id: str, run_dir: Path, peers: Peers, journal: Journal) -> None:
        self._keep = config.trainer.keep_checkpoints
        self._run_id, self._run_dir, self._peers, self._journal = run_id, run_dir, peers, journal

    async def save(self, learner: Member, state: ControllerState) -> float:
        """Has a checkpoint written and removes what is too old; returns the seconds that writing took."""
        folder = checkpoints.folder_of(self._run_dir, state.step)
        seconds = await self._peers.save(
            learner, step=state.step, folder=str(folder), controller_state=state.to_bytes()
        )
        await self._journal.record("checkpoint", step=state.step, folder=str(folder), good=state.good)
        for old in checkpoints.prune(self._run_dir, self._keep):
            await self._journal.record("checkpoint_removed", folder=str(old))
        return seconds

    def last_good(self, step: int) -> tuple[Path, ControllerState] | None:
        """The newest good checkpoint of this run up to `step`."""
        found = checkpoints.complete(self._run_dir)
        mine = ((f, state) for f, state in found if state.run_id == self._run_id and state.step <= step)
        return next(((folder, state) for folder, state in mine if state.good), None)

    async def go_back(self, learner: Member, *, step: int, reason: str) -> dict[str, float]:
        """Has the learner take the last good checkpoint's weights; the version stays `step`. Returns metrics.

        Raises:
            CheckpointError: there is none.
        """
        found = self.last_good(step)
        if found is None:
            raise CheckpointError(
                f"step {step}: {reason}, but there is no checkpoint to go back to; set trainer.save_freq, or guard.RULE.rollback: null"
            )
        folder, state = found
        await self._journal.record(
            "rollback", step=step, to_step=state.step, folder=str(folder), reason=reason
        )
        seconds = await self._peers.load(learner, folder=str(folder), version=step)
        return {"timing_s/rollback": seconds, "guard/rolled_back_to": float(state.step)}

    def stopped(self, step: int, reason: str) -> GuardError:
        """The error that a run ends with where the guard says so."""
        good = self.last_good(step)
        where = f"the last good checkpoint is {good[0]}" if good else "there is no good checkpoint"
        return GuardError(
            f"step {step}: the guard ends the run: {reason}. The weights of this step were not published; {where}. "
            "docs/guard-rails.md says what the sign usually means and what to change"
        )
