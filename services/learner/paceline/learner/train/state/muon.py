"""Runs Muon (https://kellerjordan.github.io/posts/muon/) on matrices that are sharded by rows.

    gradient and momentum, by rows -- the update, whole on one rank --> orthogonalized --> rows of the step

A complete matrix is orthogonalized by one of the ranks that share it, each rank in turn, so no bit depends on
the sharding. The arithmetic is that of `torch.optim.Muon`; step sizes match AdamW's (arXiv:2502.16982), so
learning rates need no change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from paceline.learner.distributed.host_memory import local_part

MOMENTUM: Final = "momentum_buffer"


def is_muons(name: str, parameter: Tensor) -> bool:
    """Returns whether a parameter of this name is a matrix of a layer; the others are AdamW's.

    The biases of a layer's experts are stacked, but they are no matrix.
    """
    return parameter.ndim == 2 and ".layers." in f".{name}" and ".experts." not in name


class Muon:
    """Takes steps on matrices; their gradients and momentum are sharded like them.

    Args:
        parameters: matrices, complete or sharded by rows.
        momentum: decay of the gradient's average.
    """

    def __init__(self, parameters: Sequence[Tensor], *, momentum: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._momentum, self._weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Takes a step on all matrices that have a gradient; every rank calls it."""
        given = [parameter for parameter in self.parameters if parameter.grad is not None]
        ranks = Sharing(given[0]) if given else None
        while ranks is not None and given:
            batch, given = given[: ranks.size], given[ranks.size :]
            directions = ranks.orthogonalized(batch, [self._update(parameter) for parameter in batch])
            for parameter, direction in zip(batch, directions, strict=True):
                local = local_part(parameter)
                local.mul_(1 - lr * self._weight_decay)
                local.add_(direction, alpha=lr)

    def _update(self, parameter: Tensor) -> Tensor:
        """Returns this rank's rows of the update with Nesterov momentum."""
        assert parameter.grad is not None
        gradient, kept = local_part(parameter.grad), local_part(self.state[parameter][MOMENTUM])
        average = kept.to(gradient.device)  # the average may be in host memory
        average.lerp_(gradient, 1 - self._momentum)
        if average is not kept:
            kept.copy_(average)
        return gradient.lerp(average, self._momentum)


class Sharing:
    """The ranks that share matrices by rows, as split by torch.chunk."""

    def __init__(self, parameter: Tensor) -> None:
        self.size, self._rank, self._group = 1, 0, None
        if isinstance(parameter, DTensor):
            [dim] = [i for i, placement in enumerate(parameter.placements) if placement == Shard(0)]
            self._group = parameter.device_mesh.get_group(dim)
            self.size, self._rank = self._group.size(), self._group.rank()

    def orthogonalized(self, matrices: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
        """Returns this rank's rows of the steps of at most one matrix per rank.

        Args:
            updates: (R, C) each, this rank's rows.
        """
        if self._group is None:
            return [step_of(update) for update in updates]
        own = matrices[self._rank] if self._rank < len(matrices) else None
        owned = [] if own is None else [rows * own.shape[1] for rows in self._rows(own.shape[0])]
        owned += [0] * (self.size - len(owned))
        theirs = [update.numel() for update in updates] + [0] * (self.size - len(updates))
        # The arithmetic begins in bfloat16, so half as much is sent.
        sent = torch.cat([update.bfloat16().flatten() for update in updates])
        gathered = self._exchanged(sent, theirs, owned).float()
        step = gathered if own is None else step_of(gathered.view(own.shape)).flatten()
        parts = torch.split(self._exchanged(step, owned, theirs), theirs[: len(updates)])
        return [part.view(update.shape) for part, update in zip(parts, updates, strict=True)]

    def _rows(self, num_rows: int) -> list[int]:
        """Returns each rank's number of a matrix's rows."""
        each = -(-num_rows // self.size)
        return [max(0, min(each, num_rows - rank * each)) for rank in range(self.size)]

    def _exchanged(self, values: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Exchanges values; `sends` and `receives` are the numbers to and from each rank."""
        received = values.new_empty(sum(receives))
        dist.all_to_all_single(received, values, list(receives), list(sends), group=self._group)
        return received


def step_of(update: Tensor) -> Tensor:
    """Returns the change that `torch.optim.Muon` makes to a matrix at learning rate 1 without momentum."""
    scratch = nn.Parameter(torch.zeros_like(update))
    scratch.grad = update
    library = torch.optim.Muon(
        [scratch], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    library.step()  # type: ignore[no-untyped-call]
    return scratch.detach()
