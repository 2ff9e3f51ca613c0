"""Recomputes a step's metrics from the journal, for comparison with metrics.jsonl."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

OVERLONG = "overlong/penalty_mean"
_REJECTED = ("wrong_version", "wrong_digest", "unknown", "aborted")
# The learner may hold rewards in float32.
_TOLERANCE = 1e-5


def of_barrier(verdicts: Counter[str], drop_reasons: Sequence[str]) -> dict[str, float]:
    """Returns how often a collection gave each verdict, and each reason for dropping a group."""
    metrics = {
        "barrier/admitted": float(verdicts["admitted"]),
        "barrier/duplicates": float(verdicts["duplicate"]),
        "barrier/rejected": float(sum(verdicts[verdict] for verdict in _REJECTED)),
        "barrier/groups_dropped": float(len(drop_reasons)),
    }
    for reason, count in Counter(drop_reasons).items():
        metrics[f"barrier/groups_dropped/{reason.replace(':', '_')}"] = float(count)
    return metrics


def of_rewards(groups: Mapping[int, Sequence[float]]) -> dict[str, float]:
    """Returns the mean and the spread of a batch's rewards, which are given by prompt."""
    rewards = [reward for group in groups.values() for reward in group]
    if not rewards:
        return {}
    metrics = {
        "critic/score/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }
    if max(map(len, groups.values())) > 1:
        metrics["groups/without_spread"] = fmean(min(g) == max(g) for g in groups.values())
    return metrics


def of_components(components: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Returns the mean of each component over the samples that have it."""
    values: dict[str, list[float]] = {}
    for of_sample in components:
        for name, value in of_sample.items():
            values.setdefault(name, []).append(value)
    return {f"{prefix}/{name}/mean": fmean(of_name) for name, of_name in values.items()}


def differences(line: Mapping[str, Any], computed: Mapping[str, float]) -> Iterator[str]:
    """Returns a sentence for each metric of a line that differs from the recomputed one."""
    for name, expected in computed.items():
        value = line.get(name)
        if name == "critic/score/mean":
            expected += line.get(OVERLONG) or 0.0
        if value is None or not math.isfinite(expected):
            continue
        if not math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * _size(computed)):
            yield f"has {name} = {value:.9g}, but the journal gives {expected:.9g}"


def strangers(names: Iterable[str], computed: Collection[str], prefix: str) -> Iterator[str]:
    """Returns a sentence for each metric of a line that begins with `prefix` and was not recomputed."""
    strange = (name for name in names if name.startswith(prefix) and name not in computed)
    yield from (f"has {name}, which does not follow from the journal" for name in strange)


def _size(computed: Mapping[str, float]) -> float:
    return max(abs(computed.get("reward/min", 0.0)), abs(computed.get("reward/max", 0.0)), 1e-3)
