"""The manifest of a checkpoint: the step, the state of learner and controller, the other files.

folder/__R_N.distcp, .metadata    networks, optimizers, random state; any number of ranks can load them
folder/manifest.json              written last; without it the folder is no checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.config.model import LoraConfig
from paceline.core.errors import CheckpointError
from paceline.core.policy import TrainedVision
from paceline.core.run_record.manifest import MANIFEST, manifest_fields, manifest_text
from paceline.learner.checkpoint.files import FileRecord
from paceline.storage.folder import Folder, Place, reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The frozen base that the weights in a checkpoint belong to.

    Attributes:
        adapters: adapters of the policy, with the names of their layers; None: all its weights train.
        digest: digest of the frozen weights, which the checkpoint does not hold; "" without any.
        vision: the part of a vision tower that trains.
    """

    adapters: LoraConfig | None
    digest: str
    vision: TrainedVision = "none"

    def require(self, other: Base, *, folder: Place, model_path: str) -> None:
        """Refuses to go on from weights of `folder` with another base.

        Raises:
            CheckpointError: rank, alpha or targets of adapters differ, or what trains of a vision tower, or
                the frozen weights.
        """
        if self.adapters != other.adapters:
            raise CheckpointError(
                f"{folder} was written with model.lora: {_words(self.adapters)}; now model.lora says "
                f"{_words(other.adapters)}, and with that its weights would be another policy. Set "
                "model.lora "
                "back, or begin another run (trainer.resume: never)"
            )
        if self.vision != other.vision:
            raise CheckpointError(
                f"{folder} was written with model.vision.train: {self.vision}; now it is {other.vision}, and "
                "its tensors and averages are those of other parameters. Set it back, or begin another run "
                "from the exported model (trainer.resume: never)"
            )
        if self.digest != other.digest:
            raise CheckpointError(
                f"the weights in {folder} were trained on other frozen weights than {model_path} has now; "
                "set model.path back to what the run began with, or put its files back"
            )

    def to_plain(self) -> dict[str, Any]:
        """Returns the base as the manifest holds it."""
        adapters = None if self.adapters is None else self.adapters.model_dump(mode="json")
        return {"adapters": adapters, "digest": self.digest, "vision": self.vision}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Base:
        """Reads the base that `to_plain` wrote."""
        adapters = plain["adapters"]
        return cls(
            adapters=None if adapters is None else LoraConfig.model_validate(adapters),
            digest=str(plain["digest"]),
            vision=plain.get("vision", "none"),
        )


def _words(lora: LoraConfig | None) -> str:
    if lora is None:
        return "null"
    return f"{{rank: {lora.rank}, alpha: {lora.alpha}, targets: [{', '.join(lora.targets)}]}}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Says what a checkpoint holds, file by file.

    Attributes:
        kl: state of the KL controller; empty if the coefficient is fixed.
        frozen: the digests of frozen networks with weights of their own, by name.
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
    base: Base = Base(adapters=None, digest="")
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    frozen: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the text of the manifest's file."""
        learner = {
            "version": self.step,
            "world_size": self.world_size,
            "model_path": self.model_path,
            "has_critic": self.has_critic,
            "kl": dict(self.kl),
            "base": self.base.to_plain(),
            "schedules": dict(self.schedules),
            "frozen": dict(self.frozen),
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
        """Reads the manifest of a checkpoint folder.

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
                base=Base.from_plain(learner["base"]),
                schedules=dict(learner["schedules"]),
                frozen=dict(learner["frozen"]),
                controller_state=tree["controller_state"],
                histories=dict(learner["guard_histories"]),
                files={name: FileRecord.from_plain(record) for name, record in tree["files"].items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} lacks what a manifest has: {error!r}") from error
