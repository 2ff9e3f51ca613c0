"""Records which rows of a tensor are taken (possibly several times) and where each row went."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowIndex:
    """M rows that are taken out of N.

    Attributes:
        rows: (M,) int64, below N.
        order: (M,) int64, the places among the M, sorted by row and then by place.
        starts: (N + 1,) int64; row n went to the places order[starts[n]:starts[n + 1]].
    """

    rows: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, rows: Tensor, num_rows: int) -> RowIndex:
        """Makes an index from `rows`, on their device."""
        counts = torch.bincount(rows, minlength=num_rows)
        return cls(
            rows=rows,
            order=torch.argsort(rows, stable=True),
            starts=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        )

    def to(self, device: torch.device) -> RowIndex:
        """Returns the same index on `device`."""
        rows, order, starts = (x.to(device, non_blocking=True) for x in (self.rows, self.order, self.starts))
        return RowIndex(rows=rows, order=order, starts=starts)

    def followed_by(self, rows: Tensor) -> RowIndex:
        """Returns the index for `rows` appended after the N, in order, each taken once."""
        places = torch.arange(len(self.rows), len(self.rows) + len(rows), device=rows.device)
        return RowIndex(
            rows=torch.cat([self.rows, rows]),
            order=torch.cat([self.order, places]),
            starts=torch.cat([self.starts, places + 1]),
        )
