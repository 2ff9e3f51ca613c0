"""Evaluates a policy by its answers to held-out prompts: means, pass@k, votes, lengths, with intervals."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

_RESAMPLES, _VOTES = 2000, 200
# Number of bootstrap draws in memory at once.
_DRAWS = 1_000_000
_LEVEL = 0.95
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_MARKED = re.compile(r"####\s*(\S+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedAnswer:
    """One scored answer to a held-out prompt.

    Attributes:
        prompt: number of the prompt, unique in its set.
        reward: None if the answer could not be scored.
        final: the response's `final_answer`; None if its text is unknown.
        num_tokens: number of tokens that the policy sampled.
        is_cut: whether the response reached its length limit.
    """

    prompt: int
    reward: float | None
    final: str | None
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
    """The results measured on a set of prompts.

    Attributes:
        num_prompts: prompts with at least one scored answer.
        num_missing: prompts of the set without a scored answer, because they are too long or were dropped.
        right: share of right answers, avg@n with n = num_samples.
        pass_at: by k, the probability that one of k answers is right (arXiv:2107.03374, eq. 1).
        majority_at: by k, the probability that the most frequent final answer of k is right; empty if no
            response has a final answer.
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
        """Returns the result as plain data."""
        return asdict(self)

    def of_rewards(self) -> dict[str, float]:
        """Returns the results that depend only on rewards, by metric suffix."""
        metrics = {
            "reward/mean": self.reward.value,
            "reward/low": self.reward.low,
            "reward/high": self.reward.high,
            f"avg_at_{self.num_samples}": self.right.value,
        }
        return metrics | {f"pass_at_{k}": share.value for k, share in self.pass_at.items() if k > 1}

    def as_metrics(self) -> dict[str, float]:
        """Returns all results by metric suffix."""
        votes = {f"maj_at_{k}": share.value for k, share in self.majority_at.items()}
        rest = {"response_length/mean": self.length.value, "cut_off": self.cut.value}
        return self.of_rewards() | votes | rest


def evaluate(
    answers: Iterable[EvaluatedAnswer],
    *,
    num_asked: int,
    right_above: float = 0.0,
    samples_votes: bool = True,
    with_intervals: bool = True,
) -> EvaluationResult:
    """Measures a set of prompts; every prompt counts the same.

    Args:
        answers: answers to prompts of the set, in any order; those without a reward are left out.
        right_above: an answer with a reward above this is right.
        samples_votes: whether to compute maj@k also for k below the number of answers, with 200 draws per
            prompt and k.
        with_intervals: whether to compute intervals; their ends are NaN otherwise.

    Raises:
        ValueError: no answer has a reward.
    """
    groups: dict[int, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        if answer.reward is not None:
            groups[answer.prompt].append(answer)
    if not groups:
        raise ValueError("no answer was scored")
    ordered = [_Group.of(groups[prompt], right_above) for prompt in sorted(groups)]
    most = max(len(group.right) for group in ordered)
    sizes = _powers(min(len(group.right) for group in ordered))
    votes = [k for k in sizes if k > 2 and (samples_votes or k == most)]
    if not any(final for group in ordered for final in group.finals):
        votes = []
    columns: dict[tuple[str, int], list[float]] = {
        ("reward", 1): [_mean(group.rewards) for group in ordered],
        ("right", 1): [_mean(group.right) for group in ordered],
        ("length", 1): [_mean(group.lengths) for group in ordered],
        ("cut", 1): [_mean(group.cut) for group in ordered],
        **{("pass", k): [pass_at_k(len(g.right), sum(g.right), k) for g in ordered] for k in sizes},
        **{("majority", k): [majority_at_k(g.finals, g.right, k) for g in ordered] for k in votes},
    }
    values = np.array(list(columns.values()), dtype=float)
    lows, highs = _intervals(values) if with_intervals else np.full((2, len(values)), np.nan)
    estimates = {
        name: Estimate(value=float(row.mean()), low=float(low), high=float(high))
        for name, row, low, high in zip(columns, values, lows, highs, strict=True)
    }
    return EvaluationResult(
        num_prompts=len(ordered),
        num_missing=num_asked - len(ordered),
        num_samples=most,
        reward=estimates["reward", 1],
        right=estimates["right", 1],
        pass_at={k: estimates["pass", k] for k in sizes},
        majority_at={k: estimates["majority", k] for k in votes},
        length=estimates["length", 1],
        cut=estimates["cut", 1],
    )


def gain(
    before: Iterable[EvaluatedAnswer], after: Iterable[EvaluatedAnswer], *, right_above: float = 0.0
) -> Estimate | None:
    """Returns by how much the share of right answers has grown, prompt by prompt.

    Some prompts are harder than others, which widens the intervals of both shares, but not that of the gain:
    it may lie above 0 although the other two overlap.

    Returns None if no prompt has a scored answer in both.
    """
    shares = []
    for answers in (before, after):
        right: dict[int, list[bool]] = defaultdict(list)
        for answer in answers:
            if answer.reward is not None:
                right[answer.prompt].append(answer.reward > right_above)
        shares.append({prompt: _mean(of_prompt) for prompt, of_prompt in right.items()})
    first, second = shares
    grown = np.array([[second[prompt] - first[prompt] for prompt in sorted(first.keys() & second.keys())]])
    if not grown.size:
        return None
    lows, highs = _intervals(grown)
    return Estimate(value=float(grown.mean()), low=float(lows[0]), high=float(highs[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    rewards: list[float]
    right: list[bool]
    finals: list[str]
    lengths: list[int]
    cut: list[bool]

    @classmethod
    def of(cls, answers: Sequence[EvaluatedAnswer], right_above: float) -> _Group:
        rewards = [answer.reward or 0.0 for answer in answers]
        return cls(
            rewards=rewards,
            right=[reward > right_above for reward in rewards],
            finals=[answer.final or "" for answer in answers],
            lengths=[answer.num_tokens for answer in answers],
            cut=[answer.is_cut for answer in answers],
        )


def pass_at_k(n: int, right: int, k: int) -> float:
    """Returns the probability that k of n answers, drawn without replacement, include a right one."""
    if n - right < k:
        return 1.0
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_at_k(finals: Sequence[str], right: Sequence[bool], k: int) -> float:
    """Returns the probability that the most frequent of k final answers is right; ties are averaged.

    With more than k answers, this is the mean over 200 fixed draws of k without replacement.

    Args:
        finals: the final answer in each response; "" if it has none, in which case it has no vote.
        right: whether each response is right; an answer counts as the share of its responses that are right.
    """
    if k >= len(finals):
        return _vote(finals, right)
    return _mean(
        _vote([finals[place] for place in chosen], [right[place] for place in chosen])
        for chosen in _choices(len(finals), k)
    )


@cache
def _choices(n: int, k: int) -> list[list[int]]:
    generator = np.random.default_rng(k)
    return [generator.choice(range(n), size=k, replace=False).tolist() for _ in range(_VOTES)]


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
    r"""Returns a response's answer: its last \boxed{}, else what follows its last ####, else a number.

    Returns "" if it has none of them, and the last one of several numbers.
    """
    for pattern in (_BOXED, _MARKED, _NUMBER):
        if matches := pattern.findall(text):
            return str(matches[-1]).replace(",", "").strip().rstrip(".").removeprefix("$")
    return ""


def _intervals(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the ends of the interval of each row's mean, (2, rows); all rows use the same draws.

    Args:
        values: (rows, prompts).
    """
    generator, num_prompts = np.random.default_rng(0), values.shape[1]
    at_once = max(1, _DRAWS // num_prompts)
    means = np.concatenate(
        [
            values[
                :, generator.integers(0, num_prompts, size=(min(at_once, _RESAMPLES - start), num_prompts))
            ]
            .mean(axis=2)
            .T
            for start in range(0, _RESAMPLES, at_once)
        ]
    )
    ends: npt.NDArray[np.float64] = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], axis=0)
    return ends


def _powers(most: int) -> list[int]:
    """Returns the powers of two below `most`, then `most`."""
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent < most]
    return [*powers, most]


def _mean(values: Any) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers)
