"""Policy losses, a file per family: per-token losses and metrics from log-probs and advantages.

Every loss is called `f(inputs: LossInputs, **options)` and returns `LossOutputs(loss, metrics)`. Under the
mask, the loss and its gradient are 0 for any inputs. Only log_probs and top_k.policy are differentiated.

`kl_cov` and `clip_cov` select the tokens of the mini-batch with the highest covariance. A caller that splits
the mini-batch selects once, with `highest_covariance` on the old log-probs, and passes each micro-batch its
part as `selected`; without `selected`, the tokens are chosen among those that are passed. `gspo` and
`geo_mean` need complete sequences as rows.
"""

from paceline.algorithms.policy_losses.base import LossInputs, LossOutputs
from paceline.algorithms.policy_losses.clipped_ratio import geo_mean, gspo, ppo_clip
from paceline.algorithms.policy_losses.covariance import clip_cov, highest_covariance, kl_cov
from paceline.algorithms.policy_losses.distillation import distill
from paceline.algorithms.policy_losses.reinforce import cispo, gpg
from paceline.algorithms.policy_losses.soft_gate import sapo
from paceline.algorithms.policy_losses.top_k import TopK

__all__ = [
    "LossInputs",
    "LossOutputs",
    "TopK",
    "cispo",
    "clip_cov",
    "distill",
    "geo_mean",
    "gpg",
    "gspo",
    "highest_covariance",
    "kl_cov",
    "ppo_clip",
    "sapo",
]
