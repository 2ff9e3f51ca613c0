"""Every algorithm in a training step: it starts on policy, moves the weights, does not depend on the cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.algorithms.policy_losses import highest_covariance
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.updating.update import MiniBatch, select_tokens
from support import learner_variants
from support.learner_fakes import run_config
from support.learner_ranks import alone, run_ranks
from support.learner_scenarios import take_step
from support.learner_variants import VARIANTS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

Metrics = dict[str, float]


@pytest.fixture(scope="module")
def two_ranks(model: Path) -> dict[str, Metrics]:
    """What two processes make of every variant; both say the same, to the last bit."""
    first, second = run_ranks("support.learner_variants:all_variants", 2, str(model))
    assert first == second
    return dict(first)


@pytest.fixture(scope="module")
def ranks(two_ranks: dict[str, Metrics]) -> Iterator[Ranks]:
    with alone() as group:
        yield group


@pytest.fixture(scope="module")
def one_rank(model: Path, ranks: Ranks) -> dict[str, Metrics]:
    return learner_variants.all_variants(ranks, str(model))


def assert_alike(metrics: Metrics, other: Metrics) -> None:
    assert metrics.keys() == other.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(other[name], abs=2e-5, rel=1e-4), name


@pytest.mark.parametrize("name", VARIANTS)
def test_it_starts_on_policy_and_moves_the_weights(name: str, one_rank: dict[str, Metrics]) -> None:
    metrics = one_rank[name]
    assert abs(metrics["actor/first_ppo_kl"]) < 1e-6
    assert metrics["actor/first_pg_clipfrac"] == 0.0
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped_updates"] == 0
    # The second mini-batch sees weights that the first has moved.
    assert abs(metrics["actor/ppo_kl"]) > 1e-6


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_with_smaller_micro_batches_compute_what_one_does(
    name: str, one_rank: dict[str, Metrics], two_ranks: dict[str, Metrics]
) -> None:
    assert_alike(one_rank[name], two_ranks[name])


def test_covariance_tokens_are_those_of_the_whole_mini_batch(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[MiniBatch, list[Any]]] = []

    def watch(mini: MiniBatch, actor: Any, group: Ranks) -> list[Any]:
        seen.append((mini, select_tokens(mini, actor, group)))
        return seen[-1][1]

    monkeypatch.setattr("paceline.learner.train.updating.update.select_tokens", watch)
    config = run_config(
        model,
        algorithm=VARIANTS["kl_cov"]["algorithm"],
        actor={
            "policy_loss": {"type": "kl_cov", "cov_fraction": 0.1},
            "ppo_max_token_len_per_gpu": 24,
        },
    )
    metrics = take_step(Learner.build(config, ranks), 1).metrics
    assert len(seen) == 2
    chosen = 0
    for mini, selection in seen:
        assert len(mini.parts) > 3

        def unmasked(tables: list[Any], mini: MiniBatch = mini) -> torch.Tensor:
            masks = [part.batch.mask for part in mini.parts]
            return torch.cat([table[mask] for table, mask in zip(tables, masks, strict=True)])[None].double()

        log_probs = unmasked([part.log_probs["old"] for part in mini.parts])
        advantages = unmasked([part.advantages for part in mini.parts])
        selected = unmasked(selection).bool()
        # All of its tokens as one row, without padding; a tie selects all that tie.
        expected = highest_covariance(log_probs, advantages, torch.ones_like(selected), 0.1)
        assert torch.equal(selected, expected)
        assert int(selected.sum()) == mini.denominators.num_tokens // 10
        covariance = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
        assert covariance[selected].min() > covariance[~selected].max()
        chosen += int(selected.sum())
    shares = [int(mini.denominators.num_tokens // 10) / mini.denominators.num_tokens for mini, _ in seen]
    assert metrics["actor/cov_frac"] == pytest.approx(sum(shares) / 2)
    assert chosen > 10


def test_vapo_aims_the_critic_at_undiscounted_returns_and_the_policy_at_length_adaptive_ones(
    model: Path, ranks: Ranks
) -> None:
    plain = {"adv_estimator": "gae", "lam": 1.0, **learner_variants.NO_KL}
    monte_carlo = take_step(Learner.build(run_config(model, algorithm=plain), ranks), 1).metrics
    config = run_config(model, algorithm={**plain, "adv_estimator": "vapo", "lam": 0.3, "alpha": 0.5})
    vapo = take_step(Learner.build(config, ranks), 1).metrics
    for name in ("critic/returns/mean", "critic/vf_loss", "critic/grad_norm", "critic/values/mean"):
        assert vapo[name] == monte_carlo[name], name
    assert abs(vapo["actor/pg_loss"] - monte_carlo["actor/pg_loss"]) > 1e-4
    fixed = run_config(model, algorithm={**plain, "adv_estimator": "vapo", "lam_policy": 1.0})
    assert take_step(Learner.build(fixed, ranks), 1).metrics["actor/pg_loss"] == monte_carlo["actor/pg_loss"]
