"""One training step against a gradient worked out by hand: what takes effect, not what is reported.

The policy is a model without layers: logits = W (g * x / rms(x)), x = E[previous token]. The step has two
epochs of one mini-batch, so the first ratio is 1 and the second is clipped for some tokens. numpy in float64
repeats it with entropy bonus, KL loss, gradient clipping, AdamW, and both of the guard's scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.run import RunConfig
from paceline.core.guard import Adjustments
from paceline.core.samples.trajectory import Trajectory
from paceline.core.training import BatchRow, TrainOrder
from paceline.learner.batch.blobs import fetch_rows
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.step import train_step
from paceline.wire import decode_trajectory
from support.learner_fakes import POLICY, DictBlobs, make_batch, run_config, write_model

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

TEMPERATURE, CLIP, GRAD_CLIP, EPOCHS = 0.8, 0.02, 0.05, 2
ENTROPY_COEFF, KL_LOSS_COEF = 0.3, 0.4
LR, EPS, WEIGHT_DECAY, BETAS = 0.2, 0.01, 0.1, (0.9, 0.99)
SCALES = Adjustments(lr_scale=0.5, kl_scale=0.25, clip_scale=0.5)

Weights = dict[str, np.ndarray]
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def config_of(model: Path) -> RunConfig:
    return run_config(
        model,
        actor={
            "ppo_mini_batch_size": 8,
            "ppo_epochs": EPOCHS,
            "clip_ratio": CLIP,
            "use_dual_clip": False,
            "entropy_coeff": ENTROPY_COEFF,
            "use_kl_loss": True,
            "kl_loss_coef": KL_LOSS_COEF,
            "kl_loss_type": "k1",
            "grad_clip": GRAD_CLIP,
            "optim": {"lr": LR, "eps": EPS, "weight_decay": WEIGHT_DECAY, "betas": BETAS},
        },
        algorithm={
            "adv_estimator": "grpo",
            "use_kl_in_reward": False,
            "kl_ctrl": {"type": "fixed", "kl_coef": 0.1},
        },
        rollout={"n": 4, "temperature": TEMPERATURE},
    )


@dataclass
class ByHand:
    """The same step in numpy; the weights are updated in place."""

    weights: Weights
    rms_eps: float
    previous: np.ndarray
    tokens: np.ndarray
    advantages: np.ndarray
    clipped_shares: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls, weights: Weights, rms_eps: float, rows: tuple[BatchRow, ...], blobs: dict[str, bytes]
    ) -> ByHand:
        """Every response token with the token before it and its row's advantage."""
        previous, tokens, advantages = [], [], []
        for row in rows:
            sample: Trajectory = decode_trajectory(blobs[row.blob_key])
            text = [*sample.prompt_token_ids.tolist(), *sample.response_token_ids.tolist()]
            begin = len(sample.prompt_token_ids)
            group = [r.reward for r in rows if r.trajectory_id.prompt_id == row.trajectory_id.prompt_id]
            advantage = (row.reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
            for place in range(begin, len(text)):
                previous.append(text[place - 1])
                tokens.append(text[place])
                advantages.append(advantage)
        return cls(weights, rms_eps, np.array(previous), np.array(tokens), np.array(advantages))

    def forward(self) -> tuple[np.ndarray, ...]:
        """x, rms, h, log-softmax of every token; shapes (N, d), (N, 1), (N, d), (N, V)."""
        x = self.weights[EMBED][self.previous]
        rms = np.sqrt((x * x).mean(axis=1, keepdims=True) + self.rms_eps)
        h = self.weights[NORM] * x / rms
        z = h @ self.weights[HEAD].T / TEMPERATURE
        z = z - z.max(axis=1, keepdims=True)
        return x, rms, h, z - np.log(np.exp(z).sum(axis=1, keepdims=True))

    def log_probs(self) -> np.ndarray:
        return self.forward()[3][np.arange(len(self.tokens)), self.tokens]

    def gradient(self, old: np.ndarray) -> Weights:
        """Of the token mean of max(-A r, -A clip(r)) - entropy_coeff H + kl_loss_coef kl_scale (lp - ref)."""
        x, rms, h, log_p = self.forward()
        p, count, each = np.exp(log_p), len(self.tokens), np.arange(len(self.tokens))
        ratio = np.exp(log_p[each, self.tokens] - old)
        clip = CLIP * SCALES.clip_scale
        cut = np.clip(ratio, 1 - clip, 1 + clip)
        # A token whose clipped term is the larger has no gradient.
        clipped = -self.advantages * cut > -self.advantages * ratio
        self.clipped_shares.append(float(clipped.mean()))
        of_log_prob = np.where(clipped, 0.0, -self.advantages * ratio) + KL_LOSS_COEF * SCALES.kl_scale
        # d lp / d z = onehot - p, and d H / d z = -p (log p + H).
        onehot = np.zeros_like(p)
        onehot[each, self.tokens] = 1.0
        entropy = -(p * log_p).sum(axis=1, keepdims=True)
        d_z = of_log_prob[:, None] * (onehot - p) + ENTROPY_COEFF * p * (log_p + entropy)
        d_z /= TEMPERATURE * count
        d_h = d_z @ self.weights[HEAD]
        normed = d_h * self.weights[NORM]
        d_x = normed / rms - x * (normed * x).sum(axis=1, keepdims=True) / (x.shape[1] * rms**3)
        d_embed = np.zeros_like(self.weights[EMBED])
        np.add.at(d_embed, self.previous, d_x)
        return {EMBED: d_embed, NORM: (d_h * x / rms).sum(axis=0), HEAD: d_z.T @ h}

    def train(self) -> None:
        """AdamW on the clipped gradient, with the scaled learning rate."""
        old, lr = self.log_probs(), LR * SCALES.lr_scale
        first = {name: np.zeros_like(value) for name, value in self.weights.items()}
        second = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for number in range(1, EPOCHS + 1):
            grads = self.gradient(old)
            norm = float(np.sqrt(sum((grad**2).sum() for grad in grads.values())))
            self.grad_norms.append(norm)
            for name, grad in grads.items():
                grad = grad * min(1.0, GRAD_CLIP / (norm + 1e-6))
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * grad
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * grad**2
                step = first[name] / (1 - BETAS[0] ** number)
                step /= np.sqrt(second[name] / (1 - BETAS[1] ** number)) + EPS
                self.weights[name] = self.weights[name] * (1 - lr * WEIGHT_DECAY) - lr * step


def weights_of(learner: Learner) -> Weights:
    as_fsdp(learner.actor.network).reshard()
    return {
        name: parameter.full_tensor().detach().double().numpy().copy()
        for name, parameter in hugging_face_names(learner.actor.network)
    }


def update(learner: Learner, step: int, adjustments: Adjustments, **batch: Any) -> dict[str, float]:
    """One training step."""
    rows, blobs = make_batch(step=step, seed=1, **batch)
    order = TrainOrder(step=step, policy=POLICY, rows=rows, adjustments=adjustments)
    store = DictBlobs(blobs)
    return train_step(
        learner,
        order,
        lambda wanted: fetch_rows(store, rows, wanted, policy=POLICY, vocab_size=learner.vocab_size),
    ).metrics


def test_an_update_by_hand(ranks: Ranks, tmp_path: Path) -> None:
    learner = Learner.build(config_of(write_model(tmp_path / "model", num_layers=0)), ranks)
    before = weights_of(learner)
    assert before.keys() == {EMBED, NORM, HEAD}
    rows, blobs = make_batch(step=1, seed=1)
    rms_eps = float(learner.actor.network.lm.config.rms_norm_eps)  # type: ignore[union-attr, arg-type]
    expected = ByHand.of({name: value.copy() for name, value in before.items()}, rms_eps, rows, blobs)
    expected.train()
    metrics = update(learner, 1, SCALES)

    # Every term counts: the gradient is clipped in both updates, and the ratio in the second.
    assert min(expected.grad_norms) > 2 * GRAD_CLIP
    assert expected.clipped_shares[0] == 0.0
    assert 0.1 < expected.clipped_shares[1] < 0.9
    after = weights_of(learner)
    for name, value in after.items():
        moved, by_hand = value - before[name], expected.weights[name] - before[name]
        assert np.abs(by_hand).max() > 0.05, name
        np.testing.assert_allclose(moved, by_hand, atol=2e-5, err_msg=name)
    assert metrics["actor/grad_norm"] == pytest.approx(np.mean(expected.grad_norms), rel=1e-4)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(np.mean(expected.clipped_shares), abs=1e-6)
    assert metrics["actor/lr"] == LR * SCALES.lr_scale


def test_the_guards_kl_scale_multiplies_the_kl_in_the_reward(model: Path, ranks: Ranks) -> None:
    """A scale on the configured coefficient trains as the product of both, to the last bit."""

    def trained(kl_coef: float, adjustments: Adjustments) -> Weights:
        algorithm = {"kl_ctrl": {"type": "fixed", "kl_coef": kl_coef}}
        learner = Learner.build(run_config(model, algorithm=algorithm), ranks)
        update(learner, 1, Adjustments())  # the first step's KL to the reference is 0
        update(learner, 2, adjustments)
        return weights_of(learner)

    scaled = trained(0.5, Adjustments(kl_scale=0.25))
    product, unscaled = trained(0.125, Adjustments()), trained(0.5, Adjustments())
    assert all(np.array_equal(scaled[name], product[name]) for name in scaled)
    assert not all(np.array_equal(scaled[name], unscaled[name]) for name in scaled)
    fixed = trained(0.5, Adjustments(kl_scale=0.25, fixed_kl_coef=0.5))
    assert all(np.array_equal(scaled[name], fixed[name]) for name in scaled)


def test_the_guards_lr_scale_holds_for_the_critic_too(model: Path, ranks: Ranks) -> None:
    def critic_after(lr: float, adjustments: Adjustments) -> list[torch.Tensor]:
        optim = {"optim": {"lr": lr}}
        learner = Learner.build(run_config(model, actor=optim, critic=optim), ranks)
        update(learner, 1, adjustments)
        assert learner.critic is not None
        as_fsdp(learner.critic.network).reshard()
        return [p.full_tensor().clone() for _, p in hugging_face_names(learner.critic.network)]

    scaled = critic_after(1e-3, Adjustments(lr_scale=0.5))
    product, unscaled = critic_after(5e-4, Adjustments()), critic_after(1e-3, Adjustments())
    assert all(torch.equal(*pair) for pair in zip(scaled, product, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(scaled, unscaled, strict=True))
