"""Distillation through the learner: a step's gradient against transformers' logits, and its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.algorithms.policy_losses.top_k import REST_FLOOR
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, NumericsError
from paceline.core.guard import Adjustments
from paceline.learner.batch.blobs import fetch_rows
from paceline.learner.batch.halve import Halves
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import Denominators, MicroBatch, PackedRow, TrainingBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import hugging_face_names
from paceline.learner.train.algorithm import algorithm_of, try_algorithm
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.updating.losses import PolicyLoss
from support.learner_fakes import POLICY, DictBlobs, make_batch, run_config
from support.learner_scenarios import numbers, take_step

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

CPU, TOP_K = torch.device("cpu"), 5
NO_KL: dict[str, Any] = {
    "adv_estimator": "grpo",
    "use_kl_in_reward": False,
    "kl_ctrl": {"type": "fixed", "kl_coef": 0.1},
}


def config_of(model: Path, loss: dict[str, Any], **algorithm: Any) -> RunConfig:
    teacher = {"address": "http://nowhere/v1", "model": "big", "top_k": TOP_K}
    return run_config(model, algorithm=NO_KL | {"teacher": teacher} | algorithm, actor={"policy_loss": loss})


def rows_of(num_prompts: int = 3) -> list[PackedRow]:
    rows, blobs = make_batch(num_prompts=num_prompts, teacher=TOP_K)
    table = dict(enumerate(rows))
    wanted = list(table)
    packed = fetch_rows(DictBlobs(blobs), table, wanted, policy=POLICY, vocab_size=48, has_teacher=True)
    packed[1].response_mask[0] = 0  # a token that the policy did not sample
    return [packed[index] for index in wanted]


def part_of(batch: MicroBatch) -> TrainingBatch:
    count, nothing = len(batch.mask), torch.zeros(batch.mask.shape)
    return TrainingBatch(
        batch=batch,
        log_probs={"rollout": batch.rollout_log_probs},
        values=None,
        scores=torch.zeros(count),
        group_ids=torch.zeros(count, dtype=torch.int64),
        advantages=nothing,
        returns=None,
        weights=None,
    )


def kl_by_transformers(model: Path, rows: list[PackedRow], kl: str) -> tuple[float, dict[str, Tensor]]:
    """Mean over sampled tokens and its gradient, in float64, row by row, with all logits."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model).double()
    losses = []
    for row in rows:
        tokens = np.concatenate([row.prompt_token_ids, row.response_token_ids]).astype(np.int64)
        log_p = lm(torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1)
        assert row.teacher is not None
        for place in np.flatnonzero(row.response_mask):
            ids = torch.from_numpy(row.teacher.token_ids[place]).long()
            chosen = log_p[len(row.prompt_token_ids) + place - 1]
            others = torch.ones(len(chosen), dtype=torch.bool).index_fill(0, ids, False)
            p = torch.cat([chosen[ids].exp(), chosen[others].exp().sum()[None]])
            q = torch.from_numpy(row.teacher.log_probs[place]).double().exp()
            q = torch.cat([q, (1 - q.sum()).clamp(min=REST_FLOOR)[None]])
            a, b = (p, q) if kl == "reverse" else (q, p)
            losses.append((a * (a / b).log()).sum())
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in lm.named_parameters()}
    return loss.item(), {name: grad for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_is_that_of_all_logits(model: Path, ranks: Ranks, kl: str, shared: bool) -> None:
    config = config_of(model, {"type": "distill", "kl": kl})
    learner, rows = Learner.load(config, ranks), rows_of()
    network = learner.actor.network
    loss = PolicyLoss(config, network, Adjustments(), algorithm_of(config).loss)
    count = int(sum(row.response_mask.sum() for row in rows))
    counts = Denominators(num_tokens=count, num_sequences=len(rows))
    total, sums = 0.0, torch.zeros(())
    for some in (rows[:5], rows[5:], []):  # the last is a filler
        share, numbers_of = loss(part_of(pack(some, CPU, share_prompts=shared)), counts)
        share.backward()
        total, sums = total + share.item(), sums + numbers_of
    true, gradients = kl_by_transformers(model, rows, kl)
    assert total == pytest.approx(true, rel=1e-5)
    for name, parameter in hugging_face_names(network):
        grad = parameter.grad.full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(grad.double(), gradients[name], rtol=2e-4, atol=2e-7)
    own = dict(zip(loss.names, sums.tolist(), strict=True))
    assert own["pg_loss"] == pytest.approx(true, rel=1e-5)
    mass = np.concatenate([r.teacher.log_probs[r.response_mask != 0] for r in rows if r.teacher])
    assert own["teacher_top_k_mass"] == pytest.approx(float(np.exp(mass).sum(-1).mean()), rel=1e-5)


def test_halves_of_a_micro_batch_have_their_own_teachers_tokens(model: Path) -> None:
    rows = rows_of()
    halves = Halves.of(part_of(pack(rows, CPU))).halves
    first, second = (half.batch.teacher for half in halves)
    packed = pack(rows, CPU).teacher
    assert first is not None
    assert second is not None
    assert packed is not None
    assert torch.equal(torch.cat([first.token_ids, second.token_ids]), packed.token_ids)
    assert torch.equal(torch.cat([first.log_probs, second.log_probs]), packed.log_probs)


def test_rows_that_are_drawn_again_count_again(model: Path, ranks: Ranks) -> None:
    """Resampling repeats rows of the tables; the network computes each once."""
    config = config_of(model, {"type": "distill"})
    network = Learner.load(config, ranks).actor.network
    loss = PolicyLoss(config, network, Adjustments(), algorithm_of(config).loss)
    rows, places = rows_of(1), torch.tensor([0, 2, 2, 3])

    def shares(part: TrainingBatch) -> tuple[float, list[float]]:
        counts = Denominators(num_tokens=int(part.batch.mask.sum()), num_sequences=4)
        share, sums = loss(part, counts)
        return share.item(), sums.tolist()

    part = part_of(pack(rows, CPU))
    drawn = part.with_rows(part.batch.with_rows(places), lambda table: table[places])
    repeated = part_of(pack([rows[place] for place in places], CPU))
    got, wanted = shares(drawn), shares(repeated)
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    assert got[1] == pytest.approx(wanted[1], rel=1e-5)


def test_rows_without_a_teachers_tokens_are_never_trained(model: Path, ranks: Ranks) -> None:
    config = config_of(model, {"type": "distill"})
    learner = Learner.load(config, ranks)
    loss = PolicyLoss(config, learner.actor.network, Adjustments(), algorithm_of(config).loss)
    rows, blobs = make_batch(num_prompts=1)
    packed = fetch_rows(DictBlobs(blobs), dict(enumerate(rows)), [0, 1], policy=POLICY, vocab_size=48)
    with pytest.raises(NumericsError, match="has no teacher's tokens"):
        loss(part_of(pack(list(packed.values()), CPU)), Denominators(num_tokens=9, num_sequences=2))


def test_steps_approach_the_teacher_and_begin_on_policy(model: Path, ranks: Ranks) -> None:
    """The same batch again and again; no reward enters, and the first ratio is 1."""
    config = config_of(model, {"type": "distill"})
    actor = config.actor.model_copy(update={"ratio_audit_freq": 1})
    learner = Learner.build(config.model_copy(update={"actor": actor}), ranks)
    losses, batch = [], make_batch(teacher=TOP_K)
    for step in (1, 2, 3):
        with mock.patch("support.learner_scenarios.make_batch", return_value=batch):
            metrics = numbers(take_step(learner, step))
        assert metrics["actor/first_ppo_kl"] == 0.0
        assert metrics["actor/pg_clipfrac"] == 0.0
        assert 0 < metrics["actor/policy_top_k_mass"] < metrics["actor/teacher_top_k_mass"] < 1
        losses.append(metrics["actor/pg_loss"])
    assert losses[2] < losses[1] < losses[0]


OWN_LOSS = """
from paceline.algorithms.policy_losses import LossOutputs, distill, ppo_clip
from paceline.algorithms.statistics import masked_mean

def both(inputs, weight: float):
    ppo, kl = ppo_clip(inputs, 0.2, 0.2), distill(inputs)
    return LossOutputs(ppo.loss + weight * kl.loss, {"kl": masked_mean(kl.loss.detach(), inputs.mask)})

def nothing(inputs):
    return LossOutputs(inputs.top_k.policy.detach().sum(-1))

def steep(inputs):
    policy = inputs.top_k.policy
    return LossOutputs((policy - policy.detach()).abs().sum(-1).sqrt() - inputs.log_probs)

def batches(inputs):
    return LossOutputs(inputs.top_k.policy.sum(-1) * inputs.top_k.teacher.mean())
"""


def test_a_loss_of_ones_own_reads_the_same_tables(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(OWN_LOSS)

    def own(name: str, **options: float) -> RunConfig:
        return config_of(model, {"type": "custom", "path": f"{file}:{name}", "options": options})

    try_algorithm(own("both", weight=0.5))
    with pytest.raises(ConfigError, match=r"does not depend on inputs\.log_probs or inputs\.top_k\.policy"):
        try_algorithm(own("nothing"))
    with pytest.raises(ConfigError, match="its gradient is not finite"):
        try_algorithm(own("steep"))
    with pytest.raises(ConfigError, match="differs when sequences are passed one by one"):
        try_algorithm(own("batches"))
    learner = Learner.build(own("both", weight=0.5), ranks)
    metrics = numbers(take_step(learner, 1, teacher=TOP_K))
    assert metrics["actor/kl"] > 0


@pytest.mark.parametrize(
    ("loss", "changes", "sentence"),
    [
        ({"type": "distill"}, {"algorithm": {"teacher": None}}, "distill needs a served teacher"),
        ({"type": "gpg"}, {}, "the loss gpg reads no teacher's tokens"),
        ({"type": "distill"}, {"rollout": {"temperature": 0.7}}, r"temperature=0\.7, .* write 1"),
        ({"type": "distill"}, {"data": {"image_key": "image"}}, "does not go with data.image_key"),
        (
            {"type": "distill"},
            {
                "algorithm": {"replay": {"prompts_per_step": 2}},
                "barrier": {"mode": "bounded", "max_staleness": 0},
            },
            "does not go with algorithm.replay",
        ),
        ({"type": "distill", "beta": 1.0}, {}, "beta"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, loss: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    teacher = {"address": "http://nowhere/v1", "model": "big"}
    algorithm = NO_KL | {"teacher": teacher} | changes.get("algorithm", {})
    sections = {**changes, "algorithm": algorithm, "actor": {"policy_loss": loss}}
    with pytest.raises(ConfigError, match=sentence):
        run_config(tmp_path, **sections)
