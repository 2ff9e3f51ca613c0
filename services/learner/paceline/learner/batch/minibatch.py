"""Mini-batches: the micro-batches of one optimizer step, with counts over all ranks, so that any cut gives the same loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.config.run import RunConfig
from paceline.learner.batch.plan import BatchPlan
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.advantages import Prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominators:
    """Counts of one mini-batch over all ranks."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MiniBatch:
    """This rank's micro-batches of one optimizer step."""

    parts: tuple[Prepared, ...]
    denominators: Denominators


def cut_mini_batches(
    config: RunConfig, plan: BatchPlan, prepared: Sequence[Prepared], ranks: Ranks
) -> dict[str, list[MiniBatch]]:
    """Mini-batches of "actor" and "critic" from this rank's micro-batches, which lie in the order of the plan's chunks."""
    pending = iter(prepared)
    parts = [[next(pending) for _ in range(chunk.num_micro_batches)] for chunk in plan.chunks]
    counts = [
        torch.stack([torch.stack([mask.sum(), mask.any(-1).sum()]) for mask in masks]).sum(0)
        for masks in ([part.batch.mask for part in chunk] for chunk in parts)
    ]
    per_chunk = ranks.all_sum(torch.stack(counts)).tolist()

    def cut(num_prompts: int) -> list[MiniBatch]:
        every = [
            MiniBatch(
                parts=tuple(part for chunk in chunks for part in parts[chunk]),
                denominators=Denominators(
                    num_tokens=sum(per_chunk[chunk][0] for chunk in chunks),
                    num_sequences=sum(per_chunk[chunk][1] for chunk in chunks),
                ),
            )
            for chunks in plan.mini_batches(num_prompts)
        ]
        # Resampling may leave a mini-batch without a row, on all ranks together.
        return [mini for mini in every if mini.denominators.num_sequences]

    size = config.actor.ppo_mini_batch_size
    return {"actor": cut(size), "critic": cut(config.critic.ppo_mini_batch_size or size)}
