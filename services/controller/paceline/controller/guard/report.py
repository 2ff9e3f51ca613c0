"""The guard of a run: gathers a step's readings, applies the policy, reports to the journal and to people.

    learner's result, the step's tokens and seconds -> readings -> policy -> decision

Every firing is an event `guard` with the numbers that caused it. People are told at the first step of a
streak and whenever the action is more than a warning or a skip; a summary at the end says how often each rule
fired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.controller.batch.collected_batch import Batch, share_without_spread
from paceline.controller.guard import rewards
from paceline.controller.guard.policy import Firing, GuardDecision, GuardPolicy
from paceline.controller.progress import Run
from paceline.core.guard import ALLOWED_MISMATCH_KL, RULES, Action, Reading, worst
from paceline.core.training import TrainResult
from paceline.service.observability import metrics, telemetry
from paceline.service.observability.metrics import Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """A step between LEARN and PUBLISH.

    Attributes:
        seconds: since the dispatch; None if the step was interrupted.
        replays: whether the step also trained samples of earlier steps.
    """

    step: int
    batch: Batch
    result: TrainResult
    seconds: float | None
    replays: bool = False


class Guard:
    """Judges every step of a run and reports.

    Attributes:
        policy: what its decisions follow from; its state is the guard's in a checkpoint.
        good: whether a rollback may return to the weights that the learner holds.
    """

    def __init__(self, run: Run) -> None:
        self._journal, self._events, config = run.journal, run.events, run.config
        self._config, self._enabled = config, config.guard.enabled
        self.policy = self._new_policy()
        self.may_roll_back = config.guard.uses(Action.ROLLBACK)
        self.good = True
        self._judged: list[Observation] = []
        self._judged_of_sets: dict[str, Observation] = {}
        telemetry.observe(metrics.GUARD_VALUE, lambda: [*self._judged, *self._judged_of_sets.values()])

    def _new_policy(self) -> GuardPolicy:
        return GuardPolicy(self._config.guard, kl_coef=self._config.algorithm.kl_ctrl.kl_coef)

    def scale_rates(self, step: int, lr_scale: float) -> None:
        """Sets the scale of the learning rates from a step on, as a client asked; rules go on from there."""
        self.policy.adjustments = replace(self.policy.adjustments, lr_scale=lr_scale)
        self._journal.record("rates", step=step, lr_scale=lr_scale)
        self._events.notice(f"step {step}: learning rates are {lr_scale:g} of the configured, as asked")

    def judge(self, outcome: TrainedStep) -> tuple[GuardDecision, dict[str, float]]:
        """Decides how the run goes on after a step and reports it; also returns the metrics of `guard/`."""
        result, skipped = outcome.result, "; ".join(dict.fromkeys(outcome.result.skip_reasons))
        if skipped:
            self._journal.record("update_skipped", step=outcome.step, reason=skipped)
        in_force = self.policy.adjustments
        readings = worst([*result.readings, *self._own_readings(outcome)])
        decision = self.policy.judge(outcome.step, readings)
        self._judged = [_judged(reading) for reading in readings]
        self.good = decision.good
        if skipped and not decision.firings:
            self._events.notice(f"step {outcome.step}: update skipped: {skipped}")
        self._tell(outcome.step, decision)
        if not self._enabled:
            return decision, {}
        return decision, {
            "guard/fired": float(len(decision.firings)),
            "guard/skipped": float(sum(r.num_skipped for r in readings if r.rule != "non_finite")),
            "guard/lr_scale": in_force.lr_scale,
            "guard/kl_scale": in_force.kl_scale,
            "guard/clip_scale": in_force.clip_scale,
            "guard/rollbacks": float(self.policy.num_rollbacks),
        }

    def judge_validation(self, step: int, of_step: Mapping[str, float]) -> tuple[str, dict[str, float]]:
        """Judges the validation after a step, if there was one, and reports it.

        A rollback that it asks for takes place in the next step.

        Returns:
            Why the run must end, "" if it goes on; and the metrics that change.
        """
        readings = list(self.policy.best.readings(step, of_step, self._config.held_out_sets))
        decision = self.policy.judge_validation(step, readings)
        self._judged_of_sets |= {reading.network: _judged(reading) for reading in readings}
        self.good = self.good and decision.good
        self._tell(step, decision)
        fired = of_step.get("guard/fired", 0.0) + len(decision.firings)
        return decision.stop, {"guard/fired": fired} if decision.firings else {}

    def _tell(self, step: int, decision: GuardDecision) -> None:
        """Journals the rules that fired, and tells people the news."""
        self._journal.record_all(_event(step, firing) for firing in decision.firings)
        for firing in decision.firings:
            rule, network = firing.reading.rule, firing.reading.network
            telemetry.count(metrics.GUARD_FIRINGS, rule=rule, network=network, action=firing.action.value)
            if firing.news:
                self._events.notice(f"step {step}: guard: {firing.sentence}")

    def rolled_back(self, step: int, *, to_step: int) -> None:
        """Notes that the learner holds the weights of a good checkpoint again."""
        self.policy.rolled_back()
        self.good = True
        share = self.policy.adjustments.lr_scale
        self._events.notice(
            f"step {step}: back to the weights of step {to_step}; "
            f"learning rates now {share:g} of the configured"
        )

    def summarize(self) -> None:
        """Reports at the end how often each rule fired."""
        tallies = self.policy.tallies
        if not tallies:
            return
        rules = {
            key: {
                "steps": tally.steps,
                "skipped": tally.skipped,
                "worst": tally.worst,
                "worst_step": tally.worst_step,
            }
            for key, tally in sorted(tallies.items())
        }
        self._journal.record("guard_summary", rollbacks=self.policy.num_rollbacks, rules=rules)
        for key, tally in sorted(tallies.items()):
            skipped = f", {tally.skipped} updates skipped" if tally.skipped else ""
            unit = "validation" if RULES[key.partition("/")[0]].of_validation else "step"
            steps = f"1 {unit}" if tally.steps == 1 else f"{tally.steps} {unit}s"
            self._events.notice(
                f"guard: {key.strip('/')} fired in {steps}{skipped}; "
                f"worst {tally.worst:.4g} in step {tally.worst_step}"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned; {} stands for a new run."""
        self.policy, self.good = self._new_policy(), True
        self.policy.load_state_dict(state)

    def _own_readings(self, outcome: TrainedStep) -> list[Reading]:
        """Readings of the rules that the learner cannot judge."""
        readings = []
        bad = sum(not math.isfinite(value) for value in outcome.result.metrics.values())
        if bad:
            readings.append(Reading(rule="non_finite", value=float(bad)))
        mismatch = outcome.result.metrics.get("rollout/mismatch_kl", math.nan)
        if math.isfinite(mismatch) and not self._is_stale(outcome):
            allowed = ALLOWED_MISMATCH_KL[self._config.model.dtype]
            readings.append(Reading(rule="mismatch_kl", value=mismatch, reference=allowed))
        halved = outcome.result.metrics.get("guard/out_of_memory", 0.0)
        readings.append(Reading(rule="out_of_memory", value=halved))
        without_spread = share_without_spread(outcome.batch.samples)
        if without_spread is not None:
            readings.append(Reading(rule="groups_without_spread", value=without_spread))
        readings += rewards.readings(outcome.batch, self.policy.histories)
        if outcome.seconds is None:
            return readings
        rate = outcome.batch.num_tokens / outcome.seconds
        reference = self.policy.histories.reference("throughput")
        self.policy.histories.add("throughput", rate)
        if reference is not None:
            readings.append(Reading(rule="throughput", value=rate, reference=reference))
        return readings

    def _is_stale(self, outcome: TrainedStep) -> bool:
        """Returns whether the samples come from older weights, so that engine and learner may differ."""
        ages = {header.policy.staleness_in(outcome.step) for header in outcome.batch.samples}
        return outcome.replays or (self._config.barrier.bound > 0 and ages != {0})


def _judged(reading: Reading) -> Observation:
    """Returns a reading as a metric, in the units of its rule's bounds."""
    is_multiple = RULES[reading.rule].relative and reading.reference > 0
    value = reading.value / reading.reference if is_multiple else reading.value
    return value, {"rule": reading.rule, "network": reading.network}


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
