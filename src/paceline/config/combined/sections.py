"""The sections of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Section
from paceline.config.data import DataConfig
from paceline.config.guard import GuardConfig
from paceline.config.model import ModelConfig
from paceline.config.reward import RewardConfig
from paceline.config.rollout import RolloutConfig
from paceline.config.services import (
    BarrierConfig,
    BrokerConfig,
    LearnerConfig,
    ServiceConfig,
    TelemetryConfig,
    TrainerConfig,
    WeightsConfig,
)
from paceline.config.training.actor import ActorConfig, CriticConfig
from paceline.config.training.algorithm import AlgorithmConfig


class RunSections(Section):
    """Holds the sections; `paceline.config.run` checks how they agree."""

    placement: Literal["auto", "fit", "given", "colocated"] = Field(
        "auto",
        description="How `paceline train` uses the GPUs of this machine where learner.devices and "
        "rollout.devices are not set. auto: colocated if learner.world_size and rollout.replicas are left "
        "out and the memory plan has room; otherwise fit, but without lowering counts. fit: chooses "
        "learner.world_size, rollout.replicas and rollout.tensor_model_parallel_size, if they are left out, "
        "so that all visible GPUs are used, about half of them by learner ranks; counts for which there are "
        "too few GPUs are lowered. With one GPU, learner and engine share it. given: uses the counts as "
        "configured. colocated: learner ranks and rollout servers take turns on the same GPUs, which are all "
        "visible GPUs unless learner.devices and rollout.devices are set.",
    )
    data: DataConfig
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig
    learner: LearnerConfig = LearnerConfig()
    barrier: BarrierConfig = BarrierConfig()
    guard: GuardConfig = GuardConfig()
    broker: BrokerConfig = BrokerConfig()
    weights: WeightsConfig = WeightsConfig()
    service: ServiceConfig = ServiceConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
