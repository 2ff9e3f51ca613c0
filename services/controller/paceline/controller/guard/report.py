"""The guard on the controller's side: readings of a finished step go to the warden, what it decides to the journal and to people.

    TrainStep's reply, the step's tokens and seconds -> readings -> warden -> decision

Every firing is an event `guard` with the numbers that caused it. People are told at the first step of a streak and whenever more than a
warning or a skip is done; how often each rule fired is said at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.run import RunConfig
from paceline.controller.batch.dispatch import Collected
from paceline.controller.events import EventHub
from paceline.controller.guard.policy import Decision, Firing, Warden
from paceline.controller.journal import Journal
from paceline.core.guard import Action, Adjustments, Reading, worst
from paceline.core.training import TrainResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A step as the guard sees it, between LEARN and PUBLISH: its batch, what the learner said, the seconds since its dispatch."""

    step: int
    collected: Collected
    result: TrainResult
    seconds: float


class GuardWatch:
    """Judges every step of a run and tells.

    Attributes:
        good: whether one may go back to the weights that the learner holds.
    """

    def __init__(self, config: RunConfig, journal: Journal, hub: EventHub) -> None:
        self._journal, self._hub, self._enabled = journal, hub, config.guard.enabled
        self._warden = Warden(config.guard, kl_coef=config.algorithm.kl_ctrl.kl_coef)
        self.may_roll_back = config.guard.uses(Action.ROLLBACK)
        self.good = True

    @property
    def adjustments(self) -> Adjustments:
        """What the next step is to be trained with."""
        return self._warden.adjustments

    async def judge(self, trained: Trained) -> tuple[Decision, dict[str, float]]:
        """What is to be done after a step, and the metrics of `guard/`; whatever fired is in the journal and told."""
        result, skipped = trained.result, "; ".join(dict.fromkeys(trained.result.skip_reasons))
        if skipped:
            await self._journal.record("update_skipped", step=trained.step, reason=skipped)
        in_force = self._warden.adjustments
        readings = worst([*result.readings, *self._own_readings(trained)])
        decision = self._warden.see(trained.step, readings)
        self.good = decision.good
        await self._journal.record_all(_event(trained.step, firing) for firing in decision.firings)
        if skipped and not decision.firings:
            self._hub.notice(f"step {trained.step}: update skipped: {skipped}")
        for firing in decision.firings:
            if firing.news:
                self._hub.notice(f"step {trained.step}: guard: {firing.sentence}")
        if not self._enabled:
            return decision, {}
        return decision, {
            "guard/fired": float(len(decision.firings)),
            "guard/skipped": float(sum(one.num_skipped for one in readings if one.rule != "non_finite")),
            "guard/lr_scale": in_force.lr_scale,
            "guard/kl_scale": in_force.kl_scale,
            "guard/rollbacks": float(self._warden.num_rollbacks),
        }

    def rolled_back(self, step: int, *, to_step: int) -> None:
        """The learner holds the weights of a good checkpoint again."""
        self._warden.rolled_back()
        self.good = True
        share = self._warden.adjustments.lr_scale
        self._hub.notice(
            f"step {step}: back to the weights of step {to_step}; learning rates now {share:g} of the configured"
        )

    async def summarize(self) -> None:
        """Says at the end how often each rule fired."""
        tallies = self._warden.tallies
        if not tallies:
            return
        rules = {
            key: {
                "steps": one.steps,
                "skipped": one.skipped,
                "worst": one.worst,
                "worst_step": one.worst_step,
            }
            for key, one in sorted(tallies.items())
        }
        await self._journal.record("guard_summary", rollbacks=self._warden.num_rollbacks, rules=rules)
        for key, one in sorted(tallies.items()):
            skipped = f", {one.skipped} updates skipped" if one.skipped else ""
            steps = "1 step" if one.steps == 1 else f"{one.steps} steps"
            self._hub.notice(
                f"guard: {key.strip('/')} fired in {steps}{skipped}; worst {one.worst:.4g} in step {one.worst_step}"
            )

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._warden.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From the checkpoint."""
        self._warden.load_state_dict(state)

    def _own_readings(self, trained: Trained) -> list[Reading]:
        """Of rules that the learner cannot judge."""
        readings = []
        bad = sum(not math.isfinite(value) for value in trained.result.metrics.values())
        if bad:
            readings.append(Reading(rule="non_finite", value=float(bad)))
        tokens = sum(h.num_prompt_tokens + h.num_response_tokens for h in trained.collected.batch)
        rate, reference = tokens / trained.seconds, self._warden.histories.reference("throughput")
        self._warden.histories.add("throughput", rate)
        if reference is not None:
            readings.append(Reading(rule="throughput", value=rate, reference=reference))
        return readings


def _event(step: int, firing: Firing) -> dict[str, Any]:
    reading = firing.reading
    return {
        "event": "guard",
        "step": step,
        "rule": reading.rule,
        "network": reading.network,
        "action": firing.action.value,
        "value": reading.value,
        "bound": firing.bound,
        "reference": reading.reference,
        "skipped": reading.num_skipped,
        "streak": firing.streak,
        "message": firing.sentence,
    }
