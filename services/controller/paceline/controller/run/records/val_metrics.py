"""The metrics of a validation: for each set of held-out prompts, and within it for each data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.controller.batch.collected_batch import Batch, reward_components
from paceline.controller.batch.inputs import HeldOutPrompts
from paceline.controller.run.records.metrics import episode_metrics
from paceline.core.ids import TrajectoryId
from paceline.core.samples.evaluation import EvaluatedAnswer, evaluate
from paceline.core.samples.trajectory import FinishReason, ScoredHeader


def of_sets(
    sets: Sequence[HeldOutPrompts], batch: Batch, finals: Mapping[TrajectoryId, str]
) -> dict[str, float]:
    """Returns the metrics of all sets.

    Args:
        finals: the final answer in each response; empty if the texts are not known.
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
    for source, ids in held_out.sources().items():
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
