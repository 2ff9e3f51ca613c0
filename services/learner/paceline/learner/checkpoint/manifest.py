"""What the manifest of a checkpoint says: the step, the state of learner and controller, the other files.

folder/__R_N.distcp, .metadata    networks, optimizers, random state; any number of ranks can load them
folder/manifest.json              written last; without it the folder is no checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.errors import CheckpointError
from paceline.core.manifest import MANIFEST, manifest_fields, manifest_text
from paceline.learner.checkpoint.files import FileRecord
from paceline.storage.folder import Folder, Place, reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        kl: state of the KL controller.
        controller_state: the controller's own JSON.
        histories: the guard's running medians.
        files: size and digest of every other file, by name.
    """

    step: int
    world_size: int
    model_path: str
    has_critic: bool
    kl: Mapping[str, float]
    controller_state: Any
    histories: Mapping[str, Sequence[float]]
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        """The file's text."""
        learner = {
            "version": self.step,
            "world_size": self.world_size,
            "model_path": self.model_path,
            "has_critic": self.has_critic,
            "kl": dict(self.kl),
            "guard_histories": dict(self.histories),
            "torch": torch.__version__,
        }
        return manifest_text(
            {
                "step": self.step,
                "learner": learner,
                "controller_state": self.controller_state,
                "files": {name: record.to_plain() for name, record in self.files.items()},
            }
        )

    @classmethod
    def read(cls, place: Place) -> Manifest:
        """The manifest of a checkpoint folder.

        Raises:
            CheckpointError: the folder has none, or one that is torn, changed or of another version.
        """
        folder = Folder.at(place)
        path = f"{folder}/{MANIFEST}"
        try:
            text = folder.read(MANIFEST)
        except OSError as error:
            raise CheckpointError(
                f"{folder} is no complete checkpoint ({MANIFEST}: {reason(error)}); name one with a manifest"
            ) from error
        tree = manifest_fields(text, origin=path)
        try:
            learner = tree["learner"]
            return cls(
                step=int(tree["step"]),
                world_size=int(learner["world_size"]),
                model_path=str(learner["model_path"]),
                has_critic=bool(learner["has_critic"]),
                kl=dict(learner["kl"]),
                controller_state=tree["controller_state"],
                histories=dict(learner["guard_histories"]),
                files={name: FileRecord.from_plain(record) for name, record in tree["files"].items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} lacks what a manifest has: {error!r}") from error
