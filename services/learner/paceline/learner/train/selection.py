"""Which tokens of a mini-batch a covariance loss treats apart: chosen once, over all its micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.config.actor import ActorConfig
from paceline.config.policy_losses import CovarianceLoss
from paceline.learner.algorithms.policy_losses import highest_covariance
from paceline.learner.batch.minibatch import MiniBatch
from paceline.learner.distributed.ranks import Ranks


def with_selected_tokens(
    mini_batches: Sequence[MiniBatch], actor: ActorConfig, ranks: Ranks
) -> list[MiniBatch]:
    """The mini-batches, their parts with `selected` where `actor.policy_loss` asks for it.

    The covariance is taken with the old log-probs, so the choice stands for all epochs, and in float64, so that it does
    not depend on how the mini-batch is cut. Every rank calls it alike.
    """
    loss = actor.policy_loss
    if not isinstance(loss, CovarianceLoss):
        return list(mini_batches)
    return [_select(mini, loss, ranks) for mini in mini_batches]


def _select(mini: MiniBatch, loss: CovarianceLoss, ranks: Ranks) -> MiniBatch:
    def row(tables: Sequence[Tensor]) -> Tensor:
        return torch.cat([table.flatten() for table in tables]).unsqueeze(0)

    masks = [part.batch.mask for part in mini.parts]
    selected = highest_covariance(
        row([part.old_log_probs for part in mini.parts]).double(),
        row([part.advantages for part in mini.parts]).double(),
        row(masks),
        loss.cov_fraction,
        *loss.covariance_band,
        all_reduce=ranks.all_sum,
        gather=ranks.all_gather,
    )
    pieces = torch.split(selected[0], [mask.numel() for mask in masks])
    parts = [
        replace(part, selected=piece.reshape(mask.shape))
        for part, piece, mask in zip(mini.parts, pieces, masks, strict=True)
    ]
    return replace(mini, parts=tuple(parts))
