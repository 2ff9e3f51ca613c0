"""Tries an algorithm on a few tokens before a run: finite numbers, a gradient, and splits of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.algorithms.policy_losses.base import LossInputs, LossOutputs
from paceline.algorithms.rows import Estimates, SampleRows
from paceline.algorithms.statistics import RowShard
from paceline.core.errors import ConfigError

Table = TypeVar("Table", LossInputs, SampleRows)

_DEADLINE_S = 60.0
_MASK = torch.tensor([[True, True, False], [True, False, False]])
_OLD = torch.tensor([[-1.1, -0.5, 0.0], [-1.8, 0.0, 0.0]])


def metric_names(loss: Callable[[LossInputs], LossOutputs], *, names: Sequence[str]) -> tuple[str, ...]:
    """The names of a loss's metrics, from a call on two short sequences with log-probs of these names."""
    return tuple(loss(_loss_inputs(names)).metrics)


def try_loss(label: str, loss: Callable[[LossInputs], LossOutputs], *, names: Sequence[str]) -> None:
    """Calls a policy loss on two short sequences with padding, at once and one by one.

    Args:
        label: the loss's, for errors.
        loss: it.
        names: of the log-probs that it may read beside the policy's.

    Raises:
        ConfigError: it has no gradient, a number is not finite, or a sequence's numbers depend on the others.
    """
    inputs = _loss_inputs(names)
    per_token, gradient, metrics = _loss_of(label, loss, inputs)
    for name, numbers in {"its loss": per_token, "its gradient": gradient, **metrics}.items():
        if not bool(torch.isfinite(numbers).all()):
            raise ConfigError(
                f"{label}: {name} is not finite on two sequences with log-ratios within 0.2; "
                "look for a division by 0 or a logarithm of 0, under the mask too (torch.where(mask, x, "
                "0.0) before it)"
            )
    parts = [_loss_of(label, loss, _rows_of(inputs, slice(row, row + 1))) for row in range(len(_MASK))]
    if any(names.keys() != metrics.keys() for _, _, names in parts):
        raise ConfigError(
            f"{label} returned the metrics {', '.join(parts[0][2]) or 'none'} for one sequence and "
            f"{', '.join(metrics) or 'none'} for two; return the same names at every call"
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
                f"{label}: {name} is another when two sequences are passed one by one than together, so it "
                "would depend on how a batch is cut into micro-batches; compute each token's loss from its "
                "own sequence, and each metric as a mean over the unmasked tokens (statistics.masked_mean)"
            )


def try_estimator(
    label: str, advantages: Callable[[SampleRows], Estimates], *, names: Sequence[str], needs: Sequence[str]
) -> None:
    """Calls an advantage estimator on four short sequences, on one rank and divided between two.

    Args:
        label: the estimator's, for errors.
        advantages: it.
        names: of the log-probs that the rows have.
        needs: which of "critic" and "greedy" the run has.

    Raises:
        ConfigError: a number is not finite, or the division between the ranks changes one.
    """
    rows = _estimator_rows(names, needs)
    together = advantages(rows)
    for name, table in together._asdict().items():
        if table is not None and not bool(torch.isfinite(table[rows.mask]).all()):
            raise ConfigError(
                f"{label}: its {name} are not finite on four short sequences; look for a division by 0, as "
                "by the spread of a group whose scores are equal"
            )
    for first in (1, 2):
        parts = _on_two_ranks(advantages, rows, first)
        for name, table, apart in zip(Estimates._fields, together, zip(*parts, strict=True), strict=True):
            if table is None:
                continue
            kept = [torch.where(rows.mask, numbers, 0.0) for numbers in (table, torch.cat(apart))]
            if not _close(*kept):
                raise ConfigError(
                    f"{label}: its {name} are others when the rows lie on two ranks, so they would depend "
                    "on the number of ranks; read what belongs to the whole batch through rows.shard "
                    "(groups.GroupScores.gather, shard.gather, shard.all_reduce)"
                )


def _close(together: Tensor, apart: Tensor) -> bool:
    return torch.allclose(together.float(), apart.float(), rtol=1e-3, atol=1e-4)


def _loss_inputs(names: Sequence[str]) -> LossInputs:
    return LossInputs(
        log_probs=torch.tensor([[-1.0, -0.5, 0.0], [-2.0, 0.0, 0.0]]),
        log_probs_of={
            name: _OLD if name in ("rollout", "old") else _OLD - 0.1 * place
            for place, name in enumerate(names, 1)
        },
        advantages=torch.tensor([[1.0, 1.0, 0.0], [-0.5, 0.0, 0.0]]),
        mask=_MASK,
        scores=torch.tensor([1.0, 0.0]),
    )


def _loss_of(
    label: str, loss: Callable[[LossInputs], LossOutputs], inputs: LossInputs
) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    log_probs = inputs.log_probs.clone().requires_grad_()
    per_token, metrics = loss(replace(inputs, log_probs=log_probs))
    kept = torch.where(inputs.mask, per_token, 0.0)
    if not kept.requires_grad:
        raise ConfigError(
            f"{label} does not depend on inputs.log_probs: nothing would be learned; compute it from them, "
            "without detach()"
        )
    (gradient,) = torch.autograd.grad(kept.sum(), log_probs)
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
    """The estimates of the first rows on one rank, and of the rest on another."""
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
    """The same of some rows."""

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: cut(table) for name, table in value.items()}
        return value[rows] if isinstance(value, Tensor) else value

    return replace(inputs, **{field.name: cut(getattr(inputs, field.name)) for field in fields(inputs)})
