"""The metrics of a validation: for each set of held-out prompts, and within it for each data source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paceline.controller.batch.collect import Batch, reward_components
from paceline.controller.batch.inputs import HeldOutPrompts
from paceline.controller.run.records.metrics import episode_metrics
from paceline.core.evaluation import EvaluatedAnswer, evaluate
from paceline.core.ids import TrajectoryId
from paceline.core.samples.trajectory import FinishReason, ScoredHeader

_MOST_SOURCES = 20
# What MLflow refuses in the name of a metric.
_NO_NAME = re.compile(r"[^A-Za-z0-9_.:/ -]")


def of_sets(
    sets: Sequence[HeldOutPrompts], batch: Batch, finals: Mapping[TrajectoryId, str]
) -> dict[str, float]:
    """The metrics of all sets.

    Args:
        batch: the answers to their prompts.
        finals: the final answer in each response; empty where the texts are not known.
    """
    metrics: dict[str, float] = {}
    for held_out in sets:
        ids = set(held_out.ids())
        own = [header for header in batch.samples if header.trajectory_id.prompt_id in ids]
        dropped = sum(group.prompt_id in ids for group in batch.dropped)
        of_set = _of_set(held_out, own, finals) | {"groups_dropped": float(dropped)}
        metrics |= {held_out.of.metrics + name: value for name, value in of_set.items()}
    return metrics


def _of_set(
    held_out: HeldOutPrompts, samples: Sequence[ScoredHeader], finals: Mapping[TrajectoryId, str]
) -> dict[str, float]:
    if not samples:
        return {"num_prompts": 0.0}
    metrics = _measured(held_out, samples, finals)
    metrics["num_prompts"] = float(len({header.trajectory_id.prompt_id for header in samples}))
    metrics |= episode_metrics(samples)
    metrics |= {f"{name}/mean": value for name, value in reward_components(samples).items()}
    for source, ids in _sources(held_out).items():
        own = [header for header in samples if header.trajectory_id.prompt_id in ids]
        if own:
            of_source = _measured(held_out, own, finals)
            metrics |= {f"source/{source}/{name}": value for name, value in of_source.items()}
    return metrics


def _measured(
    held_out: HeldOutPrompts, samples: Sequence[ScoredHeader], finals: Mapping[TrajectoryId, str]
) -> dict[str, float]:
    answers = [
        EvaluatedAnswer(
            prompt=header.trajectory_id.prompt_id,
            reward=header.reward,
            final=finals.get(header.trajectory_id),
            num_tokens=header.num_sampled_tokens,
            is_cut=header.finish_reason is FinishReason.LENGTH,
        )
        for header in samples
    ]
    above = held_out.of.right_above
    return evaluate(answers, num_asked=0, right_above=above, samples_votes=False).as_metrics()


def _sources(held_out: HeldOutPrompts) -> dict[str, set[int]]:
    """The prompts of each data source; none where all have the same, or there are too many to be metrics."""
    by_source: dict[str, set[int]] = {}
    for prompt_id in held_out.ids():
        source = held_out.prompts.prompts[prompt_id].context.data_source or "none"
        by_source.setdefault(_NO_NAME.sub("_", source), set()).add(prompt_id)
    return dict(sorted(by_source.items())) if 1 < len(by_source) <= _MOST_SOURCES else {}
