"""Decides whether a chunk's rows share their prompts, and checks that sharing computes the same.

A chunk shares prompts if that saves enough arithmetic. This depends only on lengths, so a resumed run decides
the same. The first chunk that shares is computed in both forms, with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import EnvironmentLackError, NumericsError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.planning.plan import Chunk
from paceline.learner.batch.types import PackedRow
from paceline.learner.distributed.host_memory import local_part
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.optimizer import OutOfMemoryError, Trainable

SharingMode = Literal["auto", "on", "off"]

MIN_GAIN = 1.2
"""With `auto`, a chunk shares if its unshared form has at least this many times the arithmetic."""

TOLERANCES = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.05, 0.1)}
"""Largest mean difference of log-probs and relative difference of the gradient, by forward type.

In bfloat16 the two forms round differently; a wrong mask changes both by over ten times as much.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The differences between shared and unshared form over all ranks.

    Mean difference of log-probs per token, and difference of the gradient as a share of its norm.
    """

    log_probs: float
    gradient: float


class SharedPrompts:
    """Decides whether a run's rows share their prompts.

    Args:
        mode: mode of `actor.shared_prompts`.
        compute: type of the forward pass.

    Attributes:
        is_unchecked: whether the next chunk that shares is the first one.
    """

    def __init__(self, mode: SharingMode, compute: torch.dtype, notify: Callable[[str], None]) -> None:
        self._mode, self._tolerances, self._notify = mode, TOLERANCES[compute], notify
        self.is_unchecked, self._is_refused = True, False

    def choose(self, make: Callable[[bool], Chunk]) -> Chunk:
        """Returns a chunk that `make` makes, with shared prompts or without."""
        if self._mode == "off" or self._is_refused:
            return make(False)
        shared = make(True)
        if self._mode == "on":
            return shared
        plain = make(False)
        return shared if plain.longest >= MIN_GAIN * shared.longest else plain

    def refuses(
        self, actor: Trainable[PolicyNetwork], rows: Sequence[PackedRow], ranks: Ranks, budget: int
    ) -> bool:
        """Checks the first chunk that shares, and leaves no gradient; every rank calls it.

        Args:
            rows: rows of this rank's first micro-batch of the chunk.
            budget: tokens of a micro-batch; the rows must fit in the unshared form, too.

        Returns:
            Whether everything must be planned without sharing.

        Raises:
            NumericsError: the two forms differ, and the mode is "on".
            EnvironmentLackError: the check ran out of memory, and the mode is "on".
        """
        try:
            difference = compare(actor, _family(rows, budget), ranks)
        except OutOfMemoryError as error:
            reason = f"the check of shared prompts ran out of memory on {error.num_ranks} rank(s)"
            if self._mode == "on":
                raise EnvironmentLackError(
                    f"{reason}, and actor.shared_prompts=on does not train without it; set it to auto, or "
                    "lower actor.ppo_max_token_len_per_gpu"
                ) from error
            return self._refuse(reason)
        most_log_probs, most_gradient = self._tolerances
        self.is_unchecked = False
        # With this form of the comparison, NaN is refused.
        if difference.log_probs <= most_log_probs and difference.gradient <= most_gradient:
            return False
        reason = (
            f"with shared prompts log-probs differ by {difference.log_probs:.2g} on average and the gradient "
            f"by {difference.gradient:.2g} of its norm, at most {most_log_probs:g} and {most_gradient:g} are "
            "rounding"
        )
        if self._mode == "on":
            raise NumericsError(f"{reason}; set actor.shared_prompts=off, and report the model")
        return self._refuse(reason)

    def _refuse(self, reason: str) -> bool:
        self.is_unchecked, self._is_refused = False, True
        self._notify(f"{reason}; every sample keeps its own copy of its prompt")
        return True


def compare(actor: Trainable[PolicyNetwork], rows: Sequence[PackedRow], ranks: Ranks) -> Difference:
    """Runs rows forward and backward in both forms and drops the gradients; every rank calls it.

    Subtracts the shared form's gradient from the other in place, to need no memory for a second one.

    Raises:
        OutOfMemoryError: on every rank, if some ran out of memory.
    """
    network, tables = actor.network, list[Tensor]()
    count = actor.add_gradient([partial(_sum, network, rows, ranks, tables, False)], ranks=ranks)
    norm = _square_sum(network, ranks.device)
    actor.add_gradient([partial(_sum, network, rows, ranks, tables, True)], ranks=ranks)
    left = _square_sum(network, ranks.device)
    network.zero_grad(set_to_none=True)
    difference = (tables[0] - tables[1]).abs().sum()
    # Ranks with the same rows count repeatedly, but in both numbers of each ratio.
    sums = ranks.world.all_sum(torch.stack([difference, count[0], left, norm])).tolist()
    return Difference(
        log_probs=sums[0] / max(sums[1], 1.0), gradient=(sums[2] / sums[3]) ** 0.5 if sums[3] else 0.0
    )


def _sum(
    network: PolicyNetwork,
    rows: Sequence[PackedRow],
    ranks: Ranks,
    tables: list[Tensor],
    share_prompts: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the sum of log-probs (negated if shared), and the number of tokens, (1,).

    Adds the log-probs, in float64, to `tables`.
    """
    batch = pack(rows, ranks.device, share_prompts=share_prompts)
    log_probs = network(batch).log_probs
    masked = batch.table(log_probs).where(batch.mask, 0.0)
    tables.append(masked.detach().double())
    return (-masked if share_prompts else masked).sum(), batch.mask.sum().double().reshape(1)


def _square_sum(network: PolicyNetwork, device: torch.device) -> Tensor:
    """Returns the square sum of this rank's part of the gradient, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in network.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            total += torch.linalg.vector_norm(local_part(parameter.grad), dtype=torch.float64).square()
    return total


def _family(rows: Sequence[PackedRow], budget: int) -> list[PackedRow]:
    """Returns two or more rows of the first repeated prompt, up to half of the budget.

    Half, because this check, unlike an update, is not repeated in smaller parts when memory runs out.
    """
    prompts = [row.prompt_key for row in rows]
    shared = next((prompt for prompt in prompts if prompts.count(prompt) > 1), None)
    family: list[PackedRow] = []
    used = 0
    for row, prompt in zip(rows, prompts, strict=True):
        used_with = used + len(row.prompt_token_ids) + len(row.response_token_ids)
        if prompt == shared and used_with <= (budget // 2 if len(family) >= 2 else budget):
            family.append(row)
            used = used_with
    return family
