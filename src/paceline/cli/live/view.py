"""What people see of a run: the numbers of a step, and plain lines for where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Protocol, TextIO

Metrics = Mapping[str, float]

LEARN_PHASES = (
    "timing_s/fetch",
    "timing_s/old_log_prob",
    "timing_s/ref",
    "timing_s/values",
    "timing_s/adv",
    "timing_s/update_critic",
    "timing_s/update_actor",
)


class View(Protocol):
    """Told what happens, in order; shows it."""

    def milestone(self, text: str) -> None:
        """A part of the start-up is done or begins."""
        ...

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """The run is in this phase; counts are 0 where they say nothing."""
        ...

    def step(self, step: int, metrics: Metrics) -> None:
        """A step is finished."""
        ...

    def notice(self, text: str) -> None:
        """Something that people should know."""
        ...

    def pulse(self) -> None:
        """Called about once a second, so that no long wait passes without a sign of life."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """The handful of a step's metrics that fit into a row; None where the step has none. Seconds where it says `_s`."""

    reward: float | None
    val_reward: float | None
    kl: float | None
    clip_frac: float | None
    entropy: float | None
    tokens_per_s: float | None
    gen_s: float | None
    reward_s: float | None
    learn_s: float | None
    weights_s: float | None
    step_s: float | None
    wait_s: float | None


def numbers(metrics: Metrics) -> StepNumbers:
    """Picks a row's numbers. KL is the one to the reference where the run measures it, else that of the update."""
    learn = [metrics[name] for name in LEARN_PHASES if name in metrics]
    return StepNumbers(
        reward=_first(metrics, "critic/score/mean", "reward/mean"),
        val_reward=_first(metrics, "val/reward/mean"),
        kl=_first(metrics, "algorithm/reference_kl", "actor/kl_loss", "actor/ppo_kl"),
        clip_frac=_first(metrics, "actor/pg_clipfrac"),
        entropy=_first(metrics, "actor/entropy"),
        tokens_per_s=_first(metrics, "perf/tokens_per_s"),
        gen_s=_first(metrics, "timing_s/gen"),
        reward_s=_first(metrics, "timing_s/reward"),
        learn_s=metrics.get("timing_s/learn", sum(learn) if learn else None),
        weights_s=_first(metrics, "timing_s/update_weights"),
        step_s=_first(metrics, "timing_s/step"),
        wait_s=_first(metrics, "barrier/wait_s"),
    )


class PlainView:
    """One line a step and one a milestone; a sign of life every `quiet_s` seconds without either."""

    def __init__(self, total_steps: int, *, out: TextIO | None = None, quiet_s: float = 20.0) -> None:
        self._total_steps, self._out, self._quiet_s = total_steps, out or sys.stdout, quiet_s
        self._began = self._spoke = self._phase_began = time.monotonic()
        self._step, self._phase, self._words = 0, "start", "start"

    def milestone(self, text: str) -> None:
        """One line with the seconds since the start."""
        self._say(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def phase(self, *, step: int, phase: str, admitted: int, wanted: int) -> None:
        """Silent: the step's line will have the seconds."""
        if (step, phase) != (self._step, self._phase):
            self._phase_began = time.monotonic()
        self._step, self._phase, self._words = step, phase, phase_words(phase, admitted, wanted)

    def pulse(self) -> None:
        """One line where nothing was said for long."""
        now = time.monotonic()
        if now - self._spoke > self._quiet_s:
            self._say(
                f"step {self._step}/{self._total_steps}: {self._words}, {now - self._phase_began:.0f} s so far"
            )

    def step(self, step: int, metrics: Metrics) -> None:
        """One line; none of the starting weights that are not validated."""
        if any(value is not None for value in astuple(numbers(metrics))):
            self._say(step_line(step, self._total_steps, metrics))

    def notice(self, text: str) -> None:
        """One line."""
        self._say(f"note: {text}")

    def close(self) -> None:
        """Nothing to do."""

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        print(line, file=self._out, flush=True)


def step_line(step: int, total_steps: int, metrics: Metrics) -> str:
    """A step in one line."""
    row = numbers(metrics)
    parts = [
        _part("reward", row.reward, ".3f"),
        _part("val", row.val_reward, ".3f"),
        _part("kl", row.kl, ".4f"),
        _part("clip", row.clip_frac, ".3f"),
        _part("entropy", row.entropy, ".3f"),
        _part("tokens/s", row.tokens_per_s, ",.0f"),
        _part("gen", row.gen_s, ".2f", " s"),
        _part("score", row.reward_s, ".2f", " s"),
        _part("learn", row.learn_s, ".2f", " s"),
        _part("push", row.weights_s, ".2f", " s"),
        _part("step", row.step_s, ".2f", " s"),
        _part("wait", row.wait_s, ".2f", " s"),
    ]
    return f"step {step}/{total_steps}  " + "  ".join(part for part in parts if part)


def phase_words(phase: str, admitted: int, wanted: int) -> str:
    """A phase, with how far it is where that is known."""
    return f"{phase} {admitted}/{wanted}" if wanted else phase


def _part(name: str, value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{name} {value:{form}}{unit}"


def _first(metrics: Metrics, *names: str) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)
