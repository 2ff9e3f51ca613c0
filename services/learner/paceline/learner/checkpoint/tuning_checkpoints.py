"""Checkpoints of `paceline sft` and `paceline rm`: where an interrupted training goes on.

OUTPUT.checkpoints/step_NNNNNN    as in a run's checkpoints; removed when the model has been written
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError
from paceline.core.run_record.manifest import MANIFEST
from paceline.learner.checkpoint.load import fill, verify
from paceline.learner.checkpoint.manifest import Manifest
from paceline.learner.checkpoint.state import State
from paceline.learner.checkpoint.write import ShardWriter
from paceline.learner.distributed.collectives import CommandError, attempt, broadcast_bytes
from paceline.learner.distributed.ranks import Ranks

log = logging.getLogger(__name__)

_NUMBERS = "numbers"
_IDENTITY = "identity"


class TuningCheckpoints:
    """The checkpoints of one training; every rank has them and calls them at the same places.

    Args:
        state: the tensors to save; loading writes into its tensors.
        identity: everything that determines the training's numbers, except its start.
        save_freq: steps from one checkpoint to the next; 0: none are written.
    """

    def __init__(
        self, root: Path, state: State, *, identity: Mapping[str, Any], save_freq: int, ranks: Ranks
    ) -> None:
        self._root, self._state, self._ranks = root.absolute(), state, ranks
        text = json.dumps(identity, sort_keys=True)
        self._identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._save_freq = save_freq
        self._writer = ShardWriter(ranks)
        self._written: Future[float] | None = None

    def load(self) -> tuple[int, dict[str, int]]:
        """Fills the state from the newest intact checkpoint; returns its step and numbers (step 0 if there is
        none).

        Raises:
            CheckpointError: the checkpoints are those of another training.
        """
        names = broadcast_bytes("\n".join(self._complete()).encode(), self._ranks).decode().split()
        for name in names:
            folder = self._root / name
            try:
                manifest = verify(folder, self._ranks)
            except CommandError as error:
                log.warning("the checkpoint %s is damaged and passed over: %s", folder, error)
                continue
            if manifest.controller_state[_IDENTITY] != self._identity:
                raise CheckpointError(
                    f"{folder} is of a training with another configuration or other data; remove "
                    f"{self._root} to begin anew, or take back the change"
                )
            fill(self._state, folder, self._ranks)
            return manifest.step, dict(manifest.controller_state[_NUMBERS])
        return 0, {}

    def after(self, step: int, numbers: Mapping[str, int]) -> None:
        """Saves if a checkpoint is due after this step; the previous one is removed when the new one is
        complete.
        """
        if not self._save_freq or step % self._save_freq:
            return
        manifest = Manifest(
            step=step,
            world_size=self._ranks.world.size,
            model_path="",
            has_critic=False,
            kl={},
            controller_state={_IDENTITY: self._identity, _NUMBERS: dict(numbers)},
            histories={},
        )
        self._finish()
        attempt(self._ranks, self._remove_older)
        self._written = self._writer.write(str(self._root / f"step_{step:06d}"), self._state, manifest)

    def remove(self) -> None:
        """Removes all of them: the training has ended."""
        self._finish()
        if self._ranks.world.rank == 0:
            shutil.rmtree(self._root, ignore_errors=True)

    def _finish(self) -> None:
        """Waits for the checkpoint that is being written; if writing fails, the training goes on."""
        self._writer.finish()
        error = None if self._written is None else self._written.exception()
        if error is not None:
            log.warning("%s; the training goes on without this checkpoint", error)

    def _complete(self) -> list[str]:
        """Returns the names of the folders with a manifest, the newest first."""
        if self._ranks.world.rank != 0:
            return []
        return sorted((path.parent.name for path in self._root.glob(f"step_*/{MANIFEST}")), reverse=True)

    def _remove_older(self) -> None:
        """Removes all checkpoints except the newest complete one, on rank 0."""
        complete = self._complete()
        if complete:
            for folder in self._root.glob("step_*"):
                if folder.name != complete[0]:
                    shutil.rmtree(folder, ignore_errors=True)
