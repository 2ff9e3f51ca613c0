"""The guard in the loop of a run, against fakes: the journal, notices, adjustments, rollbacks, ends."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.run.records.checkpoints import ControllerState, folder_of
from paceline.core.errors import CheckpointError, GuardError
from paceline.core.guard import Reading
from paceline.core.samples.trajectory import GroupRefusal, PromptGroup
from paceline.data.mixture import MixtureState
from paceline.storage.folder import Folder
from support.sequencer_run import RUN, SequencerRun, config, events_of, guarded, run, run_of


def ppo_kl(value: float, skipped: int = 0) -> list[Reading]:
    """What a learner says whose worst mini-batch had this KL."""
    return [Reading(rule="ppo_kl", network="actor", value=value, num_skipped=skipped)]


async def test_every_firing_is_journalled_with_its_numbers_and_told_once_a_streak(tmp_path: Path) -> None:
    async with run(tmp_path, **guarded(5)) as it:
        await it.enlist_all()
        it.services.readings = {1: ppo_kl(0.04), 2: ppo_kl(0.06, 3), 3: ppo_kl(0.01), 4: ppo_kl(0.045)}
        await it.go()
        firings = [
            (e["step"], e["action"], e["value"], e["bound"], e["skipped"], e["streak"])
            for e in events_of(it, "guard")
        ]
        assert firings == [
            (1, "warn", 0.04, 0.03, 0, 1),
            (2, "skip", 0.06, 0.05, 3, 2),
            (4, "warn", 0.045, 0.03, 0, 1),
        ]
        told = [text for text in it.notices if "guard" in text]
        assert told == [
            "step 1: guard: warn: actor ppo_kl is 0.04, above 0.03 (guard.ppo_kl.warn)",
            "step 4: guard: warn: actor ppo_kl is 0.045, above 0.03 (guard.ppo_kl.warn)",
            "guard: ppo_kl/actor fired in 3 steps, 3 updates skipped; worst 0.06 in step 2",
        ]
        (summary,) = events_of(it, "guard_summary")
        assert summary["rules"] == {
            "ppo_kl/actor": {"steps": 3, "skipped": 3, "worst": 0.06, "worst_step": 2}
        }
        rows = {line["step"]: line for line in it.lines()}
        assert [rows[k]["guard/fired"] for k in range(1, 6)] == [1, 1, 0, 1, 0]
        assert [rows[k]["guard/skipped"] for k in range(1, 6)] == [0, 3, 0, 0, 0]
        # The skipped step is the only one that one may not go back to.
        good = [json.loads(state)["good"] for state in it.services.saved]
        assert good == [True, False, True, True, True]
        assert all(a.lr_scale == a.kl_scale == 1.0 for a in it.services.adjustments)


async def test_rates_and_coefficients_are_adjusted_from_the_next_step_on(tmp_path: Path) -> None:
    rules = {"ppo_kl": {"lower_lr": 0.1}, "reference_kl": {"fixed_kl": 2.0, "lower_kl_coef": 3.0}}
    async with run(
        tmp_path,
        algorithm__use_kl_in_reward=True,
        algorithm__kl_ctrl={"type": "adaptive"},
        **guarded(4, **rules),
    ) as it:
        await it.enlist_all()
        drift = Reading(rule="reference_kl", value=4.0)
        it.services.readings = {1: ppo_kl(0.2), 2: [*ppo_kl(0.2), drift], 3: []}
        await it.go()
        assert [a.lr_scale for a in it.services.adjustments] == [1.0, 0.5, 0.25, 0.25]
        assert [a.kl_scale for a in it.services.adjustments] == [1.0, 1.0, 0.5, 0.5]
        assert [a.fixed_kl_coef for a in it.services.adjustments] == [None, None, 0.001, 0.001]
        assert [line["guard/lr_scale"] for line in it.lines()[1:]] == [1.0, 0.5, 0.25, 0.25]


async def test_rates_that_a_client_asked_for_are_taken_from_the_next_step_on_and_saved(
    tmp_path: Path,
) -> None:
    async with run(tmp_path, **guarded(3, ppo_kl={"lower_lr": 0.1})) as it:
        await it.enlist_all()
        it.sequencer.progress.lr_scale = 0.5
        it.services.readings = {2: ppo_kl(0.2)}
        await it.go()
        assert [a.lr_scale for a in it.services.adjustments] == [0.5, 0.5, 0.25], "the guard goes on from it"
        (event,) = events_of(it, "rates")
        assert (event["step"], event["lr_scale"]) == (1, 0.5)
        states = [json.loads(state)["guard"]["adjustments"]["lr_scale"] for state in it.services.saved]
        assert states[-1] == 0.25


async def test_a_clip_range_is_lowered_and_a_kl_coefficient_raised_up_to_their_bounds(tmp_path: Path) -> None:
    rules = {
        "ppo_kl": {"lower_clip": 0.1},
        "reference_kl": {"raise_kl_coef": 1.0},
        "max_kl_scale": 3.0,
        "min_scale": 0.3,
    }
    async with run(tmp_path, algorithm__use_kl_in_reward=True, **guarded(4, **rules)) as it:
        await it.enlist_all()
        away = Reading(rule="reference_kl", value=4.0)
        it.services.readings = {1: [*ppo_kl(0.2), away], 2: [*ppo_kl(0.2), away], 3: []}
        await it.go()
        assert [a.clip_scale for a in it.services.adjustments] == [1.0, 0.5, 0.3, 0.3]
        assert [a.kl_scale for a in it.services.adjustments] == [1.0, 2.0, 3.0, 3.0]
        assert [line["guard/clip_scale"] for line in it.lines()[1:]] == [1.0, 0.5, 0.3, 0.3]


@asynccontextmanager
async def rolled_back_in_step_4(folder: Path) -> AsyncIterator[SequencerRun]:
    """A run of five steps, done. Step 3 had skipped something and is no place to go back to."""
    rules = {"ppo_kl": {"rollback": 0.1, "skip": 0.05}}
    async with run(folder, **guarded(5, **rules), trainer__keep_checkpoints=1) as it:
        await it.enlist_all()
        it.services.writes = True
        it.services.readings = {3: ppo_kl(0.06, 1), 4: ppo_kl(0.3, 1)}
        await it.go()
        yield it


async def test_a_rollback_takes_the_last_good_weights_under_the_number_of_the_step(tmp_path: Path) -> None:
    async with rolled_back_in_step_4(tmp_path) as it:
        # Version 4 is sent once only, with what was gone back to.
        calls = [c for c in it.services.calls if c.startswith(("train", "load", "publish", "save"))]
        assert calls == [
            *("publish v0 e1", "save 0"),
            *("train 1", "publish v1 e1", "save 1"),
            *("train 2", "publish v2 e1", "save 2"),
            *("train 3", "publish v3 e1", "save 3"),
            *("train 4", "load step_000002 as 4", "publish v4 e1", "save 4"),
            *("train 5", "publish v5 e1", "save 5"),
        ]
        (event,) = events_of(it, "rollback")
        assert (event["step"], event["to_step"]) == (4, 2)
        assert "ppo_kl is 0.3, above 0.1 (guard.ppo_kl.rollback)" in event["reason"]
        phases = [e["to"] for e in events_of(it, "phase") if e["step"] == 4]
        assert phases == ["dispatch", "collect", "learn", "rollback", "publish", "commit", "checkpoint"]
        digests = {e["version"]: e["digest"] for e in events_of(it, "commit")}
        assert digests[4] == digests[2] != digests[3]
        assert any("back to the weights of step 2" in text for text in it.notices)
        assert it.breaches() == []


async def test_a_run_goes_forward_after_a_rollback(tmp_path: Path) -> None:
    """What differs from the first time: prompts and seeds go on, and the rates are lower."""
    async with rolled_back_in_step_4(tmp_path) as it:
        rows = {line["step"]: line for line in it.lines()}
        assert list(rows) == [0, 1, 2, 3, 4, 5]
        assert rows[4]["guard/rolled_back_to"] == 2
        assert rows[5]["guard/rollbacks"] == 1
        assert [a.lr_scale for a in it.services.adjustments] == [1.0, 1.0, 1.0, 1.0, 0.5]
        states = [ControllerState.from_plain(json.loads(state)) for state in it.services.saved]
        good = [(s.step, s.good) for s in states]
        assert good == [(0, True), (1, True), (2, True), (3, False), (4, True), (5, True)]
        cursors = [s.cursor for s in states[3:5]]
        assert cursors == [MixtureState.of_one(epoch=1, position=3), MixtureState.of_one(epoch=1, position=6)]
        # The newest good one outlived newer ones that are not.
        removed = [Path(e["folder"]).name for e in events_of(it, "checkpoint_removed")]
        assert removed == ["step_000000", "step_000001", "step_000002", "step_000003", "step_000004"]


async def test_one_rollback_too_many_ends_the_run(tmp_path: Path) -> None:
    rules = {"ppo_kl": {"rollback": 0.1, "skip": None}, "max_rollbacks": 1}
    async with run(tmp_path, **guarded(5, **rules)) as it:
        await it.enlist_all()
        it.services.writes = True
        it.services.readings = {k: ppo_kl(0.3) for k in (2, 3)}
        with pytest.raises(
            GuardError, match=r"step 3: .*the run went back 1 times already \(guard.max_rollbacks\)"
        ) as raised:
            await it.go()
        assert str(folder_of(Folder.at(tmp_path / "checkpoints"), 2)) in str(raised.value)
        assert "publish v3 e1" not in it.services.calls
        assert it.lines()[-1]["step"] == 3
        assert len(events_of(it, "guard_summary")) == 1


async def test_stop_does_not_publish_and_patience_waits(tmp_path: Path) -> None:
    rules = {"ppo_kl": {"stop": 0.2, "patience": 2}}
    async with run(tmp_path, **guarded(9, **rules)) as it:
        await it.enlist_all()
        it.services.readings = {1: ppo_kl(0.3), 2: ppo_kl(0.04), 3: ppo_kl(0.3), 4: ppo_kl(0.4)}
        with pytest.raises(
            GuardError, match="step 4: the guard ends the run: stop: actor ppo_kl is 0.4, above 0.2"
        ):
            await it.go()
        assert [e["action"] for e in events_of(it, "guard")] == ["skip", "warn", "skip", "stop"]
        assert it.services.calls[-1] == "train 4"
    assert (tmp_path / "trajectories/step_000004.parquet").is_file(), "the last samples show why"


async def test_without_a_checkpoint_of_this_run_there_is_nowhere_to_go_back_to(tmp_path: Path) -> None:
    async with run(tmp_path, **guarded(2, ppo_kl={"rollback": 0.1})) as it:
        await it.enlist_all()
        it.services.readings = {1: ppo_kl(0.3)}
        with pytest.raises(CheckpointError, match="no checkpoint to go back to"):
            await it.go()
    assert (tmp_path / "trajectories/step_000001.parquet").is_file()


async def test_a_run_that_never_goes_back_writes_no_checkpoint_at_its_start(tmp_path: Path) -> None:
    async with run(tmp_path, **guarded(1)) as it:
        await it.enlist_all()
        await it.go()
        assert [c for c in it.services.calls if c.startswith("save")] == ["save 1"]


async def test_a_guard_that_is_off_says_nothing(tmp_path: Path) -> None:
    async with run(tmp_path, **guarded(1, enabled=False)) as it:
        await it.enlist_all()
        it.services.readings = {1: ppo_kl(9.0)}
        train = it.services.learner.train

        async def skipping(*args: Any, **kwargs: Any) -> Any:
            result = await train(*args, **kwargs)
            return dataclasses.replace(result, skip_reasons=("actor: the loss is not finite",) * 2)

        it.services.learner.train = skipping  # type: ignore[method-assign]
        await it.go()
        assert events_of(it, "guard") == []
        # What the optimizer itself does not take is told without a guard too.
        assert [e["reason"] for e in events_of(it, "update_skipped")] == ["actor: the loss is not finite"]
        assert "step 1: update skipped: actor: the loss is not finite" in it.notices
        assert not [key for key in it.lines()[1] if key.startswith("guard/")]


async def test_metrics_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    async with run(tmp_path, **guarded(1)) as it:
        await it.enlist_all()
        train = it.services.learner.train

        async def poisoned(*args: Any, **kwargs: Any) -> Any:
            reply = await train(*args, **kwargs)
            reply.metrics["critic/vf_loss"] = float("nan")
            reply.metrics["actor/entropy"] = float("inf")
            return reply

        it.services.learner.train = poisoned  # type: ignore[method-assign]
        await it.go()
        (event,) = events_of(it, "guard")
        assert (event["rule"], event["value"], event["action"]) == ("non_finite", 2.0, "warn")


async def test_updates_that_ran_out_of_memory_are_counted_and_may_end_the_run(tmp_path: Path) -> None:
    async with run(tmp_path, **guarded(2, out_of_memory={"warn": 0.0, "stop": 1.0})) as it:
        await it.enlist_all()
        train, halved = it.services.learner.train, iter((1.0, 2.0))

        async def short_of_memory(*args: Any, **kwargs: Any) -> Any:
            reply = await train(*args, **kwargs)
            reply.metrics["guard/out_of_memory"] = next(halved)
            return reply

        it.services.learner.train = short_of_memory  # type: ignore[method-assign]
        with pytest.raises(GuardError, match=r"optimizer steps taken again in halves is 2, above 1"):
            await it.go()
        fired = [(e["step"], e["action"], e["value"]) for e in events_of(it, "guard")]
        assert fired == [(1, "warn", 1.0), (2, "stop", 2.0)]


@pytest.mark.parametrize(("kl", "fired"), [(9e-7, []), (2e-6, [("warn", 1e-6)]), (2e-5, [("stop", 1e-6)])])
async def test_the_mismatch_of_rollout_and_learner_is_judged_by_what_the_dtype_allows(
    kl: float, fired: list[tuple[str, float]], tmp_path: Path
) -> None:
    async with run(tmp_path, model__dtype="float32", **guarded(1)) as it:
        await it.enlist_all()
        train = it.services.learner.train

        async def mismatched(*args: Any, **kwargs: Any) -> Any:
            reply = await train(*args, **kwargs)
            reply.metrics["rollout/mismatch_kl"] = kl
            return reply

        it.services.learner.train = mismatched  # type: ignore[method-assign]
        if ("stop", 1e-6) in fired:
            with pytest.raises(GuardError, match="rollout/mismatch_kl"):
                await it.go()
        else:
            await it.go()
        judged = [(e["action"], e["reference"]) for e in events_of(it, "guard") if e["rule"] == "mismatch_kl"]
        assert judged == fired


@pytest.mark.parametrize(("equal", "fired"), [(0, []), (1, []), (2, [(1, 2 / 3)]), (3, [(1, 1.0)])])
async def test_groups_whose_rewards_are_equal_are_judged_by_their_share(
    equal: int, fired: list[tuple[int, float]], tmp_path: Path
) -> None:
    same = set[int]()

    def score(group: PromptGroup, sample_index: int) -> dict[str, Any]:
        if len(same) < equal or group.prompt_id in same:
            same.add(group.prompt_id)
            sample_index = 0
        return {"reward": float(sample_index), "reward_error": None}

    rules = guarded(1, groups_without_spread={"warn": 0.5}, reward_constant={"warn": None})
    async with run(tmp_path, **rules) as it:
        await it.enlist_all()
        await it.go(score)
        assert [(e["step"], pytest.approx(e["value"])) for e in events_of(it, "guard")] == fired
        assert it.lines()[1]["groups/without_spread"] == pytest.approx(equal / 3)


async def test_a_component_that_stays_the_same_is_told_after_its_steps(tmp_path: Path) -> None:
    """Its streak: steps in a row in which it was the same for all, across a restart from a checkpoint."""
    values = {1: 1.0, 2: 1.0, 3: None, 4: 0.0, 5: 0.5, 6: 0.5}

    def score(group: PromptGroup, sample_index: int) -> dict[str, Any]:
        value = values[group.step]
        components = {"style": float(sample_index) if value is None else value, "sums": float(sample_index)}
        return {"reward": float(sample_index), "reward_error": None, "components": components}

    rules = {"component_constant": {"warn": 1.0}}
    async with run(tmp_path, **guarded(5, **rules)) as it:
        await it.enlist_all()
        await it.go(score)
        fired = [(e["step"], e["rule"], e["value"]) for e in events_of(it, "guard")]
        assert fired == [(2, "component_constant", 2.0), (5, "component_constant", 2.0)]
        told = [text for text in it.notices if "guard: warn" in text]
        assert told[0] == (
            "step 2: guard: warn: steps in a row in which a reward component was the same for all responses "
            "(style) is 2, above 1 (guard.component_constant.warn)"
        )
    async with run_of(config(**guarded(6, **rules)), tmp_path) as it:
        await it.enlist_all()
        await it.go(score)
        assert [(e["step"], e["value"]) for e in events_of(it, "guard")][-1] == (6, 3.0)


@pytest.mark.parametrize(
    ("kind", "failed", "value", "detail"),
    [
        (None, 0.0, None, ""),
        ("timeout", 0.0, 1 / 3, "dropped groups"),
        ("refused", 0.0, None, ""),
        (None, 0.5, 0.5, "responses to judge"),
        ("timeout", 1.0, 1.0, "responses to judge"),
    ],
)
async def test_what_scorers_fail_on_is_judged_by_its_share(
    kind: str | None, failed: float, value: float | None, detail: str, tmp_path: Path
) -> None:
    first = set[int]()

    def score(group: PromptGroup, sample_index: int) -> dict[str, Any] | GroupRefusal:
        if kind is not None and (not first or group.prompt_id in first):
            first.add(group.prompt_id)
            if kind == "refused":  # by a rollout server, which is no scorer's fault
                return GroupRefusal(
                    run_id=RUN,
                    step=group.step,
                    purpose=group.purpose,
                    prompt_id=group.prompt_id,
                    policy=group.policy,
                    server_id="fake",
                    reason="engine_error",
                    message="it broke",
                    deliveries=6,
                )
            return {"reward": None, "reward_error": (kind, "slow")}
        share = failed if failed in (0.0, 1.0) else float(sample_index)
        return {
            "reward": float(sample_index),
            "reward_error": None,
            "components": {"judge": float(sample_index), "judge/failed": share},
        }

    async with run(tmp_path, **guarded(1)) as it:
        await it.enlist_all()
        await it.go(score)
        fired = [(e["rule"], pytest.approx(e["value"])) for e in events_of(it, "guard")]
        assert fired == ([] if value is None else [("reward_errors", value)])
        assert all(f"({detail}) is" in e["message"] for e in events_of(it, "guard"))


async def test_a_rollback_that_sends_other_weights_is_found_by_verify(tmp_path: Path) -> None:
    async with run(tmp_path, **guarded(3, ppo_kl={"rollback": 0.1, "skip": None})) as it:
        await it.enlist_all()
        it.services.writes = True
        it.services.readings = {2: ppo_kl(0.3)}
        load = it.services.learner.load

        async def other(member: Any, **kwargs: Any) -> float:
            seconds = await load(member, **kwargs)
            it.services.source = 17
            return seconds

        it.services.learner.load = other  # type: ignore[method-assign]
        await it.go()
        (breach,) = it.breaches()
        assert breach.startswith("I4: version 2 is a rollback to 1, which was committed as 0000000000000008")


async def test_a_run_that_resumes_from_step_0_writes_its_metrics_once(tmp_path: Path) -> None:
    changes = guarded(1, ppo_kl={"rollback": 0.1})
    async with run(tmp_path, **changes) as it:
        await it.enlist_all()
        await it.go()
    # The learner begins again from the model.
    async with run_of(config(**changes), tmp_path) as it:
        await it.enlist_all()
        await it.go()
        assert [line["step"] for line in it.lines()] == [0, 1]


@pytest.mark.parametrize("num_damaged", [1, 2, 4])
async def test_a_rollback_passes_over_damaged_checkpoints(num_damaged: int, tmp_path: Path) -> None:
    rules = {"ppo_kl": {"rollback": 0.1, "skip": 0.05}}
    async with run(tmp_path, **guarded(4, **rules), trainer__keep_checkpoints=9) as it:
        await it.enlist_all()
        it.services.writes = True
        it.services.readings = {4: ppo_kl(0.3, 1)}
        load, damaged = it.services.learner.load, [f"step_{step:06d}" for step in (3, 2, 1, 0)][:num_damaged]

        async def checking(member: Any, *, folder: str, version: int) -> float:
            if Path(folder).name in damaged:
                raise CheckpointError(f"{Path(folder).name}/__0_0.distcp has changed")
            return await load(member, folder=folder, version=version)

        it.services.learner.load = checking  # type: ignore[method-assign]
        if num_damaged == 4:
            with pytest.raises(CheckpointError, match="there is no checkpoint to go back to"):
                await it.go()
        else:
            await it.go()
            intact = 3 - num_damaged
            assert [c for c in it.services.calls if c.startswith("load")] == [f"load step_00000{intact} as 4"]
            assert [event["to_step"] for event in events_of(it, "rollback")] == list(range(3, intact - 1, -1))
            assert it.lines()[4]["guard/rolled_back_to"] == intact
            assert it.breaches() == []
        told = [text for text in it.notices if "the rollback passes over the checkpoint" in text]
        assert len(told) == num_damaged
        assert told[0].endswith("of step 3: step_000003/__0_0.distcp has changed")
