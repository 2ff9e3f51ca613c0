"""Policy losses against numbers worked by hand, value and gradient."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.algorithms import policy_losses
from paceline.algorithms.policy_losses import LossInputs, highest_covariance
from paceline.core.errors import ConfigError, NumericsError

pytestmark = pytest.mark.torch

LN2 = math.log(2.0)


def call(loss_function, log_probs, old_log_probs, advantages, mask, *options, selected=None, **keywords):
    inputs = LossInputs(
        log_probs=log_probs,
        log_probs_of={"old": old_log_probs},
        advantages=advantages,
        mask=mask,
        selected=selected,
    )
    return loss_function(inputs, *options, **keywords)


def run(loss_function, log_ratios, advantages, *options, log_probs=None, **keywords):
    """Loss, gradient of its sum, and metrics, for one sequence given its log-ratios, in float64."""
    log_ratios = torch.tensor([log_ratios], dtype=torch.float64)
    new = torch.tensor([log_probs], dtype=torch.float64) if log_probs else torch.full_like(log_ratios, -1.0)
    old = new - log_ratios
    new.requires_grad_()
    advantages = torch.tensor([advantages], dtype=torch.float64)
    loss, metrics = call(loss_function, new, old, advantages, torch.ones_like(new), *options, **keywords)
    loss.sum().backward()
    return loss[0].tolist(), new.grad[0].tolist(), {name: value.item() for name, value in metrics.items()}


RATIOS = [math.log(x) for x in (1.5, 0.5, 1.1, 5.0)]


def test_ppo_clip():
    loss, gradient, metrics = run(policy_losses.ppo_clip, RATIOS, [1.0, -1.0, 1.0, -1.0], 0.2, 0.2)
    assert loss == pytest.approx([-1.2, 0.8, -1.1, 5.0])
    assert gradient == pytest.approx([0.0, 0.0, -1.1, 5.0])
    assert metrics == pytest.approx(
        {"pg_clipfrac": 0.5, "pg_clipfrac_lower": 0.0, "ppo_kl": -sum(RATIOS) / 4}
    )


def test_ppo_clip_with_a_range_of_one_has_no_bound_below():
    ratios = [math.log(x) for x in (0.01, 1.9, 2.1, 0.01, 1.9, 2.1)]
    loss, gradient, _ = run(policy_losses.ppo_clip, ratios, [1.0] * 3 + [-1.0] * 3, 1.0, 1.0)
    assert loss == pytest.approx([-0.01, -1.9, -2.0, 0.01, 1.9, 2.1])
    assert gradient == pytest.approx([-0.01, -1.9, 0.0, 0.01, 1.9, 2.1])


def test_ppo_clip_with_dual_clip_bounds_a_negative_advantage():
    loss, gradient, metrics = run(policy_losses.ppo_clip, RATIOS, [1.0, -1.0, 1.0, -1.0], 0.2, 0.2, 3.0)
    assert loss == pytest.approx([-1.2, 0.8, -1.1, 3.0])
    assert gradient == pytest.approx([0.0, 0.0, -1.1, 0.0])
    assert metrics["pg_clipfrac_lower"] == 0.25


def test_clip_higher_leaves_more_room_above():
    loss, gradient, _ = run(policy_losses.ppo_clip, [math.log(1.25)] * 2, [1.0, 1.0], 0.2, 0.28)
    assert loss == pytest.approx([-1.25] * 2)
    assert gradient == pytest.approx([-1.25] * 2)


def test_gspo_gives_every_token_the_ratio_of_its_sequence():
    loss, gradient, metrics = run(policy_losses.gspo, [LN2, 0.0], [1.0, -3.0], 0.9, 0.9)
    root = math.sqrt(2.0)
    assert loss == pytest.approx([-root, 3 * root])
    assert gradient == pytest.approx([-root, 3 * root])
    assert metrics == pytest.approx({"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": -LN2 / 2})
    loss, gradient, metrics = run(policy_losses.gspo, [LN2, 0.0], [1.0, -3.0], 0.2, 0.2)
    assert loss == pytest.approx([-1.2, 3 * root])
    assert gradient == pytest.approx([0.0, 3 * root])
    assert metrics["pg_clipfrac"] == 0.5


def test_gspo_holds_the_logarithm_at_ten():
    loss, _, _ = run(policy_losses.gspo, [15.0, 13.0], [-1.0, -1.0], 0.2, 0.2)
    assert loss == pytest.approx([math.exp(10.0)] * 2)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    loss, gradient, metrics = run(policy_losses.cispo, [LN2, -LN2, 0.0], [1.0, -3.0, 2.0], 0.2, 0.28)
    assert loss == pytest.approx([1.28, -2.4, 2.0])  # log pi is -1 everywhere
    assert gradient == pytest.approx([-1.28, 2.4, -2.0])
    assert metrics == pytest.approx({"pg_clipfrac": 2 / 3, "ppo_kl": 0.0})


def test_gpg():
    loss, gradient, metrics = run(policy_losses.gpg, [LN2, 0.0], [1.5, -2.0])
    assert loss == pytest.approx([1.5, -2.0])
    assert gradient == pytest.approx([-1.5, 2.0])
    assert metrics == pytest.approx({"ppo_kl": -LN2 / 2})


def test_sapo_on_policy_has_the_gradient_of_the_ratio_and_off_policy_less():
    loss, gradient, _ = run(policy_losses.sapo, [0.0, 0.0, LN2, LN2], [2.0, -2.0, 1.0, -1.0], 1.0, 1.05)
    gate = {tau: 1 / (1 + math.exp(-tau)) for tau in (1.0, 1.05)}
    assert loss == pytest.approx([-4.0, 4.0 / 1.05, -4 * gate[1.0], 4 / 1.05 * gate[1.05]])
    slope = {tau: 4 * gate[tau] * (1 - gate[tau]) * 2 for tau in gate}
    assert gradient == pytest.approx([-2.0, 2.0, -slope[1.0], slope[1.05]])


def test_geo_mean_clips_only_where_the_advantage_drives():
    loss, gradient, metrics = run(policy_losses.geo_mean, [0.2, 0.6], [1.0, 1.0], 0.4, 0.4)
    assert loss == pytest.approx([-math.exp(0.3)] * 2)
    assert gradient == pytest.approx([-math.exp(0.3), 0.0])
    assert metrics == pytest.approx({"pg_clipfrac": 0.5, "ppo_kl": -0.4})
    loss, gradient, metrics = run(policy_losses.geo_mean, [0.2, 0.6], [-1.0, -1.0], 0.4, 0.4)
    assert loss == pytest.approx([math.exp(0.4)] * 2)
    assert gradient == pytest.approx([math.exp(0.4)] * 2)
    assert metrics["pg_clipfrac"] == 0.0


def test_geo_mean_clips_below_by_its_own_bound():
    loss, gradient, _ = run(policy_losses.geo_mean, [-0.5, 0.1], [-2.0, -2.0], 0.3, 0.4)
    assert loss == pytest.approx([2 * math.exp(-0.1)] * 2)
    assert gradient == pytest.approx([0.0, 2 * math.exp(-0.1)])


# Covariances 4.125, -0.125, 0.125, 3.375.
COV = {"log_probs": [-1.0, -2.0, -3.0, -4.0], "advantages": [4.0, 1.0, 1.0, -1.0]}


def test_kl_cov_adds_a_kl_term_to_the_token_with_the_highest_covariance():
    loss, gradient, metrics = run(
        policy_losses.kl_cov, [LN2, LN2, 0.0, 0.0], COV["advantages"], 0.25, 0.5, log_probs=COV["log_probs"]
    )
    assert loss == pytest.approx([-8.0 + 0.5 * LN2, -2.0, -1.0, 1.0])
    assert gradient == pytest.approx([-8.0 + 0.5, -2.0, -1.0, 1.0])
    assert metrics == pytest.approx({"cov_frac": 0.25, "ppo_kl": -LN2 / 2})


def test_clip_cov_takes_loss_and_gradient_from_tokens_in_the_band():
    loss, gradient, metrics = run(
        policy_losses.clip_cov,
        [0.0] * 4,
        COV["advantages"],
        0.2,
        0.2,
        0.25,
        1.0,
        4.0,
        log_probs=COV["log_probs"],
    )
    assert loss == pytest.approx([-4.0, -1.0, -1.0, 0.0])
    assert gradient == pytest.approx([-4.0, -1.0, -1.0, 0.0])
    assert metrics["cov_frac"] == 0.25


def test_covariance_selection():
    log_probs, advantages = (torch.tensor([COV[name]]) for name in ("log_probs", "advantages"))
    ones = torch.ones(1, 4)
    select = highest_covariance
    assert select(log_probs, advantages, ones, 0.0).tolist() == [[False] * 4]
    assert select(log_probs, advantages, ones, 0.0002).tolist() == [[True, False, False, False]]
    assert select(log_probs, advantages, ones, 0.5).tolist() == [[True, False, False, True]]
    assert select(log_probs, advantages, ones, 1.0, 0.0).tolist() == [[True, False, True, True]]
    assert select(log_probs, advantages, torch.zeros(1, 4), 1.0).tolist() == [[False] * 4]
    with pytest.raises(ConfigError, match="cov_fraction is 2"):
        select(log_probs, advantages, ones, 2.0)


ALL = {
    "ppo_clip": (0.2, 0.2, 3.0),
    "gspo": (0.2, 0.2),
    "cispo": (0.2, 0.2),
    "kl_cov": (0.3,),
    "clip_cov": (0.2, 0.2, 0.3, -9.0, 9.0),
    "gpg": (),
    "sapo": (),
    "geo_mean": (0.2, 0.2),
}


@pytest.mark.parametrize("name", ALL)
def test_an_infinite_log_ratio_gives_finite_losses_and_gradients(name):
    new = torch.tensor([[-1.0, -1.0, -400.0]], requires_grad=True)
    old = torch.tensor([[-math.inf, -500.0, -1.0]])
    for sign in (1.0, -1.0):
        loss, metrics = call(
            getattr(policy_losses, name), new, old, torch.full((1, 3), sign), torch.ones(1, 3), *ALL[name]
        )
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()
        assert metrics["ppo_kl"].item() == pytest.approx(-(20 + 20 - 20) / 3)


@pytest.mark.parametrize("name", ALL)
def test_all_masked_gives_zeros_for_a_micro_batch_of_padding(name):
    new = torch.full((2, 3), math.nan, requires_grad=True)
    loss, metrics = call(
        getattr(policy_losses, name), new, new.detach(), new.detach(), torch.zeros(2, 3), *ALL[name]
    )
    loss.sum().backward()
    assert loss.tolist() == [[0.0] * 3] * 2
    assert new.grad.tolist() == [[0.0] * 3] * 2
    assert {value.item() for value in metrics.values()} == {0.0}


@pytest.mark.parametrize("name", ["ppo_clip", "kl_cov", "clip_cov", "gpg", "sapo", "geo_mean"])
def test_gradcheck(name):
    """Where no gradient is stopped. (`gspo` and `cispo` stop some: their gradients are written out above.)"""
    torch.manual_seed(3)
    new, old = -torch.rand(3, 5, dtype=torch.float64), -torch.rand(3, 5, dtype=torch.float64)
    advantages, mask = torch.randn(3, 5, dtype=torch.float64), torch.rand(3, 5) > 0.3
    new.requires_grad_()
    keywords = {"selected": torch.rand(3, 5) > 0.7} if name.endswith("cov") else {}
    function = getattr(policy_losses, name)
    assert torch.autograd.gradcheck(
        lambda x: call(function, x, old, advantages, mask, *ALL[name], **keywords)[0], (new,)
    )


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "sapo", "clip_cov", "kl_cov"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    advantages = torch.tensor([[0.5, -1.5], [2.0, 0.0]])
    new = torch.tensor([[-1.0, -2.0], [-0.1, -3.0]], requires_grad=True)
    keywords = {"selected": torch.zeros(2, 2)} if name.endswith("cov") else {}
    loss, metrics = call(
        getattr(policy_losses, name), new, new.detach(), advantages, torch.ones(2, 2), *ALL[name], **keywords
    )
    loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantages)
    assert {value.item() for value in metrics.values()} == {0.0}


def test_wrong_options_and_shapes():
    ones = torch.ones(1, 2)
    with pytest.raises(ConfigError, match="dual_clip_c is 1; it must be a finite number above 1"):
        call(policy_losses.ppo_clip, ones, ones, ones, ones, 0.2, 0.2, 1.0)
    with pytest.raises(ConfigError, match=r"clip_low is 1\.2"):
        call(policy_losses.gspo, ones, ones, ones, ones, 1.2, 0.2)
    with pytest.raises(ConfigError, match="tau_negative is 0"):
        call(policy_losses.sapo, ones, ones, ones, ones, 1.0, 0.0)
    with pytest.raises(NumericsError, match=r"advantages \(1,\)"):
        call(policy_losses.gpg, ones, ones, torch.ones(1), ones)
