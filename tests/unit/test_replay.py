"""Runs that train prompt groups of earlier steps again, against fake services."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.verify.check import verify
from paceline.controller.verify.findings import Findings, JournalEntry
from paceline.controller.verify.rows.replays import Replays
from paceline.controller.verify.rows.trajectory_row import TrajectoryRow
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.replay import ReplayRule, TrainedGroup
from paceline.wire import decode_trajectory
from support import killed_sequencer
from support.fake_fleet import FakeServices
from support.faulty_fleet import FaultyFleet
from support.killed_sequencer import TRANSPORT, breaches_of, journal_events, kills, metrics_lines
from support.memory_broker import MemoryBroker
from support.sequencer_run import SequencerRun, config, events_of, run
from support.training_run import assert_same_metrics

STEPS = 6


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's end is an exception here, which loses nothing that was written."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def replaying(k: int = 0, **changes: Any) -> dict[str, Any]:
    replay = {"prompts_per_step": 2, "filter_probability": 0.9, "max_age": 3} | changes.pop("replay", {})
    return {
        "barrier__mode": "bounded",
        "barrier__max_staleness": k,
        "algorithm__rollout_correction": {"method": "tis"},
        "algorithm__replay": replay,
        "trainer__total_steps": STEPS,
        "trainer__save_freq": 4,
        "trainer__test_freq": 0,
        "trainer__val_before_train": False,
        **changes,
    }


def scored(group: Any, index: int) -> dict[str, Any]:
    reward = index + group.prompt_id / 8
    return {"reward": reward, "reward_error": None, "components": {"exact_match": reward}}


def again(it: SequencerRun) -> dict[int, list[list[Any]]]:
    """What each step trained again, by step."""
    return {e["step"]: e.get("again", []) for e in events_of(it, "batch")}


# --- the draw


def groups(steps: int, prompts: int = 4, rows: int = 2) -> list[TrainedGroup]:
    return [
        TrainedGroup(step=s, prompt_id=10 * s + p, num_rows=rows, oldest_version=s - 1)
        for s in range(1, steps + 1)
        for p in range(prompts)
    ]


def rule(**changes: Any) -> ReplayRule:
    plain = {"seed": 1, "prompts_per_step": 3, "size": 100, "filter_probability": 1.0, "max_age": 4}
    return ReplayRule.from_plain(plain | changes)


def test_a_draw_follows_from_seed_step_and_groups_alone() -> None:
    known = groups(8)
    drawn = rule().draw(known, 9)
    assert len(drawn) == len({group.prompt_id for group in drawn}) == 3
    assert drawn == sorted(drawn, key=lambda group: group.prompt_id)
    assert rule().draw(reversed(known), 9) == drawn
    assert rule(seed=2).draw(known, 9) != drawn
    assert rule().draw([g for g in known if g.step > 4], 9) == drawn, "older groups change nothing"
    draws = [tuple(rule(max_age=9).draw(known, step)) for step in (9, 10)]
    assert draws[0] != draws[1]
    without = {group.prompt_id for group in drawn}
    assert not without & {group.prompt_id for group in rule().draw(known, 9, without=without)}


def test_the_buffer_is_bounded_by_age_size_and_filter() -> None:
    known = groups(200, rows=2)
    assert {group.step for group in rule(size=10_000).buffer(known, 201)} == {197, 198, 199, 200}
    assert len(rule(size=9, max_age=300).buffer(known, 201)) == 4
    kept = rule(size=10_000, filter_probability=0.8, max_age=300).buffer(known, 201)
    assert 0.75 < len(kept) / len(known) < 0.85
    older = [TrainedGroup(step=200, prompt_id=1, num_rows=2, oldest_version=195)]
    assert rule().buffer(older, 200) == rule().buffer(older, 201) == []
    assert rule(max_age=5).buffer(older, 201) == older


def test_of_a_prompt_that_was_trained_in_several_steps_only_the_newest_group_is_there() -> None:
    twice = [TrainedGroup(step=s, prompt_id=7, num_rows=2, oldest_version=s - 1) for s in (1, 2)]
    assert rule().buffer(twice, 3) == twice[1:]


def trained_in(step: int) -> list[TrajectoryRow]:
    """What `verify` knows of the rows of `groups` that a step trained."""
    return [
        TrajectoryRow(
            TrajectoryId(step=step, purpose="train", prompt_id=group.prompt_id, sample_index=index),
            f"digest {group.prompt_id}.{index}",
            *(1.0, 1.0),
            PolicyTag(version=step - 1, digest="0" * 16),
        )
        for group in groups(step)[-4:]
        for index in range(group.num_rows)
    ]


def test_verify_remembers_what_a_step_after_a_rewind_may_train_again() -> None:
    findings, short = Findings(), rule(max_age=2, prompts_per_step=2)
    replays = Replays(findings)
    for step in range(1, 10):
        replays.finish(step, trained_in(step), short, targets=[3])
    drawn = short.draw(groups(3), 4)
    listed = [
        [str(known.key), known.digest, known.reward]
        for group in drawn
        for known in trained_in(group.step)
        if known.key.prompt_id == group.prompt_id
    ]
    assert {group.step for group in drawn} <= {2, 3}
    assert len(listed) == 4, "two groups of two rows"
    entry = JournalEntry(line=1, event={"event": "batch", "step": 4, "again": listed})
    assert len(replays.rows(entry, [], short)) == 4
    assert not findings.breaches, "the groups of steps 2 and 3 are known at the rewind to step 3"


# --- runs


async def test_steps_train_groups_of_earlier_steps_again_within_their_age(tmp_path: Path) -> None:
    async with run(tmp_path, **replaying()) as it:
        trained: dict[str, bytes] = {}
        train = it.services.learner.train

        async def train_and_look(member: Any, order: Any) -> Any:
            blobs = await it.broker.get_blobs([row.blob_key for row in order.rows])
            for row, blob in zip(order.rows, blobs, strict=True):
                assert blob is not None
                assert trained.setdefault(str(row.trajectory_id), blob) == blob
                assert decode_trajectory(blob).trajectory_id == row.trajectory_id
            return await train(member, order)

        it.services.learner.train = train_and_look  # type: ignore[method-assign]
        await it.enlist_all()
        await it.go(scored)
        assert it.breaches() == []
        listed = again(it)
        assert listed.keys() == set(range(1, STEPS + 1))
        assert listed[1] == []
        assert sum(map(len, listed.values())) > 10
        for step, rows in listed.items():
            keys = [TrajectoryId.parse(key) for key, _, _ in rows]
            assert all(1 <= step - key.step <= 3 for key in keys)
            order = it.services.orders[step - 1]
            assert len(order.rows) == 6 + len(rows)
            fresh = {row.trajectory_id.prompt_id for row in order.rows if row.trajectory_id.step == step}
            assert not fresh & {key.prompt_id for key in keys}
            places = [(row.trajectory_id.prompt_id, row.trajectory_id.sample_index) for row in order.rows]
            assert places == sorted(places)
            rewards = {str(row.trajectory_id): row.reward for row in order.rows}
            assert all(rewards[key] == reward for key, _, reward in rows)
        lines = it.lines()[1:]
        assert [line["replay/share"] for line in lines] == [
            len(rows) / (6 + len(rows)) for rows in listed.values()
        ]
        assert max(line.get("replay/age/max", 0) for line in lines) > 1
        assert all(line.get("replay/age/max", 0) <= 3 for line in lines)
        assert lines[0]["replay/buffer"] == 0
        assert lines[3]["replay/buffer"] >= 2
        # Blobs go with their step.
        kept = [key for key in it.broker._store.blobs if ":replay:" in key]
        assert all(key in {row.blob_key for row in it.services.orders[-1].rows} for key in kept)


async def test_a_run_with_replay_is_sound_to_the_last_file(tmp_path: Path) -> None:
    async with run(tmp_path, **replaying(1, rollout__in_flight="keep")) as it:
        it.services.may_end = lambda group: (
            group.prompt_id % 2 == 1 or it.sequencer.progress.step >= group.step
        )
        it.services.writes = True
        await it.enlist_all()
        await it.go(scored)
        it.journal.record("end", ok=True, message="")
        listed = again(it)
        mixed = {e["id"] for e in events_of(it, "trajectory") if "ranges" in e}
        assert mixed & {key for rows in listed.values() for key, _, _ in rows}
    cfg = config(**replaying(1, rollout__in_flight="keep"))
    assert breaches_of(tmp_path, cfg) == []
    findings = verify(tmp_path)
    assert findings.counts["rows trained"] == 6 * STEPS
    assert findings.counts["rows trained again"] == sum(map(len, listed.values()))
    path = tmp_path / "trajectories" / "step_000002.parquet"
    path.write_bytes((tmp_path / "trajectories" / "step_000003.parquet").read_bytes())
    assert breaches_of(tmp_path, cfg)


async def test_engine_and_learner_are_not_compared_over_samples_of_earlier_steps(tmp_path: Path) -> None:
    async with run(tmp_path, **replaying(guard__mismatch_kl={"warn": 1.0})) as it:
        train = it.services.learner.train

        async def train_apart(member: Any, order: Any) -> Any:
            result = await train(member, order)
            result.metrics["rollout/mismatch_kl"] = 5e-6
            return result

        it.services.learner.train = train_apart  # type: ignore[method-assign]
        await it.enlist_all()
        await it.go(scored)
        alone = [step for step, rows in again(it).items() if not rows]
        assert [e["step"] for e in events_of(it, "guard") if e["rule"] == "mismatch_kl"] == alone


# --- after a kill


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert asyncio.run(live(folder, FakeServices(), MemoryBroker(), None))
    return folder


async def live(folder: Path, fakes: FakeServices, broker: MemoryBroker, kill: Any) -> bool:
    fakes.writes = True
    return await killed_sequencer.live(config(**replaying(1)), folder, fakes, broker, scored, kill)


@pytest.mark.parametrize("written", [True, False])
async def test_a_controller_that_is_killed_draws_what_an_undisturbed_one_draws(
    undisturbed: Path, tmp_path: Path, written: bool
) -> None:
    recorded = journal_events(undisturbed)
    digests = [e["digest"] for e in recorded if e["event"] == "trained"]
    (first,) = [e["n"] for e in recorded if e["event"] == "step" and e["step"] == 2]
    (last,) = [e["n"] for e in recorded if e["event"] == "step" and e["step"] == 3]
    assert next(e for e in recorded if e["event"] == "batch" and e["step"] == 3)["again"]
    for number in kills(recorded, written=written):
        if not first < number <= last:
            continue
        folder, fakes, broker = tmp_path / f"{number}", FakeServices(), MemoryBroker()
        folder.mkdir()
        assert not await live(folder, fakes, broker, (number, written))
        assert await live(folder, fakes, broker, None)
        assert [digest for _, digest in fakes.trained] == digests, recorded[number]
        assert_same_metrics(metrics_lines(folder), metrics_lines(undisturbed), without=TRANSPORT)
        assert breaches_of(folder, config(**replaying(1))) == []


async def test_a_learner_that_goes_back_to_a_checkpoint_trains_the_same_again(tmp_path: Path) -> None:
    batches = []
    for lost_in in (0, 6):
        fleet = FaultyFleet(tmp_path / f"{lost_in}", replaying(1))

        def lose(it: SequencerRun, event: dict[str, Any], fleet: Any = fleet, lost_in: int = lost_in) -> None:
            if event["event"] == "trained" and event["step"] == lost_in and not fleet.restarts:
                fleet.restart_learner(it, "it was killed")

        assert await fleet.live(lose)
        assert fleet.restarts == int(lost_in > 0)
        assert breaches_of(fleet.folder, config(**fleet.changes)) == []
        batches.append(
            {e["step"]: e["digest"] for e in journal_events(fleet.folder) if e["event"] == "batch"}
        )
    assert batches[0] == batches[1]


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_file_that_is_not_the_one_that_was_written_is_not_trained_from(
    is_gone: bool, tmp_path: Path
) -> None:
    async with run(tmp_path, **replaying()) as it:
        train = it.services.learner.train

        async def train_and_change(member: Any, order: Any) -> Any:
            path = tmp_path / "trajectories" / "step_000002.parquet"
            if order.step == 3 and is_gone:
                path.unlink()
            elif order.step == 3:
                path.write_bytes((tmp_path / "trajectories" / "step_000001.parquet").read_bytes())
            return await train(member, order)

        it.services.learner.train = train_and_change  # type: ignore[method-assign]
        await it.enlist_all()
        with pytest.raises(CheckpointError, match="step_000002.parquet"):
            await it.go(scored)


# --- planted faults

Events = list[dict[str, Any]]


def the_batch(events: Events) -> dict[str, Any]:
    return [e for e in events if e["event"] == "batch" and len(e.get("again", [])) > 2][-1]


def one_too_many(events: Events) -> None:
    batch = the_batch(events)
    drawn = {key for key, _, _ in batch["again"]}
    own = [e for e in events if e["event"] == "trajectory" and e["verdict"] == "admitted"]
    earlier = [e for e in own if e["id"].startswith(f"train:{batch['step'] - 1}:") and e["id"] not in drawn]
    batch["again"].append([earlier[0]["id"], earlier[0]["digest"], earlier[0]["reward"]])


def one_twice(events: Events) -> None:
    the_batch(events)["again"].append(the_batch(events)["again"][0])


def one_left_out(events: Events) -> None:
    the_batch(events)["again"].pop()


def beyond_its_age(events: Events) -> None:
    for event in events:
        if event["event"] == "run":
            event["verify"]["replay"]["max_age"] = 1


def never_admitted(events: Events) -> None:
    the_batch(events)["again"][0][0] = "train:1:99:0"


def contents_changed(events: Events) -> None:
    the_batch(events)["again"][0][1] = "0" * 32


def reward_changed(events: Events) -> None:
    the_batch(events)["again"][0][2] += 1.0


def of_a_run_without_replay(events: Events) -> None:
    for event in events:
        if event["event"] == "run":
            del event["verify"]["replay"]


def of_the_same_step(events: Events) -> None:
    batch = the_batch(events)
    own = [e for e in events if e["event"] == "trajectory" and e["id"].startswith(f"train:{batch['step']}:")]
    batch["again"][0] = [own[0]["id"], own[0]["digest"], own[0]["reward"]]


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (one_too_many, "without permission"),
        (one_twice, "again twice"),
        (one_left_out, "but did not"),
        (beyond_its_age, "algorithm.replay.max_age is 1"),
        (never_admitted, "which no step before it trained"),
        (contents_changed, "at first they were"),
        (reward_changed, "at first they were"),
        (of_a_run_without_replay, "which no step before it trained"),
        (of_the_same_step, "which no step before it trained"),
    ],
)
async def test_what_is_planted_into_the_permissions_is_found(
    plant: Callable[[Events], None], words: str, undisturbed: Path, tmp_path: Path
) -> None:
    events = [json.loads(line) for line in (undisturbed / "events.jsonl").read_text().splitlines()]
    plant(events)
    for name in ("metrics.jsonl", "trajectories", "checkpoints"):
        (tmp_path / name).symlink_to(undisturbed / name)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    breaches = breaches_of(tmp_path, config(**replaying(1)))
    assert any(words in breach for breach in breaches), breaches


# --- the configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"barrier__mode": "strict", "barrier__max_staleness": None}, "barrier.mode: strict"),
        ({"algorithm__rollout_correction": {"method": "none"}}, "rollout_correction.method: none"),
        ({"trainer__save_tokens": False}, "save_tokens"),
        ({"trainer__save_trajectories": False}, "save_trajectories"),
        ({"trainer__dataflow": "flow.py:flow"}, "trainer.dataflow"),
        ({"data__image_key": "images"}, "data.image_key"),
        ({"barrier__work_ahead": "scores"}, "barrier.work_ahead"),
        ({"algorithm__adv_estimator": "remax"}, "greedy answers"),
        ({"rollout__tools": ["tools.py:add"]}, "only single answers"),
    ],
)
def test_what_does_not_go_with_a_replay(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**replaying() | changes)
    assert config(**replaying()).replays
