"""Computes log-probs, norms and entropy of rows of logits, and the gradient with respect to the logits.

On CUDA each of the two functions is one Triton kernel that reads the logits once, in the type of the head's
product; elsewhere it is plain torch. Logits are (n, V), everything else is (n,), in float32 (float64 for
float64 logits).

Rows may also have K distinct tokens each, such as a teacher's likeliest ones. Their log-probs, and that of
all other tokens together, are (n, K + 1); K logits are gathered and K gradients scattered beside the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.algorithms.policy_losses.top_k import log_rest
from paceline.algorithms.statistics import full_precision

# The smallest log-prob is -FLOOR: its probability is exactly 0, and 0 * -inf would be NaN.
FLOOR = 1e4

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowScores:
    """`log_norms` are the logsumexps of logits / temperature; `entropy` is None without `with_entropy`.

    `top_k` are log-probs of chosen tokens and, last, of all others together, (n, K + 1); None without ids.
    """

    log_probs: Tensor
    log_norms: Tensor
    entropy: Tensor | None
    top_k: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopKGradient:
    """The gradient with respect to `RowScores.top_k`, (n, K + 1), of the tokens `ids`, (n, K)."""

    ids: Tensor
    gradient: Tensor


def leaves_logits(logits: Tensor) -> bool:
    """Returns whether `score` leaves the logits unchanged."""
    return logits.is_cuda and logits.dtype in _KERNEL_TYPES


def score(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, top_ids: Tensor | None = None
) -> RowScores:
    """Returns log-probs of the targets under softmax(logits / temperature); may write into `logits`.

    Args:
        logits: (n, V).
        targets: (n,), token ids.
        temperature: above 0.
        top_ids: (n, K) int64, tokens of each row, for `RowScores.top_k`; None for none.
    """
    if top_ids is None:
        return _score(logits, targets, temperature, with_entropy)
    chosen = _scaled(logits.gather(-1, top_ids), temperature)
    scores = _score(logits, targets, temperature, with_entropy)
    chosen = chosen - scores.log_norms.unsqueeze(-1)
    return replace(scores, top_k=torch.cat([chosen, log_rest(chosen).unsqueeze(-1)], dim=-1))


def _score(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> RowScores:
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
    top_k: TopKGradient | None = None,
) -> Tensor:
    """Returns the gradient with respect to the logits, (n, V) of their type; may write into `logits`.

    d log p_y / dz = onehot(y) - p and dH / dz = -p (log p + H), over the temperature. For the rest r of the
    vocabulary, d log p_r / dz_j = [j in r] p_j / p_r - p_j.

    Args:
        logits: the scored logits, or recomputed ones that are equal to the bit.
        grad_log_probs: None for zeros.
        grad_entropy: None for zeros; otherwise the scores have an entropy.
        top_k: the gradient with respect to the scores' `top_k`; None for zeros.
    """
    if top_k is None:
        return _gradient(logits, targets, temperature, scores, grad_log_probs, grad_entropy)
    assert scores.top_k is not None
    own = torch.zeros_like(scores.log_probs) if grad_log_probs is None else grad_log_probs
    of_top, every = top_k.gradient[:, :-1], own + top_k.gradient.sum(-1)
    spread = top_k.gradient[:, -1] / scores.top_k[:, -1].exp()
    same = top_k.ids == targets.unsqueeze(-1)
    # `_gradient` overwrites the logits, and takes all columns for ones of the rest. Those of the chosen
    # tokens, and then those of the targets, are computed here and replace its own.
    columns = torch.cat([top_k.ids, targets.unsqueeze(-1)], dim=-1)
    log_p = _scaled(logits.gather(-1, columns), temperature) - scores.log_norms.unsqueeze(-1)
    of_target = own + (same * of_top).sum(-1), every - spread * ~same.any(-1)
    direct = torch.cat([of_top, of_target[0].unsqueeze(-1)], dim=-1)
    factors = torch.cat([every.unsqueeze(-1).expand_as(same), of_target[1].unsqueeze(-1)], dim=-1)
    exact = direct - log_p.exp() * factors
    if grad_entropy is not None and scores.entropy is not None:
        inner = log_p.clamp(min=-FLOOR) + scores.entropy.unsqueeze(-1)
        exact = exact - log_p.exp() * inner * grad_entropy.unsqueeze(-1)
    grad = _gradient(logits, targets, temperature, scores, every - spread, grad_entropy)
    exact = exact.div_(temperature).to(grad.dtype)
    return grad.scatter_(-1, top_k.ids, exact[:, :-1]).scatter_(-1, targets.unsqueeze(-1), exact[:, -1:])


def _gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    scores: RowScores,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
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
