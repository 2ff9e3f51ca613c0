"""The first mini-batch takes its old log-probs from its own forward pass, where nothing reads them before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import NumericsError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.updating import update
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step, train

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

GROUPS = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}
MEASURED = {"actor/first_ppo_kl", "actor/first_pg_clipfrac"}


def build(model: Path, ranks: Ranks, freq: int, actor: dict[str, Any] | None = None, **more: Any) -> Learner:
    algorithm = {**GROUPS, **more.pop("algorithm", {})}
    return Learner.build(
        run_config(model, algorithm=algorithm, actor={"ratio_audit_freq": freq, **(actor or {})}, **more),
        ranks,
    )


@contextmanager
def scored_rows(learner: Learner) -> Iterator[list[int]]:
    """The rows that go through the policy without a graph."""
    rows: list[int] = []

    def note(network: Any, arguments: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            rows.extend(arguments[0].rows)

    hook = learner.actor.network.register_forward_pre_hook(note)
    yield rows
    hook.remove()


def bits(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.actor.network.parameters()]


@pytest.mark.parametrize(
    ("epochs", "mini_batch_size", "use_kl_loss"),
    [(1, 4, False), (1, 8, False), (2, 4, False), (2, 8, False), (1, 4, True), (2, 8, True)],
)
def test_every_number_and_weight_is_that_of_a_batch_scored_before(
    model: Path, ranks: Ranks, epochs: int, mini_batch_size: int, use_kl_loss: bool
) -> None:
    actor = {"ppo_epochs": epochs, "ppo_mini_batch_size": mini_batch_size, "use_kl_loss": use_kl_loss}
    always, rarely = build(model, ranks, 1, actor), build(model, ranks, 100, actor)
    expected = train(always, 1, 3)
    metrics = [numbers(take_step(rarely, 1))]
    with scored_rows(rarely) as rows:
        metrics += train(rarely, 2, 3)
    assert len(rows) == 2 * 4 * (8 - mini_batch_size)
    assert metrics[0] == expected[0]
    for own, other in zip(metrics[1:], expected[1:], strict=True):
        assert other["rollout/mismatch_kl"] > 0
        assert (other["algorithm/reference_kl"] != 0) == use_kl_loss
        assert own == {name: value for name, value in other.items() if name not in MEASURED}
    assert all(torch.equal(a, b) for a, b in zip(bits(rarely), bits(always), strict=True))


def test_the_ratio_is_audited_every_so_many_steps(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build(model, ranks, 3)
    assert [row.keys() >= MEASURED for row in train(learner, 1, 4)] == [True, False, False, True]
    honest = update.update_policy

    def meddling(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            learner.actor.network.lm.model.norm.weight.mul_(1.01)
        return honest(*arguments, **keywords)

    monkeypatch.setattr("paceline.learner.train.step.update_policy", meddling)
    train(learner, 5, 6)
    with pytest.raises(NumericsError, match="must be exactly on policy"):
        take_step(learner, 7)


def test_a_batch_that_the_guard_refuses_is_scored_all_the_same(model: Path, ranks: Ranks) -> None:
    guard = {"min_history": 1, "reward_constant": {"skip": 1e9}}
    always, rarely = build(model, ranks, 1, guard=guard), build(model, ranks, 100, guard=guard)
    for learner in (always, rarely):
        take_step(learner, 1)
    expected, result = take_step(always, 2), take_step(rarely, 2)
    assert len(result.skip_reasons) == 2
    assert result.metrics["rollout/mismatch_kl"] == expected.metrics["rollout/mismatch_kl"] > 0


def test_the_guard_judges_the_kl_to_the_reference_after_the_update_too(model: Path, ranks: Ranks) -> None:
    actor, guard = {"use_kl_loss": True}, {"reference_kl": {"warn": 1e-9}}
    always, rarely = (build(model, ranks, freq, actor, guard=guard) for freq in (1, 100))
    for learner in (always, rarely):
        take_step(learner, 1)
    expected, own = (
        next(r for r in take_step(learner, 2).readings if r.rule == "reference_kl")
        for learner in (always, rarely)
    )
    assert own == expected
    assert own.value > 1e-9


@pytest.mark.parametrize(
    "changes",
    [
        {"actor": {"use_kl_loss": True}, "guard": {"reference_kl": {"skip": 9.0}}},
        {"algorithm": {"use_kl_in_reward": True}},
        {"algorithm": {"rollout_correction": {"method": "tis"}}},
        {"algorithm": {"resample": {"method": "pow"}}},
        {"actor": {"policy_loss": "kl_cov"}},
    ],
)
def test_what_reads_them_before_the_update_gets_them_all(
    model: Path, ranks: Ranks, changes: dict[str, dict[str, Any]]
) -> None:
    learner = build(model, ranks, 100, **changes)
    take_step(learner, 1)
    with scored_rows(learner) as rows:
        take_step(learner, 2)
    assert sorted(rows) == list(range(32))


def test_a_learner_that_goes_on_with_a_step_of_one_mini_batch_scores_nothing_before_it(
    model: Path, ranks: Ranks
) -> None:
    """It is no audit, and its policy has computed nothing yet: FSDP knows nothing to forget."""
    actor = {"ppo_mini_batch_size": 8, "shared_prompts": "off"}
    learner = build(model, ranks, 100, actor)
    learner.version = 1
    with scored_rows(learner) as rows:
        metrics = numbers(take_step(learner, 2))
    assert rows == []
    expected = build(model, ranks, 1, actor)
    expected.version = 1
    assert metrics == {k: v for k, v in numbers(take_step(expected, 2)).items() if k not in MEASURED}
