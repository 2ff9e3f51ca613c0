"""How far the sampler's log-probs are from the learner's on a step's tokens, and the weights that make up for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.config.shaping import RolloutCorrectionConfig
from paceline.learner.algorithms import rollout_correction
from paceline.learner.algorithms.statistics import keep
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.advantages import Prepared


def with_rollout_weights(prepared: Sequence[Prepared], correction: RolloutCorrectionConfig) -> list[Prepared]:
    """The micro-batches with their weights, (B, R), where `algorithm.rollout_correction` asks for some."""
    if correction.method == "none":
        return list(prepared)
    return [replace(part, weights=_weights(part, correction)) for part in prepared]


def mismatch_metrics(
    prepared: Sequence[Prepared], correction: RolloutCorrectionConfig, ranks: Ranks
) -> dict[str, float]:
    """Over all ranks' tokens, under `rollout/`; every rank calls it alike.

    mismatch_kl: KL(sampler || learner) by k3; logprob_diff_max: the largest difference. effective_sample_size, a share in
    [0, 1], and largest_weight are of the weights at the correction's level before any cap, at that of tokens without a
    correction. corrected_share, with one: the share of tokens whose weight was capped or is 0.
    """
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    weight_sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
    largest = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for part in prepared:
        mask = part.batch.mask
        difference = keep(part.old_log_probs - part.batch.rollout_log_probs, mask).double()
        total[0] += (difference.exp() - 1.0 - difference).sum()
        total[1] += mask.sum()
        raw = _raw_weights(part, correction)
        weight_sums[:3] += rollout_correction.weight_sums(raw, mask)
        if part.weights is not None:
            bounded = part.weights == 0 if correction.method != "tis" else raw > correction.cap
            weight_sums[3] += (bounded & mask).sum()
        here = torch.stack([difference.abs().max(), rollout_correction.largest_weight(raw, mask)])
        largest = torch.maximum(largest, here)
    sums = ranks.all_sum(total).tolist()
    weight_sums, largest = ranks.all_sum(weight_sums), ranks.all_max(largest)
    metrics = {
        "rollout/mismatch_kl": sums[0] / sums[1],
        "rollout/logprob_diff_max": float(largest[0].item()),
        "rollout/effective_sample_size": float(
            rollout_correction.effective_sample_size_from_sums(weight_sums[:3]).item()
        ),
        "rollout/largest_weight": float(largest[1].item()),
    }
    if correction.method != "none":
        metrics["rollout/corrected_share"] = float(weight_sums[3].item()) / sums[1]
    return metrics


def _raw_weights(part: Prepared, correction: RolloutCorrectionConfig) -> Tensor:
    return rollout_correction.rollout_weights(
        part.old_log_probs.double(),
        part.batch.rollout_log_probs.double(),
        part.batch.mask,
        correction.weight_level,
    )


def _weights(part: Prepared, correction: RolloutCorrectionConfig) -> Tensor:
    old, rollout, mask = part.old_log_probs, part.batch.rollout_log_probs, part.batch.mask
    if correction.method == "tis":
        return rollout_correction.tis(old, rollout, mask, correction.cap, correction.weight_level)
    if correction.method == "icepop":
        return rollout_correction.icepop(old, rollout, mask, correction.low, correction.high)
    return rollout_correction.sequence_mask(
        old, rollout, mask, correction.low, correction.high, correction.weight_level
    )
