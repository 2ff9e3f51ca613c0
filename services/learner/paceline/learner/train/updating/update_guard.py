"""The guard on the learner: decides, equally on every rank, whether an optimizer step may be taken.

rewards, reference KL -> judge_batch, judge_reference_kl: may any step on this batch be taken?
metrics of a mini-batch, gradient norm -> judge_update: may this step be taken?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.config.guard import GuardConfig
from paceline.core.guard import (
    RULES,
    Action,
    Adjustments,
    Histories,
    Reading,
    crossed,
    describe,
    spread,
    worst,
)
from paceline.learner.distributed.ranks import Ranks


class UpdateGuard:
    """Judges the optimizer steps of one training step and keeps their readings.

    Args:
        histories: running medians, which outlive the step.
    """

    def __init__(
        self, config: GuardConfig, histories: Histories, ranks: Ranks, adjustments: Adjustments
    ) -> None:
        self.adjustments = adjustments
        self._limits, self._histories, self._ranks = config.limits, histories, ranks
        self._readings: list[Reading] = []
        self.refusal = ""
        """Why no optimizer step on this batch may be taken; "" if steps may be taken."""

    @property
    def readings(self) -> list[Reading]:
        """The worst reading of every rule and network so far."""
        return worst(self._readings)

    @property
    def metrics(self) -> dict[str, float]:
        """Returns, for the step's metrics, the largest `ppo_kl` of a mini-batch."""
        kls = [reading.value for reading in self._readings if reading.rule == "ppo_kl"]
        return {"actor/ppo_kl_max": max(kls)} if kls else {}

    def judge_batch(self, rewards: Sequence[float]) -> None:
        """Judges the rewards of all rows of the step, before any update; may set `refusal`."""
        if len(rewards) > 1:
            values = dict.fromkeys(("reward_constant", "reward_jump"), spread(rewards))
            self.refusal = self._judge("", values)

    def judge_reference_kl(self, value: float | None) -> None:
        """Judges the mean KL to the reference over all sequences; before an update, may set `refusal`.

        None means that there is no reference.
        """
        if value is None:
            return
        reason = self._judge("", {"reference_kl": value})
        self.refusal = "; ".join(filter(None, (self.refusal, reason)))

    def judge_update(
        self, network: str, names: Sequence[str], sums: Tensor, grad_norm: float, grad_clip: float
    ) -> str:
        """Returns why a step of "actor" or "critic" must be skipped, or ""; `sums` belong to `names`.

        The rule `grad_norm` ignores gradients below the clip, even far above the median.
        """
        if not self._limits:
            return ""
        # The numbers are reduced already; the maximum over ranks makes them bitwise equal.
        numbers = self._ranks.world.all_max(torch.cat([sums, sums.new_tensor([grad_norm])])).tolist()
        metrics = dict(zip([*names, "grad_norm"], numbers, strict=True))
        return self._judge(network, self._judged_values(network, metrics, grad_clip))

    def note_non_finite(self, network: str) -> None:
        """Counts a step that was skipped because its loss or gradient was not finite."""
        kinds = [(reading.rule, reading.network) for reading in self._readings]
        number = kinds.count(("non_finite", network)) + 1.0
        self._readings.append(Reading(rule="non_finite", value=number, network=network, num_skipped=1))

    def _judged_values(
        self, network: str, metrics: Mapping[str, float], grad_clip: float
    ) -> dict[str, float]:
        """Returns the values for the network's rules, by rule."""
        values = {
            name: metrics[rule.metric]
            for name, rule in RULES.items()
            if network in rule.networks and rule.metric in metrics
        }
        if values.get("grad_norm", math.inf) <= grad_clip:
            self._histories.add(f"{network}/grad_norm", values.pop("grad_norm"))
        return values

    def _judge(self, network: str, values: Mapping[str, float]) -> str:
        """Records readings of the values by rule; returns why the step must be skipped, else ""."""
        reasons = []
        for name, number in values.items():
            value = abs(number) if RULES[name].absolute else number
            reading = self._reading(name, network, value) if name in self._limits else None
            if reading is None:
                continue
            refused = Action.SKIP in crossed(self._limits[name], reading)
            if refused:
                reasons.append(describe(reading, self._limits[name].bounds[Action.SKIP], Action.SKIP))
            self._readings.append(
                Reading(
                    rule=name,
                    value=value,
                    network=network,
                    reference=reading.reference,
                    num_skipped=int(refused),
                )
            )
        return "; ".join(reasons)

    def _reading(self, name: str, network: str, value: float) -> Reading | None:
        """Returns the reading of a rule; None if the value is not finite or the rule has no median yet."""
        reference: float | None = 0.0
        if RULES[name].relative:
            key = f"{network}/{name}" if network else name
            reference = self._histories.reference(key)
            self._histories.add(key, value)
        if reference is None or not math.isfinite(value):
            return None
        return Reading(rule=name, value=value, network=network, reference=reference)
