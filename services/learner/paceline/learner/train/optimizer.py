"""A network that learns: AdamW over sharded parameters, its schedule, gradients of several micro-batches.

A step whose loss or gradient is not finite is not taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import as_fsdp, hugging_face_names

N = TypeVar("N", bound=nn.Module)

PartLoss = Callable[[], tuple[Tensor, Tensor]]
"""Computes a micro-batch's share of the loss and a vector of sums for the metrics, the loss first.

Shares and sums add up over micro-batches and ranks.
"""
Veto = Callable[[Tensor, float], str]
"""From the sums of a mini-batch's metrics and its gradient norm to why its step must be skipped, or ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate by step: linear from 0 in the warm-up, then constant or a cosine to `min_ratio`.

    A function of the step alone, so resuming needs no state. Steps count from 1. The last step of the warm-up
    runs at the peak, and so does every later step of `constant`.
    """

    peak: float
    kind: str
    total_steps: int
    warmup_ratio: float
    min_ratio: float = 0.0

    def at(self, step: int) -> float:
        """The rate of a step, counted from 1."""
        warmup = math.ceil(self.warmup_ratio * self.total_steps)
        if step <= warmup:
            return self.peak * step / warmup
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one optimizer step did.

    Attributes:
        grad_norm: before clipping.
        skip_reason: why the step was not taken; "" if it was.
        finite: whether loss and gradient were finite.
    """

    grad_norm: float
    skip_reason: str = ""
    finite: bool = True

    @property
    def taken(self) -> bool:
        """Whether the parameters moved."""
        return not self.skip_reason


class Optimizer:
    """AdamW (arXiv:1711.05101) with decoupled weight decay on all parameters.

    Args:
        network: sharded; its backward pass leaves the gradients.
        betas: of the two averages.
        eps: AdamW's.
        weight_decay: AdamW's.
        grad_clip: largest global norm of the gradient.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        grad_clip: float = 1.0,
    ) -> None:
        self._network, self._grad_clip = network, grad_clip
        self._parameters = list(network.parameters())
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        self._fill_state()

    def step(
        self, lr: float, *, loss_is_finite: bool, veto: Callable[[float], str] | None = None
    ) -> StepOutcome:
        """Clips the gradient and takes one step; clears the gradients in any case. Every rank calls it.

        Args:
            lr: the learning rate.
            loss_is_finite: whether the mini-batch's loss over all ranks is finite.
            veto: called with the gradient's norm if all is finite; returns why to skip the step, or "".
        """
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(grads)
        if isinstance(total_norm, DTensor):
            total_norm = total_norm.full_tensor()
        norm = float(total_norm)
        finite = loss_is_finite and math.isfinite(norm)
        if not finite:
            reason = f"the gradient's norm is {norm}" if loss_is_finite else "the loss is not finite"
        else:
            reason = veto(norm) if veto is not None else ""
        if not reason:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._grad_clip, total_norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return StepOutcome(grad_norm=norm, skip_reason=reason, finite=finite)

    def state(self) -> dict[str, Tensor]:
        """Averages and step counts by "PARAMETER.KIND", sharded; loading writes into them."""
        return {f"{name}.{kind}": tensor for name, kind, tensor in self._entries()}

    def _entries(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in hugging_face_names(self._network):
            for kind, tensor in sorted(self._adamw.state[parameter].items()):
                yield name, kind, tensor

    def _fill_state(self) -> None:
        """Creates AdamW's state before its first step, so a checkpoint can load into it."""
        for parameter in self._parameters:
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trainable(Generic[N]):
    """A sharded network with its optimizer and schedule."""

    network: N
    optimizer: Optimizer
    schedule: Schedule

    def update(
        self,
        losses: Sequence[PartLoss],
        *,
        step: int,
        ranks: Ranks,
        lr_scale: float = 1.0,
        veto: Veto | None = None,
    ) -> tuple[StepOutcome, Tensor]:
        """Takes one optimizer step on a mini-batch.

        Args:
            losses: of this rank's micro-batches; every rank has the same number.
            step: training step, for the schedule.
            ranks: the group.
            lr_scale: multiplies the schedule's learning rate.
            veto: decides, if all is finite, whether the step may be taken.

        Returns:
            What the optimizer did, and the metrics' sums over micro-batches and ranks, in float64.
        """
        fsdp = as_fsdp(self.network)
        total: Tensor | None = None
        for number, part_loss in enumerate(losses):
            # Gradients add up unsharded; the last micro-batch reduces them over the ranks, once.
            last = number == len(losses) - 1
            fsdp.set_is_last_backward(last)
            fsdp.set_requires_gradient_sync(last)
            loss, sums = part_loss()
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
