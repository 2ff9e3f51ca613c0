"""One run configuration for each algorithm of the learner, and what a group of ranks makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.model.lora import is_adapter, with_adapters
from paceline.learner.train.state.learner import Learner
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step

NO_KL = {"use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}
GROUPS = {"adv_estimator": "grpo", **NO_KL}

VARIANTS: dict[str, dict[str, Any]] = {
    "vapo": {"algorithm": {"adv_estimator": "vapo", "alpha": 0.5, **NO_KL}},
    "positive_loss": {
        "algorithm": GROUPS,
        "actor": {"positive_loss_coef": 0.5, "positive_above": 0.2, "loss_agg_mode": "seq-mean-token-mean"},
    },
    "gspo": {
        "algorithm": GROUPS,
        "actor": {"policy_loss": "gspo", "clip_ratio": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    },
    "geo_mean": {
        "algorithm": GROUPS,
        "actor": {"policy_loss": "geo_mean", "clip_ratio": 0.4, "loss_agg_mode": "seq-mean-token-mean"},
    },
    "cispo": {"algorithm": GROUPS, "actor": {"policy_loss": "cispo", "clip_ratio_low": 1.0}},
    "gpg": {"algorithm": {**GROUPS, "adv_estimator": "gpg"}, "actor": {"policy_loss": "gpg"}},
    "sapo": {"algorithm": GROUPS, "actor": {"policy_loss": {"type": "sapo", "tau_negative": 2.0}}},
    "kl_cov": {"algorithm": GROUPS, "actor": {"policy_loss": {"type": "kl_cov", "cov_fraction": 0.1}}},
    "clip_cov": {
        "algorithm": GROUPS,
        "actor": {"policy_loss": {"type": "clip_cov", "cov_fraction": 0.1, "cov_low": 0.0}},
    },
    "overlong": {
        "algorithm": {**GROUPS, "overlong": {"enable": True, "buffer_length": 4, "factor": 0.5}},
    },
    "pf_ppo": {"algorithm": {**NO_KL, "resample": {"method": "pow", "power": 3.0}}},
    "resampled_sequences": {
        "algorithm": {**GROUPS, "resample": {"method": "max_min"}},
        "actor": {"loss_agg_mode": "seq-mean-token-mean"},
    },
    "tis": {
        "algorithm": {**GROUPS, "rollout_correction": {"method": "tis", "level": "sequence", "cap": 3.0}},
    },
    "icepop": {"algorithm": {**GROUPS, "rollout_correction": {"method": "icepop"}}},
    "lora": {"model": {"lora": {"rank": 3, "alpha": 6.0}}},
    "muon": {"algorithm": GROUPS, "actor": {"optim": {"type": "muon", "lr": 1e-3}}},
    "sequence_mask": {
        "algorithm": {**GROUPS, "rollout_correction": {"method": "sequence_mask", "level": "geometric"}},
    },
}
"""Sections over those of `run_config`."""


def one_step(ranks: Ranks, model: str, name: str, **actor: Any) -> dict[str, float]:
    """Metrics of a variant's first training step, with two mini-batches; `actor` overrides the variant's."""
    sections = dict(VARIANTS[name])
    sections["actor"] = {**sections.get("actor", {}), **actor}
    sections["model"] = {"path": model, **sections.get("model", {})}
    learner = Learner.build(run_config(Path(model), **sections), ranks)
    return numbers(take_step(learner, 1)) | _pushed(learner)


def _pushed(learner: Learner) -> dict[str, float]:
    """A number of what a push of adapters would send, which depends on every element and its place."""
    if learner.config.model.lora is None:
        return {}
    network, total = learner.actor.network, 0.0
    as_fsdp(network).reshard()
    with with_adapters(network):
        for name, parameter in hugging_face_names(network):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not is_adapter(name):
                values = full.detach().double().flatten()
                total += float(values @ torch.linspace(1, 2, values.numel(), dtype=torch.float64))
    return {"pushed": total}


def all_variants(ranks: Ranks, model: str) -> dict[str, dict[str, float]]:
    """A step of each; several ranks cut their rows into smaller micro-batches than one."""
    tokens = 128 if ranks.world.size == 1 else 48
    return {name: one_step(ranks, model, name, ppo_max_token_len_per_gpu=tokens) for name in VARIANTS}
