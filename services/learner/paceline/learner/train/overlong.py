"""The penalty on responses that come near the longest length allowed, on a step's scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.config.run import RunConfig
from paceline.core.training import BatchRow
from paceline.learner.algorithms.shaping import overlong_penalty


def shaped_scores(config: RunConfig, rows: Sequence[BatchRow]) -> tuple[list[float], dict[str, float]]:
    """The scores of all rows with `algorithm.overlong`'s penalty (DAPO, arXiv:2503.14476, eq. 13), and its metrics.

    Every rank has all rows, so every rank computes the same without a word to the others.
    """
    scores, overlong = [row.reward for row in rows], config.algorithm.overlong
    if not overlong.enable:
        return scores, {}
    lengths = torch.tensor([row.num_response_tokens for row in rows], dtype=torch.float64)
    penalties = overlong_penalty(
        lengths, config.data.max_response_length, overlong.buffer_length, overlong.factor
    ).tolist()
    metrics = {
        "overlong/penalty_mean": sum(penalties) / len(penalties),
        "overlong/share": sum(penalty < 0 for penalty in penalties) / len(penalties),
    }
    return [score + penalty for score, penalty in zip(scores, penalties, strict=True)], metrics
