"""Computes statistics of prompt groups, the samples that answer one prompt.

Group ids are any integers in any order. A group of one counts as having mean 0, which leaves its score
unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.algorithms.checks import require_positions, require_rows
from paceline.algorithms.statistics import RowShard, full_precision
from paceline.core.errors import NumericsError


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The place of B sequences in a (G, N) table with one row per group; N is the largest group's size.

    A table is used because sums of scatter-adds differ from run to run on a GPU.
    """

    row: Tensor  # (B,) group of each sequence, 0..G-1
    column: Tensor  # (B,) place within the group
    sizes: Tensor  # (G,)

    @staticmethod
    def of(group_ids: Tensor) -> Groups:
        """Sorts the sequences into groups.

        Raises:
            NumericsError: there are no sequences, or the ids are not a vector of integers.
        """
        if group_ids.dim() != 1 or group_ids.is_floating_point() or group_ids.is_complex():
            raise NumericsError(
                "group_ids must be a vector of integers, not "
                f"{group_ids.dtype} of shape {tuple(group_ids.shape)}"
            )
        if group_ids.numel() == 0:
            raise NumericsError("there are no sequences to group: the batch is empty")
        _, row, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        order = torch.argsort(row, stable=True)
        starts = sizes.cumsum(0) - sizes
        column = torch.empty_like(row)
        column[order] = torch.arange(row.numel(), device=row.device) - starts[row[order]]
        return Groups(row=row, column=column, sizes=sizes)

    def table(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Arranges (B,) as (G, N), with `fill` where a group has fewer than N members."""
        table = x.new_full((self.sizes.numel(), int(self.sizes.max().item())), fill)
        return table.index_put((self.row, self.column), x)

    def sum(self, x: Tensor) -> Tensor:
        """Sums in each group, (G,)."""
        return self.table(x).sum(-1)

    def mean(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns the mean of each group, (G,), and 0 for a group of one; with `weights`, (B,), weighted.

        The mean of equal scores is exactly that score. Otherwise the rounding error of the sum, divided by a
        standard deviation of 0 + 1e-6, would become an advantage.
        """
        highest, lowest = self.table(x, -torch.inf).amax(-1), self.table(x, torch.inf).amin(-1)
        if weights is None:
            mean = self.sum(x) / self.sizes
        else:
            mean = self.sum(weights * x) / self.sum(weights).clamp(min=1.0)
        mean = torch.where(highest == lowest, highest, mean)
        return torch.where(self.sizes == 1, 0.0, mean)

    def std(self, x: Tensor) -> Tensor:
        """Returns the unbiased standard deviation of each group, (G,), and 1 for a group of one."""
        deviation = x - self.mean(x)[self.row]
        var = self.sum(deviation.square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.sizes == 1, 1.0, var.sqrt())


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """The scores of the full batch, of which this rank may hold only some rows.

    Attributes:
        scores: (B_all,), scores of all ranks.
        lengths: (B_all,), unmasked tokens of each sequence.
        groups: groups of all ranks' sequences.
        mask: (B, T), mask of this rank's rows.
        shard: which rows of the batch these are.
    """

    scores: Tensor
    lengths: Tensor
    groups: Groups
    mask: Tensor
    shard: RowShard

    @classmethod
    def gather(cls, scores: Tensor, mask: Tensor, group_ids: Tensor, shard: RowShard) -> GroupScores:
        """Gathers the scores of all ranks from this rank's scores (B,), mask (B, T) and group ids (B,).

        Ranks exchange a few bytes per row.

        Raises:
            NumericsError: shapes do not fit, or there are no sequences.
        """
        require_positions(mask)
        require_rows(mask.shape[0], scores=scores, group_ids=group_ids)
        return cls(
            scores=full_precision(shard.gather(scores.detach())),
            lengths=shard.gather(mask.bool().sum(-1)),
            groups=Groups.of(shard.gather(group_ids)),
            mask=mask,
            shard=shard,
        )

    @property
    def deviation(self) -> Tensor:
        """Each score minus the mean of its group, (B_all,)."""
        return self.scores - self.groups.mean(self.scores)[self.groups.row]

    @property
    def std(self) -> Tensor:
        """std_g of each sequence's group, (B_all,)."""
        return self.groups.std(self.scores)[self.groups.row]

    def spread(self, advantages: Tensor) -> Tensor:
        """Copies each value of this rank's rows of (B_all,) to the row's tokens, (B, T), 0 under the mask.

        Raises:
            NumericsError: the whole batch is masked.
        """
        if not bool(self.lengths.any()):
            raise NumericsError(
                "all tokens are masked: no advantage would be used; look at the response mask"
            )
        return torch.where(self.mask.bool(), advantages[self.shard.rows].unsqueeze(-1), 0.0)
