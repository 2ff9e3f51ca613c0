"""Mini-batches: the micro-batches of one optimizer step, with their counts over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.config.run import RunConfig
from paceline.learner.batch.planning.plan import BatchPlan
from paceline.learner.batch.types import TrainingBatch
from paceline.learner.distributed.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominators:
    """Counts of one mini-batch over all ranks, by which losses divide, however the rows are split."""

    num_tokens: int
    num_sequences: int
    num_positive_tokens: int = 0
    """Tokens of right responses; see actor.positive_loss_coef."""


def nominal_counts(config: RunConfig) -> Denominators:
    """Returns the counts to divide by while those of the mini-batch are unknown.

    The number of tokens is a power of two, so that dividing by it rounds nothing.
    """
    sequences = config.actor.ppo_mini_batch_size * config.rollout.n
    most = sequences * config.data.max_response_length
    return Denominators(num_tokens=1 << (most - 1).bit_length(), num_sequences=sequences)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MiniBatch:
    """This rank's micro-batches of one optimizer step."""

    parts: tuple[TrainingBatch, ...]
    denominators: Denominators


def cut_mini_batches(
    config: RunConfig, plan: BatchPlan, batches: Sequence[TrainingBatch], ranks: Ranks
) -> dict[str, list[MiniBatch]]:
    """Returns mini-batches of "actor" and "critic"; this rank's micro-batches are in the plan's order."""
    remaining = iter(batches)
    chunks = [[next(remaining) for _ in range(chunk.num_micro_batches)] for chunk in plan.chunks]
    above = config.actor.positive_above
    counts = [torch.stack([_counts(part, above) for part in chunk]).sum(0) for chunk in chunks]
    per_chunk = ranks.data.all_sum(torch.stack(counts)).tolist()

    def cut(num_prompts: int) -> list[MiniBatch]:
        mini_batches = [
            MiniBatch(
                parts=tuple(part for index in indices for part in chunks[index]),
                denominators=Denominators(
                    num_tokens=sum(per_chunk[index][0] for index in indices),
                    num_sequences=sum(per_chunk[index][1] for index in indices),
                    num_positive_tokens=sum(per_chunk[index][2] for index in indices),
                ),
            )
            for indices in plan.mini_batches(num_prompts)
        ]
        # Resampling may leave a mini-batch without rows, on all ranks together.
        return [mini for mini in mini_batches if mini.denominators.num_sequences]

    size = config.actor.ppo_mini_batch_size
    return {"actor": cut(size), "critic": cut(config.critic.ppo_mini_batch_size or size)}


def _counts(part: TrainingBatch, above: float) -> torch.Tensor:
    """Counts tokens, sequences, and tokens of sequences with a score above the bound."""
    mask = part.batch.mask
    return torch.stack([mask.sum(), mask.any(-1).sum(), part.positive_mask(above).sum()])
