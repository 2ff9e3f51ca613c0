"""What must not matter: padding, values under the mask, order, and how a batch is cut over ranks.

Masks are random with holes, as tool calls leave them; all in float64, so that equal means equal to 1e-9.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.algorithms import advantages, policy_losses
from paceline.algorithms import rollout_correction as correction
from paceline.algorithms.aggregation import MODES, aggregate
from paceline.algorithms.kl import kl_estimate, token_rewards
from paceline.algorithms.policy_losses import LossInputs, TopK, highest_covariance
from paceline.algorithms.rows import SampleRows
from paceline.algorithms.statistics import ALL_ROWS, RowShard, masked_mean
from paceline.algorithms.value_losses import clipped_value_loss
from paceline.config.load import section_types
from paceline.config.training.actor import ActorConfig
from paceline.config.training.algorithm import AlgorithmConfig
from paceline.core.estimators import ADV_ESTIMATORS

pytestmark = pytest.mark.torch

FEW = settings(max_examples=20, deadline=None)
CONSTANT = 7.0
POLICY_LOSSES = sorted(section_types(ActorConfig.model_fields["policy_loss"]).keys() - {"custom"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Random tensors of B sequences with at least one token each, in groups of two and more."""

    mask: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    rewards: Tensor
    values: Tensor
    group_ids: Tensor
    greedy_scores: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(**{name: change(getattr(self, name)) for name in self.__dataclass_fields__})

    def rows(self, index: Tensor | slice) -> Batch:
        return self.map(lambda x: x[index])

    def padded(self, right: int, value: float) -> Batch:
        """More columns, and `value` wherever the mask is 0."""

        def pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, right)) if x.dim() == 2 else x

        mask = pad(self.mask)

        def poison(x: Tensor) -> Tensor:
            return pad(x).masked_fill(~mask, value) if x.dim() == 2 and x.is_floating_point() else pad(x)

        return self.map(poison)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_groups, num_columns = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(2, 3), min_size=num_groups, max_size=num_groups))
    num_rows = sum(sizes)
    row = st.lists(st.booleans(), min_size=num_columns, max_size=num_columns).filter(any)
    mask = torch.tensor(draw(st.lists(row, min_size=num_rows, max_size=num_rows)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (num_rows, num_columns)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    old = -normal(*shape).abs()
    group_ids = torch.repeat_interleave(torch.arange(num_groups) * 5 - 3, torch.tensor(sizes))
    return Batch(
        mask=mask,
        log_probs=old + 0.3 * normal(*shape),
        old_log_probs=old,
        advantages=normal(*shape),
        rewards=torch.where(mask, normal(*shape), 0.0),
        values=normal(*shape),
        group_ids=group_ids[torch.randperm(num_rows, generator=generator)],
        greedy_scores=normal(num_rows),
    )


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def policy_loss(
    name: str, batch: Batch, selected: Tensor, mode: str, **denominators: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The aggregated loss, its gradient by log_probs, and the metrics."""
    log_probs = batch.log_probs.clone().requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs,
        log_probs_of={"old": batch.old_log_probs},
        advantages=batch.advantages,
        mask=batch.mask,
        selected=selected,
        top_k=TopK(policy=outcomes(log_probs, batch.mask), teacher=outcomes(batch.old_log_probs, batch.mask)),
    )
    loss, metrics = getattr(policy_losses, name)(inputs, **arguments(name))
    total = aggregate(loss, batch.mask, mode, constant=CONSTANT, **denominators)
    return total.detach(), torch.autograd.grad(total, log_probs)[0], metrics


def outcomes(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of two outcomes, (B, T, 2), NaN under the mask."""
    logits = torch.where(mask, log_probs, 0.0)
    table = torch.stack([logits, -logits], dim=-1).log_softmax(-1)
    return torch.where(mask.unsqueeze(-1), table, torch.nan)


def arguments(name: str) -> dict[str, float]:
    """The options of a loss, through the configuration."""
    own = {
        "kl_cov": {"cov_fraction": 0.3},
        "clip_cov": {"cov_fraction": 0.3, "cov_low": -9.0, "cov_high": 9.0},
    }
    clip = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04} if name == "gspo" else {}
    actor = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.25, "clip_ratio_c": 1.5}
    return ActorConfig(**actor, policy_loss={"type": name, **own.get(name, clip)}).loss_arguments


def select(batch: Batch) -> Tensor:
    return highest_covariance(batch.old_log_probs, batch.advantages, batch.mask, 0.3)


def estimate(name: str, batch: Batch, shard: RowShard = ALL_ROWS) -> tuple[Tensor, Tensor | None]:
    inputs = SampleRows(
        scores=torch.where(batch.mask, batch.rewards, 0.0).sum(-1),
        token_rewards=batch.rewards,
        mask=batch.mask,
        group_ids=batch.group_ids,
        values=batch.values,
        greedy_scores=batch.greedy_scores,
        shard=shard,
    )
    algorithm = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8)
    return getattr(advantages, name)(inputs, **algorithm.estimator_arguments)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@FEW
@given(batch=batches(), data=st.data())
def test_policy_loss_does_not_depend_on_micro_batches(name: str, batch: Batch, data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(MODES))
    num_rows = batch.mask.shape[0]
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)))
    selected = select(batch)
    full, gradient, metrics = policy_loss(name, batch, selected, mode)
    num_tokens = int(batch.mask.sum())
    total, pieces, means = torch.zeros(()).double(), torch.zeros_like(gradient), dict.fromkeys(metrics, 0.0)
    for part in range(3):
        index = (owner == part).nonzero().flatten()
        # A micro-batch has padding of its own, and at times no rows at all.
        piece = batch.rows(index).padded(part, value=torch.nan)
        picked = torch.nn.functional.pad(selected[index], (0, part))
        loss, grad, its_metrics = policy_loss(
            name, piece, picked, mode, num_tokens=num_tokens, num_sequences=num_rows
        )
        total += loss
        pieces[index] = grad[:, : gradient.shape[1]]
        share = int(piece.mask.sum()) / num_tokens
        means = {key: means[key] + float(value) * share for key, value in its_metrics.items()}
    close(total, full)
    close(pieces, gradient)
    assert means == pytest.approx({key: float(value) for key, value in metrics.items()}, abs=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@FEW
@given(batch=batches(), data=st.data())
def test_policy_loss_does_not_depend_on_padding_nor_order(
    name: str, batch: Batch, data: st.DataObject
) -> None:
    mode = data.draw(st.sampled_from(MODES))
    order = torch.tensor(data.draw(st.permutations(range(batch.mask.shape[0]))))
    full, gradient, metrics = policy_loss(name, batch, select(batch), mode)
    other = batch.padded(2, value=data.draw(st.sampled_from([torch.nan, torch.inf, 1e30]))).rows(order)
    loss, grad, its_metrics = policy_loss(name, other, select(other), mode)
    close(loss, full)
    close(grad[:, :-2], torch.where(batch.mask, gradient, 0.0)[order])
    assert grad[:, -2:].abs().sum() == 0
    for key, value in metrics.items():
        close(its_metrics[key], value)


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
@FEW
@given(batch=batches(), data=st.data())
def test_advantages_do_not_depend_on_padding_nor_order(name: str, batch: Batch, data: st.DataObject) -> None:
    if int(batch.mask.sum()) < 2:
        return
    order = torch.tensor(data.draw(st.permutations(range(batch.mask.shape[0]))))
    wanted, wanted_returns = estimate(name, batch)
    got, returns = estimate(name, batch.padded(2, value=torch.nan).rows(order))
    # A division by a spread of 1e-6 or a variance of 1e-8 magnifies rounding; where there is a spread it
    # does not.
    torch.testing.assert_close(got[:, :-2], wanted[order], rtol=1e-7, atol=1e-7)
    assert got[:, -2:].abs().sum() == 0
    if wanted_returns is not None and returns is not None:
        mask = batch.mask[order]
        close(returns[:, :-2][mask], wanted_returns[order][mask])


@FEW
@given(batch=batches())
def test_token_estimators_step_over_holes_as_if_they_were_not_there(batch: Batch) -> None:
    adaptive = advantages.length_adaptive_lambda(batch.mask.sum(-1).double(), 0.5)
    result, returns = advantages.generalized_advantages(
        batch.rewards, batch.values, batch.mask, 0.9, adaptive
    )
    to_go = advantages.return_to_go(batch.rewards, batch.mask, 0.9)
    for row, kept in enumerate(batch.mask):
        rewards, values = batch.rewards[row, kept][None], batch.values[row, kept][None]
        alone = advantages.generalized_advantages(
            rewards, values, torch.ones_like(rewards), 0.9, float(adaptive[row])
        )
        close(result[row, kept], alone[0][0])
        close(returns[row, kept], alone[1][0])
        close(to_go[row, kept], advantages.return_to_go(rewards, torch.ones_like(rewards), 0.9)[0])


@FEW
@given(batch=batches())
def test_group_advantages_sum_to_zero_and_rloo_is_leave_one_out(batch: Batch) -> None:
    scores = batch.rewards.sum(-1)
    ones = torch.ones(scores.numel(), 1)
    rows = SampleRows(scores=scores, token_rewards=ones, mask=ones, group_ids=batch.group_ids)
    rloo = advantages.rloo(rows)
    for group in batch.group_ids.unique():
        members = (batch.group_ids == group).nonzero().flatten()
        for result in (advantages.grpo(rows), advantages.gpg(rows), rloo):
            close(result.advantages[members].sum(), torch.zeros(()).double())
        for member in members:
            others = scores[members[members != member]]
            close(rloo.advantages[member, 0], scores[member] - others.mean())


class Ranks:
    """Threads in place of ranks, with an addition and a gathering between them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._barrier = threading.Barrier(number)
        self._slots: list[Tensor] = [torch.zeros(0)] * number

    def _exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._slots[rank] = x
        self._barrier.wait(timeout=120)
        everything = list(self._slots)
        self._barrier.wait(timeout=120)
        return everything

    def all_reduce(self, rank: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.stack(self._exchange(rank, x)).sum(0)

    def gather(self, rank: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.cat(self._exchange(rank, x))

    def run(self, work: Callable[[int], Tensor]) -> Tensor:
        with ThreadPoolExecutor(self.number) as pool:
            return torch.cat(list(pool.map(work, range(self.number))))


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
@settings(max_examples=8, deadline=None)
@given(batch=batches(), cut=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_advantages_do_not_depend_on_ranks(name: str, batch: Batch, cut: tuple[int, int]) -> None:
    if int(batch.mask.sum()) < 2:
        return
    num_rows = batch.mask.shape[0]
    edges = [0, *sorted(min(x, num_rows) for x in cut), num_rows]  # a rank may have no rows
    ranks = Ranks(3)

    def work(rank: int) -> Tensor:
        rows = slice(edges[rank], edges[rank + 1])
        shard = RowShard(all_reduce=ranks.all_reduce(rank), gather=ranks.gather(rank), rows=rows)
        return estimate(name, batch.rows(rows), shard)[0]

    torch.testing.assert_close(ranks.run(work), estimate(name, batch)[0], rtol=1e-7, atol=1e-7)


@settings(max_examples=15, deadline=None)
@given(batch=batches(), cut=st.integers(0, 9), fraction=st.floats(0.01, 1.0), low=st.floats(-1, 0.5))
def test_covariance_selection_does_not_depend_on_ranks(
    batch: Batch, cut: int, fraction: float, low: float
) -> None:
    edge = min(cut, batch.mask.shape[0])
    ranks = Ranks(2)

    def choose(part: Batch, **collectives: object) -> Tensor:
        return highest_covariance(
            part.log_probs, part.advantages, part.mask, fraction, low, 9.0, **collectives
        )

    def work(rank: int) -> Tensor:
        part = batch.rows(slice(0, edge) if rank == 0 else slice(edge, None))
        return choose(part, all_reduce=ranks.all_reduce(rank), gather=ranks.gather(rank))

    full = choose(batch)
    assert torch.equal(ranks.run(work), full)
    assert int(full.sum()) <= max(1, int(int(batch.mask.sum()) * fraction))
    assert not (full & ~batch.mask).any()


@FEW
@given(batch=batches(), data=st.data())
def test_value_loss_does_not_depend_on_micro_batches_nor_padding(batch: Batch, data: st.DataObject) -> None:
    def run(part: Batch, **denominators: float) -> tuple[Tensor, Tensor]:
        values = part.values.clone().requires_grad_()
        loss, _ = clipped_value_loss(values, part.old_log_probs, part.rewards, part.mask, 0.3)
        total = aggregate(loss, part.mask, "token-mean", **denominators)
        return total.detach(), torch.autograd.grad(total, values)[0]

    full, gradient = run(batch)
    cut = data.draw(st.integers(0, batch.mask.shape[0]))
    num_tokens = int(batch.mask.sum())
    first, first_grad = run(batch.rows(slice(0, cut)).padded(1, torch.nan), num_tokens=num_tokens)
    second, second_grad = run(batch.rows(slice(cut, None)).padded(3, torch.inf), num_tokens=num_tokens)
    close(first + second, full)
    close(torch.cat([first_grad[:, :-1], second_grad[:, :-3]]), gradient)


@FEW
@given(batch=batches(), data=st.data())
def test_kl_and_rewards_do_not_depend_on_padding_nor_order(batch: Batch, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(batch.mask.shape[0]))))

    def run(part: Batch) -> tuple[Tensor, Tensor, Tensor]:
        kl = kl_estimate(part.old_log_probs, part.values, "k3")
        means = masked_mean(kl, part.mask, dim=-1)
        return means, kl, token_rewards(part.greedy_scores, part.mask, kl, 0.1)

    means, kl, rewards = run(batch)
    other_means, _, other_rewards = run(batch.padded(2, torch.nan).rows(order))
    close(other_means, means[order])
    close(other_rewards[:, :-2], rewards[order])
    # Per sequence, all rewards add up to the score less the penalty.
    close(rewards.sum(-1), batch.greedy_scores - 0.1 * torch.where(batch.mask, kl, 0.0).sum(-1))


@FEW
@given(batch=batches(), data=st.data())
def test_rollout_correction_does_not_depend_on_padding_nor_order(batch: Batch, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(batch.mask.shape[0]))))
    level = data.draw(st.sampled_from(correction.LEVELS))

    def run(part: Batch) -> tuple[list[Tensor], list[Tensor]]:
        pair = (part.old_log_probs, part.log_probs, part.mask)
        per_token = [
            correction.tis(*pair, 1.1, level),
            correction.icepop(*pair, 0.8, 1.25),
            correction.sequence_mask(*pair, 0.8, 1.25, level),
        ]
        numbers = [
            correction.effective_sample_size(correction.weight_sums(per_token[0], part.mask)),
            correction.largest_weight(per_token[0], part.mask),
            correction.mismatch_kl(*pair).sum(),
            correction.log_prob_diff_max(*pair),
        ]
        return per_token, numbers

    per_token, numbers = run(batch)
    other_per_token, other_numbers = run(batch.padded(2, torch.nan).rows(order))
    for got, wanted in zip(other_per_token, per_token, strict=True):
        close(got[:, :-2], wanted[order])
    for got, wanted in zip(other_numbers, numbers, strict=True):
        close(got, wanted)
    assert 0 < float(numbers[0]) <= 1 + 1e-12
