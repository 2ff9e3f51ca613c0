"""`logits_rows` as Triton kernels, with one program per row. Imported only with CUDA."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_COLUMNS = 4096
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _score(  # type: ignore[no-untyped-def]
    logits,
    targets,
    log_probs,
    log_norms,
    entropy,
    temperature,
    stride,
    num_columns,
    COLUMNS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * stride
    # With d = z - top: the sums of e^d and of d e^d, rescaled when a block has a higher top. All values are
    # finite, since 0 times infinity would be NaN.
    top = tl.full((), -1e30, dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    weighted = tl.zeros((), dtype=tl.float32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        z = tl.load(values + columns, mask=inside, other=-1e30).to(tl.float32) / temperature
        z = tl.where(z == float("-inf"), -1e30, z)
        higher = tl.maximum(top, tl.max(z, axis=0))
        shrink = tl.exp(top - higher)
        powers = tl.where(inside, tl.exp(z - higher), 0.0)
        if WITH_ENTROPY:
            weighted = shrink * (weighted + total * (top - higher)) + tl.sum(powers * (z - higher), axis=0)
        total = total * shrink + tl.sum(powers, axis=0)
        top = higher
    norm = top + tl.log(total)
    target = tl.load(values + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(log_norms + row, norm)
    tl.store(log_probs + row, target - norm)
    if WITH_ENTROPY:
        tl.store(entropy + row, tl.log(total) - weighted / total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    targets,
    log_norms,
    entropy,
    grad_log_probs,
    grad_entropy,
    temperature,
    stride,
    num_columns,
    FLOOR: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_LOG_PROBS: tl.constexpr,
    BY_ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * stride
    norm = tl.load(log_norms + row)
    target = tl.load(targets + row)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        z = tl.load(values + columns, mask=inside, other=0.0)
        log_p = z.to(tl.float32) / temperature - norm
        p = tl.exp(log_p)
        grad = tl.zeros((COLUMNS,), dtype=tl.float32)
        if BY_ENTROPY:
            grad -= p * (tl.maximum(log_p, -FLOOR) + tl.load(entropy + row)) * tl.load(grad_entropy + row)
        if BY_LOG_PROBS:
            grad += (tl.where(columns == target, 1.0, 0.0) - p) * tl.load(grad_log_probs + row)
        tl.store(values + columns, (grad / temperature).to(z.dtype), mask=inside)


def score(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log_probs, log_norms, and entropy or None, (n,) float32, of (n, V) contiguous logits."""
    log_probs, log_norms, entropy = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        _score[(len(logits),)](
            logits,
            targets,
            log_probs,
            log_norms,
            entropy,
            temperature,
            logits.stride(0),
            logits.shape[1],
            COLUMNS=_COLUMNS,
            WITH_ENTROPY=with_entropy,
            num_warps=_WARPS,
        )
    return log_probs, log_norms, entropy if with_entropy else None


def gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    log_norms: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    floor: float,
) -> Tensor:
    """Overwrites the logits with the gradient with respect to them, and returns it."""
    with torch.cuda.device(logits.device):
        _gradient[(len(logits),)](
            logits,
            targets,
            log_norms,
            log_norms if entropy is None else entropy,
            log_norms if grad_log_probs is None else grad_log_probs.contiguous(),
            log_norms if grad_entropy is None else grad_entropy.contiguous(),
            temperature,
            logits.stride(0),
            logits.shape[1],
            FLOOR=floor,
            COLUMNS=_COLUMNS,
            BY_LOG_PROBS=grad_log_probs is not None,
            BY_ENTROPY=grad_entropy is not None and entropy is not None,
            num_warps=_WARPS,
        )
    return logits
