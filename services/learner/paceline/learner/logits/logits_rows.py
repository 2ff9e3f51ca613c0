"""Computes log-probs, norms and entropy of rows of logits, and the gradient with respect to the logits.

On CUDA each of the two functions is one Triton kernel that reads the logits once, in the type of the head's
product; elsewhere it is plain torch. Logits are (n, V), everything else is (n,), in float32 (float64 for
float64 logits).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.algorithms.statistics import full_precision

# The smallest log-prob is -FLOOR: its probability is exactly 0, and 0 * -inf would be NaN.
FLOOR = 1e4

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowScores:
    """`log_norms` are the logsumexps of logits / temperature; `entropy` is None without `with_entropy`."""

    log_probs: Tensor
    log_norms: Tensor
    entropy: Tensor | None


def leaves_logits(logits: Tensor) -> bool:
    """Returns whether `score` leaves the logits unchanged."""
    return logits.is_cuda and logits.dtype in _KERNEL_TYPES


def score(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> RowScores:
    """Returns log-probs of the targets under softmax(logits / temperature); may write into `logits`."""
    if leaves_logits(logits):
        from paceline.learner.logits import logits_rows_kernel

        log_probs, log_norms, entropy = logits_rows_kernel.score(logits, targets, temperature, with_entropy)
        return RowScores(log_probs=log_probs, log_norms=log_norms, entropy=entropy)
    z = _scaled(logits, temperature)
    log_norms = torch.logsumexp(z, dim=-1)
    log_probs = z.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_norms
    entropy = None
    if with_entropy:
        log_p = z.sub_(log_norms.unsqueeze(-1)).clamp_(min=-FLOOR)
        entropy = -(log_p.exp().mul_(log_p)).sum(-1)
    return RowScores(log_probs=log_probs, log_norms=log_norms, entropy=entropy)


def gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    scores: RowScores,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Returns the gradient with respect to the logits, (n, V) of their type; may write into `logits`.

    d log p_y / dz = onehot(y) - p and dH / dz = -p (log p + H), over the temperature.

    Args:
        logits: the scored logits, or recomputed ones that are equal to the bit.
        scores: scores of these rows.
        grad_log_probs: None for zeros.
        grad_entropy: None for zeros; otherwise the scores have an entropy.
    """
    if leaves_logits(logits):
        from paceline.learner.logits import logits_rows_kernel

        return logits_rows_kernel.gradient(
            logits,
            targets,
            temperature,
            scores.log_norms,
            scores.entropy,
            grad_log_probs,
            grad_entropy,
            FLOOR,
        )
    log_p = _scaled(logits, temperature).sub_(scores.log_norms.unsqueeze(-1))
    probs = log_p.exp()
    grad = torch.zeros_like(probs)
    if grad_entropy is not None and scores.entropy is not None:
        log_p = log_p.clamp_(min=-FLOOR).add_(scores.entropy.unsqueeze(-1))
        grad -= log_p.mul_(probs).mul_(grad_entropy.unsqueeze(-1))
    if grad_log_probs is not None:
        row_grad = grad_log_probs.unsqueeze(-1)
        grad -= probs.mul_(row_grad)
        grad.scatter_add_(-1, targets.unsqueeze(-1), row_grad)
    return grad.div_(temperature).to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = full_precision(logits)
    return z.div_(temperature) if temperature != 1.0 else z
