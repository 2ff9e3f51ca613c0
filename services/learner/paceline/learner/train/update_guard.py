"""The guard on the learner's side: may this optimizer step be taken? Every rank comes to the same answer, from the same numbers.

rewards, reference KL -> judge_batch: any step of this batch at all?
metrics of a mini-batch, gradient norm -> judge_update: this one?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from paceline.learner.train.optimizer import StepOutcome


class UpdateGate:
    """Judges the optimizer steps of one training step and keeps what it saw.

    Args:
        config: the rules.
        histories: running medians, which outlast the step.
        ranks: the group.
        adjustments: in force in this step.
    """

    def __init__(
        self, config: GuardConfig, histories: Histories, ranks: Ranks, adjustments: Adjustments
    ) -> None:
        self.adjustments = adjustments
        self._limits, self._histories, self._ranks = config.limits, histories, ranks
        self._readings: list[Reading] = []
        self.refusal = ""
        """Why no optimizer step of this batch may be taken; "" where nothing speaks against it."""

    @property
    def readings(self) -> list[Reading]:
        """The worst of every rule and network so far."""
        return worst(self._readings)

    @property
    def metrics(self) -> dict[str, float]:
        """For the step's line: the largest `ppo_kl` of a mini-batch."""
        found = [one.value for one in self._readings if one.rule == "ppo_kl"]
        return {"actor/ppo_kl_max": max(found)} if found else {}

    def judge_batch(self, *, rewards: Sequence[float], reference_kl: float | None) -> None:
        """Looks at what is known before any update; sets `refusal`.

        Args:
            rewards: of all rows of the step, on every rank.
            reference_kl: mean over all sequences; None without a reference.
        """
        values = {} if reference_kl is None else {"reference_kl": reference_kl}
        if len(rewards) > 1:
            values |= dict.fromkeys(("reward_constant", "reward_jump"), spread(rewards))
        self.refusal = self._judge("", values)

    def judge_update(
        self, network: str, names: Sequence[str], sums: Tensor, grad_norm: float, grad_clip: float
    ) -> str:
        """Why an optimizer step of "actor" or "critic" is not to be taken, "" where it is; `sums` are of the metrics `names`.

        A gradient that clipping leaves alone is no matter for `grad_norm`, however much it exceeds the median.
        """
        if not self._limits:
            return ""
        # Reduced numbers all of them; the largest over the ranks makes them equal to the last bit.
        numbers = self._ranks.all_max(torch.cat([sums, sums.new_tensor([grad_norm])])).tolist()
        metrics = dict(zip([*names, "grad_norm"], numbers, strict=True))
        return self._judge(network, self._of_interest(network, metrics, grad_clip))

    def note_non_finite(self, network: str) -> None:
        """The optimizer did not take a step, since its loss or gradient was not finite."""
        earlier = [one for one in self._readings if (one.rule, one.network) == ("non_finite", network)]
        number = len(earlier) + 1.0
        self._readings.append(Reading(rule="non_finite", value=number, network=network, num_skipped=1))

    def _of_interest(self, network: str, metrics: Mapping[str, float], grad_clip: float) -> dict[str, float]:
        values = {
            name: metrics[rule.metric]
            for name, rule in RULES.items()
            if network in rule.networks and rule.metric in metrics
        }
        if values.get("grad_norm", math.inf) <= grad_clip:
            self._histories.add(f"{network}/grad_norm", values.pop("grad_norm"))
        return values

    def _judge(self, network: str, values: Mapping[str, float]) -> str:
        """Readings of the values, and the reasons to refuse."""
        reasons = []
        for name, value in values.items():
            reading = self._read(name, network, value) if name in self._limits else None
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

    def _read(self, name: str, network: str, value: float) -> Reading | None:
        """None where there is nothing to judge: no finite value, no median yet."""
        reference: float | None = 0.0
        if RULES[name].relative:
            key = f"{network}/{name}" if network else name
            reference = self._histories.reference(key)
            self._histories.add(key, value)
        if reference is None or not math.isfinite(value):
            return None
        return Reading(rule=name, value=value, network=network, reference=reference)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkGate:
    """The gate as the update of one network sees it; `names` are those of its metrics' sums."""

    gate: UpdateGate
    network: str
    names: Sequence[str]
    grad_clip: float

    def veto(self, sums: Tensor, grad_norm: float) -> str:
        """Why a step is not to be taken, "" where it is."""
        return self.gate.judge_update(self.network, self.names, sums, grad_norm, self.grad_clip)

    def note(self, outcome: StepOutcome) -> None:
        """Told what came of a step."""
        if not outcome.finite:
            self.gate.note_non_finite(self.network)
