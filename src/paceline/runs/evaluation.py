"""What the answers to held-out prompts say of a policy: means, pass@k, votes, lengths, with intervals."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

_RESAMPLES, _VOTES = 2000, 200
_LEVEL = 0.95
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_MARKED = re.compile(r"####\s*(\S+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedAnswer:
    """One scored answer to a held-out prompt.

    Attributes:
        prompt: which prompt, unique in its set.
        reward: None where it could not be scored.
        num_tokens: that the policy drew.
        is_cut: whether the response ended at data.max_response_length.
    """

    prompt: int
    text: str
    reward: float | None
    num_tokens: int
    is_cut: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over prompts with its interval of 95%, from bootstrap samples of the prompts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """What was measured on a set of prompts.

    Attributes:
        num_prompts: with at least one scored answer.
        num_missing: prompts of the set without one: too long, or dropped.
        num_samples: answers per prompt.
        reward: mean reward.
        right: share of right answers, avg@n with n = num_samples.
        pass_at: by k, the probability that one of k answers is right (arXiv:2107.03374, eq. 1).
        majority_at: by k, that the most frequent final answer of k is right.
        length: mean tokens of a response.
        cut: share of responses that were cut off.
    """

    num_prompts: int
    num_missing: int
    num_samples: int
    reward: Estimate
    right: Estimate
    pass_at: Mapping[int, Estimate]
    majority_at: Mapping[int, Estimate]
    length: Estimate
    cut: Estimate

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def evaluate(
    answers: Sequence[EvaluatedAnswer], *, num_asked: int, right_above: float = 0.0
) -> EvaluationResult:
    """Measures a set of prompts; every prompt counts the same.

    Args:
        answers: to any prompts of the set, in any order; those without a reward are left out.
        num_asked: prompts of the set.
        right_above: an answer with a reward above this is right.

    Raises:
        ValueError: no answer has a reward.
    """
    groups: dict[int, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        if answer.reward is not None:
            groups[answer.prompt].append(answer)
    if not groups:
        raise ValueError("no answer was scored")
    ordered = [groups[prompt] for prompt in sorted(groups)]
    fewest = min(map(len, ordered))
    sizes = _powers(fewest)
    generator = np.random.default_rng(0)
    draws = generator.integers(0, len(ordered), size=(_RESAMPLES, len(ordered)))

    def estimate(value: Callable[[list[EvaluatedAnswer]], float]) -> Estimate:
        return _estimate(np.array([value(group) for group in ordered]), draws)

    def is_right(answer: EvaluatedAnswer) -> bool:
        return answer.reward is not None and answer.reward > right_above

    return EvaluationResult(
        num_prompts=len(ordered),
        num_missing=num_asked - len(ordered),
        num_samples=max(map(len, ordered)),
        reward=estimate(lambda group: _mean(answer.reward or 0.0 for answer in group)),
        right=estimate(lambda group: _mean(map(is_right, group))),
        pass_at={k: estimate(partial(_passes, is_right=is_right, k=k)) for k in sizes},
        majority_at={k: estimate(partial(_votes, is_right=is_right, k=k)) for k in sizes if k > 2},
        length=estimate(lambda group: _mean(answer.num_tokens for answer in group)),
        cut=estimate(lambda group: _mean(answer.is_cut for answer in group)),
    )


def _passes(group: list[EvaluatedAnswer], *, is_right: Callable[[EvaluatedAnswer], bool], k: int) -> float:
    return pass_at_k(len(group), sum(map(is_right, group)), k)


def _votes(group: list[EvaluatedAnswer], *, is_right: Callable[[EvaluatedAnswer], bool], k: int) -> float:
    return majority_at_k([final_answer(answer.text) for answer in group], list(map(is_right, group)), k)


def pass_at_k(n: int, right: int, k: int) -> float:
    """The probability that k of n answers, drawn without replacement, have one of the `right` ones."""
    if n - right < k:
        return 1.0
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_at_k(finals: Sequence[str], right: Sequence[bool], k: int) -> float:
    """How often the most frequent final answer of k is right; equally frequent ones count their mean.

    With k below the number of answers the mean over 200 draws of k without replacement, the same each time.

    Args:
        finals: the final answer in each response; "" where it has none, which takes no part in the vote.
        right: whether each response is right; an answer is as right as the responses that give it.
    """
    if k >= len(finals):
        return _vote(finals, right)
    generator = np.random.default_rng(k)
    places = range(len(finals))
    return _mean(
        _vote([finals[place] for place in chosen], [right[place] for place in chosen])
        for chosen in (generator.choice(places, size=k, replace=False) for _ in range(_VOTES))
    )


def _vote(finals: Sequence[str], right: Sequence[bool]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for final, is_right in zip(finals, right, strict=True):
        if final:
            votes[final].append(is_right)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return _mean(_mean(voters) for voters in votes.values() if len(voters) == most)


def final_answer(text: str) -> str:
    r"""The answer that a response gives: its last \boxed{}, else what follows its last ####, else a number.

    "" where it has none of them; of several numbers it is the last.
    """
    for pattern in (_BOXED, _MARKED, _NUMBER):
        if matches := pattern.findall(text):
            return str(matches[-1]).replace(",", "").strip().rstrip(".").removeprefix("$")
    return ""


def _estimate(values: np.ndarray, draws: np.ndarray) -> Estimate:
    means = values[draws].mean(axis=1)
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Estimate(value=float(values.mean()), low=float(low), high=float(high))


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on up to `most`, which is one of them."""
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent < most]
    return [*powers, most]


def _mean(values: Any) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers)


def table(results: Mapping[str, EvaluationResult]) -> str:
    """The results as aligned lines, one per set."""
    rows = [["set", "prompts", "missing", "n", "reward", "avg@n", "pass@k", "maj@k", "tokens", "cut off"]]
    for name, result in results.items():
        rows.append(
            [
                name,
                str(result.num_prompts),
                str(result.num_missing),
                str(result.num_samples),
                _shown(result.reward),
                _shown(result.right),
                " ".join(f"{k}: {_shown(estimate)}" for k, estimate in result.pass_at.items() if k > 1)
                or "-",
                " ".join(f"{k}: {_shown(estimate)}" for k, estimate in result.majority_at.items()) or "-",
                f"{result.length.value:.0f}",
                f"{100 * result.cut.value:.1f}%",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
