"""Advantages of whole sequences against the other samples of their prompt group, before they are spread over tokens.

Each function takes `(scores, lengths, group_ids, options...)`, all of shape (B,), and returns (B,). B must be the
batch over all ranks: scores and lengths are a few bytes for each sequence, so ranks gather them and keep their rows.
`paceline.learner.algorithms.advantages` has the same estimators spread over tokens.

Group ids are any integers in any order. A group of one has nothing to compare with: its mean is taken as 0, so that
its score stands as it is (only `pass_at_k` refuses it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import NumericsError
from paceline.learner.algorithms.checks import require_range, require_rows
from paceline.learner.algorithms.statistics import full_precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Where each of B sequences sits in a (G, N) table with one row for each group, N the largest group's size.

    A table and not scatter-adds: sums of scatter-adds differ from run to run on a GPU.
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
                f"group_ids must be a vector of integers, not {group_ids.dtype} of shape {tuple(group_ids.shape)}"
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
        """(B,) spread into (G, N), `fill` where a group is short."""
        table = x.new_full((self.sizes.numel(), int(self.sizes.max().item())), fill)
        return table.index_put((self.row, self.column), x)

    def sum(self, x: Tensor) -> Tensor:
        """Sums in each group, (G,)."""
        return self.table(x).sum(-1)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of each group, (G,), and 0 for a group of one.

        Equal scores give exactly that score: the rounding of a sum would otherwise come out of a division by a
        standard deviation of 0 + 1e-6 as an advantage.
        """
        highest, lowest = self.table(x, -torch.inf).amax(-1), self.table(x, torch.inf).amin(-1)
        mean = torch.where(highest == lowest, highest, self.sum(x) / self.sizes)
        return torch.where(self.sizes == 1, 0.0, mean)

    def std(self, x: Tensor) -> Tensor:
        """Unbiased standard deviation of each group, (G,), and 1 for a group of one."""
        deviation = x - self.mean(x)[self.row]
        var = self.sum(deviation.square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.sizes == 1, 1.0, var.sqrt())


def group_mean(scores: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """s - mean_g: the baseline of Dr. GRPO (arXiv:2503.20783) and REINFORCE++-baseline (arXiv:2501.03262)."""
    scores, groups = _prepare(scores, lengths, group_ids)
    return scores - groups.mean(scores)[groups.row]


def grpo(
    scores: Tensor, lengths: Tensor, group_ids: Tensor, normalize_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """(s - mean_g) / (std_g + eps) (arXiv:2402.03300, section 4.1.2); without the division it is `group_mean`."""
    deviation = group_mean(scores, lengths, group_ids)
    if not normalize_by_std:
        return deviation
    require_range("eps", eps, above=0.0)
    scores, groups = _prepare(scores, lengths, group_ids)
    return deviation / (groups.std(scores)[groups.row] + eps)


def rloo(scores: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """The score minus the mean of the others: (s - mean_g) n / (n - 1) (RLOO, arXiv:2402.14740)."""
    scores, groups = _prepare(scores, lengths, group_ids)
    sizes = groups.sizes[groups.row]
    # A group of one has mean 0, and 1 / 1 as its factor.
    return (scores - groups.mean(scores)[groups.row]) * (sizes / (sizes - 1).clamp(min=1))


def opo(scores: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """The score minus the group's mean weighted by length, the baseline of least variance (OPO, arXiv:2505.23585)."""
    scores, groups = _prepare(scores, lengths, group_ids)
    weights = lengths.to(scores.dtype)
    totals = groups.sum(weights)
    baseline = groups.sum(weights * scores) / totals.clamp(min=1.0)
    # As in Groups.mean: equal scores are their own baseline, to the last bit.
    highest, lowest = groups.table(scores, -torch.inf).amax(-1), groups.table(scores, torch.inf).amin(-1)
    baseline = torch.where(highest == lowest, highest, baseline)
    baseline = torch.where(groups.sizes == 1, 0.0, baseline)
    return scores - baseline[groups.row]


def gpg(scores: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """(B / number of non-zero scores) (s - mean_g) (GPG, arXiv:2504.02546); all scores 0 give 0."""
    deviation = group_mean(scores, lengths, group_ids)
    num_signals = torch.count_nonzero(scores).clamp(min=1)
    return deviation * (scores.numel() / num_signals)


def pass_at_k(scores: Tensor, lengths: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Only the best of a group: (best - second best) / (std_g + eps), 0 for the others (arXiv:2503.19595).

    Raises:
        NumericsError: a group of one.
    """
    require_range("eps", eps, above=0.0)
    scores, groups = _prepare(scores, lengths, group_ids)
    if int(groups.sizes.min().item()) < 2:
        raise NumericsError(
            "pass_at_k compares the best sample of a group with the second best, and a group has one sample; set rollout.n to 2 or more"
        )
    best, place = groups.table(scores, -torch.inf).topk(2, dim=-1)
    gain = (best[:, 0] - best[:, 1]) / (groups.std(scores) + eps)
    return torch.where(groups.column == place[groups.row, 0], gain[groups.row], 0.0)


def _prepare(scores: Tensor, lengths: Tensor, group_ids: Tensor) -> tuple[Tensor, Groups]:
    require_rows(group_ids.numel(), scores=scores, lengths=lengths)
    return full_precision(scores.detach()), Groups.of(group_ids)
