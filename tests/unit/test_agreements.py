"""What the sections of a run's configuration must agree on."""

from __future__ import annotations

import inspect

import pytest

from paceline.config.combined import agreements
from paceline.core.errors import ConfigError
from support import cli_configs


def test_every_check_of_the_module_is_made() -> None:
    checks = {
        function
        for function in vars(agreements).values()
        if inspect.isfunction(function) and function.__annotations__.get("return") == "None"
    }
    assert set(agreements.AGREEMENTS) == checks - {agreements.check_warmup, agreements._refuse}


def test_a_critic_that_warms_up_for_all_counted_steps_is_refused() -> None:
    config = cli_configs.config(
        trainer={"total_epochs": 1.0, "total_steps": None},
        critic={"warmup": 3},
        algorithm={"adv_estimator": "gae"},
    )
    size = config.data.train_batch_size
    assert config.with_epochs_counted(4 * size).trainer.total_steps == 4
    with pytest.raises(ConfigError, match=r"critic.warmup=3 leaves none of trainer.total_steps=3"):
        config.with_epochs_counted(3 * size)
