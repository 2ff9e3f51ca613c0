"""What `paceline convert-config` makes of TRL's losses and rates computes what TRL's formulas say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.algorithms import policy_losses
from paceline.algorithms.policy_losses import LossInputs
from paceline.cli.convert.convert import convert
from paceline.config.load import parse
from paceline.config.training.actor import ActorConfig
from paceline.learner.train.state.schedule import Schedule

pytestmark = pytest.mark.torch

RATIOS = (0.3, 0.75, 0.95, 1.0, 1.1, 1.25, 3.5, 7.0)


def theirs(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, config: dict[str, Any]):
    """Per-token losses as TRL's documentation writes them."""
    ratio = (log_probs - old).exp()
    low, high = config.get("epsilon", 0.2), config.get("epsilon_high", config.get("epsilon", 0.2))
    kind = config.get("loss_type", "dapo")
    if kind == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * log_probs
    if kind == "sapo":
        heat = torch.where(advantages > 0, 1.0, config.get("sapo_temperature_neg", 1.05))
        return -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantages
    clipped = ratio.clamp(1 - low, 1 + high)
    bounded = ratio.clamp(max=config["delta"]) if "delta" in config else ratio
    return -torch.minimum(bounded * advantages, clipped * advantages)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28},
        {"loss_type": "dr_grpo", "delta": 4.0},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.3},
    ],
    ids=str,
)
def test_trls_losses(config: dict[str, Any]) -> None:
    actor = parse(ActorConfig, convert(config, "trl").tree["actor"])
    function = getattr(policy_losses, actor.policy_loss.type)
    advantages = torch.tensor([[1.5] * len(RATIOS) + [-0.5] * len(RATIOS)], dtype=torch.float64)
    old = torch.full_like(advantages, -2.0)
    gradients, losses = [], []
    for ours in (True, False):
        new = (old + torch.tensor([RATIOS * 2], dtype=torch.float64).log()).requires_grad_()
        if ours:
            inputs = LossInputs(
                log_probs=new,
                log_probs_of={"old": old},
                advantages=advantages,
                mask=torch.ones_like(new),
                selected=None,
            )
            loss, _ = function(inputs, **actor.loss_arguments)
        else:
            loss = theirs(new, old, advantages, config)
        loss.sum().backward()
        losses.append(loss.detach())
        gradients.append(new.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine"])
def test_rates_are_those_of_the_next_update(kind: str) -> None:
    """TRL's update u, counted from 0, has the factor of u: the first is that of a warm-up not begun."""
    config = {"lr_scheduler_type": kind, "warmup_steps": 10, "max_steps": 50, "learning_rate": 2e-6}
    optim = convert(config, "trl").tree["actor"]["optim"]
    schedule = Schedule(
        peak=optim["lr"],
        kind=optim["lr_scheduler"] if kind != "constant_with_warmup" else "constant",
        total_steps=50,
        warmup_ratio=optim["warmup_steps_ratio"],
    )

    def factor(update: int) -> float:
        if update < 10:
            return update / 10
        done = (update - 10) / 40
        return {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}.get(kind, 1.0)

    assert [schedule.at(step) for step in range(1, 51)] == pytest.approx(
        [2e-6 * factor(update) for update in range(1, 51)], abs=1e-18
    )
