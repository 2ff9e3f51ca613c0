"""The policy losses and advantage estimators by name. docs/add-an-algorithm.md says what a new line takes."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.algorithms import advantages, estimators
from paceline.algorithms.estimators import Estimator, of_groups, with_critic
from paceline.algorithms.policy_losses import clipped_ratio, covariance, reinforce, soft_gate
from paceline.algorithms.policy_losses.base import LossFunction

ADV_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": with_critic(advantages.gae),
    "vapo": with_critic(advantages.vapo),
    "grpo": of_groups(advantages.grpo),
    "dr_grpo": of_groups(advantages.dr_grpo),
    "rloo": of_groups(advantages.rloo),
    "reinforce_plus_plus": Estimator(function=estimators.reinforce_plus_plus),
    "reinforce_plus_plus_baseline": of_groups(advantages.reinforce_plus_plus_baseline),
    "remax": Estimator(function=estimators.remax, needs=("greedy_scores",)),
    "opo": of_groups(advantages.opo),
    "gpg": of_groups(advantages.gpg),
    "pass_at_k": of_groups(advantages.pass_at_k),
}

POLICY_LOSSES: Mapping[str, LossFunction] = {
    "ppo_clip": LossFunction.of_tensors(clipped_ratio.ppo_clip, "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"),
    "gspo": LossFunction.of_tensors(clipped_ratio.gspo, "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"),
    "cispo": LossFunction.of_tensors(reinforce.cispo, "pg_clipfrac", "ppo_kl"),
    "geo_mean": LossFunction.of_tensors(clipped_ratio.geo_mean, "pg_clipfrac", "ppo_kl"),
    "kl_cov": LossFunction.of_tensors(covariance.kl_cov, "cov_frac", "ppo_kl", selects_tokens=True),
    "clip_cov": LossFunction.of_tensors(
        covariance.clip_cov, "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "cov_frac", selects_tokens=True
    ),
    "gpg": LossFunction.of_tensors(reinforce.gpg, "ppo_kl"),
    "sapo": LossFunction.of_tensors(soft_gate.sapo, "ppo_kl"),
}
