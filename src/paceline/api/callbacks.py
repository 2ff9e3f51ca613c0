"""Callbacks of a training run, and the run that they act on."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.api.step import Step
from paceline.core.errors import ConfigError
from paceline.runs import run_dir as run_dirs
from paceline.runs.controller_client import ControllerClient

_ANSWER_S = 20.0


class Training:
    """A training run in progress, for callbacks.

    Attributes:
        stopping: whether a callback has asked to end the run.
    """

    def __init__(self, run_dir: Path, process: subprocess.Popen[str]) -> None:
        self.run_dir, self._process, self.stopping = run_dir, process, False

    def stop(self) -> None:
        """Ends the run after the step in progress, with a checkpoint.

        Your loop still gets the steps that finish until then.
        """
        if not self.stopping:
            self.stopping = True
            self._process.send_signal(signal.SIGINT)

    def scale_rates(self, lr_scale: float) -> int:
        """Multiplies the configured learning rates; replaces the current scale, including the guard's.

        Returns:
            The first step that is trained with the new scale.

        Raises:
            ConfigError: `lr_scale` is not from 0 to 100, or the run has ended.
            PeerLostError: the controller does not answer.
        """
        note = run_dirs.read_note(self.run_dir)
        if note is None or not note.controller or not note.alive:
            raise ConfigError(
                f"the run in {self.run_dir} is not running: its learning rates cannot be changed"
            )
        # A notebook has an event loop of its own in this thread.
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(asyncio.run, _set_rates(note, lr_scale))
            return call.result(_ANSWER_S)


class Callback:
    """Receives the run's steps: override the methods you need. The run does not wait for callbacks."""

    def before_step(self, number: int, training: Training) -> None:
        """Handles the beginning of a step."""

    def after_step(self, step: Step, training: Training) -> None:
        """Handles a finished step, before the loop gets it; step 0 is the starting model."""

    def after_validation(self, step: Step, training: Training) -> None:
        """Handles a validation that arrived while later steps were trained (`rollout.validation_servers`).

        `step` now has the validation's metrics, which it lacked in `after_step`.
        """


@dataclass(kw_only=True)
class EarlyStop(Callback):
    """Ends a run whose metric has stopped improving.

    Args:
        metric: the metric's name in docs/metrics.md; steps without it do not count.
        patience: how many consecutive measurements may fail to improve on the best one.
        min_delta: smallest improvement that counts.
        minimize: whether smaller values are better.
        target: the run also ends when the metric reaches this value.
    """

    metric: str = "val/reward/mean"
    patience: int = 3
    min_delta: float = 0.0
    minimize: bool = False
    target: float | None = None

    def __post_init__(self) -> None:
        self._best, self._waited = -math.inf, 0

    def after_validation(self, step: Step, training: Training) -> None:
        """Compares the metric, as `after_step` does."""
        self.after_step(step, training)

    def after_step(self, step: Step, training: Training) -> None:
        """Compares the metric, and stops the run when patience is exhausted."""
        value = step.metrics.get(self.metric)
        if value is None:
            return
        sign = -1.0 if self.minimize else 1.0
        if sign * value > self._best + self.min_delta:
            self._best, self._waited = sign * value, 0
        else:
            self._waited += 1
        reached = self.target is not None and sign * value >= sign * self.target
        if reached or self._waited >= self.patience:
            training.stop()


async def _set_rates(note: run_dirs.RunNote, lr_scale: float) -> int:
    async with ControllerClient.of_run(note) as controller:
        return await controller.set_rates(lr_scale)
