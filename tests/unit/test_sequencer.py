"""The loop of a run against fake services: whole sequences of calls, events and phases."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest

from paceline.broker import names
from paceline.controller.batch import collect
from paceline.controller.fleet.membership import Health
from paceline.controller.run.records.checkpoints import ControllerState
from paceline.core.errors import DeadlineError, PeerLostError, RewardError, WeightSyncError
from paceline.core.ids import Purpose
from paceline.core.members import LearnerState, MemberKind, RankRef, RewardState, RolloutState
from paceline.core.samples.trajectory import GroupRefusal, PromptGroup
from paceline.data.cursor import PromptCursor
from support.fake_fleet import score_all
from support.sequencer_run import RUN, SequencerRun, run

LEARNER_RANK = RankRef(MemberKind.LEARNER, 0)


async def test_a_whole_run(tmp_path: Path) -> None:
    async with run(tmp_path) as it:
        await it.enlist_all()
        await it.go()

        def push(version: int) -> list[str]:
            receives = [f"receive rollout-{i} v{version} e1" for i in range(2)]
            return [f"publish v{version} e1", *receives, *(f"commit rollout-{i} {version}" for i in range(2))]

        assert it.services.calls == [
            "describe learner",
            *(f"describe {m}" for m in ("learner", "rollout-0", "rollout-1")),
            "join learner e1",
            "join rollout-0 e1 at 1",
            "join rollout-1 e1 at 2",
            *push(0),
            *["train 1", *push(1), "save 1"],
            *["train 2", *push(2), "save 2"],
        ]
        for batch in it.services.batches:
            assert batch == sorted(batch)
            assert len(batch) == 6
        assert {p.version for p in (order.policy for order in it.services.orders)} == {0, 1}
        phases = [e["to"] for e in it.events() if e["event"] == "phase"]
        step = ["dispatch", "collect", "learn", "publish", "commit"]
        assert phases == [
            "forming",
            "publish",
            "commit",
            "validate",
            *step,
            "checkpoint",
            *step,
            "validate",
            "checkpoint",
            "ended",
        ]
        assert [line["step"] for line in it.lines()] == [0, 1, 2]
        assert it.lines()[0]["val/reward/mean"] == it.lines()[2]["val/reward/mean"] == 0.0
        assert it.breaches() == []
        state = ControllerState.from_plain(json.loads(it.services.saved[0]))
        assert (state.step, state.cursor.walks[0].position) == (1, 3)
        assert await it.broker.get_blobs([names.blob(RUN, "train:1:0:0", "fake", "0")]) == [None]


async def test_the_learner_is_told_how_many_patches_of_images_a_row_has(tmp_path: Path) -> None:
    async with run(tmp_path, trainer__total_steps=1) as it:
        await it.enlist_all()

        def answer(group: Any, index: int) -> dict[str, Any]:
            return {"reward": float(index), "reward_error": None, "num_patches": 4 * group.prompt_id}

        await it.go(answer)
        (order,) = it.services.orders
    assert [row.num_patches for row in order.rows] == [4 * row.trajectory_id.prompt_id for row in order.rows]
    assert max(row.num_patches for row in order.rows) > 0


@pytest.mark.parametrize(
    ("gpus", "num_gpus"),
    [
        ({}, 0),
        ({"learner": "a", "rollout-0": "b", "rollout-1": "c"}, 3),
        ({"learner": "a", "rollout-0": "a", "rollout-1": "b"}, 2),
    ],
)
async def test_tokens_per_second_are_told_per_gpu(
    gpus: dict[str, str], num_gpus: int, tmp_path: Path
) -> None:
    async with run(tmp_path) as it:
        it.services.gpus = gpus
        await it.enlist_all()
        await it.go()
    line = it.lines()[1]
    assert line["perf/num_gpus"] == num_gpus
    per_gpu = line["perf/tokens_per_s"] / num_gpus if num_gpus else None
    assert line.get("perf/tokens_per_s_per_gpu") == pytest.approx(per_gpu)


async def test_a_lost_rollout_is_put_out_and_the_rest_go_on(tmp_path: Path) -> None:
    async with run(tmp_path, trainer__val_before_train=False) as it:
        await it.enlist_all()
        it.services.lose = {"rollout-1"}
        await it.go()
        assert [m.member_id for m in it.supervisor.fleet.usable(MemberKind.ROLLOUT)] == ["rollout-0"]
        assert [c for c in it.services.calls if c.startswith("leave")] == [
            "leave learner e1",
            "leave rollout-0 e1",
        ]
        assert "join rollout-0 e2 at 1" in it.services.calls
        assert "commit rollout-1 0" not in it.services.calls
        assert [c for c in it.services.calls if c.startswith("train")] == ["train 1", "train 2"]
        assert it.breaches() == []


@pytest.mark.parametrize("known", [True, False])
async def test_who_only_lost_a_peer_stays(known: bool, tmp_path: Path) -> None:
    """A server that dies in a push breaks its peers' connections: all fail, one is expelled.

    Its own call shows that if nobody answers it; otherwise the learner names its rank.
    """
    async with run(tmp_path, trainer__val_before_train=False) as it:
        await it.enlist_all()
        receive, publish = it.services.rollout.receive, it.services.learner.publish

        async def failing_receive(member: Any, **kwargs: Any) -> Any:
            if kwargs["version"] == 1 and kwargs["epoch"] == 1:
                culprit = member.member_id == "rollout-1" and known
                raise PeerLostError("connection closed", peer="rollout-1" if culprit else LEARNER_RANK)
            return await receive(member, **kwargs)

        async def failing_publish(member: Any, **kwargs: Any) -> Any:
            if kwargs["version"] == 1 and kwargs["epoch"] == 1:
                raise PeerLostError("connection closed", peer=RankRef(MemberKind.ROLLOUT, 1))
            return await publish(member, **kwargs)

        it.services.rollout.receive, it.services.learner.publish = failing_receive, failing_publish  # type: ignore[method-assign]
        await it.go()
        assert [m.member_id for m in it.supervisor.fleet.usable(MemberKind.ROLLOUT)] == ["rollout-0"]
        assert [c for c in it.services.calls if c.startswith("train")] == ["train 1", "train 2"]
        assert it.breaches() == []


async def test_a_learner_that_is_lost_in_a_push_ends_the_run_and_nobody_else_is_blamed(
    tmp_path: Path,
) -> None:
    async with run(tmp_path, trainer__val_before_train=False, service__recovery_timeout_s=0.5) as it:
        await it.enlist_all()

        async def receive(member: Any, **kwargs: Any) -> Any:
            raise PeerLostError("connection closed", peer=LEARNER_RANK)

        async def publish(member: Any, **kwargs: Any) -> Any:
            raise PeerLostError("the learner went away", peer=RankRef(MemberKind.LEARNER))

        it.services.rollout.receive, it.services.learner.publish = receive, publish  # type: ignore[method-assign]
        with pytest.raises(PeerLostError, match="the learner went away"):
            await it.go()
        assert len(it.supervisor.fleet.usable(MemberKind.ROLLOUT)) == 2


async def test_the_last_server_is_tried_though_it_is_suspected(tmp_path: Path) -> None:
    async with run(
        tmp_path, trainer__val_before_train=False, trainer__total_steps=1, rollout__replicas=1
    ) as it:
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.READY)
        await it.enlist("reward-0", MemberKind.REWARD, RewardState.SERVING)
        await it.enlist("rollout-0", MemberKind.ROLLOUT, RolloutState.STALE)
        it.supervisor.fleet.members(MemberKind.ROLLOUT)[0].health = Health.SUSPECT
        await it.go()
        assert [c for c in it.services.calls if c.startswith("commit")] == [
            "commit rollout-0 0",
            "commit rollout-0 1",
        ]


async def test_a_newcomer_gets_the_current_version_before_the_next_step(tmp_path: Path) -> None:
    async with run(tmp_path, rollout__replicas=1) as it:
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.READY)
        await it.enlist("reward-0", MemberKind.REWARD, RewardState.SERVING)
        await it.enlist("rollout-0", MemberKind.ROLLOUT, RolloutState.STALE)
        train = it.services.learner.train

        async def train_and_enlist(*args: Any, **kwargs: Any) -> Any:
            reply = await train(*args, **kwargs)
            if args[1].step == 1:
                await it.enlist("rollout-1", MemberKind.ROLLOUT, RolloutState.STALE)
            return reply

        it.services.learner.train = train_and_enlist  # type: ignore[method-assign]
        await it.go()
        assert "commit rollout-1 1" in it.services.calls
        assert it.services.calls.index("commit rollout-1 1") < it.services.calls.index("train 2")


async def test_a_version_is_in_the_journal_before_any_server_serves_it(tmp_path: Path) -> None:
    async with run(tmp_path, trainer__val_before_train=False, trainer__total_steps=1) as it:
        await it.enlist_all()
        record = it.journal.record

        def recorded(event: str, **fields: Any) -> None:
            if event in ("phase", "commit"):
                it.services.calls.append(f"journal: {event} {fields.get('to', fields.get('version'))}")
            record(event, **fields)

        it.journal.record = recorded  # type: ignore[method-assign]
        await it.go()

        def push(version: int) -> list[str]:
            return [
                "journal: phase publish",
                f"publish v{version} e1",
                *(f"receive rollout-{i} v{version} e1" for i in range(2)),
                f"journal: commit {version}",
                "journal: phase commit",
                *(f"commit rollout-{i} {version}" for i in range(2)),
            ]

        pushes = (
            "publish",
            "receive",
            "commit",
            *(f"journal: {e}" for e in ("phase publish", "phase commit", "commit")),
        )
        assert [c for c in it.services.calls if c.startswith(pushes)] == [*push(0), *push(1)]


async def test_a_server_whose_digest_differs_is_put_out_and_the_rest_go_on(tmp_path: Path) -> None:
    async with run(tmp_path, trainer__val_before_train=False) as it:
        await it.enlist_all()
        it.services.corrupt = {"rollout-0"}
        await it.go()
        assert [m.member_id for m in it.supervisor.fleet.usable(MemberKind.ROLLOUT)] == ["rollout-1"]
        assert not [c for c in it.services.calls if c.startswith("commit rollout-0")]
        (dead,) = [e for e in it.events() if e["event"] == "member" and e["what"] == "dead"]
        assert dead["member"] == "rollout-0"
        assert dead["reason"].startswith(
            "WeightSyncError: w: rollout-0 holds (0,)..(2,) with digest 0000000000000001"
        )
        assert [c for c in it.services.calls if c.startswith("train")] == ["train 1", "train 2"]
        assert it.breaches() == []


async def test_a_digest_that_no_server_shares_is_never_committed(tmp_path: Path) -> None:
    async with run(tmp_path) as it:
        await it.enlist_all()
        it.services.corrupt = {"rollout-0", "rollout-1"}
        with pytest.raises(WeightSyncError, match="rollout-0 holds"):
            await it.go()
        assert not [c for c in it.services.calls if c.startswith("commit")]
        assert not [e for e in it.events() if e["event"] == "commit"]
        assert len(it.supervisor.fleet.usable(MemberKind.ROLLOUT)) == 2


async def test_a_group_without_reward_is_dropped_with_its_reason_and_the_step_goes_on(tmp_path: Path) -> None:
    def answer(group: Any, index: int) -> dict[str, Any]:
        bad = group.prompt_id == min(bad_ids) and index == 1
        return {"reward": None, "reward_error": ("timeout", "too slow")} if bad else score_all(group, index)

    bad_ids = PromptCursor(range(7), seed=0).take(3)
    async with run(tmp_path, trainer__val_before_train=False, trainer__total_steps=1) as it:
        await it.enlist_all()
        await it.go(answer)
        assert {p for p, _ in it.services.batches[0]} == set(bad_ids) - {min(bad_ids)}
        dropped = [e for e in it.events() if e["event"] == "group_dropped"]
        assert [(e["prompt"], e["reason"], e["message"]) for e in dropped] == [
            (min(bad_ids), "reward:timeout", "too slow")
        ]
        assert it.lines()[-1]["barrier/groups_dropped/reward_timeout"] == 1
        assert it.breaches() == []


async def test_too_many_groups_without_reward_end_the_run(tmp_path: Path) -> None:
    async with run(tmp_path, trainer__val_before_train=False) as it:
        await it.enlist_all()
        with pytest.raises(
            RewardError, match="3 of 3 prompt groups have no reward.*raised: boom.*max_dropped_share"
        ):
            await it.go(lambda *_: {"reward": None, "reward_error": ("raised", "boom")})


async def test_parts_of_rewards_on_tokens_reach_the_rows_and_the_record(tmp_path: Path) -> None:
    """The batch's digest is over them, and `paceline verify` finds the same from the journal."""

    def answer(group: Any, index: int) -> dict[str, Any]:
        parts = ((0, 0.25 + index),) if group.purpose == Purpose.TRAIN else ()
        return {"reward": 1.0, "reward_error": None, "token_rewards": parts}

    async with run(tmp_path, trainer__val_before_train=False, trainer__total_steps=1) as it:
        await it.enlist_all()
        await it.go(answer)
        (order,) = it.services.orders
        assert [row.token_rewards for row in order.rows][:2] == [((0, 0.25),), ((0, 1.25),)]
        plain = tuple(replace(row, token_rewards=()) for row in order.rows)
        assert replace(order, rows=plain).digest != order.digest
        assert it.breaches() == []


async def test_a_teachers_digests_reach_the_rows_and_the_record(tmp_path: Path) -> None:
    """The batch's digest is over them, so another one in the journal is a breach."""

    def answer(group: Any, index: int) -> dict[str, Any]:
        return {"reward": 1.0, "reward_error": None, "teacher_digest": f"{group.prompt_id:016x}{index:016x}"}

    async with run(tmp_path, trainer__val_before_train=False, trainer__total_steps=1) as it:
        await it.enlist_all()
        await it.go(answer)
        (order,) = it.services.orders
        rows = {row.trajectory_id: row.teacher_digest for row in order.rows}
        assert rows == {key: f"{key.prompt_id:016x}{key.sample_index:016x}" for key in rows}
        plain = tuple(replace(row, teacher_digest="") for row in order.rows)
        assert replace(order, rows=plain).digest != order.digest
        assert it.breaches() == []
        journal = it.folder / "events.jsonl"
        digest = order.rows[0].teacher_digest
        journal.write_text(journal.read_text().replace(digest, "f" * 32))
        (breach,) = it.breaches()
        assert "batch" in breach


async def test_a_greedy_answer_goes_with_each_prompt_and_is_never_a_row(tmp_path: Path) -> None:
    def answer(group: Any, index: int) -> dict[str, Any]:
        greedy = group.purpose == Purpose.GREEDY
        if group.purpose != Purpose.VALIDATE:
            assert (group.sampling.temperature, group.num_samples) == ((0.0, 1) if greedy else (1.0, 2))
        bad = greedy and group.prompt_id == lost
        reward = 10.0 + group.prompt_id if greedy else float(index)
        scored = {"reward": None if bad else reward, "reward_error": ("raised", "boom") if bad else None}
        return scored | ({"num_sampled_tokens": 1 + group.prompt_id % 2} if greedy else {})

    lost = min(PromptCursor(range(7), seed=0).take(3))
    async with run(
        tmp_path,
        trainer__val_before_train=False,
        trainer__total_steps=2,
        algorithm__adv_estimator="remax",
    ) as it:
        await it.enlist_all()
        await it.go(answer)
        for rows in (order.rows for order in it.services.orders):
            assert {row.trajectory_id.purpose for row in rows} == {"train"}
            greedy = [(row.greedy_score, row.num_greedy_tokens) for row in rows]
            prompts = [row.trajectory_id.prompt_id for row in rows]
            assert greedy == [(10.0 + prompt, 1 + prompt % 2) for prompt in prompts]
            assert [row.reward for row in rows] == [0.0, 1.0] * (len(rows) // 2)
        assert len(it.services.orders[0].rows) == 4  # its greedy answer has no score, so the group is dropped
        dropped = [e for e in it.events() if e["event"] == "group_dropped" and e["step"] == 1]
        assert [(e["prompt"], e["reason"]) for e in dropped] == [(lost, "reward:raised")]
        asked = [e["samples"] for e in it.events() if e["event"] == "dispatch"]
        assert asked == [{"train": 2, "greedy": 1}] * 2
        assert it.breaches() == []
        trained = {row.trajectory_id.prompt_id for row in it.services.orders[0].rows}
        assert it.lines()[1]["reward/greedy_answers/mean"] == 10.0 + sum(trained) / 2


async def test_a_refused_group_is_dropped_with_its_reason_and_the_rest_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(collect, "time", clock)
    monkeypatch.setattr(collect, "_CHECK_S", math.inf)  # a silent broker is not asked before the deadline
    first = PromptCursor(range(7), seed=0).take(3)
    bad, other = first[0], first[1]

    def answer(group: PromptGroup, index: int) -> dict[str, Any] | GroupRefusal:
        concerned = group.step == 1 and group.purpose == Purpose.TRAIN
        if not concerned or group.prompt_id not in (bad, other):
            return score_all(group, index)
        # The other's refusal is of another run: it concerns nobody here.
        return (
            score_all(group, index)
            if group.prompt_id == other and index == 0
            else GroupRefusal(
                run_id=RUN if group.prompt_id == bad else "another",
                step=group.step,
                purpose=group.purpose,
                prompt_id=group.prompt_id,
                policy=group.policy,
                server_id="fake",
                reason="engine_error",
                message="it broke",
                deliveries=6,
            )
        )

    def answered(it: SequencerRun) -> bool:
        events = it.events()
        refused = {e["prompt"] for e in events if e["event"] == "refusal"}
        return len(refused) == 2 and [e["event"] for e in events].count("trajectory") == 3

    async def pass_time(it: SequencerRun) -> None:
        """Lets the collection stall once all answers are in."""
        nonlocal passed_s
        while True:
            await asyncio.sleep(0.01)
            passed_s += 400.0 * answered(it)

    async with run(tmp_path, trainer__val_before_train=False, barrier__stall_timeout_s=300.0) as it:
        await it.enlist_all()
        passing = asyncio.create_task(pass_time(it))
        with pytest.raises(DeadlineError, match=rf"1 prompt groups .* \(the first is prompt {other}\)"):
            await it.go(answer)
        passing.cancel()
        refused = [e for e in it.events() if e["event"] == "refusal"]
        assert {(e["prompt"], e["reason"], e["message"], e["server"]) for e in refused} == {
            (bad, "engine_error", "it broke", "fake"),
            (other, "engine_error", "it broke", "fake"),
        }
    bad = first[0]
    other = -1
    async with run(tmp_path / "again", trainer__val_before_train=False) as it:
        await it.enlist_all()
        await it.go(answer)
        dropped = [(e["prompt"], e["reason"]) for e in it.events() if e["event"] == "group_dropped"]
        assert dropped == [(bad, "rollout:engine_error")]
        assert {row.trajectory_id.prompt_id for row in it.services.orders[0].rows} == set(first) - {bad}


async def test_the_trajectories_file_has_the_texts_and_they_leave_the_broker(tmp_path: Path) -> None:
    async with run(tmp_path, trainer__val_before_train=False) as it:
        await it.enlist_all()
        await it.go()
        keys = [names.blob(RUN, str(row.trajectory_id), "fake", "0") for row in it.services.orders[0].rows]
        assert await it.broker.get_blobs([names.text(key) for key in keys]) == [None] * 6
    rows = pyarrow.parquet.read_table(tmp_path / "trajectories/step_000001.parquet").to_pylist()
    assert [row["response"] for row in rows] == [
        f"sample {row['sample_index']} of {row['prompt_id']}" for row in rows
    ]
    assert len(rows) == 6


async def test_silence_ends_in_an_error_that_names_what_is_missing(tmp_path: Path) -> None:
    async with run(tmp_path, barrier__stall_timeout_s=0.3, trainer__val_before_train=False) as it:
        await it.enlist_all()
        with pytest.raises(DeadlineError, match="COLLECT.*3 prompt groups of step 1 are incomplete"):
            await it.sequencer.run()


async def test_start_names_who_does_not_come(tmp_path: Path) -> None:
    async with run(tmp_path, service__startup_timeout_s=0.2) as it:
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.LOADING)
        with pytest.raises(DeadlineError, match="the learner and the reward service and 2 rollout server"):
            await it.sequencer.run()


async def test_a_member_that_cannot_start_ends_the_start_at_once(tmp_path: Path) -> None:
    async with run(tmp_path, service__startup_timeout_s=300.0) as it:
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.LOADING)
        starting = asyncio.create_task(it.sequencer.run())
        await asyncio.sleep(0.05)
        _, changes = it.supervisor.fleet.heartbeat(
            "learner", "a", state=None, policy=None, in_flight=0, failure="no such folder", is_final=True
        )
        await it.supervisor.apply(changes)
        with pytest.raises(PeerLostError, match="learner: no such folder"):
            await asyncio.wait_for(starting, 120)
