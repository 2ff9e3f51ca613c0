"""The configurations of `paceline sft`, `paceline rm` and `paceline dpo`, which train on pairs."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.model import ModelConfig
from paceline.config.services import LearnerConfig, TelemetryConfig
from paceline.config.training.tuning import DpoConfig, PairDataConfig, RmConfig, SftConfig


class TuningRunConfig(Section):
    """What `paceline sft`, `paceline rm` and `paceline dpo` have in common."""

    data: PairDataConfig
    model: ModelConfig
    learner: LearnerConfig = LearnerConfig()
    seed: int = Field(0, ge=0, description="Governs the order of the pairs.")
    telemetry: TelemetryConfig = TelemetryConfig()

    takes_adapters: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False

    @model_validator(mode="after")
    def _all_weights_train(self) -> Self:
        if self.model.lora is not None and not self.takes_adapters:
            raise ValueError("`paceline sft` and `paceline rm` train all weights; leave model.lora out")
        return self

    @model_validator(mode="after")
    def _matrices_are_whole(self) -> Self:
        if self.learner.tensor_parallel > 1:
            raise ValueError("training on pairs divides no matrices; leave learner.tensor_parallel out")
        return self

    @model_validator(mode="after")
    def _images_are_read(self) -> Self:
        if self.data.image_key is not None and not self.takes_images:
            raise ValueError("`paceline rm` and `paceline dpo` read no images; leave data.image_key out")
        self.model.vision.require_images(self.data.image_key)
        return self


class SftRunConfig(TuningRunConfig):
    """Everything that `paceline sft` needs."""

    takes_images: ClassVar[bool] = True

    sft: SftConfig


class RmRunConfig(TuningRunConfig):
    """Everything that `paceline rm` needs."""

    rm: RmConfig


class DpoRunConfig(TuningRunConfig):
    """Everything that `paceline dpo` needs."""

    takes_adapters: ClassVar[bool] = True

    dpo: DpoConfig
