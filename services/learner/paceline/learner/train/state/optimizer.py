"""Trains a network: optimizers, and gradients over several micro-batches.

Skips steps whose loss or gradient is not finite.
"""

from __future__ import annotations

import gc
import logging
import math
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.core.errors import EnvironmentLackError
from paceline.learner.batch.pack import pack
from paceline.learner.distributed.catching_up import PassCollectives, forget_broken_pass
from paceline.learner.distributed.host_memory import local_part
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.train.state.compact_averages import compact_forms
from paceline.learner.train.state.host_averages import AVERAGES, Form, step_in_parts, zero_averages
from paceline.learner.train.state.muon import MOMENTUM, Muon, is_muons
from paceline.learner.train.state.schedule import Schedule

log = logging.getLogger(__name__)

N = TypeVar("N", bound=nn.Module)

_LOWER: Final = (
    "lower the token budget of micro-batches (actor.ppo_max_token_len_per_gpu, sft.max_token_len_per_gpu)"
)


class OutOfMemoryError(EnvironmentLackError):
    """Says, on every rank, that some ran out of memory in an update; nothing has changed.

    Args:
        network: "PolicyNetwork" or "ValueNetwork".
        num_ranks: number of ranks that ran out of memory.
    """

    def __init__(self, network: str, num_ranks: int) -> None:
        super().__init__(f"out of memory in an update of the {network} on {num_ranks} rank(s); {_LOWER}")
        self.num_ranks = num_ranks


PartLoss = Callable[[], tuple[Tensor, Tensor]]
"""Computes a micro-batch's share of the loss, and a vector of sums for the metrics that begins with the loss.

Shares and sums add up over micro-batches and ranks.
"""
Veto = Callable[[Tensor, float], str]
"""Returns why a step must be skipped, or "", from the sums of its metrics and its gradient norm."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scaling:
    """Factors for losses, gradient and sums that were divided by other counts of tokens or sequences.

    Attributes:
        gradient: factor of the loss, and so of its gradient.
        sums: (S,) float64, a factor for each sum.
    """

    gradient: float
    sums: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The outcome of an optimizer step.

    Attributes:
        skip_reason: why the step was not taken; "" if it was.
    """

    grad_norm: float
    skip_reason: str = ""
    finite: bool = True

    @property
    def taken(self) -> bool:
        """Whether the step was taken."""
        return not self.skip_reason


class Optimizer:
    """Applies AdamW (arXiv:1711.05101) to all trained parameters, or Muon to the layers' matrices.

    Call `make_averages` before the first step and before a checkpoint.

    Args:
        network: a sharded network; its backward pass leaves the gradients.
        muon_momentum: momentum of Muon on the layers' matrices; None: AdamW on all parameters.
        compact: whether the matrices' averages have 8 bits; not with Muon.
        grad_clip: largest global norm of the gradient.
        offloads: whether the averages are in host memory.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        muon_momentum: float | None = None,
        compact: bool = False,
        grad_clip: float = 1.0,
        offloads: bool = False,
    ) -> None:
        self._offloads, self._compact = offloads, compact
        self._network, self._grad_clip = network, grad_clip
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        matrices = {
            parameter
            for name, parameter in hugging_face_names(network)
            if muon_momentum is not None and parameter.requires_grad and is_muons(name, parameter)
        }
        self._muon = Muon(
            [parameter for parameter in self._parameters if parameter in matrices],
            momentum=muon_momentum or 0.0,
            weight_decay=weight_decay,
        )
        others = [parameter for parameter in self._parameters if parameter not in matrices]
        # If Muon has all trained parameters (adapters), none are left, and torch refuses an empty list.
        self._adamw = torch.optim.AdamW(
            [{"params": group} for group in by_mesh(others)] or [{"params": []}],
            lr=0.0,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )

    def make_averages(self) -> None:
        """Creates averages of zeros, into which a checkpoint can be loaded."""
        of_muon = set(self._muon.parameters)
        forms = {parameter: self._forms(parameter, of_muon) for parameter in self._parameters}
        averages = zero_averages(forms, on_host=self._offloads)
        for parameter, state in averages.items():
            if parameter in of_muon:
                self._muon.state[parameter] = state
            else:
                steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self._adamw.state[parameter] = {"step": steps, **state}

    def _forms(self, parameter: Tensor, of_muon: Collection[Tensor]) -> dict[str, Form]:
        """Returns the types and shapes of a parameter's averages, by name."""
        local = local_part(parameter)
        if self._compact and parameter.ndim > 1:
            return compact_forms(local)
        names = (MOMENTUM,) if parameter in of_muon else AVERAGES
        return {name: (local.dtype, tuple(local.shape)) for name in names}

    def step(
        self, lr: float, *, loss_is_finite: bool, veto: Callable[[float], str] | None = None
    ) -> StepOutcome:
        """Clips the gradient and takes a step; always clears the gradients. Every rank calls it.

        Args:
            loss_is_finite: whether the mini-batch's loss over all ranks is finite.
            veto: called with the gradient's norm if all is finite; returns why to skip the step, or "".
        """
        total_norm = _norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        norm = float(total_norm)
        finite = loss_is_finite and math.isfinite(norm)
        if not finite:
            reason = f"the gradient's norm is {norm}" if loss_is_finite else "the loss is not finite"
        else:
            reason = veto(norm) if veto is not None else ""
        if not reason:
            for group in by_mesh(self._parameters):
                torch.nn.utils.clip_grads_with_norm_(group, self._grad_clip, total_norm)
            for settings in self._adamw.param_groups:
                settings["lr"] = lr
            self._muon.step(lr)
            if not (self._offloads or self._compact):
                self._adamw.step()
            else:
                step_in_parts(self._adamw)
        for parameter in self._parameters:
            parameter.grad = None
        return StepOutcome(grad_norm=norm, skip_reason=reason, finite=finite)

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the gradient after its reduction."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)

    def state(self) -> dict[str, Tensor]:
        """Returns averages and step counts by "PARAMETER.KIND", sharded; loading writes into them."""
        entries: dict[str, Tensor] = {}
        for name, parameter in hugging_face_names(self._network):
            state = self._muon.state.get(parameter) or self._adamw.state.get(parameter, {})
            entries |= {f"{name}.{kind}": tensor for kind, tensor in sorted(state.items())}
        return entries


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by the mesh over which they are sharded: torch's operations on lists need one mesh."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the norm of all gradients together, over all ranks."""
    norms = [_norm_on_mesh(group) for group in by_mesh(gradients)] or [torch.zeros(())]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def _norm_on_mesh(gradients: Sequence[Tensor]) -> Tensor:
    first = gradients[0]
    placements = first.placements if isinstance(first, DTensor) else ()
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not isinstance(first, DTensor) or len(sharded) < 2:
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # torch would warn that it reduces over one dimension after the other.
    squares = torch.nn.utils.get_total_norm([local_part(gradient) for gradient in gradients]).square()
    for dim in sharded:
        dist.all_reduce(squares, group=first.device_mesh.get_group(dim))
    return squares.sqrt()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trainable(Generic[N]):
    """A sharded network with its optimizer and schedule.

    Attributes:
        accumulates: whether gradients add up unsharded over a mini-batch and are reduced once, not per
            micro-batch.
        keeps_gathered: whether weights stay gathered between micro-batches.
    """

    network: N
    optimizer: Optimizer
    schedule: Schedule
    collectives: PassCollectives | None = None
    accumulates: bool = True
    keeps_gathered: bool = False

    def update(
        self,
        losses: Sequence[PartLoss],
        *,
        step: int,
        ranks: Ranks,
        lr_scale: float = 1.0,
        veto: Veto | None = None,
        begun: Tensor | None = None,
        scaling: Scaling | None = None,
    ) -> tuple[StepOutcome, Tensor]:
        """Takes one optimizer step on a mini-batch.

        Args:
            losses: losses of this rank's micro-batches, except those that `begun` counts; every rank has the
                same number, at least one.
            step: training step, for the schedule.
            veto: decides, if all is finite, whether the step may be taken.
            begun: the sums that `add_gradient` returned for the mini-batch's first micro-batches, added up.
            scaling: multiplies gradient and sums if losses used other counts than the mini-batch's.

        Returns:
            The step's outcome, and the metrics' sums over micro-batches and ranks, in float64.

        Raises:
            OutOfMemoryError: on every rank, if some ran out of memory; no parameter and no state has changed.
        """
        total = self.add_gradient(losses, ranks=ranks)
        sums = ranks.data.all_sum(total if begun is None else begun + total)
        if scaling is not None:
            sums = sums * scaling.sums.to(sums)
            self.optimizer.scale_gradient(scaling.gradient)
        outcome = self.optimizer.step(
            self.schedule.at(step) * lr_scale,
            loss_is_finite=bool(torch.isfinite(sums[0]).item()),
            veto=None if veto is None else lambda grad_norm: veto(sums, grad_norm),
        )
        return outcome, sums

    def add_gradient(self, losses: Sequence[PartLoss], *, ranks: Ranks, completes: bool = True) -> Tensor:
        """Runs forward and backward on micro-batches; every rank calls it.

        Args:
            completes: whether they are the last of a mini-batch; else `update` takes the others.

        Returns:
            This rank's sums, for `update` if others follow.

        Raises:
            OutOfMemoryError: on every rank, if some ran out of memory; the gradient is gone.
        """
        total, num_failed = self._passes(losses, ranks, completes=completes)
        if total is None or num_failed:
            if completes:
                self.network.zero_grad(set_to_none=True)
            else:
                self.drop_gradient(ranks)
            raise OutOfMemoryError(type(self.network).__name__, num_failed)
        return total

    def drop_gradient(self, ranks: Ranks) -> None:
        """Drops a gradient that is not complete; every rank calls it."""
        # Only a reduction clears FSDP's unreduced gradients.
        self._prepare_pass(reduces=True, reshards=True)
        self._begin_pass(again=False, still_gathered=False)
        self._filler_pass(ranks)
        self.network.zero_grad(set_to_none=True)

    def _passes(
        self, losses: Sequence[PartLoss], ranks: Ranks, *, completes: bool
    ) -> tuple[Tensor | None, int]:
        """Runs forward and backward on micro-batches; `completes`: whether they are the last of a mini-batch.

        A rank that ran out of memory still takes part in collectives, because the others wait for it. It runs
        fillers: micro-batches without rows of the batch.

        Returns:
            This rank's sums, None if it ran out of memory; and the number of ranks that did.
        """
        total: Tensor | None = None
        failed = False
        for number, part_loss in enumerate(losses):
            last = number == len(losses) - 1
            self._prepare_pass(
                reduces=(last and completes) or not self.accumulates,
                reshards=last or not self.keeps_gathered,
            )
            goes_on = number > 0 and self.keeps_gathered
            self._begin_pass(again=False, still_gathered=goes_on)
            sums = None if failed else self._pass(part_loss, ranks)
            if sums is None:
                if not failed:
                    self._recover(ranks)
                self._begin_pass(again=not failed, still_gathered=goes_on)
                failed = True
                self._absent_pass(part_loss, ranks)
            else:
                total = sums if total is None else total + sums
        if failed:
            forget_broken_pass(self.network)  # drops the filler passes' state in FSDP
        num_failed = int(ranks.world.all_sum(torch.tensor([failed], device=ranks.device).float()).item())
        return (None if failed else total), num_failed

    def _prepare_pass(self, *, reduces: bool, reshards: bool) -> None:
        fsdp = as_fsdp(self.network)
        fsdp.set_is_last_backward(reduces)
        fsdp.set_requires_gradient_sync(reduces)
        fsdp.set_reshard_after_backward(reshards)

    def _pass(self, part_loss: PartLoss, ranks: Ranks) -> Tensor | None:
        """Runs a micro-batch; returns its sums, or None after freeing its activations if memory ran out."""
        try:
            loss, sums = part_loss()
            # FSDP averages gradients over the ranks, but the losses are shares of a sum.
            torch.autograd.backward(loss * ranks.fsdp.size())
            return sums.double()
        except torch.OutOfMemoryError as error:
            # str: a log record that held the error would keep its frames alive.
            log.warning("out of memory in a micro-batch: %s", str(error))
            # The frames reference the activations.
            traceback.clear_frames(error.__traceback__)
        return None

    def _recover(self, ranks: Ranks) -> None:
        """Makes the network usable after an aborted pass, and frees its memory."""
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        forget_broken_pass(self.network)

    def _absent_pass(self, part_loss: PartLoss, ranks: Ranks) -> None:
        """Takes part in a micro-batch's collectives without its tokens.

        Raises:
            EnvironmentLackError: there is no memory even for this rank's messages in context or expert
                parallelism.
        """
        if self.collectives is None:
            self._filler_pass(ranks)
            return
        try:
            with self.collectives.without_tokens():
                if ranks.context is None:
                    self._filler_pass(ranks)
                else:
                    loss, _ = part_loss()
                    torch.autograd.backward(loss * 0.0)
        except torch.OutOfMemoryError as error:
            reason, lower = str(error).partition(". ")[0], _LOWER.replace("lower", "Lower", 1)
            raise EnvironmentLackError(
                f"out of memory in an update, and again without this rank's tokens: {reason}. {lower} or "
                "raise learner.context_parallel, and start the run again: it goes on from its newest "
                "checkpoint"
            ) from error

    def _filler_pass(self, ranks: Ranks) -> None:
        """Takes part in a micro-batch's collectives with a filler."""
        output = self.network(pack([], ranks.device))
        numbers = output[0] if isinstance(output, tuple) else output
        torch.autograd.backward(numbers.sum() * 0.0)

    def _begin_pass(self, *, again: bool, still_gathered: bool) -> None:
        if self.collectives is not None:
            self.collectives.begin(again=again, still_gathered=still_gathered)
