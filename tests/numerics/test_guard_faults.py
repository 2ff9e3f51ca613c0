"""Faults in a run of a real learner: the right rule fires, and the weights stay unchanged."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.controller.run.records.checkpoints import complete
from paceline.core.errors import GuardError
from paceline.learner.checkpoint.load import load
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.updating import update
from paceline.storage.folder import Folder
from support.architectures import tiny_config
from support.fake_fleet import Answer
from support.learner_fakes import VOCAB_SIZE, run_config
from support.learner_scenarios import NanGradient
from support.learner_services import LearnerServices
from support.sequencer_run import SequencerRun, run_of

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900), pytest.mark.usefixtures("ranks")]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of what learns."""
    assert learner.critic is not None
    copies = {}
    for kind, network in (("actor", learner.actor.network), ("critic", learner.critic.network)):
        as_fsdp(network).reshard()
        copies |= {f"{kind}.{n}": p.full_tensor().clone() for n, p in hugging_face_names(network)}
    return copies


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], kind: str = "") -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items() if name.startswith(kind))


def rewards(fault: dict[int, float] | None = None, constant_from: int = 10**9) -> Answer:
    """Rewards that differ by sample; a fault replaces some in its steps; from a step on all are equal."""

    def answer(group: Any, index: int) -> dict[str, Any]:
        value = float((group.prompt_id * 3 + index * 5) % 4)
        if group.step >= constant_from:
            value = 1.0
        if index == 0 and fault and group.step in fault:
            value = fault[group.step]
        return {"reward": value, "reward_error": None}

    return answer


class Faulty:
    """A run with its learner; `seen` are the weights before each step and at the end."""

    def __init__(self, model: Path, ranks: Ranks, steps: int, **guard: Any) -> None:
        self.config = run_config(
            model,
            data={"train_batch_size": 4, "seed": 0},
            actor={"ppo_mini_batch_size": 2},
            rollout={"n": 4, "replicas": 2},
            trainer={"total_steps": steps, "save_freq": 1, "val_before_train": False},
            # Made-up tokens are no sample of the policy: only what a test is about may act.
            guard={"min_history": 2, "ppo_kl": {"skip": None}, "mismatch_kl": False, **guard},
        )
        self.learner = Learner.build(self.config, ranks)
        self.services = LearnerServices(self.learner, 4, 4)
        self.seen: dict[int, dict[str, torch.Tensor]] = {}
        self.act: Any = lambda step: None

    def _before(self, step: int) -> None:
        self.seen[step] = weights(self.learner)
        self.act(step)

    async def go(self, it: SequencerRun, answer: Answer) -> None:
        await it.enlist_all()
        self.services.before = self._before
        try:
            await it.go(answer, timeout_s=80)
        finally:
            self.seen[self.learner.version + 1] = weights(self.learner)


def of(it: SequencerRun, rule: str) -> list[dict[str, Any]]:
    return [e for e in it.events() if e["event"] == "guard" and e["rule"] == rule]


async def test_a_batch_with_a_reward_of_a_million_is_not_trained(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    run = Faulty(model, ranks, 4)
    async with run_of(run.config, tmp_path, run.services) as it:
        await run.go(it, rewards(fault={3: 1e6}))
    (event,) = of(it, "reward_jump")
    assert (event["step"], event["action"], event["bound"], event["skipped"]) == (3, "skip", 1000.0, 1)
    # 4 of 16 rewards are 1e6, the rest near 0: a spread of 1e6 sqrt(3) / 4.
    assert event["value"] == pytest.approx(1e6 * 3**0.5 / 4, rel=1e-4)
    assert event["reference"] == pytest.approx(1.0, rel=0.5)
    assert not same(run.seen[1], run.seen[2])
    assert not same(run.seen[2], run.seen[3])
    assert same(run.seen[3], run.seen[4]), "the poisoned batch moved weights"
    assert not same(run.seen[4], run.seen[5])
    rows = it.lines()
    assert (rows[3]["actor/skipped_updates"], rows[3]["critic/skipped_updates"]) == (2, 2)
    assert "reward_jump" in next(e for e in it.events() if e["event"] == "update_skipped")["reason"]


async def test_a_nan_gradient_is_not_taken_and_ends_the_run_where_it_lasts(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Faulty(model, ranks, 9, non_finite={"patience": 2})
    honest, bad = update.PolicyLoss.__call__, {2, 4, 5}

    def poisoned(self: Any, *arguments: Any) -> Any:
        loss, sums = honest(self, *arguments)
        return (NanGradient.apply(loss) if run.learner.version + 1 in bad else loss), sums

    monkeypatch.setattr(update.PolicyLoss, "__call__", poisoned)
    async with run_of(run.config, tmp_path, run.services) as it:
        with pytest.raises(
            GuardError, match="step 5: .* stop: actor numbers that are not finite is 2, above 0"
        ):
            await run.go(it, rewards())
    firings = [(e["step"], e["network"], e["action"], e["value"], e["skipped"]) for e in of(it, "non_finite")]
    assert firings == [
        (2, "actor", "warn", 2.0, 2),
        (4, "actor", "warn", 2.0, 2),
        (5, "actor", "stop", 2.0, 2),
    ]
    for step in (2, 4, 5):
        assert same(run.seen[step], run.seen[step + 1], "actor")
        assert not same(run.seen[step], run.seen[step + 1], "critic")
    assert not same(run.seen[3], run.seen[4], "actor")


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_a_learner_that_forgets_the_scale_of_the_logits_is_stopped_in_its_first_step(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """Cohere's logits are scaled after the head; the engine, here transformers, does so."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    engine = AutoModelForCausalLM.from_config(tiny_config("cohere", vocab_size=VOCAB_SIZE)).eval()
    engine.save_pretrained(tmp_path / "model")

    def log_probs(prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            scores = engine(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return scores.gather(-1, ids[len(prompt) :, None]).squeeze(-1).numpy()

    if is_wrong:
        monkeypatch.setattr("paceline.learner.model.networks.logit_scale", lambda config: 1.0)
    run = Faulty(tmp_path / "model", ranks, 1, mismatch_kl=True)
    run.services.sampler = log_probs
    async with run_of(run.config, tmp_path / "run", run.services) as it:
        if not is_wrong:
            await run.go(it, rewards())
            assert it.lines()[1]["rollout/mismatch_kl"] < 1e-9
            assert of(it, "mismatch_kl") == []
            return
        with pytest.raises(
            GuardError,
            match=r"step 1: .* stop: rollout/mismatch_kl is .*, above 1e-05, 10 times what model.dtype",
        ):
            await run.go(it, rewards())
    (event,) = of(it, "mismatch_kl")
    assert (event["step"], event["action"], event["bound"], event["reference"]) == (1, "stop", 10.0, 1e-6)
    assert event["value"] > 0.1
    assert "publish 1" not in run.services.calls


def raise_rate(run: Faulty, at: int) -> Any:
    """From step `at` on the policy learns a hundred times faster."""
    schedule = run.learner.actor.schedule

    def act(step: int) -> None:
        if step == at:
            fast = dataclasses.replace(schedule, peak=100 * schedule.peak)
            run.learner.actor = dataclasses.replace(run.learner.actor, schedule=fast)

    return act


async def test_a_learning_rate_a_hundred_times_too_high_stops_the_updates_of_the_step(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    run = Faulty(model, ranks, 3, ppo_kl={"skip": 0.05})
    run.act = raise_rate(run, 3)
    async with run_of(run.config, tmp_path, run.services) as it:
        await run.go(it, rewards())
    *earlier, event = of(it, "ppo_kl")
    assert all(e["action"] == "warn" for e in earlier)
    # The first mini-batch is on policy and was taken; the second saw what it did.
    assert (event["step"], event["action"], event["bound"], event["skipped"]) == (3, "skip", 0.05, 1)
    assert event["value"] > 0.05
    assert it.lines()[3]["actor/skipped_updates"] == 1
    assert it.lines()[3]["actor/ppo_kl_max"] == event["value"]


async def test_a_rollback_restores_the_weights_and_goes_on_slower(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    run = Faulty(model, ranks, 5, ppo_kl={"skip": None, "rollback": 0.05})
    fast, schedule = raise_rate(run, 3), run.learner.actor.schedule

    def act(step: int) -> None:
        fast(step)
        if step == 4:
            run.learner.actor = dataclasses.replace(run.learner.actor, schedule=schedule)

    run.act = act
    async with run_of(run.config, tmp_path, run.services) as it:
        await run.go(it, rewards())
    (event,) = [e for e in it.events() if e["event"] == "rollback"]
    assert (event["step"], event["to_step"]) == (3, 2)
    # Before step 3 the weights were those of step 2; so they are before step 4.
    assert same(run.seen[3], run.seen[4])
    assert not same(run.seen[4], run.seen[5])
    rows = it.lines()
    assert rows[4]["actor/lr"] == pytest.approx(0.5 * rows[2]["actor/lr"])
    assert rows[4]["critic/lr"] == pytest.approx(0.5 * rows[2]["critic/lr"])
    assert run.learner.version == 5
    assert it.breaches() == []


async def test_rewards_that_become_constant_are_noticed_and_end_the_run_where_told_to(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    run = Faulty(model, ranks, 9, reward_constant={"stop": 0.0, "patience": 3})
    async with run_of(run.config, tmp_path, run.services) as it:
        with pytest.raises(GuardError, match="step 5: .*spread of the rewards is 0, at or below 0"):
            await run.go(it, rewards(constant_from=3))
    assert [(e["step"], e["action"], e["value"]) for e in of(it, "reward_constant")] == [
        (3, "warn", 0.0),
        (4, "warn", 0.0),
        (5, "stop", 0.0),
    ]


async def test_a_run_that_is_started_again_goes_on_with_adjustments_medians_and_streaks(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    guard = {
        "reward_jump": {"skip": None, "lower_lr": 0.0, "patience": 2},
        "grad_norm": {"warn": 0.5},
        "throughput": {"warn": None},  # it judges seconds
    }

    def numbers(it: SequencerRun) -> dict[int, dict[str, Any]]:
        varying = ("time", "timing_s/", "weights/", "perf/", "barrier/")
        return {
            row["step"]: {k: v for k, v in row.items() if not k.startswith(varying)} for row in it.lines()
        }

    unbroken = Faulty(model, ranks, 6, **guard)
    async with run_of(unbroken.config, tmp_path / "whole", unbroken.services) as first:
        await unbroken.go(first, rewards())
    # A median from step 3 on, so the second step in a row is the fourth: it is waited for across the restart.
    assert [row["guard/lr_scale"] for row in first.lines()[1:]] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]

    half = Faulty(model, ranks, 6, **guard)

    def stop_in_4(step: int) -> None:
        if step == 4:
            saved = tmp_path / "half" / "checkpoints" / "step_000003" / "manifest.json"
            for _ in range(6000):  # it is being written in the background
                if saved.is_file():
                    break
                time.sleep(0.01)
            raise ZeroDivisionError("the learner dies")

    half.act = stop_in_4
    async with run_of(half.config, tmp_path / "half", half.services) as broken:
        with pytest.raises(ZeroDivisionError):
            await half.go(broken, rewards())
    folder, state = next(complete(Folder.at(tmp_path / "half" / "checkpoints")))
    assert state.step == 3
    histories = json.loads(folder.read("manifest.json"))["learner"]["guard_histories"]
    assert len(histories["actor/grad_norm"]) == 6

    rest = Faulty(model, ranks, 6, **guard)
    load(rest.learner, folder.path)
    rest.services = LearnerServices(rest.learner, 4, 4)
    async with run_of(rest.config, tmp_path / "half", rest.services) as second:
        await rest.go(second, rewards())
    assert numbers(second) == numbers(first)
    assert same(unbroken.seen[7], rest.seen[7])
