"""The distance of the sampler's log-probs from the learner's on a step's tokens, and the weights that correct it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.config.shaping import RolloutCorrectionConfig
from paceline.learner.algorithms import rollout_correction
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.advantages import Prepared


def with_rollout_weights(prepared: Sequence[Prepared], correction: RolloutCorrectionConfig) -> list[Prepared]:
    """The micro-batches with the weights of `algorithm.rollout_correction`, (B, R), if it has a method."""
    if correction.method == "none":
        return list(prepared)
    return [replace(part, weights=_weights(part, correction)) for part in prepared]


def mismatch_metrics(
    prepared: Sequence[Prepared], correction: RolloutCorrectionConfig, ranks: Ranks
) -> dict[str, float]:
    """The metrics `rollout/*`, over all ranks' tokens; every rank calls it.

    mismatch_kl: KL(sampler || learner) per token, by `rollout_correction.mismatch_kl`; logprob_diff_max: the largest
    difference. effective_sample_size, a share in [0, 1], and largest_weight belong to the weights before any cap, at
    the correction's level, or per token without a correction. corrected_share, with a correction: the share of tokens
    whose weight was capped or is 0.
    """
    kl_and_count = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    weight_sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
    largest = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for part in prepared:
        old, rollout, mask = part.old_log_probs, part.batch.rollout_log_probs, part.batch.mask
        kl_and_count[0] += rollout_correction.mismatch_kl(old, rollout, mask).sum()
        kl_and_count[1] += mask.sum()
        raw = rollout_correction.rollout_weights(
            old.double(), rollout.double(), mask, correction.weight_level
        )
        weight_sums[:3] += rollout_correction.weight_sums(raw, mask)
        if part.weights is not None:
            bounded = part.weights == 0 if correction.method != "tis" else raw > correction.cap
            weight_sums[3] += (bounded & mask).sum()
        difference = rollout_correction.log_prob_diff_max(old, rollout, mask).double()
        highest = torch.stack([difference, rollout_correction.largest_weight(raw, mask)])
        largest = torch.maximum(largest, highest)
    kl_sum, num_tokens = ranks.all_sum(kl_and_count).tolist()
    weight_sums, largest = ranks.all_sum(weight_sums), ranks.all_max(largest)
    metrics = {
        "rollout/mismatch_kl": kl_sum / num_tokens,
        "rollout/logprob_diff_max": float(largest[0].item()),
        "rollout/effective_sample_size": float(
            rollout_correction.effective_sample_size(weight_sums[:3]).item()
        ),
        "rollout/largest_weight": float(largest[1].item()),
    }
    if correction.method != "none":
        metrics["rollout/corrected_share"] = float(weight_sums[3].item()) / num_tokens
    return metrics


def _weights(part: Prepared, correction: RolloutCorrectionConfig) -> Tensor:
    old, rollout, mask = part.old_log_probs, part.batch.rollout_log_probs, part.batch.mask
    if correction.method == "tis":
        return rollout_correction.tis(old, rollout, mask, correction.cap, correction.weight_level)
    if correction.method == "icepop":
        return rollout_correction.icepop(old, rollout, mask, correction.low, correction.high)
    return rollout_correction.sequence_mask(
        old, rollout, mask, correction.low, correction.high, correction.weight_level
    )
