"""What a first run relies on without naming it."""

from __future__ import annotations

from support.cli_configs import config


def test_a_run_is_saved_goes_on_and_validates_by_itself() -> None:
    trainer = config(trainer={"total_steps": 120}).trainer
    assert [step for step in range(1, 121) if trainer.saves_after(step)] == [50, 100, 120]
    assert trainer.resume == "auto"
    assert trainer.val_before_train


def test_layout_and_memory_are_chosen() -> None:
    run = config()
    assert run.placement == "auto"
    assert run.actor.memory.is_open


def test_there_is_a_critic_only_where_the_estimator_uses_one() -> None:
    estimators = ("gae", "grpo", "rloo", "remax", "reinforce_plus_plus")
    with_critic = {name for name in estimators if "critic" in config(algorithm={"adv_estimator": name}).needs}
    assert with_critic == {"gae"}
