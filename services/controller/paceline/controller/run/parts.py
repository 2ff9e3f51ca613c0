"""The parts of the controller that the steps of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.controller.batch.collect import Collector
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.replay import ReplayBuffer
from paceline.controller.batch.training_batch import TrainingBatches
from paceline.controller.fleet.clients import LearnerClient
from paceline.controller.fleet.turns import Turns
from paceline.controller.guard.report import Guard
from paceline.controller.progress import Progress, Run
from paceline.controller.run.lookahead import Lookahead
from paceline.controller.run.publication import Publication
from paceline.controller.run.records.checkpoints import Checkpoints
from paceline.controller.run.validation import Validation
from paceline.controller.run.work_ahead import WorkAheadDriver


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What alignment and verbs use; `write_metrics` writes the line of the run's last step."""

    run: Run
    progress: Progress
    inputs: Inputs
    batches: TrainingBatches
    collector: Collector
    learner: LearnerClient
    publication: Publication
    checkpoints: Checkpoints
    guard: Guard
    turns: Turns
    ahead: WorkAheadDriver
    lookahead: Lookahead
    replay: ReplayBuffer
    validation: Validation
    write_metrics: Callable[[Mapping[str, float]], object]
