"""What a step's metrics say of its rewards: spread, shares at either end, seconds of scoring."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from paceline.controller.batch.collected_batch import Batch
from paceline.controller.run.records import metrics
from support.headers import scored


def of_step(*rows: tuple[float, dict[str, float], float]) -> dict[str, float]:
    """The metrics of a step whose samples have these rewards, components and seconds."""
    samples = [
        dataclasses.replace(
            scored(number // 2, number % 2, reward=reward), components=parts, reward_s=seconds
        )
        for number, (reward, parts, seconds) in enumerate(rows)
    ]
    batch = Batch(samples=samples, dropped=(), verdicts=Counter(), num_groups=len(samples) // 2)
    push = {"weights/pause_ms": 0.0, "perf/num_gpus": 0.0}
    return metrics.assemble(batch, learner={}, push=push, learn_s=1.0, cleanup_s=0.0, step_s=2.0)


def test_each_component_has_its_spread_and_the_shares_at_either_end() -> None:
    values = [(1.0, 0.0), (3.0, 0.0), (1.0, 0.5), (2.0, 0.0)]
    seen = of_step(*((a + b, {"right": a, "style": b, "style/words": 9.0}, 0.0) for a, b in values))
    assert seen["reward/right/mean"] == 1.75
    assert seen["reward/right/std"] == pytest.approx(0.6875**0.5)
    assert (seen["reward/right/lowest_share"], seen["reward/right/highest_share"]) == (0.5, 0.25)
    assert (seen["reward/style/lowest_share"], seen["reward/style/highest_share"]) == (0.75, 0.25)
    assert "reward/style/words/std" not in seen
    assert (seen["reward/min"], seen["reward/max"]) == (1.0, 3.0)
    assert seen["reward/std"] == pytest.approx(0.546875**0.5)


def test_a_component_that_some_samples_lack_is_measured_over_the_others() -> None:
    seen = of_step((1.0, {"judge": 1.0}, 0.0), (0.0, {}, 0.0), (0.0, {"judge": 1.0}, 0.0), (0.0, {}, 0.0))
    assert (seen["reward/judge/std"], seen["reward/judge/lowest_share"]) == (0.0, 1.0)


def test_seconds_of_scoring_are_the_median_and_the_slowest_hundredth() -> None:
    seen = of_step(*((1.0, {}, float((37 * number) % 101)) for number in range(101)))
    assert (seen["timing_s/score_p50"], seen["timing_s/score_p99"]) == (50.0, 99.0)
