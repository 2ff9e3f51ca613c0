"""Tries an algorithm on a few tokens before a run: checks finite numbers, a gradient, and split batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.algorithms.algorithm import Algorithm, Estimator, LossFunction, TrainedNetwork
from paceline.algorithms.policy_losses.base import LossInputs, LossOutputs
from paceline.algorithms.policy_losses.top_k import TopK
from paceline.algorithms.rows import Estimates, SampleRows
from paceline.algorithms.statistics import RowShard
from paceline.core.errors import ConfigError

Table = TypeVar("Table", LossInputs, SampleRows)

_DEADLINE_S = 60.0
_MASK = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
_OLD = torch.tensor([[-1.1, -0.5, 0.0], [-1.8, 0.0, 0.0], [-0.7, -1.3, -2.1]])


def metric_names(
    loss: Callable[[LossInputs], LossOutputs], *, names: Sequence[str], needs: Sequence[str]
) -> tuple[str, ...]:
    """Returns the names of a loss's metrics, from a call on three short sequences; see `try_loss`."""
    return tuple(loss(_loss_inputs(names, needs)).metrics)


def try_loss(
    label: str, loss: Callable[[LossInputs], LossOutputs], *, names: Sequence[str], needs: Sequence[str]
) -> None:
    """Calls a policy loss on three short sequences with padding, together and one by one.

    Two of them answer the same prompt.

    Args:
        label: the loss's name for errors.
        names: names of the log-probs that it may read besides the policy's.
        needs: which of "critic", "greedy" and "teacher" the run has.

    Raises:
        ConfigError: the loss has no gradient, a number is not finite, or a sequence's numbers depend on the
            other sequences.
    """
    inputs = _loss_inputs(names, needs)
    per_token, gradient, metrics = _loss_of(label, loss, inputs)
    for name, numbers in {"its loss": per_token, "its gradient": gradient, **metrics}.items():
        if not bool(torch.isfinite(numbers).all()):
            raise ConfigError(
                f"{label}: {name} is not finite on three sequences with log-ratios within 0.2; "
                "look for a division by 0 or a logarithm of 0, under the mask too (torch.where(mask, x, "
                "0.0) before it)"
            )
    parts = [_loss_of(label, loss, _rows_of(inputs, slice(row, row + 1))) for row in range(len(_MASK))]
    if any(names.keys() != metrics.keys() for _, _, names in parts):
        raise ConfigError(
            f"{label} returned the metrics {', '.join(parts[0][2]) or 'none'} for one sequence and "
            f"{', '.join(metrics) or 'none'} for three; return the same names at every call"
        )
    shares = _MASK.sum(-1) / _MASK.sum()
    means = {
        name: sum(share * part[2][name] for share, part in zip(shares, parts, strict=True))
        for name in metrics
    }
    pairs = {
        "its loss": (per_token, torch.cat([part[0] for part in parts])),
        "its gradient": (gradient, torch.cat([part[1] for part in parts])),
        **{f"its metric {name!r}": (metrics[name], means[name]) for name in metrics},
    }
    for name, (together, apart) in pairs.items():
        if not _close(together, torch.as_tensor(apart)):
            raise ConfigError(
                f"{label}: {name} differs when sequences are passed one by one, so it would depend on how a "
                "batch is cut into micro-batches; compute each token's loss from its "
                "own sequence, and each metric as a mean over the unmasked tokens (statistics.masked_mean)"
            )


def try_estimator(
    label: str, advantages: Callable[[SampleRows], Estimates], *, names: Sequence[str], needs: Sequence[str]
) -> None:
    """Calls an advantage estimator on four short sequences, on one rank and divided between two.

    Args:
        label: the estimator's name for errors.
        names: names of the log-probs that the rows have.
        needs: which of "critic" and "greedy" the run has.

    Raises:
        ConfigError: a number is not finite, or changes when the rows are divided between ranks.
    """
    rows = _estimator_rows(names, needs)
    together = advantages(rows)
    for name, table in together._asdict().items():
        if table is not None and not bool(torch.isfinite(table[rows.mask]).all()):
            raise ConfigError(
                f"{label}: its {name} are not finite on four short sequences; look for a division by 0, such "
                "as by the spread of a group with equal scores"
            )
    for first in (1, 2):
        parts = _on_two_ranks(advantages, rows, first)
        for name, table, apart in zip(Estimates._fields, together, zip(*parts, strict=True), strict=True):
            if table is None:
                continue
            kept = [torch.where(rows.mask, numbers, 0.0) for numbers in (table, torch.cat(apart))]
            if not _close(*kept):
                raise ConfigError(
                    f"{label}: its {name} differ when the rows lie on two ranks, so they would depend "
                    "on the number of ranks; read what belongs to the whole batch through rows.shard "
                    "(groups.GroupScores.gather, shard.gather, shard.all_reduce)"
                )


def try_step(label: str, algorithm: Algorithm, *, names: Sequence[str], needs: Sequence[str]) -> None:
    """Carries out an algorithm's step, with its estimator and loss tried on a few short sequences.

    Args:
        label: the algorithm's name for errors.
        names: names of the log-probs that it may read.
        needs: as in `try_loss`.

    Raises:
        ConfigError: as in `try_loss` and `try_estimator`, or the verbs do not form a training step.
    """
    algorithm.step(_TriedVerbs(label, names, needs))


class _TriedVerbs:
    """The verbs of a step, without a batch."""

    def __init__(self, label: str, names: Sequence[str], needs: Sequence[str]) -> None:
        self._label, self._names, self._needs = label, names, needs
        self.has_critic = "critic" in needs

    def score(self) -> None:
        """Does nothing, since a trial has no networks."""

    def estimate(self, estimator: Estimator) -> None:
        try_estimator(self._label, estimator, names=self._names, needs=self._needs)

    def update(self, network: TrainedNetwork, loss: LossFunction | None = None) -> None:
        if loss is not None:
            try_loss(self._label, loss, names=self._names, needs=self._needs)


def _close(together: Tensor, apart: Tensor) -> bool:
    return torch.allclose(together.float(), apart.float(), rtol=1e-3, atol=1e-4)


def _loss_inputs(names: Sequence[str], needs: Sequence[str]) -> LossInputs:
    return LossInputs(
        log_probs=torch.tensor([[-1.0, -0.5, 0.0], [-2.0, 0.0, 0.0], [-0.8, -1.3, -2.0]]),
        log_probs_of={
            name: _OLD if name in ("rollout", "old") else _OLD - 0.1 * place
            for place, name in enumerate(names, 1)
        },
        advantages=torch.tensor([[1.0, 1.0, 0.0], [-0.5, 0.0, 0.0], [0.25, 0.25, -0.25]]),
        mask=_MASK,
        scores=torch.tensor([1.0, 0.0, 0.5]),
        group_ids=torch.tensor([7, 3, 7]),
        values=torch.where(_MASK, 0.5 * _OLD, 0.0) if "critic" in needs else None,
        top_k=_top_k() if "teacher" in needs else None,
    )


def _top_k() -> TopK:
    """Returns two different distributions over two tokens and the others, at each place."""
    places = torch.arange(float(_MASK.numel() * 3)).reshape(*_MASK.shape, 3)
    policy, teacher = ((places + shift).cos().log_softmax(-1) for shift in (0.0, 0.7))
    return TopK(policy=policy, teacher=teacher)


def _loss_of(
    label: str, loss: Callable[[LossInputs], LossOutputs], inputs: LossInputs
) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    log_probs, top_k = inputs.log_probs.clone().requires_grad_(), inputs.top_k
    differentiated = [log_probs]
    if top_k is not None:
        top_k = replace(top_k, policy=top_k.policy.clone().requires_grad_())
        differentiated.append(top_k.policy)
    per_token, metrics = loss(replace(inputs, log_probs=log_probs, top_k=top_k))
    kept = torch.where(inputs.mask, per_token, 0.0)
    if not kept.requires_grad:
        raise ConfigError(
            f"{label} does not depend on inputs.log_probs"
            + (" or inputs.top_k.policy" if top_k is not None else "")
            + ": nothing would be learned; compute it from them, without detach()"
        )
    gradients = torch.autograd.grad(kept.sum(), differentiated, materialize_grads=True)
    # By sequence, so that gradients of sequences that are passed one by one can be joined.
    gradient = torch.cat([part.flatten(1) for part in gradients], dim=1)
    return kept.detach(), gradient, metrics


def _estimator_rows(names: Sequence[str], needs: Sequence[str]) -> SampleRows:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 0, 0]]).bool()
    rewards = torch.where(mask, torch.arange(12.0).reshape(4, 3).cos(), 0.0)
    return SampleRows(
        scores=rewards.sum(-1),
        token_rewards=rewards,
        mask=mask,
        group_ids=torch.tensor([7, 3, 7, 3]),
        log_probs={
            name: torch.where(mask, -1.5 + 0.5 * (torch.arange(12.0).reshape(4, 3) + place).sin(), 0.0)
            for place, name in enumerate(names)
        },
        values=rewards * 0.5 if "critic" in needs else None,
        greedy_scores=torch.tensor([0.5, 0.25, 0.5, 0.25]) if "greedy" in needs else None,
    )


def _on_two_ranks(
    advantages: Callable[[SampleRows], Estimates], rows: SampleRows, first: int
) -> list[Estimates]:
    """Estimates the first rows on one rank, and the rest on another."""
    barrier, slots = Barrier(2), [torch.zeros(0)] * 2
    cuts = [slice(0, first), slice(first, len(rows.mask))]

    def exchange(rank: int, table: Tensor) -> list[Tensor]:
        barrier.wait(_DEADLINE_S)
        slots[rank] = table
        barrier.wait(_DEADLINE_S)
        return list(slots)

    def work(rank: int) -> Estimates:
        shard = RowShard(
            all_reduce=lambda sums: torch.stack(exchange(rank, sums)).sum(0),
            gather=lambda table: torch.cat(exchange(rank, table)),
            rows=torch.arange(len(rows.mask))[cuts[rank]],
        )
        try:
            return advantages(replace(_rows_of(rows, cuts[rank]), shard=shard))
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(work, rank) for rank in range(2)]
    failed = [call.exception() for call in calls]
    for error in failed:
        if error is not None and not isinstance(error.__cause__ or error, BrokenBarrierError):
            raise error
    return [call.result() for call in calls]


def _rows_of(inputs: Table, rows: slice) -> Table:
    """Returns the inputs of some rows."""

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: cut(table) for name, table in value.items()}
        if isinstance(value, TopK):
            return TopK(policy=value.policy[rows], teacher=value.teacher[rows])
        return value[rows] if isinstance(value, Tensor) else value

    return replace(inputs, **{field.name: cut(getattr(inputs, field.name)) for field in fields(inputs)})
