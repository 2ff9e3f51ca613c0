"""Compares the first warm steps of a run with the estimate, and says where to look if they are slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Self

from paceline.config.run import RunConfig
from paceline.core.cards import Card
from paceline.models.model_shape import ModelShape
from paceline.sizing.machine import Machine
from paceline.sizing.model_files import model_tree
from paceline.sizing.step_time import StepTime

# The first step compiles kernels and captures graphs.
_COLD_STEPS, _WARM_STEPS = 1, 3
_SLOWER: Final = 1.3

_UPDATE = ("timing_s/update_actor", "timing_s/update_critic")


@dataclass(kw_only=True, slots=True)
class Expectation:
    """Compares a run's steps on GPUs with their estimate.

    Args:
        config: configuration of the run, with every automatic value chosen (`settle`).
    """

    config: RunConfig
    shape: ModelShape
    card: Card
    _rows: list[Mapping[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, config: RunConfig, machine: Machine) -> Self | None:
        """Returns the expectation for a run; None on a CPU, for episodes, or if too little is known.

        The duration of episodes depends on tools and environments, which are not estimated.
        """
        if config.has_episodes or config.learner.device == "cpu":
            return None
        shape = ModelShape.of(model_tree(config.model))
        if shape is None or machine.card is None:
            return None
        return cls(config=config, shape=shape, card=machine.card)

    def step(self, metrics: Mapping[str, float]) -> str:
        """Takes the metrics of the next step; returns a sentence once enough steps are warm, else ""."""
        if len(self._rows) >= _COLD_STEPS + _WARM_STEPS or "timing_s/gen" not in metrics:
            return ""
        self._rows.append(metrics)
        warm = self._rows[_COLD_STEPS:]
        return self._sentence(warm) if len(warm) == _WARM_STEPS else ""

    def _sentence(self, rows: Sequence[Mapping[str, float]]) -> str:
        estimate = self._estimate(rows)
        step, generation = _median(rows, "timing_s/step"), _median(rows, "timing_s/gen")
        update = _median(rows, *_UPDATE)
        words = (
            f"{len(rows)} warm steps took {step:.1f} s (median): generation {generation:.1f}, "
            f"update {update:.1f}; expected for answers of this length: {estimate.seconds:.1f}, "
            f"{estimate.waited:.1f}, {estimate.update:.1f}"
        )
        advice = []
        if generation > _SLOWER * estimate.generation:
            advice.append(f"generation is slow: {self._about_generation()}")
        if update > _SLOWER * estimate.update:
            advice.append(f"the update is slow: {self._about_update()}")
        return "; ".join([words, *advice])

    def _estimate(self, rows: Sequence[Mapping[str, float]]) -> StepTime:
        """Estimates a step with the lengths that these steps had."""
        response = _median(rows, "response_length/mean")
        tokens = median(row.get("perf/tokens_per_s", 0.0) * row.get("timing_s/step", 0.0) for row in rows)
        num_rows = self.config.data.train_batch_size * self.config.rollout.n
        prompt = tokens / num_rows - response
        return StepTime.of(
            self.config,
            self.shape,
            self.card,
            prompt_tokens=max(1, round(prompt)),
            response_tokens=max(1, round(response)),
        )

    def _about_generation(self) -> str:
        rollout = self.config.rollout
        if rollout.enforce_eager:
            return "leave rollout.enforce_eager out, so that the engine captures graphs"
        return (
            "the engine's GPU waits for its host, or is shared: look for other programs on its cores and in "
            "nvidia-smi"
        )

    def _about_update(self) -> str:
        actor = self.config.with_compile(on_gpu=True).actor
        if not actor.compiles:
            return "set actor.compile: true"
        return "look in nvidia-smi for low clocks, high temperatures and other programs on the GPUs"


def _median(rows: Sequence[Mapping[str, float]], *names: str) -> float:
    """Returns the median over rows of the sum of these metrics."""
    return median(sum(row.get(name, 0.0) for name in names) for row in rows)
