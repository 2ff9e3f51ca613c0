"""Computes losses for pairs of a better and a worse answer to a prompt, from the answers' log-probs.

    dpo    arXiv:2305.18290; with label smoothing it is the conservative form
    ipo    arXiv:2310.12036, on means over tokens
    simpo  arXiv:2405.14734, without a reference
    kto    arXiv:2402.01306, each answer by itself against a reference point

Every loss is called `f(pairs, beta, **options)` and returns one number per pair, (P,).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairScores:
    """Sums of log-probs over the tokens of both answers, (P,) each; only the policy's are differentiated.

    Attributes:
        chosen: the policy's sums for the better answers.
        chosen_tokens: numbers of tokens of the better answers.
        rejected_tokens: numbers of tokens of the worse answers.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def gain_chosen(self) -> Tensor:
        """Log-ratios of policy and reference for the better answers."""
        return self.chosen - self.ref_chosen

    @property
    def gain_rejected(self) -> Tensor:
        """Log-ratios of policy and reference for the worse answers."""
        return self.rejected - self.ref_rejected


def dpo(pairs: PairScores, beta: float, *, label_smoothing: float = 0.0) -> Tensor:
    """Returns -log sigmoid of beta times the difference of the log-ratios.

    Args:
        beta: strength of the pull to the reference.
        label_smoothing: assumed share of pairs with swapped labels.
    """
    margin = beta * (pairs.gain_chosen - pairs.gain_rejected)
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def ipo(pairs: PairScores, beta: float) -> Tensor:
    """Returns the squared distance of the difference of mean log-ratios per token from 1 / (2 beta)."""
    margin = pairs.gain_chosen / pairs.chosen_tokens - pairs.gain_rejected / pairs.rejected_tokens
    return (margin - 1 / (2 * beta)) ** 2


def simpo(pairs: PairScores, beta: float, *, gamma: float = 0.5) -> Tensor:
    """Returns -log sigmoid of (beta times the difference of mean log-probs per token, minus gamma)."""
    margin = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return -F.logsigmoid(beta * margin - gamma)


def kto(pairs: PairScores, beta: float, *, reference_point: float) -> Tensor:
    """Penalises better answers for not exceeding the reference point, and worse ones for not staying below.

    Args:
        beta: strength of the pull to the reference.
        reference_point: the policy's KL to the reference, estimated on answers to other prompts; at least 0.
    """
    better = 1 - (beta * (pairs.gain_chosen - reference_point)).sigmoid()
    worse = 1 - (beta * (reference_point - pairs.gain_rejected)).sigmoid()
    return better + worse
