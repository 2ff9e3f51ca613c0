"""Computes masked mean, variance and whitening, of a batch on one or several ranks.

A mask is 1 (or True) on the tokens that count. Entries under a 0 never matter, not even NaN. Half and
integer inputs are reduced in float32; float32 and float64 keep their precision.

Over several ranks, whitening takes two reductions: (sum, count), then the squared deviations from the common
mean. One pass with sum(x^2) - n mean^2 would lose all digits if the mean is large compared with the spread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.algorithms.checks import require_same_shape
from paceline.core.errors import NumericsError

EPS = 1e-8

AllReduce = Callable[[Tensor], Tensor]
"""Returns the sum of a small 1-D tensor over all ranks."""


def _alone(rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShard:
    """The rows of a batch that this rank holds; by default it holds the full batch.

    Attributes:
        all_reduce: adds a small 1-D tensor over all ranks.
        gather: turns (B,) of this rank into (B_all,) of all ranks, in the same order on every rank.
        rows: this rank's rows in the result of `gather`: a slice, or their indices.
    """

    all_reduce: AllReduce = _alone
    gather: Callable[[Tensor], Tensor] = _alone
    rows: slice | Tensor = field(default_factory=lambda: slice(None))


ALL_ROWS = RowShard()


def full_precision(x: Tensor) -> Tensor:
    """Returns `x` if it is float32 or float64, else `x` as float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """Returns `x` in full precision where the mask is 1, exactly 0 elsewhere, in value and gradient."""
    return torch.where(mask.bool(), full_precision(x), 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sums x over the unmasked entries of `dim` (all dims if None); x and mask have one shape."""
    require_same_shape(x=x, mask=mask)
    kept = keep(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Returns sum(x mask) / (sum(mask) + 1e-8), over all dims or one.

    Args:
        x: any shape, such as (B, T).
        mask: the shape of x.
        dim: the dim to reduce; None reduces all and gives a 0-dim tensor.

    Without unmasked entries the mean is 0, so a row of padding is not an error. `masked_var`, `masked_whiten`
    and `aggregate` raise if everything is masked.
    """
    total = masked_sum(x, mask, dim)
    kept = mask.bool().to(total.dtype)
    return total / ((kept.sum() if dim is None else kept.sum(dim)) + EPS)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the unbiased variance of the unmasked entries: mean((x - mu)^2) n / (n - 1), 0-dim.

    Raises:
        NumericsError: fewer than two entries are unmasked.
    """
    return _moments(x, mask, _alone)[1]


def masked_whiten(x: Tensor, mask: Tensor, all_reduce: AllReduce = _alone) -> Tensor:
    """Returns (x - mu) rsqrt(var + 1e-8), with mean and unbiased variance of the unmasked entries.

    Masked entries are shifted and scaled, too, and are meaningless; multiply by the mask.

    Args:
        x: (B, T), this rank's rows, possibly none.
        mask: the shape of x.
        all_reduce: adds a 1-D tensor over all ranks; called twice, by every rank.

    Raises:
        NumericsError: fewer than two entries are unmasked, over all ranks (raised on every rank).
    """
    mean, var = _moments(x, mask, all_reduce)
    return whiten_with(x, mean, var)


def masked_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Returns [sum, count] of unmasked entries, (2,): add ranks or micro-batches, then `mean_from_sums`."""
    return torch.stack([masked_sum(x, mask), mask.bool().sum().to(full_precision(x).dtype)])


def masked_squared_deviation(x: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    """Returns sum((x - mean)^2 mask), 0-dim: add over ranks or micro-batches, then `var_from_sums`."""
    return masked_sum((full_precision(x) - mean).square(), mask)


def mean_from_sums(total: Tensor, count: Tensor) -> Tensor:
    """Returns the masked mean from the added-up sum and count."""
    return total / (count + EPS)


def var_from_sums(squared_deviation: Tensor, count: Tensor) -> Tensor:
    """Returns the unbiased variance from the added-up squared deviations and count.

    Raises:
        NumericsError: the count is below two.
    """
    number = int(count.item())
    if number < 2:
        what = "no token is unmasked" if number == 0 else "one token is unmasked"
        raise NumericsError(
            f"a variance needs at least two unmasked tokens, and {what}: look at the mask and the batch size"
        )
    return squared_deviation / (count + EPS) * (count / (count - 1))


def whiten_with(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Returns (x - mean) rsqrt(var + 1e-8)."""
    return (full_precision(x) - mean) * torch.rsqrt(var + EPS)


def _moments(x: Tensor, mask: Tensor, all_reduce: AllReduce) -> tuple[Tensor, Tensor]:
    total, count = all_reduce(masked_sums(x, mask)).unbind()
    mean = mean_from_sums(total, count)
    squared_deviation = all_reduce(masked_squared_deviation(x, mask, mean).reshape(1))[0]
    return mean, var_from_sums(squared_deviation, count)
