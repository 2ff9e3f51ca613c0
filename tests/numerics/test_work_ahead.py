"""Work ahead of the barrier: the numbers of a step do not depend on how much of it was done ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.guard import Adjustments
from paceline.core.training import BatchRow, ChunkOrder, TrainOrder, TrainResult
from paceline.learner.batch.blobs import fetch_rows
from paceline.learner.batch.planning.plan import Chunk
from paceline.learner.batch.types import PackedRow
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.flops import arithmetic_of
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.train.scoring import lengths
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.state.shared_prompts import SharedPrompts
from paceline.learner.train.step import train_step
from paceline.learner.train.updating.losses import PolicyLoss
from paceline.learner.train.work_ahead import work_ahead
from paceline.wire import blob_digest, decode_trajectory, encode_trajectory
from support.learner_fakes import POLICY, DictBlobs, make_batch, run_config
from support.learner_scenarios import numbers
from support.more import more

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

SAMPLES, UNCHANGED = 4, Adjustments()
GRPO = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}
Chunks = Sequence[tuple[int, bool]]
"""Chunks to work on ahead, in this order: the number, and whether with the gradient."""

READS_SAMPLES = """
from paceline.algorithms.policy_losses import LossOutputs
from paceline.algorithms.statistics import masked_mean


def reads(inputs):
    weights = inputs.scores + inputs.group_ids / 7
    if inputs.values is not None:
        raise ValueError("there is no critic")
    loss = -weights[:, None] * (inputs.log_probs - inputs.old_log_probs).exp()
    group = masked_mean(inputs.group_ids[:, None].expand_as(inputs.mask), inputs.mask)
    return LossOutputs(loss, {"group": group})
"""
"""A policy loss whose gradient depends on scores and group ids."""

NOTHING: Chunks = ()
SOME: Chunks = [(0, True), (3, False)]
IN_ANY_ORDER: Chunks = [(7, False), (1, False), (0, True), (4, False), (1, True), (1, True), (2, True)]
EVERYTHING: Chunks = [*((number, True) for number in range(4)), *((number, False) for number in range(4, 8))]


class Step:
    """A step of a made-up batch, of which parts may be done ahead."""

    def __init__(self, learner: Learner, step: int, **batch: Any) -> None:
        self.learner, self.step = learner, step
        self.rows, blobs = make_batch(step=step, seed=1, **batch)
        self.blobs = DictBlobs(blobs)
        self.fetched: list[int] = []

    def fetch(self, rows: dict[int, BatchRow]) -> Callable[[Sequence[int]], dict[int, PackedRow]]:
        def fetch(wanted: Sequence[int]) -> dict[int, PackedRow]:
            self.fetched += wanted
            vocab_size = self.learner.vocab_size
            return fetch_rows(self.blobs, rows, wanted, policy=POLICY, vocab_size=vocab_size)

        return fetch

    def ahead(self, chunks: Chunks, adjustments: Adjustments = UNCHANGED) -> Step:
        width = self.learner.config.prompts_per_chunk * SAMPLES
        for number, with_gradient in chunks:
            first = number * width
            rows = self.rows[first : first + width]
            order = ChunkOrder(
                step=self.step,
                policy=POLICY,
                first_row=first,
                rows=rows,
                with_gradient=with_gradient,
                adjustments=adjustments,
            )
            work_ahead(self.learner, order, self.fetch(dict(enumerate(rows, first))))
        return self

    def train(
        self, rows: Iterable[BatchRow] | None = None, adjustments: Adjustments = UNCHANGED
    ) -> TrainResult:
        rows = self.rows if rows is None else tuple(rows)
        order = TrainOrder(step=self.step, policy=POLICY, rows=rows, adjustments=adjustments)
        return train_step(self.learner, order, self.fetch(dict(enumerate(rows))))


def build(folder: Path, ranks: Ranks, mode: str = "gradients", /, **sections: Any) -> Learner:
    """GRPO with a reference, a chunk per prompt, two mini-batches of four."""
    actor = {"ppo_mini_batch_size": 4, "use_kl_loss": True} | sections.pop("actor", {})
    barrier = {"work_ahead": mode} | ({} if mode == "off" else {"prompts_per_chunk": 1})
    barrier |= sections.pop("barrier", {})
    config = run_config(
        folder, algorithm=GRPO | sections.pop("algorithm", {}), actor=actor, barrier=barrier, **sections
    )
    return Learner.build(config, ranks)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    as_fsdp(learner.actor.network).reshard()
    return {
        name: parameter.full_tensor().clone() for name, parameter in hugging_face_names(learner.actor.network)
    }


def of_step(result: TrainResult) -> dict[str, float]:
    """The numbers that must not depend on how much was done ahead."""
    return {name: value for name, value in numbers(result).items() if not name.startswith("ahead/")}


def outcome(learner: Learner, result: TrainResult) -> tuple[dict[str, float], dict[str, list[Any]]]:
    return of_step(result), {name: weight.tolist() for name, weight in weights(learner).items()}


def steps_of(learner: Learner, *ahead: Chunks, **batch: Any) -> list[Any]:
    """A step for each of these, which are worked on ahead."""
    return [
        outcome(learner, Step(learner, step, **batch).ahead(chunks).train())
        for step, chunks in enumerate(ahead, 1)
    ]


@pytest.fixture(scope="module")
def plain(model: Path, ranks: Ranks) -> list[Any]:
    """Two steps of `build`'s run with nothing done ahead."""
    return steps_of(build(model, ranks), NOTHING, NOTHING)


@pytest.mark.parametrize("chunks", [IN_ANY_ORDER, *more(SOME, EVERYTHING)])
def test_the_same_bits_however_much_was_done_ahead(
    model: Path, ranks: Ranks, plain: list[Any], chunks: Chunks
) -> None:
    assert steps_of(build(model, ranks), chunks, chunks) == plain


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"actor": {"memory": {"accumulate": False}}}, id="reduced per micro-batch"),
        pytest.param(
            {"actor": {"memory": {"accumulate": True, "keep_gathered": True}}},
            id="gathered",
            marks=pytest.mark.more,
        ),
        pytest.param(
            {"actor": {"ppo_epochs": 2, "ratio_audit_freq": 1}}, id="epochs, audit", marks=pytest.mark.more
        ),
        pytest.param({"actor": {"shared_prompts": "on", "ratio_audit_freq": 50}}, id="shared prompts"),
        pytest.param(
            {
                "actor": {"loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.01},
                "algorithm": {"overlong": {"enable": True, "buffer_length": 4}},
            },
            id="sequence mean, overlong",
            marks=pytest.mark.more,
        ),
        pytest.param({"model": {"lora": {"rank": 2, "alpha": 4}}}, id="adapters"),
    ],
)
def test_the_same_bits_in_every_kind_of_run(model: Path, ranks: Ranks, sections: dict[str, Any]) -> None:
    """The second step shows what the first has left behind."""
    if "model" in sections:
        sections = {"model": {"path": str(model), **sections["model"]}}
    expected = steps_of(build(model, ranks, **sections), NOTHING, NOTHING)
    assert steps_of(build(model, ranks, **sections), EVERYTHING, IN_ANY_ORDER) == expected


@pytest.mark.parametrize("estimator", ["rloo", "remax", *more("dr_grpo", "opo", "pass_at_k")])
def test_every_estimator_that_compares_a_groups_samples(model: Path, ranks: Ranks, estimator: str) -> None:
    algorithm = {"adv_estimator": estimator, "overlong": {"enable": True, "buffer_length": 4}}
    greedy = {"with_greedy": estimator == "remax"}
    expected, learner = (build(model, ranks, algorithm=algorithm) for _ in range(2))
    result = Step(learner, 1, **greedy).ahead(EVERYTHING).train()
    assert outcome(learner, result) == steps_of(expected, NOTHING, **greedy)[0]
    assert result.metrics["ahead/gradient_share"] == 12 / 32


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "seq-mean-token-mean", *more("seq-mean-token-sum", "seq-mean-token-sum-norm")],
)
def test_a_gradient_with_counts_of_the_configuration_is_that_of_the_mini_batch(
    model: Path, ranks: Ranks, mode: str
) -> None:
    """Up to rounding the step is that of a run that does nothing ahead.

    With AdamW's usual epsilon the first step is as long for gradients that are nothing but rounding.
    """
    actor = {"loss_agg_mode": mode, "entropy_coeff": 0.01, "optim": {"lr": 1e-3, "eps": 1e-4}}
    learners = [build(model, ranks, "off", actor=actor), build(model, ranks, actor=actor)]
    off, ahead = (
        Step(learner, 1).ahead(chunks).train()
        for learner, chunks in zip(learners, (NOTHING, SOME), strict=True)
    )
    for name, value in numbers(off).items():
        assert ahead.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for (name, ours), theirs in zip(weights(learners[1]).items(), weights(learners[0]).values(), strict=True):
        # AdamW's first steps are lr x sign(gradient) where a gradient is as small as the rounding.
        assert float(torch.isclose(ours, theirs, atol=1e-6).float().mean()) > 0.99, name


def test_what_was_done_ahead_is_not_done_again(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    honest = PolicyLoss.__call__

    def counting(self: PolicyLoss, part: Any, *rest: Any) -> Any:
        passes.extend(part.batch.rows)
        return honest(self, part, *rest)

    monkeypatch.setattr(PolicyLoss, "__call__", counting)
    step = Step(build(model, ranks), 1).ahead(IN_ANY_ORDER)
    assert sorted(set(passes)) == list(range(12))
    assert sorted(step.fetched) == [*range(12), *range(16, 20), *range(28, 32)]
    result = step.train()
    assert sorted(step.fetched) == list(range(32))
    assert sorted(passes) == list(range(32))
    assert result.metrics["ahead/scored_share"] == 20 / 32
    assert result.metrics["ahead/gradient_share"] == 12 / 32
    assert result.metrics["timing_s/ahead"] > 0
    after = Step(step.learner, 2).train()
    assert (after.metrics["ahead/scored_share"], after.metrics["timing_s/ahead"]) == (0, 0)


def test_utilisation_counts_the_seconds_of_a_gradient_ahead(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arithmetic is that of the whole update, so the seconds must be, too."""
    monkeypatch.setattr("paceline.learner.train.step.peak_flops", lambda device: 1e9)
    step = Step(build(model, ranks), 1).ahead(EVERYTHING)
    ahead_s = step.learner.ahead.update_s
    metrics = step.train().metrics
    assert ahead_s > 0
    flops = arithmetic_of(step.learner.actor.network).of_rows(lengths(step.rows))
    assert metrics["perf/mfu"] == pytest.approx(flops / (metrics["timing_s/update_actor"] + ahead_s) / 1e9)


def test_scores_ahead_are_those_of_a_step_that_does_nothing_ahead(model: Path, ranks: Ranks) -> None:
    """A critic and a KL in the reward allow no gradient ahead; with the same chunks the bits are the same."""
    sections: dict[str, Any] = {
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "horizon": 1000},
        },
        "actor": {"use_kl_loss": False},
        "barrier": {"prompts_per_chunk": 4},
    }
    chunks = [(1, True), (0, True)]
    off = build(model, ranks, "off", **{**sections, "barrier": {}})
    scores = build(model, ranks, "scores", **sections)
    assert steps_of(scores, chunks, chunks) == steps_of(off, NOTHING, NOTHING)


def test_rows_that_are_others_in_the_end_are_computed_again(
    model: Path, ranks: Ranks, plain: list[Any]
) -> None:
    """A group is drawn again, after a recollection say: its tokens, or only its places, are others."""
    for changed in (lambda rows: (*rows[:4], *rows[8:]), lambda rows: rows[4:]):
        expected_learner, learner = build(model, ranks), build(model, ranks)
        expected = Step(expected_learner, 1)
        wanted = outcome(expected_learner, expected.train(changed(expected.rows)))
        assert outcome(learner, Step(learner, 1).ahead(EVERYTHING).train(changed(expected.rows))) == wanted
    learner = build(model, ranks)
    step = Step(learner, 1)
    drawn, step.rows = step.rows, make_batch(step=1, seed=2)[0]
    step.blobs.put(make_batch(step=1, seed=2)[1])
    step.ahead(EVERYTHING)
    step.rows = drawn
    step.blobs.put(make_batch(step=1, seed=1)[1])
    assert outcome(learner, step.train()) == plain[0]


def test_samples_that_are_drawn_again_with_other_tokens_are_computed_again(
    model: Path, ranks: Ranks, plain: list[Any]
) -> None:
    """All lengths are the same, and so are all chunks."""
    learner = build(model, ranks)
    step = Step(learner, 1)
    rows, blobs = step.rows, dict(step.blobs.blobs)
    step.rows = tuple(reversed_sample(step, row) for row in rows)
    step.ahead(EVERYTHING)
    step.rows, step.blobs = rows, DictBlobs(blobs)
    result = step.train()
    assert result.metrics["ahead/scored_share"] == 0
    assert outcome(learner, result) == plain[0]


def reversed_sample(step: Step, row: BatchRow) -> BatchRow:
    """The row with its response's tokens in the opposite order, and a first one that it did not have."""
    (blob,) = step.blobs.get([row.blob_key])
    trajectory = decode_trajectory(blob, vocab_size=step.learner.vocab_size)
    tokens = trajectory.response_token_ids[::-1].copy()
    tokens[0] = (tokens[0] + 1) % step.learner.vocab_size
    blob = encode_trajectory(replace(trajectory, response_token_ids=tokens))
    step.blobs.put({row.blob_key: blob})
    return replace(row, blob_digest=blob_digest(blob))


def test_memory_that_runs_out_behind_a_begun_gradient_has_the_whole_step_taken_again(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = {"ratio_audit_freq": 50}
    expected, learner = build(model, ranks, actor=actor), build(model, ranks, actor=actor)
    expected.version = learner.version = 1
    wanted = numbers(Step(expected, 2).train())
    step = Step(learner, 2).ahead(EVERYTHING)
    honest, fails = PolicyLoss.__call__, [True]

    def out_of_memory(self: PolicyLoss, *arguments: Any) -> Any:
        if fails:
            raise torch.OutOfMemoryError(f"CUDA out of memory: made up {fails.pop()}")
        return honest(self, *arguments)

    monkeypatch.setattr(PolicyLoss, "__call__", out_of_memory)
    result = step.train()
    assert result.metrics["guard/out_of_memory"] == 1
    for name, value in wanted.items():
        if not name.startswith("ahead/"):
            assert result.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_gradient_with_other_rewards_or_adjustments_is_dropped(model: Path, ranks: Ranks) -> None:
    """Rewards that are normalized over the batch change when it is complete."""
    other = tuple(
        replace(row, reward=row.reward * 2 + row.trajectory_id.sample_index)
        for row in make_batch(step=1, seed=1)[0]
    )
    for rows, adjustments in ((other, Adjustments()), (None, Adjustments(clip_scale=0.5, kl_scale=0.5))):
        expected, learner = build(model, ranks), build(model, ranks)
        wanted = outcome(expected, Step(expected, 1).train(rows, adjustments))
        result = Step(learner, 1).ahead(EVERYTHING).train(rows, adjustments)
        assert outcome(learner, result) == wanted
        assert result.metrics["ahead/scored_share"] == 1
        assert result.metrics["ahead/gradient_share"] == 0


def test_a_loss_of_ones_own_reads_ahead_what_it_reads_in_the_step(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Group ids, scores and values, none here, are read; other scores may leave the same advantages."""
    (tmp_path / "own.py").write_text(READS_SAMPLES)
    actor = {"policy_loss": {"type": "custom", "path": f"{tmp_path / 'own.py'}:reads"}}
    expected, learner = (build(model, ranks, actor=actor) for _ in range(2))
    rows = [replace(row, reward=float(row.trajectory_id.sample_index)) for row in Step(learner, 1).rows]
    moved = [replace(row, reward=row.reward + 8) for row in rows]
    for step, final, share in ((1, rows, 12 / 32), (2, moved, 0)):
        ahead, plain = Step(learner, step), Step(expected, step)
        ahead.rows = tuple(replace(row, reward=own.reward) for row, own in zip(ahead.rows, rows, strict=True))
        final = [replace(row, reward=own.reward) for row, own in zip(ahead.rows, final, strict=True)]
        result = ahead.ahead(EVERYTHING).train(final)
        assert result.metrics["ahead/gradient_share"] == share
        assert outcome(learner, result) == outcome(expected, plain.train(final))


def test_a_batch_that_the_guard_refuses_leaves_no_gradient_behind(model: Path, ranks: Ranks) -> None:
    guard = {"reward_constant": {"skip": 0.5}}
    equal = [replace(row, reward=1.0) for row in make_batch(step=1, seed=1)[0]]
    # Equal rewards leave no gradient but that of the entropy.
    learners = [build(model, ranks, guard=guard, actor={"entropy_coeff": 0.1}) for _ in range(2)]
    before = weights(learners[0])
    for learner, chunks in zip(learners, (NOTHING, EVERYTHING), strict=True):
        step = Step(learner, 1)
        step.rows = tuple(equal)
        result = step.ahead(chunks).train()
        assert result.metrics["actor/skipped_updates"] == 2
    assert all(torch.equal(weight, before[name]) for name, weight in weights(learners[1]).items())
    outcomes = [outcome(learner, Step(learner, 2).train()) for learner in learners]
    assert outcomes[0] == outcomes[1]


def test_a_gradient_that_runs_out_of_memory_is_taken_in_the_step(
    model: Path, ranks: Ranks, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build(model, ranks)
    honest, fails = PolicyLoss.__call__, [False, True]

    def out_of_memory(self: PolicyLoss, *arguments: Any) -> Any:
        result = honest(self, *arguments)
        if fails and fails.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory: made up")
        return result

    monkeypatch.setattr(PolicyLoss, "__call__", out_of_memory)
    result = Step(learner, 1).ahead(EVERYTHING).train()
    assert fails == []
    assert result.metrics["ahead/gradient_share"] == 0
    first = outcome(learner, result)
    fails += [False, True]
    step = Step(learner, 2).ahead(EVERYTHING)
    assert fails == []
    # The second chunk's pass was thrown away, and so are its log-probs; the other mini-batch was scored.
    chunks = [learner.ahead._chunks[number * SAMPLES][1] for number in range(8)]
    known = [all("old" in part.log_probs for part in chunk.parts) for chunk in chunks]
    assert known == [True, False, False, False, True, True, True, True]
    assert [first, outcome(learner, step.train())] == plain


def test_the_check_of_shared_prompts_takes_a_begun_gradient_back(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk that shares is checked with gradients of its own, and need not be the step's first."""

    def choose(sharing: SharedPrompts, make: Callable[[bool], Chunk]) -> Chunk:
        plain = make(False)
        return plain if plain.rows[0] == 0 else make(True)

    monkeypatch.setattr(SharedPrompts, "choose", choose)
    wanted = steps_of(build(model, ranks), NOTHING, NOTHING)
    learner = build(model, ranks)
    first = Step(learner, 1).ahead(EVERYTHING).train()
    assert first.metrics["ahead/gradient_share"] == 0
    outcomes = [outcome(learner, first)]
    second = Step(learner, 2).ahead(EVERYTHING).train()
    assert second.metrics["ahead/gradient_share"] == 12 / 32
    assert [*outcomes, outcome(learner, second)] == wanted


def test_work_for_another_step_or_policy_is_forgotten(model: Path, ranks: Ranks, plain: list[Any]) -> None:
    learner = build(model, ranks)
    Step(learner, 2).ahead(EVERYTHING)
    result = Step(learner, 1).ahead([(0, True)]).train()
    assert result.metrics["ahead/scored_share"] == result.metrics["ahead/gradient_share"] == 4 / 32
    assert outcome(learner, result) == plain[0]
