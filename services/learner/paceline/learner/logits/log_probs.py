"""Token log-probs and entropy: from logits, or chunk by chunk from hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.algorithms.checks import require_range
from paceline.algorithms.statistics import full_precision
from paceline.core.errors import NumericsError
from paceline.learner.logits import logits_rows


def token_log_probs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns log-probs of the targets under softmax(logits / temperature), in float32.

    Args:
        logits: (..., V), any float type; row i scores targets[i], so the caller shifts by one.
        targets: (...), token ids in [0, V).
        temperature: the sampling temperature, above 0.
        with_entropy: also compute H = logsumexp(z) - sum(softmax(z) z).

    Returns:
        log_probs (...) and entropy (...) or None; float32, or float64 for float64 logits. The log-probs are
        the same to the bit with and without entropy.
    """
    _check(logits, targets, temperature)
    z = full_precision(logits)
    if temperature != 1.0:
        z = z / temperature
    log_norm = torch.logsumexp(z, dim=-1)
    log_probs = z.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_norm
    if not with_entropy:
        return log_probs, None
    finite = torch.maximum(z, (log_norm.detach() - logits_rows.FLOOR).unsqueeze(-1))
    return log_probs, log_norm - (torch.softmax(z, dim=-1) * finite).sum(-1)


def chunked_log_probs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    top_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes `token_log_probs(hidden @ weight.T + bias, ...)` from at most chunk_size rows at a time.

    The backward pass recomputes each chunk's logits, so peak memory grows with chunk_size x V instead of N x
    V, at the cost of one more product with the head. On CUDA the logits of a single chunk are kept.

    Args:
        hidden: (..., H), the last hidden states.
        lm_head_weight: (V, H), whole (not sharded), of hidden's type.
        targets: (...), token ids.
        temperature: above 0.
        chunk_size: tokens for each chunk, at least 1.
        with_entropy: as in `token_log_probs`.
        bias: (V,) or None, added to the logits.
        softcap: bounds the logits before the temperature applies, see `bounded`.
        top_ids: (..., K) int64 or None, distinct tokens of each row that are scored, too.

    Returns:
        As `token_log_probs`, shape (...); and with `top_ids` (..., K + 1): log-probs of the K tokens and,
        last, of all others together. Gradients flow through all of them.
    """
    if top_ids is not None and top_ids.shape[:-1] != targets.shape:
        raise NumericsError(
            f"top_ids of shape {tuple(top_ids.shape)} do not fit targets of shape {tuple(targets.shape)}"
        )
    require_range("chunk_size", chunk_size, at_least=1)
    if hidden.shape[-1] != lm_head_weight.shape[-1]:
        raise NumericsError(
            f"hidden states of size {hidden.shape[-1]} do not fit a head of size {lm_head_weight.shape[-1]}"
        )
    _check(hidden, targets, temperature)
    log_probs, entropy, top_k = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        lm_head_weight,
        bias,
        targets.reshape(-1),
        None if top_ids is None else top_ids.reshape(-1, top_ids.shape[-1]),
        float(temperature),
        int(chunk_size),
        with_entropy,
        softcap,
    )
    shape = targets.shape
    return (
        log_probs.view(shape),
        entropy.view(shape) if with_entropy else None,
        None if top_ids is None else top_k.view(*shape, -1),
    )


def bounded(logits: Tensor, softcap: float | None) -> Tensor:
    """Returns c tanh(logits / c) for a softcap c (Gemma 2, arXiv:2408.00118, section 2.2), or the logits."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = rows @ weight.t()
    if bias is not None:
        logits += bias
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _check(rows: Tensor, targets: Tensor, temperature: float) -> None:
    require_range("temperature", temperature, above=0.0)
    if rows.shape[:-1] != targets.shape:
        raise NumericsError(
            f"targets of shape {tuple(targets.shape)} do not fit rows of shape {tuple(rows.shape)}"
        )


class _ChunkedLogProbs(torch.autograd.Function):
    """Calls `logits_rows` chunk by chunk, and keeps only a few numbers per row of each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        top_ids: Tensor | None,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = []
        for start in range(0, max(1, len(targets)), chunk_size):
            part = slice(start, start + chunk_size)
            logits = _logits(hidden[part], weight, bias, softcap)
            ids = None if top_ids is None else top_ids[part]
            parts.append(logits_rows.score(logits, targets[part], temperature, with_entropy, ids))
        ctx.logits = logits if len(parts) == 1 and logits_rows.leaves_logits(logits) else None
        log_probs = torch.cat([part.log_probs for part in parts])
        log_norms = torch.cat([part.log_norms for part in parts])
        entropies = [part.entropy for part in parts if part.entropy is not None]
        entropy = torch.cat(entropies) if entropies else log_probs.new_empty(0)
        tops = [part.top_k for part in parts if part.top_k is not None]
        top_k = torch.cat(tops) if tops else log_probs.new_empty(0)
        ctx.save_for_backward(hidden, weight, bias, targets, log_probs, log_norms, entropy, top_ids, top_k)
        ctx.temperature, ctx.chunk_size, ctx.with_entropy = temperature, chunk_size, with_entropy
        ctx.softcap = softcap
        ctx.set_materialize_grads(False)
        return log_probs, entropy, top_k

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, grad_top_k: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_probs, log_norms, entropy, top_ids, top_k = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        # Chunks add up in at least float32: hundreds of bf16 additions would lose the small ones.
        kind = torch.promote_types(weight.dtype, torch.float32)
        kept, ctx.logits = ctx.logits, None
        is_whole = 0 < targets.numel() <= ctx.chunk_size
        grad_weight = torch.zeros_like(weight, dtype=kind) if need_weight and not is_whole else None
        grad_bias = torch.zeros_like(bias, dtype=kind) if need_bias else None
        for start in range(0, targets.numel(), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            logits = _logits(hidden[part], weight, bias, ctx.softcap) if kept is None else kept
            # The tanh's slope follows from its value, which `gradient` may overwrite.
            slope = None if ctx.softcap is None else 1.0 - (logits / ctx.softcap).square_()
            grad = logits_rows.gradient(
                logits,
                targets[part],
                ctx.temperature,
                logits_rows.RowScores(
                    log_probs=log_probs[part],
                    log_norms=log_norms[part],
                    entropy=entropy[part] if ctx.with_entropy else None,
                    top_k=None if top_ids is None else top_k[part],
                ),
                None if grad_log_probs is None else grad_log_probs[part],
                grad_entropy[part] if ctx.with_entropy and grad_entropy is not None else None,
                None
                if top_ids is None or grad_top_k is None
                else logits_rows.TopKGradient(ids=top_ids[part], gradient=grad_top_k[part]),
            )
            if slope is not None:
                grad = grad.mul_(slope)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[part])
            elif need_weight:
                grad_weight = grad.t() @ hidden
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=kind)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *(None,) * 6,
        )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes total += a @ b; bf16 factors and a float32 total take one pass, if the device can."""
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
