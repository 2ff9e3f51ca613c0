"""AdamW over sharded parameters, with a stateless schedule, clipping by global norm, and no step on numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.learner.model.loading import hugging_face_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate by training step: linear from 0 over the warm-up, then constant or a cosine down to `min_ratio`.

    A function of the step alone, so that resuming needs no state. Steps count from 1; the last step of the warm-up and
    every one after it in `constant` run at the peak.
    """

    peak: float
    kind: str
    total_steps: int
    warmup_ratio: float
    min_ratio: float = 0.0

    def at(self, step: int) -> float:
        """The rate of a step, `step` from 1."""
        warmup = math.ceil(self.warmup_ratio * self.total_steps)
        if step <= warmup:
            return self.peak * step / warmup
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one optimizer step did. `grad_norm` is before clipping; `skip_reason` is empty where the step was taken; `finite` whether loss and
    gradient were."""

    grad_norm: float
    skip_reason: str = ""
    finite: bool = True

    @property
    def taken(self) -> bool:
        """Whether parameters moved."""
        return not self.skip_reason


class Optimizer:
    """AdamW (arXiv:1711.05101) with decoupled weight decay on all parameters.

    Args:
        network: sharded; gradients are left by its backward pass.
        betas: of the two averages.
        eps: AdamW's.
        weight_decay: AdamW's.
        grad_clip: largest global norm.
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
        """Clips and takes one step, on every rank alike; gradients are forgotten in any case.

        Args:
            lr: the learning rate.
            loss_is_finite: whether the mini-batch's loss, over all ranks, is a finite number.
            veto: asked with the gradient's norm where all is finite; gives why the step is not to be taken, "" where it is.
        """
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm_of_all = torch.nn.utils.get_total_norm(grads)
        if isinstance(norm_of_all, DTensor):
            norm_of_all = norm_of_all.full_tensor()
        norm = float(norm_of_all)
        finite = loss_is_finite and math.isfinite(norm)
        if not finite:
            reason = f"the gradient's norm is {norm}" if loss_is_finite else "the loss is not finite"
        else:
            reason = veto(norm) if veto is not None else ""
        if not reason:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._grad_clip, norm_of_all)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return StepOutcome(grad_norm=norm, skip_reason=reason, finite=finite)

    def state(self) -> dict[str, Tensor]:
        """The averages and step counts by "PARAMETER.KIND", sharded like the parameters; loading writes into them."""
        return {f"{name}.{kind}": tensor for name, kind, tensor in self._entries()}

    def _entries(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in hugging_face_names(self._network):
            for kind, tensor in sorted(self._adamw.state[parameter].items()):
                yield name, kind, tensor

    def _fill_state(self) -> None:
        """What AdamW would make at its first step, so that a checkpoint finds its place before any step."""
        for parameter in self._parameters:
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
