"""A network that learns: parameters, optimizer and schedule, and how gradients accumulate over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from paceline.learner.batch.types import MicroBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import as_fsdp
from paceline.learner.train.optimizer import Optimizer, Schedule, StepOutcome

N = TypeVar("N", bound=nn.Module)

Veto = Callable[[Tensor, float], str]
"""From the sums of a mini-batch's metrics and its gradient norm to why its step is not taken; "" where it is."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trainable(Generic[N]):
    """A sharded network with its optimizer and schedule."""

    network: N
    optimizer: Optimizer
    schedule: Schedule

    def update(
        self,
        batches: Sequence[MicroBatch],
        loss_and_sums: Callable[[MicroBatch], tuple[Tensor, Tensor]],
        *,
        step: int,
        ranks: Ranks,
        lr_scale: float = 1.0,
        veto: Veto | None = None,
    ) -> tuple[StepOutcome, Tensor]:
        """One optimizer step on a mini-batch.

        Args:
            batches: this rank's micro-batches; every rank has as many.
            loss_and_sums: gives a micro-batch's share of the loss, a scalar that sums up over micro-batches and ranks,
                and a vector of sums for the metrics. The vector's first entry is the loss itself.
            step: training step, for the schedule.
            ranks: the group.
            lr_scale: multiplies the schedule's learning rate.
            veto: asked, where all is finite, whether the step may be taken.

        Returns:
            What the optimizer did, and the metrics' sums over micro-batches and ranks, in float64.
        """
        fsdp = as_fsdp(self.network)
        total: Tensor | None = None
        for number, batch in enumerate(batches):
            # Gradients add up unsharded and are reduced over the ranks once, with the last micro-batch.
            last = number == len(batches) - 1
            fsdp.set_is_last_backward(last)
            fsdp.set_requires_gradient_sync(last)
            loss, sums = loss_and_sums(batch)
            # FSDP averages gradients over the ranks; the losses are shares of a sum.
            torch.autograd.backward(loss * ranks.world_size)
            total = sums.double() if total is None else total + sums.double()
        assert total is not None
        sums = ranks.all_sum(total)
        outcome = self.optimizer.step(
            self.schedule.at(step) * lr_scale,
            loss_is_finite=bool(torch.isfinite(sums[0]).item()),
            veto=None if veto is None else lambda grad_norm: veto(sums, grad_norm),
        )
        return outcome, sums


def without_gradient(
    network: nn.Module, batches: Sequence[MicroBatch], call: Callable[[MicroBatch], Tensor]
) -> list[Tensor]:
    """`call` of every micro-batch without a graph. The network's root shards are let go of afterwards.

    FSDP keeps the root's parameters gathered after a forward pass that no backward pass follows; the next forward pass
    would compute with the embeddings of before the update.
    """
    with torch.no_grad():
        results = [call(batch) for batch in batches]
    as_fsdp(network).reshard()
    return results
