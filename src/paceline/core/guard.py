"""Guard rules: which numbers of a training step are judged, and which actions their bounds call for.

reading (a rule's number, the worst of a step) + limits -> actions
actions beyond skip -> adjustments of the next steps, a rollback, or the end:
`paceline.controller.guard.policy`
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median


class Action(enum.Enum):
    """What a rule does, mildest first; the value is the word in configuration and journal."""

    WARN = "warn"
    SKIP = "skip"
    LOWER_CLIP = "lower_clip"
    RAISE_KL_COEF = "raise_kl_coef"
    LOWER_KL_COEF = "lower_kl_coef"
    FIXED_KL = "fixed_kl"
    LOWER_LR = "lower_lr"
    ROLLBACK = "rollback"
    STOP = "stop"


class Sense(enum.Enum):
    """Says on which side of a bound a rule fires; the value is the word in sentences."""

    ABOVE = "above"
    BELOW = "at or below"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A number that the guard judges.

    Attributes:
        metric: the number in words, or its key among the metrics (of an optimizer step, if it judges those).
        relative: whether bounds are multiples of `scale`.
        scale: the reference value of a relative rule, in words.
        absolute: whether the absolute value is judged, because a KL estimate by k1 can be negative.
        networks: the networks whose optimizer steps it judges one by one; () for a rule that judges the step
            as a whole.
        of_validation: whether it judges validations, each set of held-out prompts separately, and no updates.
    """

    name: str
    metric: str
    sense: Sense = Sense.ABOVE
    relative: bool = False
    scale: str = "its running median"
    absolute: bool = False
    networks: tuple[str, ...] = ()
    of_validation: bool = False
    actions: tuple[Action, ...] = tuple(Action)


_WITHOUT_SKIP = tuple(action for action in Action if action is not Action.SKIP)

RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(name="ppo_kl", metric="ppo_kl", absolute=True, networks=("actor",)),
        Rule(name="reference_kl", metric="algorithm/reference_kl", absolute=True),
        Rule(name="grad_norm", metric="grad_norm", relative=True, networks=("actor", "critic")),
        Rule(name="pg_clipfrac", metric="pg_clipfrac", networks=("actor",)),
        Rule(name="pg_clipfrac_lower", metric="pg_clipfrac_lower", networks=("actor",)),
        Rule(name="vf_clipfrac", metric="vf_clipfrac", networks=("critic",)),
        Rule(name="entropy_low", metric="entropy", sense=Sense.BELOW, networks=("actor",)),
        Rule(name="entropy_high", metric="entropy", relative=True, networks=("actor",)),
        Rule(name="reward_constant", metric="spread of the rewards", sense=Sense.BELOW),
        Rule(name="reward_jump", metric="spread of the rewards", relative=True),
        Rule(
            name="groups_without_spread",
            metric="share of prompt groups whose rewards are all equal",
            actions=_WITHOUT_SKIP,
        ),
        Rule(
            name="component_constant",
            metric="steps in a row in which a reward component was the same for all responses",
            actions=_WITHOUT_SKIP,
        ),
        Rule(name="reward_errors", metric="share of what a scorer could not score", actions=_WITHOUT_SKIP),
        Rule(name="out_of_memory", metric="optimizer steps taken again in halves", actions=_WITHOUT_SKIP),
        Rule(name="non_finite", metric="numbers that are not finite", actions=_WITHOUT_SKIP),
        Rule(
            name="mismatch_kl",
            metric="rollout/mismatch_kl",
            relative=True,
            scale="what model.dtype allows",
            actions=(Action.WARN, Action.STOP),
        ),
        Rule(
            name="throughput",
            metric="tokens/s of generating, scoring and learning",
            sense=Sense.BELOW,
            relative=True,
            actions=(Action.WARN, Action.STOP),
        ),
        Rule(
            name="val_fall",
            metric="gap below the best validation's interval",
            of_validation=True,
            actions=_WITHOUT_SKIP,
        ),
    )
}


ALLOWED_MISMATCH_KL: Mapping[str, float] = {"float32": 1e-6, "bfloat16": 0.01}
"""The largest KL between rollout and learner, in nats per token, that rounding explains, by model.dtype.

Measured: 2e-13 to 6e-10 in float32 (log-probs 5e-7 to 3.4e-5 apart), 0.002 in bfloat16.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleLimits:
    """The configuration of one rule.

    Attributes:
        patience: number of consecutive steps that must cross a bound before an action beyond SKIP is taken.
    """

    bounds: Mapping[Action, float]
    patience: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A rule's number in one step; the worst one if there are several.

    Attributes:
        network: "actor" or "critic" if the rule judges optimizer steps; the name of a set of held-out prompts
            if it judges validations; else "".
        reference: the reference value of a relative rule; 0 for others.
        num_skipped: optimizer steps that the rule skipped; batches if the rule looks at the whole batch.
        detail: where the number comes from, in words; "" if the rule says so itself.
    """

    rule: str
    value: float
    network: str = ""
    reference: float = 0.0
    num_skipped: int = 0
    detail: str = ""

    @property
    def badness(self) -> float:
        """Orders readings of one rule, the worst highest."""
        size = self.value / self.reference if RULES[self.rule].relative else self.value
        return size if RULES[self.rule].sense is Sense.ABOVE else -size

    def threshold(self, bound: float) -> float:
        """Returns a bound in the units of the value."""
        return bound * self.reference if RULES[self.rule].relative else bound


def crossed(limits: RuleLimits, reading: Reading) -> tuple[Action, ...]:
    """Returns the actions whose bound is crossed, mildest first.

    NaN crosses no bound; the rule `non_finite` counts such values.
    """
    rule = RULES[reading.rule]
    actions = []
    for action in Action:
        bound = limits.bounds.get(action)
        if bound is None or (rule.relative and reading.reference <= 0.0):
            continue
        threshold = reading.threshold(bound)
        beyond = reading.value > threshold if rule.sense is Sense.ABOVE else reading.value <= threshold
        if beyond:
            actions.append(action)
    return tuple(actions)


def describe(reading: Reading, bound: float, action: Action) -> str:
    """Describes the reading, the bound and its configuration key, in one clause."""
    rule = RULES[reading.rule]
    of = f"{reading.network}{':' if rule.of_validation else ''} " if reading.network else ""
    detail = f" ({reading.detail})" if reading.detail else ""
    limit = f"{reading.threshold(bound):.4g}"
    if rule.relative:
        limit += f", which is {rule.scale}" if bound == 1 else f", {bound:g} times {rule.scale}"
    return (
        f"{of}{rule.metric}{detail} is {reading.value:.4g}, {rule.sense.value} {limit} "
        f"(guard.{rule.name}.{action.value})"
    )


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation over all values; exactly 0 if all are equal."""
    if min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def worst(readings: Iterable[Reading]) -> list[Reading]:
    """Picks the worst reading per rule and network, with all skipped steps, in order of first appearance."""
    by_rule: dict[tuple[str, str], Reading] = {}
    for reading in readings:
        key = reading.rule, reading.network
        before = by_rule.get(key)
        if before is None:
            by_rule[key] = reading
            continue
        chosen = max(before, reading, key=lambda candidate: candidate.badness)
        by_rule[key] = replace(chosen, num_skipped=before.num_skipped + reading.num_skipped)
    return list(by_rule.values())


@dataclass(kw_only=True, slots=True)
class Histories:
    """The last `window` values by name, and their medians; part of the checkpoint."""

    window: int = 100
    min_history: int = 10
    _values: dict[str, deque[float]] = field(default_factory=dict)

    def reference(self, name: str) -> float | None:
        """Returns the median; None with fewer than `min_history` values, or if it is not above 0."""
        values = self._values.get(name, ())
        if len(values) < self.min_history:
            return None
        middle = median(values)
        return middle if middle > 0.0 else None

    def add(self, name: str, value: float) -> None:
        """Adds a value, unless it is not finite.

        Values of skipped steps count too, so that the median follows a lasting change.
        """
        if math.isfinite(value):
            self._values.setdefault(name, deque(maxlen=self.window)).append(value)

    def streak(self, name: str, value: float) -> int:
        """Returns how many of the newest values in a row are `value`; at most `window`."""
        values = reversed(self._values.get(name, ()))
        return sum(1 for _ in itertools.takewhile(lambda other: other == value, values))

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the histories as a checkpoint stores them."""
        return {name: list(values) for name, values in sorted(self._values.items())}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores what `state_dict` returned before."""
        self._values = {name: deque(map(float, values), maxlen=self.window) for name, values in state.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adjustments:
    """The guard's changes to the configuration, as absolute values: sending them twice changes nothing.

    Attributes:
        lr_scale: multiplies every learning rate.
        kl_scale: multiplies the KL coefficient in force, in the reward and in the loss.
        clip_scale: multiplies the policy loss's clip range.
        fixed_kl_coef: replaces an adaptive coefficient of the reward; None leaves it adaptive.
    """

    lr_scale: float = 1.0
    kl_scale: float = 1.0
    clip_scale: float = 1.0
    fixed_kl_coef: float | None = None

    def kl_coef(self, controlled: float) -> float:
        """Returns the coefficient in force if the KL controller's own is `controlled`."""
        return self.kl_scale * (controlled if self.fixed_kl_coef is None else self.fixed_kl_coef)
