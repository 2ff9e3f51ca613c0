"""Detects signs in the metrics that a run learns little; each is reported when it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

_CUT_SHARE = 0.3
_FLAT_SHARE = 0.75
_FLAT_STEPS = 3
# Entropy is compared with that of the first steps.
_FIRST_STEPS = 5
_ENTROPY_SHARE = 0.25


class Signs:
    """Looks at the steps of a run in their order."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._flat: deque[float] = deque(maxlen=_FLAT_STEPS)
        self._first_entropies: list[float] = []

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Returns a sentence for each sign that this step shows for the first time."""
        now = {
            name: sentence
            for name, sentence in (
                ("cut", self._cut(metrics)),
                ("flat", self._without_spread(metrics)),
                ("entropy", self._low_entropy(metrics)),
            )
            if sentence
        }
        new = [f"step {step}: {sentence}" for name, sentence in now.items() if name not in self._shown]
        self._shown = set(now)
        return new

    def _cut(self, metrics: Mapping[str, float]) -> str:
        share = metrics.get("response_length/clip_ratio", 0.0)
        if share < _CUT_SHARE:
            return ""
        return (
            f"{share:.0%} of the responses were cut off at data.max_response_length; raise it, or check that "
            "the model ends its responses at all"
        )

    def _without_spread(self, metrics: Mapping[str, float]) -> str:
        share = metrics.get("groups/without_spread")
        if share is not None:
            self._flat.append(share)
        if len(self._flat) < _FLAT_STEPS or min(self._flat) < _FLAT_SHARE:
            return ""
        return (
            f"for {_FLAT_STEPS} steps at least {min(self._flat):.0%} of the prompt groups had the same "
            "reward for all samples, so that their advantages are zero; the prompts may be too "
            "easy or too hard, or the reward too coarse (algorithm.dynamic_sampling replaces such groups)"
        )

    def _low_entropy(self, metrics: Mapping[str, float]) -> str:
        entropy = metrics.get("actor/entropy")
        if entropy is None:
            return ""
        if len(self._first_entropies) < _FIRST_STEPS:
            self._first_entropies.append(entropy)
            return ""
        first = fmean(self._first_entropies)
        if entropy > _ENTROPY_SHARE * first:
            return ""
        return (
            f"the entropy fell from {first:.3f} to {entropy:.3f} nats per token: the policy explores little; "
            "lower actor.optim.lr, set actor.entropy_coeff, or raise actor.clip_ratio_high"
        )
