"""What shapes a training step: overlong penalty, value pre-training, resampling, rollout correction."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms.aggregation import MODES
from paceline.algorithms.algorithm import Algorithm
from paceline.algorithms.rows import SampleRows
from paceline.config.load import section_types
from paceline.config.run import RunConfig
from paceline.config.training.actor import ActorConfig
from paceline.core.guard import Adjustments
from paceline.learner.batch.pack import pack
from paceline.learner.batch.planning.arithmetic import Arithmetic, RowLength
from paceline.learner.batch.planning.plan import plan_batch, plan_chunk
from paceline.learner.batch.types import Denominators, MicroBatch, PackedRow, ScoredBatch, TrainingBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.networks import PolicyNetwork, TokenScores
from paceline.learner.train import estimating
from paceline.learner.train.algorithm import algorithm_of
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.updating.losses import PolicyLoss, ValueLoss
from paceline.learner.train.updating.update import MiniBatch, cut_mini_batches, select_tokens
from paceline.wire import decode_trajectory
from support import learner_scenarios as scenarios
from support.learner_fakes import make_batch, run_config
from support.learner_scenarios import GROUP_ESTIMATORS, numbers, take_step
from support.learner_variants import GROUPS, NO_KL

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]


# The loss `distill` reads a teacher's tokens: tests/numerics/test_distillation_step.py.
POLICY_LOSSES = sorted(section_types(ActorConfig.model_fields["policy_loss"]).keys() - {"custom", "distill"})
OVERLONG = {"algorithm": {**GROUPS, "overlong": {"enable": True, "buffer_length": 4, "factor": 0.5}}}


class TestOverlong:
    def test_scores_by_hand(self) -> None:
        # 8 tokens are allowed: the penalty begins after 4 and is a half at 8.
        rows, _ = make_batch(step=1, seed=1)
        by_hand = {length: -0.5 * max(0, length - 4) / 4 for length in range(1, 9)}
        scores, greedy, metrics = estimating.overlong_scores(run_config(Path("m"), **OVERLONG), rows)
        assert greedy == [None] * len(rows)
        penalties = [by_hand[row.num_response_tokens] for row in rows]
        assert scores == pytest.approx([row.reward + p for row, p in zip(rows, penalties, strict=True)])
        assert metrics["overlong/penalty_mean"] == pytest.approx(sum(penalties) / len(rows))
        assert metrics["overlong/share"] == sum(row.num_response_tokens > 4 for row in rows) / len(rows)
        assert 0.2 < metrics["overlong/share"] < 0.8

    def test_tokens_of_tools_do_not_count(self) -> None:
        rows, _ = make_batch(step=1, seed=1)
        longer = [replace(row, num_response_tokens=8) for row in rows]
        config = run_config(Path("m"), **OVERLONG)
        assert estimating.overlong_scores(config, longer) == estimating.overlong_scores(config, rows)

    def test_the_step_is_that_of_the_shaped_scores(
        self, model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = run_config(model, **OVERLONG)
        shaped = numbers(take_step(Learner.build(config, ranks), 1))
        rows, _ = make_batch(step=1, seed=1)
        shaping_of_step = estimating.overlong_scores(config, rows)
        scores, _, _ = shaping_of_step
        monkeypatch.setattr(estimating, "overlong_scores", lambda config, rows: shaping_of_step)
        plain = run_config(model, algorithm=GROUPS)
        assert numbers(take_step(Learner.build(plain, ranks), 1)) == shaped
        assert shaped["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))

    def test_a_greedy_answer_has_the_penalty_of_its_own_length(self, model: Path, ranks: Ranks) -> None:
        rows, _ = make_batch(step=1, seed=1, with_greedy=True)
        config = run_config(model, **OVERLONG)
        scores, greedy, metrics = estimating.overlong_scores(config, rows)
        # Prompt i has a greedy answer of 8 - i tokens, worth i / 4.
        by_hand = [-0.5, 0.25 - 0.375, 0.5 - 0.25, 0.75 - 0.125, 1.0, 1.25, 1.5, 1.75]
        assert greedy == [by_hand[row.trajectory_id.prompt_id] for row in rows]
        without = estimating.overlong_scores(config, make_batch(step=1, seed=1)[0])
        assert (scores, metrics) == (without[0], without[2])

    def test_answers_as_long_and_good_as_the_greedy_one_teach_remax_nothing(
        self, model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows, blobs = make_batch(step=1, seed=1)
        assert sum(row.num_sampled_tokens > 4 for row in rows) > 8
        alike = tuple(
            replace(row, reward=0.75, greedy_score=0.75, num_greedy_tokens=row.num_sampled_tokens)
            for row in rows
        )
        algorithm = OVERLONG["algorithm"] | {"adv_estimator": "remax"}
        monkeypatch.setattr(scenarios, "make_batch", lambda **_: (alike, blobs))
        config = run_config(model, algorithm=algorithm)
        metrics = numbers(take_step(Learner.build(config, ranks), 1))
        assert metrics["actor/grad_norm"] == 0.0
        assert metrics["overlong/penalty_mean"] < -0.1


class TestPlacedRewards:
    def test_what_is_placed_on_a_token_is_no_part_of_later_returns(
        self, model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With gamma 1 a token's return is what comes from it on; the sequences' scores stay the same."""
        rows, blobs = make_batch(step=1, seed=1)
        placed = tuple(replace(row, token_rewards=((0, row.reward),)) for row in rows)
        config = run_config(model, algorithm={**NO_KL, "adv_estimator": "gae", "gamma": 1.0, "lam": 1.0})
        seen = {}
        for name, chosen in (("last", rows), ("first", placed)):
            monkeypatch.setattr(scenarios, "make_batch", lambda *, chosen=chosen, **_: (chosen, blobs))
            seen[name] = numbers(take_step(Learner.build(config, ranks), 1))
        total, num_tokens = sum(row.reward for row in rows), sum(row.num_response_tokens for row in rows)
        on_all = sum(row.reward * row.num_response_tokens for row in rows)
        assert seen["last"]["critic/returns/mean"] == pytest.approx(on_all / num_tokens, rel=1e-4)
        assert seen["first"]["critic/returns/mean"] == pytest.approx(total / num_tokens, rel=1e-4)
        for same in ("critic/score/mean", "critic/rewards/mean"):
            assert seen["first"][same] == pytest.approx(seen["last"][same])

    @pytest.mark.parametrize("name", GROUP_ESTIMATORS)
    def test_groups_of_equal_scores_have_no_advantage_wherever_the_parts_lie(
        self, model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """Token rewards add up to a score but for their rounding, which a std of 0 + 1e-6 would magnify."""
        rows, blobs = make_batch(step=1, seed=1)
        parts = np.random.default_rng(0)
        placed = tuple(
            replace(
                row,
                reward=1.0,
                token_rewards=tuple(
                    (place, float(parts.normal())) for place in range(row.num_response_tokens)
                ),
            )
            for row in rows
        )
        monkeypatch.setattr(scenarios, "make_batch", lambda **_: (placed, blobs))
        config = run_config(model, algorithm={**NO_KL, "adv_estimator": name})
        metrics = numbers(take_step(Learner.build(config, ranks), 1))
        assert metrics["actor/grad_norm"] == 0.0
        assert metrics["critic/advantages/mean"] == 0.0

    def test_the_scores_of_groups_have_the_penalty(
        self, model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the second step, as in the first the policy is the reference."""
        seen: list[SampleRows] = []
        honest = Algorithm.advantages

        def recording(self: Algorithm, rows: SampleRows) -> Any:
            seen.append(rows)
            return honest(self, rows)

        monkeypatch.setattr(Algorithm, "advantages", recording)
        kl = {"use_kl_in_reward": True, "kl_ctrl": {"type": "fixed", "kl_coef": 10.0}}
        learner = Learner.build(run_config(model, algorithm={**kl, "adv_estimator": "grpo"}), ranks)
        for step in (1, 2):
            take_step(learner, step)
        inputs = seen[-1]
        sums = torch.where(inputs.mask, inputs.token_rewards, 0.0).sum(-1)
        torch.testing.assert_close(inputs.scores, sums)
        rewards = {round(row.reward, 4) for row in make_batch(step=2, seed=1)[0]}
        kept = [round(score, 4) in rewards for score in inputs.scores.tolist()]
        assert sum(kept) < len(kept) / 2

    def test_a_group_estimator_takes_no_notice_of_where_the_parts_lie(
        self, model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows, blobs = make_batch(step=1, seed=1)
        placed = tuple(replace(row, token_rewards=((0, 0.1), (0, 1 / 3))) for row in rows)
        kl = {"use_kl_in_reward": True, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}
        config = run_config(model, algorithm={**kl, "adv_estimator": "grpo"})
        seen = []
        for chosen in (rows, placed):
            monkeypatch.setattr(scenarios, "make_batch", lambda *, chosen=chosen, **_: (chosen, blobs))
            seen.append(numbers(take_step(Learner.build(config, ranks), 1)))
        for same in ("actor/grad_norm", "actor/pg_loss", "critic/advantages/mean"):
            assert seen[0][same] == seen[1][same], same


class TestValuePreTraining:
    def test_the_critic_aims_at_plain_returns_and_nothing_else_moves(self, model: Path, ranks: Ranks) -> None:
        def two_steps(**algorithm: Any) -> list[dict[str, float]]:
            critic = {"warmup": 1, "warmup_lam": algorithm.pop("warmup_lam", None), "optim": {"lr": 1e-3}}
            learner = Learner.build(run_config(model, algorithm=algorithm, critic=critic), ranks)
            return [numbers(take_step(learner, step)) for step in (1, 2)]

        kl = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "horizon": 1000}}
        plain = two_steps(adv_estimator="gae", lam=1.0, **kl)
        short = two_steps(adv_estimator="gae", lam=0.3, **kl)
        pre_trained = two_steps(adv_estimator="gae", lam=0.3, warmup_lam=1.0, **kl)
        for name in ("critic/returns/mean", "critic/vf_loss", "critic/grad_norm"):
            assert pre_trained[0][name] == plain[0][name], name
            assert abs(short[0][name] - plain[0][name]) > 1e-4, name
        # Afterwards the targets are those of lam, on a critic that has learned as under lam 1.
        assert pre_trained[1]["critic/values/mean"] == plain[1]["critic/values/mean"]
        assert abs(pre_trained[1]["critic/returns/mean"] - plain[1]["critic/returns/mean"]) > 1e-4
        # The coefficient of the KL stays while the policy does.
        assert [step["algorithm/kl_coef"] for step in pre_trained] == [0.05, 0.05]

    def test_vapo_does_so_by_itself(self, model: Path, ranks: Ranks) -> None:
        critic = {"warmup": 1, "optim": {"lr": 1e-3}}
        metrics = []
        for algorithm in ({"adv_estimator": "vapo"}, {"adv_estimator": "gae", "lam": 1.0}):
            config = run_config(model, algorithm={**NO_KL, **algorithm}, critic=critic)
            metrics.append(numbers(take_step(Learner.build(config, ranks), 1)))
        for name in ("critic/returns/mean", "critic/vf_loss", "critic/grad_norm"):
            assert metrics[0][name] == metrics[1][name], name
        assert "actor/pg_loss" not in metrics[0]


def packed_rows(count: int = 6) -> list[PackedRow]:
    """Rows of a made-up batch, with a hole in each mask that is long enough for one."""
    rows, blobs = make_batch(step=1, seed=4, num_prompts=count // 2, num_samples=2)
    packed = []
    for index, row in enumerate(rows):
        trajectory = decode_trajectory(blobs[row.blob_key])
        mask = trajectory.response_mask.copy()
        mask[2:3] = 0
        packed.append(
            PackedRow(
                index=index,
                prompt_token_ids=trajectory.prompt_token_ids,
                response_token_ids=trajectory.response_token_ids,
                response_mask=mask,
                response_log_probs=trajectory.response_log_probs,
            )
        )
    return packed


def policy_loss(config: RunConfig, network: PolicyNetwork) -> PolicyLoss:
    return PolicyLoss(config, network, Adjustments(), algorithm_of(config).loss)


def made_up(batch: MicroBatch, counts: torch.Tensor | None = None) -> TrainingBatch:
    """Old log-probs near the model's, the rest from a generator; rows are repeated by `counts`."""
    draw = torch.Generator().manual_seed(5)
    shape = batch.mask.shape

    def table(scale: float, mean: float = 0.0) -> torch.Tensor:
        return mean + scale * torch.randn(shape, generator=draw)

    scored = ScoredBatch(
        batch=batch,
        log_probs={
            "old": table(0.7, -4.0),
            "reference": table(0.7, -4.0),
            "rollout": batch.rollout_log_probs,
        },
        values=table(0.5),
    )
    part = TrainingBatch(
        batch=scored.batch,
        log_probs=scored.log_probs,
        values=scored.values,
        scores=table(1.0)[:, 0],
        group_ids=torch.arange(len(batch.mask)),
        advantages=table(1.0),
        returns=table(1.0),
        weights=table(0.1, 1.0),
    )
    return estimating.drawn(part, counts)


class TestResampling:
    COUNTS = torch.tensor([2, 0, 1, 3, 0, 1])

    def both(self, counts: torch.Tensor = COUNTS) -> tuple[TrainingBatch, TrainingBatch]:
        """A micro-batch whose tables repeat rows, and one whose tokens do."""
        rows = packed_rows()
        micro_batch = pack(rows, torch.device("cpu"))
        part = made_up(micro_batch)
        take = torch.arange(6).repeat_interleave(counts)
        tokens = pack([rows[index] for index in take.tolist()], torch.device("cpu"))
        width = tokens.mask.shape[1]

        def pick(table: torch.Tensor | None) -> torch.Tensor:
            assert table is not None
            return table[take, :width]

        really = TrainingBatch(
            batch=tokens,
            log_probs={name: pick(table) for name, table in part.log_probs.items()},
            values=pick(part.values),
            scores=part.scores[take],
            group_ids=part.group_ids[take],
            advantages=pick(part.advantages),
            returns=pick(part.returns),
            weights=pick(part.weights),
        )
        return made_up(micro_batch, counts), really

    def outcome(self, part: TrainingBatch, network: Any, loss: Any) -> tuple[list[float], list[torch.Tensor]]:
        mask = part.batch.mask
        counts = Denominators(num_tokens=int(mask.sum()), num_sequences=int(mask.any(-1).sum()))
        total, sums = loss(part, counts)
        total.backward()
        grads = [p.grad.full_tensor().clone() for p in network.parameters() if p.grad is not None]
        network.zero_grad(set_to_none=True)
        return sums.tolist(), grads

    def assert_equal(self, outcomes: Any) -> None:
        (sums, grads), (other_sums, other_grads) = outcomes
        assert sums == pytest.approx(other_sums, rel=1e-5, abs=1e-6)
        assert len(grads) == len(other_grads) > 10
        for grad, other in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)
        assert max(float(grad.abs().max()) for grad in grads) > 1e-3

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", ["ppo_clip", "gspo", "geo_mean", "clip_cov"])
    def test_repeated_tables_are_repeated_rows(self, model: Path, ranks: Ranks, mode: str, name: str) -> None:
        own = {"cov_fraction": 0.2, "cov_low": 0.0} if name == "clip_cov" else {}
        actor = {"policy_loss": {"type": name, **own}, "loss_agg_mode": mode}
        actor |= {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}
        actor |= {"clip_ratio": 0.02} if name != "geo_mean" else {"clip_ratio": 0.4}
        config = run_config(model, actor=actor, algorithm=GROUPS)
        learner = Learner.build(config, ranks)
        network = learner.actor.network
        loss = policy_loss(config, network)
        outcomes = []
        for part in self.both():
            mini = MiniBatch(parts=(part,), denominators=Denominators(num_tokens=1, num_sequences=1))
            (selected,) = select_tokens(mini, config.actor, ranks)
            outcomes.append(self.outcome(replace(part, selected=selected), network, loss))
        self.assert_equal(outcomes)

    def test_the_critics_too(self, model: Path, ranks: Ranks) -> None:
        config = run_config(model, critic={"vf_clip_param": 0.1})
        critic = Learner.build(config, ranks).critic
        assert critic is not None
        loss = ValueLoss(config, critic.network)
        self.assert_equal([self.outcome(part, critic.network, loss) for part in self.both()])

    @settings(max_examples=40, deadline=None)
    @given(
        counts=st.lists(st.integers(0, 4), min_size=6, max_size=6).filter(any),
        mode=st.sampled_from(MODES),
        name=st.sampled_from(POLICY_LOSSES),
        cov_fraction=st.sampled_from([0.0, 0.1, 0.5]),
    )
    def test_whatever_is_drawn(self, counts: list[int], mode: str, name: str, cov_fraction: float) -> None:
        """With a table of log-probs by token for a network; every loss, in float64 wherever it keeps it."""
        by_token = torch.linspace(-6, -2, 48, dtype=torch.float64, requires_grad=True)

        def network(batch: MicroBatch, *_: Any) -> TokenScores:
            flat = by_token[batch.targets]
            return TokenScores(flat, flat.square())

        network.lm = torch.nn.Module()  # without experts
        network.replaying = ()
        clip = {"gspo": 0.02, "geo_mean": 0.4}.get(name, 0.2)
        own = {
            "clip_cov": {"cov_fraction": cov_fraction, "cov_low": 0.0},
            "kl_cov": {"cov_fraction": cov_fraction},
        }
        actor = {
            "policy_loss": {"type": name, **own.get(name, {})},
            "loss_agg_mode": mode,
            "clip_ratio": clip,
        }
        actor |= {"entropy_coeff": 0.1, "use_kl_loss": True}
        config = run_config(Path("m"), actor=actor, algorithm=GROUPS)
        loss = policy_loss(config, network)
        outcomes = []
        for part in self.both(torch.tensor(counts)):
            mask = part.batch.mask
            totals = Denominators(num_tokens=int(mask.sum()), num_sequences=int(mask.any(-1).sum()))
            mini = MiniBatch(parts=(part,), denominators=totals)
            (selected,) = select_tokens(mini, config.actor, self.ranks())
            total, sums = loss(replace(part, selected=selected), totals)
            (gradient,) = torch.autograd.grad(total, by_token)
            outcomes.append((sums, gradient))
        torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=1e-6, atol=1e-8)

    @pytest.mark.parametrize(
        ("name", "own"),
        [(name, "seq-mean-token-mean") for name in ("gspo", "geo_mean", "sapo")]
        + [(name, "token-mean") for name in ("ppo_clip", "cispo", "kl_cov", "clip_cov", "gpg")],
    )
    def test_without_a_mode_the_gradient_is_that_of_the_losss_own(self, name: str, own: str) -> None:
        """verl hard-codes the mean over sequences in gspo, geo_mean and sapo."""
        by_token = torch.linspace(-6, -2, 48, dtype=torch.float64, requires_grad=True)

        def network(batch: MicroBatch, *_: Any) -> TokenScores:
            flat = by_token[batch.targets]
            return TokenScores(flat, flat.square())

        network.lm = torch.nn.Module()
        network.replaying = ()
        (part, _) = self.both(torch.ones(6, dtype=torch.int64))
        mask = part.batch.mask
        counted = Denominators(num_tokens=int(mask.sum()), num_sequences=int(mask.any(-1).sum()))
        actual = Denominators(num_tokens=2 * counted.num_tokens, num_sequences=3 * counted.num_sequences)

        def gradient_and_factor(mode: str | None) -> tuple[torch.Tensor, float]:
            clip = {"gspo": 0.02, "geo_mean": 0.4}.get(name, 0.2)
            actor = {"policy_loss": name, "loss_agg_mode": mode, "clip_ratio": clip}
            loss = policy_loss(run_config(Path("m"), actor=actor, algorithm=GROUPS), network)
            selected = torch.zeros_like(mask) if "cov" in name else None
            (gradient,) = torch.autograd.grad(loss(replace(part, selected=selected), counted)[0], by_token)
            return gradient, loss.scaling(counted, actual).gradient

        (given, factor), (expected, same_factor) = gradient_and_factor(None), gradient_and_factor(own)
        assert torch.equal(given, expected)
        assert factor == same_factor == {"token-mean": 1 / 2, "seq-mean-token-mean": 1 / 3}[own]
        (other,) = {"token-mean", "seq-mean-token-mean"} - {own}
        assert float((given - gradient_and_factor(other)[0]).norm() / given.norm()) > 0.05

    @pytest.mark.parametrize("above", [-1.0, 0.1, 99.0])
    def test_the_positive_example_loss_by_hand(self, above: float) -> None:
        """mu / N times the sum of -log pi over the N tokens of right responses, beside the policy's loss."""
        by_token = torch.linspace(-6, -2, 48, dtype=torch.float64, requires_grad=True)

        def network(batch: MicroBatch, *_: Any) -> TokenScores:
            return TokenScores(by_token[batch.targets], torch.zeros(len(batch.targets), dtype=torch.float64))

        network.lm = torch.nn.Module()
        network.replaying = ()
        (part, _) = self.both()
        batch, outcomes = part.batch, []
        num_right = sum(
            int(mask.sum()) for mask, score in zip(batch.mask, part.scores, strict=True) if score > above
        )
        counts = Denominators(num_tokens=50, num_sequences=6, num_positive_tokens=num_right)
        for coef in (0.0, 0.3):
            config = run_config(
                Path("m"), actor={"positive_loss_coef": coef, "positive_above": above}, algorithm=GROUPS
            )
            loss = policy_loss(config, network)
            total, sums = loss(part, counts)
            (gradient,) = torch.autograd.grad(total, by_token)
            outcomes.append((dict(zip(loss.names, sums.tolist(), strict=True)), gradient))
        expected, gradient = 0.0, torch.zeros(48, dtype=torch.float64)
        by_index = {row.index: row for row in batch.sources}
        for place, source in enumerate(by_index[index] for index in batch.rows):
            if float(part.scores[place]) > above:
                for token in source.response_token_ids[source.response_mask.astype(bool)].tolist():
                    expected -= float(by_token.detach()[token]) / num_right
                    gradient[token] -= 0.3 / num_right
        (without, gradient_without), (metrics, gradient_with) = outcomes
        assert "positive_loss" not in without
        assert metrics["positive_loss"] == pytest.approx(expected, rel=1e-6)
        assert metrics["loss"] == pytest.approx(without["loss"] + 0.3 * expected, rel=1e-6)
        torch.testing.assert_close(gradient_with, gradient_without + gradient, rtol=1e-6, atol=1e-9)
        assert (num_right > 0) == (above < 99)

    @staticmethod
    def ranks() -> Any:
        """A group of one, for what adds up over ranks."""
        alone = SimpleNamespace(all_sum=lambda values: values, all_gather=lambda values: values)
        return SimpleNamespace(data=alone)

    def test_the_draw_is_a_function_of_seed_and_step(self) -> None:
        scores, groups = [float(i % 5) for i in range(40)], [i // 4 for i in range(40)]

        def drawn(step: int, seed: int = 3, **resampling: Any) -> tuple[list[int], dict[str, float]]:
            config = run_config(
                Path("m"),
                algorithm={**GROUPS, "resample": {"method": "pow", **resampling}},
                trainer={"seed": seed},
            )
            counts, metrics = estimating.draw_rows(config, scores=scores, group_ids=groups, step=step)
            batch = pack([replace(packed_rows()[0], index=i) for i in range(40)], torch.device("cpu"))
            return list(made_up(batch, counts).batch.rows), metrics

        rows, metrics = drawn(1)
        assert rows == drawn(1)[0]
        assert len(rows) == 40
        assert all(scores[row] > 0 for row in rows)
        assert metrics["resample/distinct_share"] == len(set(rows)) / 40
        assert metrics["resample/largest_count"] == max(rows.count(row) for row in rows)
        assert metrics["resample/score_mean"] == pytest.approx(sum(scores[row] for row in rows) / 40)
        assert rows != drawn(2)[0]
        assert rows != drawn(1, seed=4)[0]
        extremes = {
            row
            for row in range(40)
            if scores[row]
            in (
                max(scores[row // 4 * 4 : row // 4 * 4 + 4]),
                min(scores[row // 4 * 4 : row // 4 * 4 + 4]),
            )
        }
        assert set(drawn(1, method="max_min")[0]) <= extremes
        assert drawn(1, method="none")[1] == {}

    def test_a_mini_batch_without_a_row_is_left_out(self, ranks: Ranks) -> None:
        rows = packed_rows(8)  # 4 prompts of 2 samples
        lengths = [
            RowLength(
                prompt_id=i // 2,
                num_prompt_tokens=len(row.prompt_token_ids),
                num_response_tokens=len(row.response_token_ids),
            )
            for i, row in enumerate(rows)
        ]
        arithmetic = Arithmetic(per_token=1, per_response_token=0, per_pair=0)
        make = partial(plan_chunk, num_data_ranks=1, token_budget=4096, arithmetic=arithmetic)
        plan = plan_batch(lengths, prompts_per_chunk=2, make=make)
        config: RunConfig = run_config(
            Path("m"), data={"train_batch_size": 4}, actor={"ppo_mini_batch_size": 2}
        )
        batches = [
            pack([rows[i] for i in indices], ranks.device)
            for chunk in plan.chunks
            for indices in chunk.micro_batches[0]
        ]
        counts = torch.tensor([3, 0, 2, 3, 0, 0, 0, 0])
        minis = cut_mini_batches(config, plan, [made_up(batch, counts) for batch in batches], ranks)
        assert [len(group) for group in minis.values()] == [1, 1]
        totals = minis["actor"][0].denominators
        assert totals.num_sequences == 8
        tokens = [int(row.response_mask.sum()) for row in rows]
        assert totals.num_tokens == 3 * tokens[0] + 2 * tokens[2] + 3 * tokens[3]
        plain = cut_mini_batches(config, plan, [made_up(batch) for batch in batches], ranks)["actor"]
        assert [mini.denominators.num_sequences for mini in plain] == [4, 4]


class TestRolloutCorrection:
    def test_weights_and_metrics_by_hand(
        self, model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[TrainingBatch] = []
        make = estimating.drawn

        def watch(*arguments: Any) -> TrainingBatch:
            seen.append(make(*arguments))
            return seen[-1]

        monkeypatch.setattr(estimating, "drawn", watch)
        config = run_config(
            model,
            algorithm={**GROUPS, "rollout_correction": {"method": "tis", "cap": 1.5}},
            actor={"loss_agg_mode": "token-mean", "ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 48},
        )
        metrics = numbers(take_step(Learner.build(config, ranks), 1))
        weights, losses = [], []
        for part in seen:
            for place in part.batch.mask.nonzero().tolist():
                row, column = place
                difference = part.log_probs["old"][row, column] - part.batch.rollout_log_probs[row, column]
                weights.append(math.exp(difference.item()))
                # On policy the loss of a token is minus its advantage.
                losses.append(-part.advantages[row, column].item() * min(weights[-1], 1.5))
        assert len(seen) > 2
        assert metrics["actor/pg_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4, abs=1e-6)
        share = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
        assert metrics["rollout/effective_sample_size"] == pytest.approx(share, rel=1e-5)
        assert metrics["rollout/largest_weight"] == pytest.approx(max(weights), rel=1e-5)
        assert metrics["rollout/corrected_share"] == sum(w > 1.5 for w in weights) / len(weights)
        assert 0.1 < metrics["rollout/corrected_share"] < 0.9

    def test_with_a_bound_on_staleness_sequences_are_masked_unless_the_file_says_otherwise(
        self, model: Path, ranks: Ranks
    ) -> None:
        """The least kept weight is high enough to drop sequences."""

        def pg_loss(correction: dict[str, Any], **sections: Any) -> float:
            algorithm = {**GROUPS, "rollout_correction": {"low": 0.9, "high": 1.1, **correction}}
            learner = Learner.build(run_config(model, algorithm=algorithm, **sections), ranks)
            return float(numbers(take_step(learner, 1))["actor/pg_loss"])

        bound = {"mode": "bounded", "max_staleness": 1}
        masked = pg_loss({"method": "sequence_mask"})
        assert pg_loss({}, barrier=bound) == masked
        assert pg_loss({"method": "icepop"}, barrier=bound) != masked
        assert pg_loss({}) not in (masked, pg_loss({"method": "icepop"}))

    def test_without_a_correction_the_metrics_are_there_and_the_losses_as_ever(
        self, model: Path, ranks: Ranks
    ) -> None:
        plain = numbers(take_step(Learner.build(run_config(model, algorithm=GROUPS), ranks), 1))
        wide = {"method": "icepop", "low": 0.0, "high": 1e9}
        unclipped = {"method": "sequence_mask", "low": 0.0, "high": 1e9}
        raw, masked = (
            numbers(
                take_step(
                    Learner.build(run_config(model, algorithm={**GROUPS, "rollout_correction": one}), ranks),
                    1,
                )
            )
            for one in (wide, unclipped)
        )
        # A mask that keeps every sequence is no correction at all.
        assert masked["actor/pg_loss"] == plain["actor/pg_loss"]
        assert masked["rollout/corrected_share"] == 0
        # Here they are the sequences' weights, there the tokens'.
        assert masked["rollout/largest_weight"] != plain["rollout/largest_weight"]
        assert abs(raw["actor/pg_loss"] - plain["actor/pg_loss"]) > 1e-3
        assert raw["rollout/largest_weight"] == plain["rollout/largest_weight"] > 2
        assert raw["rollout/effective_sample_size"] == plain["rollout/effective_sample_size"] < 0.9
