"""What the loop of a run does, beside what it says it does: seeds, deadlines, clean-up, frequencies."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.controller.batch import collect
from paceline.controller.journal import Event
from paceline.controller.run.records.checkpoints import ControllerState
from paceline.core.errors import DeadlineError, LostDataError, PeerLostError, RewardError
from paceline.core.guard import Reading
from paceline.core.ids import Purpose, TrajectoryId, sample_seed
from paceline.core.members import LearnerState, MemberKind, RolloutState
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import GroupRefusal, PromptGroup
from paceline.data.cursor import PromptCursor
from paceline.wire import encode_scored_header
from support.fake_fleet import score_all
from support.headers import scored
from support.memory_broker import MemoryBroker, MemoryStore
from support.sequencer_run import RUN, SequencerRun, config, run, run_of

CALM = {"trainer__val_before_train": False}


class Asked:
    """Notes every group that the rollout servers get, and answers it."""

    def __init__(self) -> None:
        self.groups: dict[TrajectoryId, PromptGroup] = {}

    def __call__(self, group: PromptGroup, index: int) -> dict[str, Any]:
        self.groups[group.trajectory_id(index)] = group
        return score_all(group, index)

    def of(self, purpose: Purpose) -> list[tuple[TrajectoryId, PromptGroup]]:
        """Each sample of a purpose with its group."""
        return [(key, group) for key, group in self.groups.items() if key.purpose == purpose.value]


def of(it: SequencerRun, event: str) -> list[dict[str, Any]]:
    return [e for e in it.events() if e["event"] == event]


# --- what servers are asked for


async def test_a_sample_has_another_seed_in_each_step_and_the_same_after_a_restart(tmp_path: Path) -> None:
    asked = Asked()
    async with run(tmp_path, **CALM, trainer__total_steps=4, trainer__seed=11) as it:
        await it.enlist_all()
        await it.go(asked)
    samples = asked.of(Purpose.TRAIN)
    assert {key.step for key, _ in samples} == {1, 2, 3, 4}
    for key, group in samples:
        assert group.seeds[key.sample_index] == sample_seed(
            run_seed=11, step=key.step, prompt_id=key.prompt_id, sample_index=key.sample_index
        )
    assert len({group.seeds[key.sample_index] for key, group in samples}) == len(samples)


async def test_samples_are_drawn_as_the_configuration_says(tmp_path: Path) -> None:
    asked = Asked()
    changes = {
        "rollout__temperature": 0.7,
        "rollout__val": {"n": 3, "temperature": 0.3},
        "data__max_response_length": 17,
        "data__val_max_prompts": 1,
        "trainer__total_steps": 1,
    }
    async with run(tmp_path, **changes) as it:
        await it.enlist_all()
        await it.go(asked)
    train = {(g.sampling.temperature, g.num_samples) for _, g in asked.of(Purpose.TRAIN)}
    val = {(g.sampling.temperature, g.num_samples) for _, g in asked.of(Purpose.VALIDATE)}
    assert (train, val) == ({(0.7, 2)}, {(0.3, 3)})
    assert {g.sampling.max_tokens for g in asked.groups.values()} == {17}
    assert {g.sampling.stop_token_ids for g in asked.groups.values()} == {(0,)}
    assert {key.prompt_id for key, _ in asked.of(Purpose.VALIDATE)} == {0}


@pytest.mark.parametrize(("freq", "steps"), [(None, [0, 3]), (0, [0]), (2, [0, 2, 3])])
async def test_validations_after_the_start(tmp_path: Path, freq: int | None, steps: list[int]) -> None:
    changes = {
        **CALM,
        "trainer__val_before_train": True,
        "trainer__total_steps": 3,
        "trainer__test_freq": freq,
    }
    async with run(tmp_path, **changes) as it:
        await it.enlist_all()
        await it.go()
        assert [line["step"] for line in it.lines() if "val/reward/mean" in line] == steps


async def test_validations_and_checkpoints_come_as_often_as_asked_for(tmp_path: Path) -> None:
    changes = {**CALM, "trainer__total_steps": 7, "trainer__test_freq": 2, "trainer__save_freq": 3}
    async with run(tmp_path, **changes) as it:
        await it.enlist_all()
        await it.go()
        assert [line["step"] for line in it.lines() if "val/reward/mean" in line] == [2, 4, 6, 7]
        assert [call for call in it.services.calls if call.startswith("save")] == [
            "save 3",
            "save 6",
            "save 7",
        ]


@pytest.mark.parametrize("saves", [True, False])
async def test_trajectories_are_written_only_where_wanted(saves: bool, tmp_path: Path) -> None:
    async with run(tmp_path, trainer__save_trajectories=saves, trainer__total_steps=1) as it:
        await it.enlist_all()
        await it.go()
    files = sorted(os.listdir(tmp_path / "trajectories")) if saves else []
    assert (tmp_path / "trajectories").exists() == saves
    assert files == (["step_000001.parquet", "val_000000.parquet", "val_000001.parquet"] if saves else [])


@pytest.mark.parametrize("share", [0.3, 0.4])
async def test_one_group_of_three_without_reward_may_be_too_many(share: float, tmp_path: Path) -> None:
    lost = min(PromptCursor(range(7), seed=0).take(3))

    def answer(group: PromptGroup, index: int) -> dict[str, Any]:
        if group.prompt_id == lost and group.purpose == Purpose.TRAIN and group.step == 1:
            return {"reward": None, "reward_error": ("raised", "boom")}
        return score_all(group, index)

    async with run(tmp_path, **CALM, reward__max_dropped_share=share, trainer__total_steps=1) as it:
        await it.enlist_all()
        if share < 1 / 3:
            with pytest.raises(RewardError, match="1 of 3 prompt groups have no reward"):
                await it.go(answer)
        else:
            await it.go(answer)
            assert len(it.services.orders[0].rows) == 4


# --- deadlines


async def pour(it: SequencerRun, header: Any, *, every_s: float) -> None:
    """Appends the same header again and again."""
    while True:
        message = Outgoing(stream=names.scored(RUN), payload=encode_scored_header(header))
        await it.broker.append([message])
        await asyncio.sleep(every_s)


def own_header(it: SequencerRun, number: int) -> Any:
    """A good sample of step 1: the `number`-th of its prompts, the first sample."""
    policy = it.services.policies["rollout-0"]
    prompt = PromptCursor(range(7), seed=0).take(3)[number]
    return replace(scored(prompt, step=1, policy=policy), run_id=RUN)


async def collecting(it: SequencerRun) -> None:
    """Returns when step 1 is being collected."""
    while not any(e["event"] == "phase" and e["to"] == "collect" for e in it.events()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_junk_is_no_progress_of_a_collection(tmp_path: Path) -> None:
    """Samples of a policy that is none arrive all the time; the collection stalls all the same."""
    async with run(tmp_path, **CALM, barrier__stall_timeout_s=0.4, barrier__collect_timeout_s=300.0) as it:
        await it.enlist_all()
        it.may_answer = lambda: False
        running = asyncio.create_task(it.go())
        await collecting(it)
        junk = replace(own_header(it, 0), policy=PolicyTag(version=0, digest="f" * 16))
        pouring = asyncio.create_task(pour(it, junk, every_s=0.05))
        try:
            with pytest.raises(DeadlineError, match="barrier.stall_timeout_s"):
                await running
        finally:
            pouring.cancel()


async def test_a_collection_ends_at_its_deadline(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM, barrier__stall_timeout_s=300.0, barrier__collect_timeout_s=0.5) as it:
        await it.enlist_all()
        it.may_answer = lambda: False
        running = asyncio.create_task(it.go())
        await collecting(it)
        with pytest.raises(DeadlineError, match="barrier.collect_timeout_s"):
            await running


async def test_the_time_in_which_services_are_waited_for_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers are gone for longer than a collection may be without progress."""
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(collect, "time", clock)
    async with run(tmp_path, **CALM, barrier__stall_timeout_s=300.0, trainer__total_steps=1) as it:
        await it.enlist_all()
        answers: list[bool] = []
        it.may_answer = lambda: bool(answers)
        wait = it.wait_for_services

        async def absent() -> None:
            nonlocal passed_s
            if not answers:
                passed_s = 400.0
                answers.append(True)
            await wait()

        it.wait_for_services = absent  # type: ignore[method-assign]
        await it.go()
        assert [step for step, _ in it.services.trained] == [1]


@pytest.mark.parametrize("change", [{"step": 2}, {"policy": PolicyTag(version=0, digest="f" * 16)}])
async def test_a_refusal_counts_only_for_its_own_step_and_policy(change: Any, tmp_path: Path) -> None:
    async with run(tmp_path, **CALM, barrier__stall_timeout_s=1.0, trainer__total_steps=1) as it:
        await it.enlist_all()
        stray: list[GroupRefusal] = []

        def answer(group: PromptGroup, index: int) -> dict[str, Any] | GroupRefusal:
            if stray:
                return score_all(group, index)
            refusal = GroupRefusal(
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
            stray.append(replace(refusal, **change))
            return stray[0]

        with pytest.raises(DeadlineError):
            await it.go(answer)
        assert of(it, "group_dropped") == []


async def test_a_step_is_collected_again_a_bounded_number_of_times(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM) as it:
        await it.enlist_all()
        attempts: list[int] = []

        async def lost(member: Any, order: Any) -> Any:
            attempts.append(order.step)
            assert len(attempts) < 20
            raise LostDataError("the blobs are gone")

        it.services.learner.train = lost  # type: ignore[method-assign]
        with pytest.raises(LostDataError):
            await it.go()
        assert attempts == [1] * 4


# --- what is left behind


async def test_finished_steps_leave_nothing_in_the_broker(tmp_path: Path) -> None:
    store = MemoryStore()
    changes = {"trainer__total_steps": 4, "trainer__test_freq": 1}
    async with run_of(config(**changes), tmp_path, broker=MemoryBroker(store=store)) as it:
        await it.enlist_all()
        await it.go()
        steps = {
            (purpose, int(step))
            for purpose, step in (key.split(":")[3:5] for key in store.blobs if ":blob:" in key)
        }
        assert steps == {("train", 4), ("validate", 4)}
        assert [version for version in range(3) if names.prompts(RUN, version) in store.streams] == []
        # The log has the last step and its validation alone.
        assert await it.broker.length(names.scored(RUN)) <= 6 + 2


async def test_prompts_that_are_in_the_stream_are_not_sent_again(tmp_path: Path) -> None:
    """The learner is lost in step 1, before it is trained; the step is executed again."""
    async with run(tmp_path, **CALM, trainer__total_steps=1) as it:
        await it.enlist_all()
        append, sent, losses = it.broker.append, list[str](), list[int]()

        async def counting(messages: Any, **kwargs: Any) -> Any:
            sent.extend(m.stream for m in messages if m.stream == names.prompts(RUN, 0))
            return await append(messages, **kwargs)

        it.broker.append = counting  # type: ignore[method-assign]
        train = it.services.learner.train

        async def lost_once(member: Any, order: Any) -> Any:
            losses.append(order.step)
            if len(losses) == 1:
                raise PeerLostError("the call broke", peer="learner")
            return await train(member, order)

        it.services.learner.train = lost_once  # type: ignore[method-assign]
        await it.go()
        assert losses == [1, 1]
        assert len(sent) == 3


async def test_a_restarted_controller_reads_the_log_from_the_last_finished_step(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with run_of(config(**CALM), tmp_path, broker=broker) as it:
        await it.enlist_all()
        await it.go()
        services = it.services
        positions = [event["log_position"] for event in of(it, "step")]
        assert len(set(positions)) == 3
    read_log, afters = broker.read_log, list[str]()

    async def noting(stream: str, *, after: str, **kwargs: Any) -> Any:
        if stream == names.scored(RUN) and kwargs["block_s"]:  # what a collection waits for
            afters.append(after)
        return await read_log(stream, after=after, **kwargs)

    async with run_of(config(**CALM, trainer__total_steps=3), tmp_path, services, broker) as it:
        broker.read_log = noting  # type: ignore[method-assign]
        await it.enlist_all()
        await it.go()
        assert afters[0] == positions[-1]
        assert [e["log_position"] for e in of(it, "step")][:3] == positions
        assert it.breaches() == []
        admitted = [e["id"] for e in of(it, "trajectory")]
        assert len(admitted) == len(set(admitted)), "entries of finished steps were judged again"


@pytest.mark.parametrize("keep", [1, 2, 3])
async def test_as_many_checkpoints_stay_as_configured(keep: int, tmp_path: Path) -> None:
    async with run(tmp_path, **CALM, trainer__total_steps=5, trainer__keep_checkpoints=keep) as it:
        it.services.writes = True
        await it.enlist_all()
        await it.go()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [f"step_{step:06d}" for step in range(6 - keep, 6)]


async def test_a_checkpoint_counts_when_it_is_complete(tmp_path: Path) -> None:
    async with run(tmp_path, **CALM, trainer__total_steps=1) as it:
        await it.enlist_all()
        seen: list[int] = []

        async def written(member: Any, *, step: int) -> float:
            await asyncio.sleep(0.05)
            seen.append(len(of(it, "checkpoint")))
            return 0.0

        it.services.learner.wait_checkpoint = written  # type: ignore[method-assign]
        await it.go()
        assert seen == [0]
        assert len(of(it, "checkpoint")) == 1


async def test_a_rollback_is_saved_at_once(tmp_path: Path) -> None:
    """Else a run that is resumed would repeat the steps that led to it."""
    rules = {"guard__ppo_kl": {"rollback": 0.1, "skip": None}}
    async with run(tmp_path, **CALM, **rules, trainer__total_steps=4, trainer__save_freq=0) as it:
        it.services.writes = True
        it.services.readings = {2: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
        await it.enlist_all()
        await it.go()
        saves = [call for call in it.services.calls if call.startswith(("save", "load"))]
        assert saves == ["save 0", "load step_000000 as 2", "save 2", "save 4"]


async def test_a_rewind_takes_the_guards_state_and_the_checkpoints_back(tmp_path: Path) -> None:
    """Step 2 halves the rate; the learner comes back at step 1, and step 2 begins at the full rate again."""
    rules = {"guard__ppo_kl": {"lower_lr": 0.1}}
    changes = {**CALM, **rules, "trainer__total_steps": 3, "trainer__keep_checkpoints": 9}
    broker = MemoryBroker()
    async with run_of(config(**changes), tmp_path, broker=broker) as it:
        it.services.writes = True
        it.services.readings = {2: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
        await it.enlist_all()
        await it.go()
        assert [a.lr_scale for a in it.services.adjustments] == [1.0, 1.0, 0.5]
        services = it.services
    services.version = services.source = 1
    services.trained.clear()
    services.standings.clear()
    async with run_of(config(**changes), tmp_path, services, broker) as it:
        await it.enlist_all()
        await it.go()
        assert [e["to_step"] for e in of(it, "rewind")] == [1]
        assert [a.lr_scale for a in services.adjustments][3:] == [1.0, 0.5]
        assert it.breaches() == []
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step_000001", "step_000002", "step_000003"]


async def test_a_step_that_is_finished_from_its_checkpoint_takes_the_guards_state_from_it(
    tmp_path: Path,
) -> None:
    """The controller is killed between the checkpoint of step 1 and the event that finishes the step."""
    rules = {"guard__ppo_kl": {"lower_lr": 0.1}}
    changes = {**CALM, **rules, "trainer__total_steps": 2}
    broker = MemoryBroker()
    async with run_of(config(**changes), tmp_path, broker=broker) as it:
        it.services.writes = True
        it.services.readings = {1: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
        services, record_all = it.services, it.journal.record_all

        def killed(events: Iterable[Event]) -> None:
            events = list(events)
            if any((event["event"], event.get("step")) == ("step", 1) for event in events):
                raise RuntimeError("killed")
            record_all(events)

        it.journal.record_all = killed  # type: ignore[method-assign]
        await it.enlist_all()
        with pytest.raises(RuntimeError, match="killed"):
            await it.go()
    state = ControllerState.from_plain(json.loads(services.saved[-1]))
    assert state.step == 1
    async with run_of(config(**changes), tmp_path, services, broker) as it:
        await it.enlist_all()
        await it.go()
        assert [a.lr_scale for a in services.adjustments] == [1.0, 0.5]
        assert [line["step"] for line in it.lines()] == [0, 1, 2]


async def test_newcomers_get_no_weights_but_the_committed_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A learner whose weights have changed under the same version serves no newcomer."""
    async with run(tmp_path, **CALM, trainer__total_steps=1) as it:
        await it.enlist_all()
        it.may_answer = lambda: "was committed with digest" in caplog.text
        running = asyncio.create_task(it.go())
        await collecting(it)
        it.services.source = 17
        await it.enlist("rollout-2", MemberKind.ROLLOUT, RolloutState.STALE)
        while not it.may_answer():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        it.services.source = 0
        await running
        assert "newcomers (rollout-2) did not get v0@" in caplog.text
        assert of(it, "newcomers") == []


def test_lines_of_metrics_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.controller.run.records import metrics

    synced: list[str] = []
    monkeypatch.setattr(metrics.os, "fsync", lambda _: synced.append((tmp_path / "m").read_text()))
    monkeypatch.setattr(metrics.time, "time", lambda: 1763690000.1234)
    metrics.MetricsFile(tmp_path / "m").append(3, {"a": 1.0})
    assert synced == ['{"step": 3, "time": 1763690000.123, "a": 1.0}\n']


async def test_a_restarted_controller_goes_on_with_the_guards_adjustments(tmp_path: Path) -> None:
    rules = {"guard__ppo_kl": {"lower_lr": 0.1}}
    broker = MemoryBroker()
    async with run_of(config(**CALM, **rules), tmp_path, broker=broker) as it:
        it.services.readings = {2: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
        await it.enlist_all()
        await it.go()
        services = it.services
    async with run_of(config(**CALM, **rules, trainer__total_steps=3), tmp_path, services, broker) as it:
        await it.enlist_all()
        await it.go()
        assert [a.lr_scale for a in services.adjustments] == [1.0, 1.0, 0.5]


async def test_a_lost_learner_takes_the_guards_adjustments_back_with_it(tmp_path: Path) -> None:
    """Step 2 halves the rate; in step 3 the learner is lost, and comes back with the weights of step 1."""
    rules = {"guard__ppo_kl": {"lower_lr": 0.1}}
    changes = {**CALM, **rules, "trainer__total_steps": 3, "trainer__keep_checkpoints": 9}
    async with run(tmp_path, **changes, service__recovery_timeout_s=30.0) as it:
        it.services.writes = True
        it.services.readings = {2: [Reading(rule="ppo_kl", network="actor", value=0.3)]}
        await it.enlist_all()
        train, scales = it.services.learner.train, list[tuple[int, float]]()

        async def dying(member: Any, order: Any) -> Any:
            scales.append((order.step, order.adjustments.lr_scale))
            if order.step == 3 and member.incarnation == "a":
                it.services.version = it.services.source = 1
                it.services.trained.clear()
                await it.enlist("learner", MemberKind.LEARNER, LearnerState.READY, incarnation="b")
                raise PeerLostError("the learner was killed", peer="learner")
            return await train(member, order)

        it.services.learner.train = dying  # type: ignore[method-assign]
        await it.go()
        assert scales == [(1, 1.0), (2, 1.0), (3, 0.5), (2, 1.0), (3, 0.5)]
        assert [e["to_step"] for e in of(it, "rewind")] == [1]
        assert [line["step"] for line in it.lines()] == [0, 1, 2, 3]
        assert it.breaches() == []
