"""The controller's part of a checkpoint: what goes into the manifest, which one a run goes on from, which are kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError
from paceline.data.cursor import CursorState

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """Everything of the controller that a resumed run needs.

    `num_prompts` tells whether the data changed; `guard` is the state of the guard's policy; `good` says that a rollback may go to these
    weights.
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
        """Reads what `to_bytes` wrote, parsed; raises CheckpointError where it is something else."""
        try:
            return cls(**{**plain, "cursor": CursorState(**plain["cursor"])})
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's controller state cannot be read: {error}; resume with the version of Paceline that wrote it"
            ) from error


def folder_of(run_dir: Path, step: int) -> Path:
    """Where a step's checkpoint lies."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def newest(run_dir: Path) -> tuple[Path, ControllerState] | None:
    """The newest complete checkpoint; None where there is none."""
    return next(complete(run_dir), None)


def complete(run_dir: Path) -> Iterator[tuple[Path, ControllerState]]:
    """The checkpoints whose manifest is there, which is written last; the newest first."""
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
    """Removes all but the newest `keep` checkpoints and the newest good one, and incomplete ones older than the newest; returns what went."""
    folders = sorted((run_dir / "checkpoints").glob("step_*"))
    whole = [folder for folder in folders if (folder / MANIFEST).is_file()]
    doomed = whole[:-keep]
    if doomed:
        good = next((folder for folder, state in complete(run_dir) if state.good), None)
        doomed = [folder for folder in doomed if folder != good]
    if whole:
        doomed += [folder for folder in folders if folder not in whole and folder < whole[-1]]
    for folder in doomed:
        # The manifest goes first: a folder that is half removed must not look complete.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return doomed
