"""Corrections of routers' scores that move towards an even load (`actor.router_bias_update_rate`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder import experts
from paceline.learner.model.loading import Precision, load_policy
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.state.optimizer import Optimizer, StepOutcome
from paceline.learner.train.updating import update
from paceline.models.facts import FAMILIES
from paceline.weights import corrections
from support.expert_models import COMMON_KINDS, write_model
from support.learner_fakes import make_batch, run_config
from support.learner_scenarios import take_step

RATE = 0.01
KINDS = (*COMMON_KINDS, "glm4_moe_lite", "llama4_text")


def learner_of(folder: Path, ranks: Ranks, **actor: Any) -> Learner:
    config = run_config(
        folder,
        algorithm={"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
        actor={"ppo_mini_batch_size": 8, "optim": {"lr": 1e-9}, "router_bias_update_rate": RATE, **actor},
    )
    return Learner.build(config, ranks)


def corrections_of(learner: Learner) -> list[Tensor]:
    parameters = experts.correction_parameters(learner.actor.network.lm)
    return [corrections.join(parameter.full_tensor()).clone() for parameter in parameters]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The counts of each optimizer step that was taken."""
    seen: list[Tensor] = []
    honest = experts.move_corrections

    def recording(lm: torch.nn.Module, rate: float, counts: Tensor) -> None:
        seen.append(counts.clone())
        honest(lm, rate, counts)

    monkeypatch.setattr(update, "move_corrections", recording)
    return seen


def test_an_expert_with_less_than_its_share_rises_and_one_with_more_falls(
    ranks: Ranks, tmp_path: Path
) -> None:
    write_model(tmp_path, "glm4_moe")
    lm = load_policy(tmp_path, ranks, Precision(compute=torch.float32)).lm
    before = [corrections.join(p.full_tensor()).clone() for p in experts.correction_parameters(lm)]
    counts = torch.tensor([9.0, 5.0, 5.0, 1.0, 0.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    experts.move_corrections(lm, 0.25, counts)
    after = [corrections.join(p.full_tensor()) for p in experts.correction_parameters(lm)]
    wanted = torch.tensor([[-0.25, 0.0, 0.0, 0.25], [0.25, 0.25, 0.25, -0.25]])
    for old, new, moves in zip(before, after, wanted, strict=True):
        assert torch.equal(new, old + moves)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if FAMILIES[kind].corrects_scores])
def test_a_step_moves_corrections_by_the_choices_for_responses(
    kind: str, ranks: Ranks, tmp_path: Path, counted: list[Tensor]
) -> None:
    write_model(tmp_path, kind)
    learner = learner_of(tmp_path, ranks)
    before = corrections_of(learner)
    take_step(learner, 1)
    after = corrections_of(learner)
    by_layer = torch.stack(counted).split([len(layer) for layer in before], dim=1)
    lm: Any = learner.actor.network.lm
    num_tokens = sum(row.num_response_tokens for row in make_batch(step=1, seed=1)[0])
    assert {int(layer.sum()) for layer in by_layer} == {lm.config.num_experts_per_tok * num_tokens}
    for old, new, layer in zip(before, after, by_layer, strict=True):
        moved = sum((RATE * (row.mean() - row).sign()).float() for row in layer)
        torch.testing.assert_close(new - old, moved, atol=1e-7, rtol=0)


def test_cut_micro_batches_move_them_alike(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek_v3")
    moved = []
    for tokens in (4096, 32):
        learner = learner_of(tmp_path, ranks, ppo_max_token_len_per_gpu=tokens)
        take_step(learner, 1)
        moved.append(corrections_of(learner))
    assert all(map(torch.equal, *moved))


def test_the_load_becomes_even(ranks: Ranks, tmp_path: Path, counted: list[Tensor]) -> None:
    """Beside corrections that hardly move; on the same batches, by the spread of the last eight counts."""
    write_model(tmp_path, "glm4_moe")
    spreads = []
    for rate in (1e-12, 0.02):
        learner = learner_of(tmp_path, ranks, router_bias_update_rate=rate)
        counted.clear()
        for step in range(1, 13):
            take_step(learner, step)
        layers = torch.stack(counted[-8:]).unflatten(1, (len(corrections_of(learner)), -1))
        spreads.append(float((layers.std(-1) / layers.mean(-1)).mean()))
    assert spreads[1] < 0.6 * spreads[0], spreads


def test_a_step_that_is_not_taken_moves_nothing(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "deepseek_v3")
    learner = learner_of(tmp_path, ranks)
    before = corrections_of(learner)
    skipped = StepOutcome(grad_norm=1.0, skip_reason="vetoed")
    monkeypatch.setattr(Optimizer, "step", lambda *_, **__: skipped)
    take_step(learner, 1)
    assert all(map(torch.equal, before, corrections_of(learner)))


def test_models_and_runs_without_corrections_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match=r"router_bias_update_rate=0\.01 moves .* has none: leave it out"):
        learner_of(tmp_path, ranks)
    with pytest.raises(ConfigError, match=r"does not go with model\.lora"):
        run_config(tmp_path, actor={"router_bias_update_rate": RATE}, model={"lora": {"rank": 2}})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_a_family_is_true(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    lm = load_policy(tmp_path, ranks, Precision(compute=torch.float32)).lm
    assert bool(experts.correction_parameters(lm)) is FAMILIES[kind].corrects_scores
