"""A whole training step on one rank: invariances, every estimator, skipped updates, export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.guard import GuardConfig
from paceline.config.load import dump_yaml
from paceline.config.run import RunConfig
from paceline.core.errors import CheckpointError, ConfigError, ModelError, NumericsError
from paceline.core.guard import Adjustments, Histories
from paceline.learner.batch.planning import plan as batching
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.export import export
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.updating import update
from paceline.learner.train.updating.update_guard import UpdateGuard
from support.learner_fakes import make_batch, run_config
from support.learner_scenarios import numbers, save, take_step, train
from support.more import more

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

NUM_LAYERS = 2
WITHOUT_CRITIC = {"use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of the policy's parameters."""
    as_fsdp(learner.actor.network).reshard()
    return {
        name: parameter.full_tensor().clone() for name, parameter in hugging_face_names(learner.actor.network)
    }


def test_the_first_mini_batch_is_exactly_on_policy_and_later_ones_are_not(model: Path, ranks: Ranks) -> None:
    metrics = train(Learner.build(run_config(model), ranks), 1, 2)
    for step in metrics:
        assert abs(step["actor/first_ppo_kl"]) < 1e-6
        assert step["actor/first_pg_clipfrac"] == 0.0
        assert step["actor/ppo_kl"] != 0.0
    assert metrics[0]["algorithm/reference_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[1]["algorithm/reference_kl"] > 1e-4
    # The coefficient of the first step's KL, 0: 0.05 (1 - 0.2 x 32 / 1000).
    assert metrics[1]["algorithm/kl_coef"] == pytest.approx(0.05 * (1 - 0.2 * 32 / 1000))
    assert metrics[0]["response_length/mean"] == pytest.approx(4.78125)


def test_the_kl_coefficient_stays_where_the_guard_refuses_the_update(model: Path, ranks: Ranks) -> None:
    learner = Learner.build(run_config(model, guard={"reference_kl": {"skip": 1e-5}}), ranks)
    train(learner, 1, 1)
    before = learner.kl_controller.value
    (metrics,) = train(learner, 2, 2)
    assert metrics["algorithm/reference_kl"] > 1e-4
    assert metrics["actor/skipped_updates"] == 2
    assert learner.kl_controller.value == before


def test_the_guard_refuses_a_batch_by_its_reference_kl_with_the_kl_in_the_loss(
    model: Path, ranks: Ranks
) -> None:
    learner = Learner.build(
        run_config(
            model,
            algorithm=WITHOUT_CRITIC | {"adv_estimator": "grpo"},
            actor={"ppo_mini_batch_size": 4, "use_kl_loss": True},
            guard={"reference_kl": {"skip": 1e-5}},
        ),
        ranks,
    )
    train(learner, 1, 1)
    before = weights(learner)
    (metrics,) = train(learner, 2, 2)
    assert abs(metrics["algorithm/reference_kl"]) > 1e-4
    assert metrics["actor/skipped_updates"] == 2
    assert all(torch.equal(weight, before[name]) for name, weight in weights(learner).items())


def test_scoring_by_the_reference_leaves_nothing_behind(model: Path, ranks: Ranks) -> None:
    """FSDP notes every forward pass for a backward pass; a reference model has none."""
    learner = Learner.build(run_config(model), ranks)
    train(learner, 1, 2)
    state: Any = as_fsdp(learner.frozen["reference"].network)._get_fsdp_state()
    assert state._comm_ctx.post_forward_order == []
    groups = [group for part in state._state_ctx.all_states for group in part._fsdp_param_groups]
    assert len(groups) == 3
    assert [group._post_forward_indices for group in groups] == [[], [], []]


@pytest.mark.parametrize("kl", [0.06, -0.06])
def test_a_kl_of_either_sign_is_judged_by_its_size(ranks: Ranks, kl: float) -> None:
    guard = UpdateGuard(GuardConfig(), Histories(), ranks, Adjustments())
    refusal = guard.judge_update("actor", ["ppo_kl"], torch.tensor([kl], dtype=torch.float64), 0.5, 1.0)
    assert refusal == "actor ppo_kl is 0.06, above 0.05 (guard.ppo_kl.skip)"
    assert guard.metrics == {"actor/ppo_kl_max": 0.06}


@pytest.mark.parametrize(("horizon", "is_refused"), [(6, True), (7, False)])
def test_a_horizon_that_could_turn_the_kl_coefficient_negative_is_refused(
    model: Path, horizon: int, is_refused: bool
) -> None:
    control = {"type": "adaptive", "kl_coef": 0.05, "target_kl": 0.1, "horizon": horizon}
    algorithm = {"adv_estimator": "gae", "use_kl_in_reward": True, "kl_ctrl": control}
    if not is_refused:
        run_config(model, algorithm=algorithm)
        return
    with pytest.raises(ConfigError, match="horizon=6 would let one step of 32 sequences .* above 6"):
        run_config(model, algorithm=algorithm)


def test_the_same_seed_gives_the_same_bits(model: Path, ranks: Ranks) -> None:
    runs = [train(Learner.build(run_config(model), ranks), 1, 2) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "seq-mean-token-mean", *more("seq-mean-token-sum", "seq-mean-token-sum-norm")],
)
def test_losses_and_gradients_do_not_depend_on_the_cut_into_micro_batches(
    model: Path, ranks: Ranks, mode: str
) -> None:
    results, moved = [], []
    for budget in (48, 4096):
        actor = {"ppo_max_token_len_per_gpu": budget, "loss_agg_mode": mode, "entropy_coeff": 0.01}
        learner = Learner.build(run_config(model, actor=actor), ranks)
        results.append(numbers(take_step(learner, 1)))
        moved.append(weights(learner))
    for name, value in results[0].items():
        assert value == pytest.approx(results[1][name], abs=1e-5, rel=1e-4), name
    for name, value in moved[0].items():
        # AdamW's first steps are lr x sign(gradient) where a gradient is as small as the rounding.
        close = torch.isclose(value, moved[1][name], atol=1e-5)
        assert float(close.float().mean()) > 0.99, name


def test_the_first_gradient_norm_is_that_of_one_forward_pass_over_everything(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = []
    for budget in (48, 4096):
        config = run_config(model, actor={"ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": budget})
        norms.append(numbers(take_step(Learner.build(config, ranks), 1))["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0.1


@pytest.mark.parametrize(
    "estimator",
    [
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        *more("dr_grpo", "reinforce_plus_plus_baseline", "opo", "gpg", "pass_at_k"),
    ],
)
def test_every_estimator_without_a_critic_trains(model: Path, ranks: Ranks, estimator: str) -> None:
    config = run_config(model, algorithm={"adv_estimator": estimator, **WITHOUT_CRITIC})
    learner = Learner.build(config, ranks)
    assert learner.critic is None
    assert not learner.frozen
    before = weights(learner)
    metrics = numbers(take_step(learner, 1))
    assert metrics["actor/grad_norm"] > 0
    assert "critic/vf_loss" not in metrics
    assert any(not torch.equal(value, before[name]) for name, value in weights(learner).items())


def test_remax_learns_from_scores_beyond_the_greedy_ones(model: Path, ranks: Ranks) -> None:
    config = run_config(model, algorithm={"adv_estimator": "remax", **WITHOUT_CRITIC})
    metrics = numbers(take_step(Learner.build(config, ranks), 1, with_greedy=True))
    rows, _ = make_batch(step=1, seed=1, with_greedy=True)
    tokens = [row.num_response_tokens for row in rows]
    beyond = [row.reward - row.trajectory_id.prompt_id / 4 for row in rows]
    # A row's advantage is the same on each of its tokens.
    mean = sum(a * n for a, n in zip(beyond, tokens, strict=True)) / sum(tokens)
    assert metrics["critic/advantages/mean"] == pytest.approx(mean, rel=1e-5)
    assert metrics["actor/grad_norm"] > 0


def test_remax_without_greedy_scores_is_refused(model: Path, ranks: Ranks) -> None:
    config = run_config(model, algorithm={"adv_estimator": "remax", **WITHOUT_CRITIC})
    learner = Learner.build(config, ranks)
    with pytest.raises(ConfigError, match="the advantage estimator needs greedy_scores"):
        take_step(learner, 1)
    assert learner.version == 0


def test_a_batch_that_is_short_is_trained_as_a_full_one_of_its_size(model: Path, ranks: Ranks) -> None:
    results = []
    for size in (8, 5):
        config = run_config(
            model,
            data={"train_batch_size": size},
            actor={"ppo_mini_batch_size": size},
            algorithm={"adv_estimator": "grpo", **WITHOUT_CRITIC},
        )
        results.append(numbers(take_step(Learner.build(config, ranks), 1, num_prompts=5)))
    assert results[0] == results[1]
    # With mini-batches of four prompts the second has one.
    config = run_config(model, algorithm={"adv_estimator": "grpo", **WITHOUT_CRITIC})
    halves = numbers(take_step(Learner.build(config, ranks), 1, num_prompts=5))
    assert halves["critic/advantages/mean"] == results[0]["critic/advantages/mean"]
    assert halves["actor/ppo_kl"] != 0 == results[0]["actor/ppo_kl"]


def test_grpo_advantages_by_hand_reach_the_loss(model: Path, ranks: Ranks) -> None:
    # On policy the loss of a token is -A: with seq-mean-token-sum-norm over 8 tokens it is -mean(A len) / 8.
    config = run_config(
        model,
        algorithm={"adv_estimator": "grpo", **WITHOUT_CRITIC},
        actor={"loss_agg_mode": "seq-mean-token-sum-norm", "ppo_mini_batch_size": 8},
    )
    from support.learner_fakes import make_batch

    rows, _ = make_batch(step=1, seed=1)
    expected = 0.0
    for prompt in range(8):
        group = [row for row in rows if row.trajectory_id.prompt_id == prompt]
        scores = torch.tensor([row.reward for row in group])
        lengths = torch.tensor([float(row.num_response_tokens) for row in group])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
        expected -= float((advantages * lengths).sum()) / 8 / len(rows)
    metrics = numbers(take_step(Learner.build(config, ranks), 1))
    assert metrics["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)


def test_the_critic_alone_learns_during_its_warm_up(model: Path, ranks: Ranks) -> None:
    learner = Learner.build(run_config(model, critic={"warmup": 1, "ppo_mini_batch_size": 2}), ranks)
    before = weights(learner)
    first = numbers(take_step(learner, 1))
    assert "actor/pg_loss" not in first
    assert first["critic/grad_norm"] > 0
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())
    assert "actor/pg_loss" in numbers(take_step(learner, 2))


GRPO = {"adv_estimator": "grpo", **WITHOUT_CRITIC}


def test_values_at_the_edge_of_an_optimizer_and_a_warm_up_without_a_critic(model: Path, ranks: Ranks) -> None:
    """With a first beta of 0 the average is the last gradient."""
    optim = {"lr": 1e-3, "betas": [0.0, 0.999]}
    config = run_config(
        model, algorithm=GRPO, actor={"optim": optim, "ppo_mini_batch_size": 8}, critic={"warmup": 9}
    )
    learner = Learner.build(config, ranks)
    first, second = train(learner, 1, 2)
    assert {"actor/pg_loss", "actor/grad_norm"} <= first.keys()
    state: dict[str, Any] = learner.actor.optimizer.state()
    averages = [average.full_tensor() for name, average in state.items() if name.endswith(".exp_avg")]
    norm = float(torch.stack([average.square().sum() for average in averages]).sum().sqrt())
    assert norm == pytest.approx(min(1.0, second["actor/grad_norm"]), rel=1e-4)


def test_values_at_the_edge_of_an_aggregation_constant(model: Path, ranks: Ranks) -> None:
    def loss(**actor: Any) -> float:
        actor |= {"loss_agg_mode": "seq-mean-token-sum-norm", "ppo_mini_batch_size": 8}
        config = run_config(model, algorithm=GRPO, actor=actor)
        return numbers(take_step(Learner.build(config, ranks), 1))["actor/pg_loss"]

    # The longest response allowed has 8 tokens.
    assert loss(loss_agg_constant=100) == pytest.approx(loss() * 8 / 100, rel=1e-5)


def test_values_at_the_edge_of_how_many_samples_are_compared(model: Path, ranks: Ranks) -> None:
    """Single samples teach without a group; of two, each is the best or the worst, so all are drawn alike."""
    algorithm = {"adv_estimator": "reinforce_plus_plus", **WITHOUT_CRITIC}
    learner = Learner.build(run_config(model, algorithm=algorithm, rollout={"n": 1}), ranks)
    assert numbers(take_step(learner, 1, num_samples=1))["actor/grad_norm"] > 0.1
    steps = []
    for resample in ({"method": "max_min"}, {"method": "pow", "power": 0.0}):
        config = run_config(model, algorithm=GRPO | {"resample": resample}, rollout={"n": 2})
        steps.append(numbers(take_step(Learner.build(config, ranks), 1, num_samples=2)))
    assert steps[0] == steps[1]
    assert 1 / 16 < steps[0]["resample/distinct_share"] < 1


def test_an_update_that_is_not_finite_is_skipped_counted_and_reported(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner.build(run_config(model), ranks)
    before = weights(learner)
    honest = update.PolicyLoss.__call__

    def poisoned(self: Any, *arguments: Any) -> Any:
        loss, sums = honest(self, *arguments)
        sums[0] = math.nan
        return loss * math.nan, sums

    with monkeypatch.context() as patch:
        patch.setattr(update.PolicyLoss, "__call__", poisoned)
        result = take_step(learner, 1)
    assert result.skip_reasons == ("actor: the loss is not finite",) * 2
    assert result.metrics["actor/skipped_updates"] == 2
    assert result.metrics["critic/skipped_updates"] == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())
    assert learner.version == 1
    assert take_step(learner, 2).skip_reasons == ()


def test_old_log_probs_of_other_weights_are_found_out(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner.build(run_config(model), ranks)
    honest = update.update_critic

    def meddling(*arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            learner.actor.network.lm.model.norm.weight.mul_(1.001)
        return honest(*arguments, **keywords)

    monkeypatch.setattr("paceline.learner.train.step.update_critic", meddling)
    with pytest.raises(NumericsError, match="must be exactly on policy, but ppo_kl="):
        take_step(learner, 1)


def test_a_checkpoint_is_exported_to_a_folder_that_transformers_loads(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config = run_config(model)
    learner = Learner.build(config, ranks)
    train(learner, 1, 2)
    folder = tmp_path / "checkpoints" / "step_000002"
    save(learner, folder, step=2)
    (tmp_path / "config.resolved.yaml").write_text(dump_yaml(config))
    out = export(tmp_path, 2, tmp_path / "out")

    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32
    own_weights = weights(learner)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, own_weights[name]), name
    assert (out / "generation_config.json").is_file()
    with pytest.raises(ModelError, match="is not empty"):
        export(tmp_path, 2, tmp_path / "out")
    with pytest.raises(CheckpointError, match="step_000003 is no complete checkpoint"):
        export(tmp_path, 3, tmp_path / "other")


def test_a_row_over_the_budget_is_named(model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    config: RunConfig = run_config(model, actor={"ppo_max_token_len_per_gpu": 24})
    monkeypatch.setattr(batching, "CPU_TOKEN_BUDGET", 1)
    # The CPU's own smaller budget never refuses what the configuration allows.
    assert take_step(Learner.build(config, ranks), 1, num_prompts=4).step == 1


def test_gradients_below_the_clip_are_not_judged_and_count_in_the_median(ranks: Ranks) -> None:
    """Without them the first large gradient after small ones would have no median to be measured by."""
    limits = GuardConfig.model_validate({"grad_norm": {"skip": 10.0}})
    guard = UpdateGuard(limits, Histories(), ranks, Adjustments())

    def judge(grad_norm: float) -> str:
        return guard.judge_update("actor", ["loss"], torch.zeros(1, dtype=torch.float64), grad_norm, 1.0)

    assert [judge(0.25) for _ in range(9)] == [""] * 9
    assert judge(0.5) == ""
    assert guard.readings == []
    assert "actor grad_norm is 3, above 2.5, 10 times its running median" in judge(3.0)
    (reading,) = guard.readings
    assert (reading.value, reading.reference, reading.num_skipped) == (3.0, 0.25, 1)
