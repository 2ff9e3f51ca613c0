"""Learner and rollout servers take turns on their GPUs: the order of orders, and who is lost in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.controller.fleet.clients import FreedMemory
from paceline.controller.fleet.membership import Member
from paceline.controller.fleet.turns import KINDS, Turn
from paceline.core.errors import DeadlineError, PeerLostError
from paceline.core.members import LearnerState, MemberKind, RolloutState
from paceline.rollout.states import EngineReady, Event, Slept, advance
from support.sequencer_run import SequencerRun, run

ORDERS = ("free", "sleep", "wake", "receive", "publish", "train", "commit", "join")
TURNS: dict[str, Any] = {"rollout__sleep": "always", "trainer__val_before_train": False}


def orders(it: SequencerRun) -> list[str]:
    """What concerns memory, without the epochs' numbers; calls to both servers at once as one."""
    calls = [call.split(" e")[0] for call in it.services.calls if call.startswith(ORDERS)]
    return [call.replace("rollout-0", "both") for call in calls if "rollout-1" not in call]


def holders(it: SequencerRun) -> list[str]:
    return [event["holder"] for event in it.events() if event["event"] == "turn"]


async def test_the_learner_trains_while_all_sleep_and_pushes_into_weights_that_are_awake(
    tmp_path: Path,
) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        await it.go()

        def push(version: int) -> list[str]:
            return [
                "free weights",
                "free",  # while weights wake
                "wake both weights",
                *(["join learner", "join both"] if version == 0 else []),
                f"publish v{version}",
                f"receive both v{version}",
                "free kv_cache",
                "wake both weights",
                "wake both kv_cache",
                f"commit both {version}",
            ]

        rollouts_turn = ["free kv_cache", "wake both weights", "wake both kv_cache"]
        assert orders(it) == [
            *push(0),
            *rollouts_turn,
            *("sleep both", "train 1"),
            *push(1),
            *rollouts_turn,
            *("sleep both", "train 2"),
            *push(2),
            *rollouts_turn,  # of the last validation
        ]
        assert holders(it) == ["push", "rollout", *["learner", "push", "rollout"] * 2]
        assert all(event["limit_s"] > 0 for event in it.events() if event["event"] == "turn")
        for line in it.lines()[1:]:
            kinds = [line[f"timing_s/turns/{kind}"] for kind in KINDS]
            assert min(kinds) > 0
            assert line["timing_s/turns"] >= max(kinds)
        # By each order to the learner; the first step's are also those of version 0.
        assert [line["perf/freed_gib"] for line in it.lines()[1:]] == [7.0, 4.0]
        assert it.breaches() == []


async def test_a_learner_beside_whose_cache_an_engine_has_room_keeps_it(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        it.services.has_room = True
        await it.go()
        assert {call for call in it.services.calls if call.startswith("free")} == {
            "free weights",
            "free kv_cache",
        }
        assert it.lines()[1]["perf/freed_gib"] == 0.0
        assert it.breaches() == []


async def test_the_learner_is_told_what_engines_were_seen_to_take(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        it.services.freed_bytes = {"rollout-0": 30 << 30, "rollout-1": 31 << 30}
        await it.turns.take(Turn.PUSH)
        await it.turns.take(Turn.LEARNER)
        it.services.freed_bytes = {"rollout-0": 29 << 30}  # one that has not worked since
        await it.turns.take(Turn.LEARNER)
        await it.turns.take(Turn.PUSH)
        assert it.services.engine_bytes == [0, 0, 31 << 30, 31 << 30]


async def test_for_servers_that_sleep_in_their_turn_there_must_be_room_for_all(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        await report(it, "rollout-0", Slept())
        await it.turns.take(Turn.ROLLOUT)
        assert it.services.calls[0] == "free weights kv_cache"


async def test_a_learner_that_fails_while_weights_wake_fails_the_turn_after_they_did(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        free = it.services.learner.free

        async def fail_the_second(member: Any, parts: Any, engine_bytes: int) -> Any:
            if not parts:
                raise DeadlineError(phase="TURN", peer="learner", seconds=1, hint="")
            return await free(member, parts, engine_bytes)

        it.services.learner.free = fail_the_second  # type: ignore[method-assign]
        with pytest.raises(DeadlineError):
            await it.turns.take(Turn.PUSH)
        assert it.services.calls == ["free weights", "wake rollout-0 weights", "wake rollout-1 weights"]


async def test_a_turn_is_in_the_journal_before_its_first_order(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        record = it.journal.record

        def recorded(event: str, **fields: Any) -> None:
            record(event, **fields)
            if event == "turn":
                it.services.calls.append(f"turn {fields['holder']}")

        it.journal.record = recorded  # type: ignore[method-assign]
        await it.go()
        turn = [call.split()[1] for call in it.services.calls if call.startswith(("turn", "sleep", "train"))]
        first = turn.index("learner")
        assert turn[first : first + 4] == ["learner", "rollout-0", "rollout-1", "1"]


async def test_without_sleep_no_order_is_given_and_nothing_is_written(tmp_path: Path) -> None:
    async with run(tmp_path, trainer__val_before_train=False) as it:
        await it.enlist_all()
        await it.go()
        assert not [c for c in it.services.calls if c.startswith(("free", "sleep", "wake"))]
        assert holders(it) == []
        assert "timing_s/turns" not in it.lines()[1]


async def test_a_server_that_does_not_sleep_is_put_out_and_the_learner_trains(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        it.services.sleepless = {"rollout-1"}
        await it.go()
        assert [m.member_id for m in it.supervisor.fleet.usable(MemberKind.ROLLOUT)] == ["rollout-0"]
        assert [c for c in it.services.calls if c.startswith("train")] == ["train 1", "train 2"]
        assert it.breaches() == []


async def test_a_server_that_comes_in_the_learners_turn_starts_its_engine_after_it(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        train, answers = it.services.learner.train, []

        async def train_beside_a_start(member: Any, order: Any) -> Any:
            await it.enlist("rollout-2", MemberKind.ROLLOUT, RolloutState.JOINING)
            answers.append(it.turns.may_start(server(it, "rollout-2")))
            return await train(member, order)

        it.services.learner.train = train_beside_a_start  # type: ignore[method-assign]
        watching = asyncio.create_task(until_started(it, "rollout-2"))
        await it.go()
        await watching
        assert answers[0] is False
        assert "sleep rollout-2" in it.services.calls
        assert it.breaches() == []


def server(it: SequencerRun, member_id: str) -> Member:
    member = it.supervisor.fleet.get(member_id)
    assert member is not None
    return member


async def until_started(it: SequencerRun, member_id: str) -> None:
    """What the server does: it asks with its heartbeats, starts its engine, and is stale."""
    async with asyncio.timeout(120):
        while it.supervisor.fleet.get(member_id) is None or not it.turns.may_start(  # noqa: ASYNC110
            server(it, member_id)
        ):
            await asyncio.sleep(0.001)
    assert it.turns.turn is not Turn.LEARNER
    await asyncio.sleep(0.02)
    await report(it, member_id, EngineReady())


async def report(it: SequencerRun, member_id: str, event: Event) -> None:
    """The server moves, and says so in its next heartbeat."""
    services, incarnation = it.services, server(it, member_id).incarnation
    standing = services.standings[member_id] = advance(services.standing(member_id), event)
    _, changes = it.supervisor.fleet.heartbeat(
        member_id, incarnation, state=standing.state, policy=standing.policy, in_flight=0
    )
    assert [change.state for change in changes] == [standing.state]
    await it.supervisor.apply(changes)


async def test_the_learners_turn_begins_when_a_server_that_starts_is_up(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        await it.enlist("rollout-2", MemberKind.ROLLOUT, RolloutState.JOINING)
        assert it.turns.may_start(server(it, "rollout-2"))
        await it.turns.take(Turn.ROLLOUT)
        taking = asyncio.create_task(it.turns.take(Turn.LEARNER))
        await asyncio.sleep(0.05)
        assert not taking.done()
        assert not [c for c in it.services.calls if c.startswith("sleep")]
        # Granted once, it stays granted: the answer may have been lost.
        assert it.turns.may_start(server(it, "rollout-2"))
        await report(it, "rollout-2", EngineReady())
        await asyncio.wait_for(taking, 120)
        assert sorted(c for c in it.services.calls if c.startswith("sleep")) == [
            f"sleep rollout-{i}" for i in range(3)
        ]


async def test_a_server_that_never_gets_up_does_not_hold_the_learner_for_ever(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS, service__startup_timeout_s=0.1) as it:
        await it.enlist_all()
        await it.enlist("rollout-2", MemberKind.ROLLOUT, RolloutState.JOINING)
        assert it.turns.may_start(server(it, "rollout-2"))
        await asyncio.wait_for(it.turns.take(Turn.LEARNER), 120)
        assert "holds up the learner's turn: not ready within 0.1 s" in server(it, "rollout-2").failure


async def test_servers_that_slept_get_the_policy_again_where_a_step_is_collected_again(
    tmp_path: Path,
) -> None:
    """The broker has lost the trajectories when the learner fetches them; the servers sleep."""
    async with run(tmp_path, **TURNS, barrier__stall_timeout_s=300.0) as it:
        await it.enlist_all()
        asked = iter([False])
        it.services.has_blob = lambda key: next(asked, True)
        train = it.services.learner.train

        async def train_later(member: Any, order: Any) -> Any:
            await asyncio.sleep(0.1)  # until the servers have taken note that nothing is to be drawn
            return await train(member, order)

        it.services.learner.train = train_later  # type: ignore[method-assign]
        await it.go()
        assert [c for c in it.services.calls if c.startswith("train")] == ["train 1", "train 2"]
        (newcomers,) = [e for e in it.events() if e["event"] == "newcomers"]
        assert (newcomers["version"], newcomers["servers"]) == (0, ["rollout-0", "rollout-1"])
        assert holders(it)[:4] == ["push", "rollout", "learner", "rollout"]
        assert it.breaches() == []


async def test_a_server_that_comes_back_asleep_is_woken_before_it_gets_weights(tmp_path: Path) -> None:
    """It is put out in the learner's turn, and registers again when the others sample for step 2."""
    async with run(tmp_path, **TURNS, barrier__stall_timeout_s=300.0) as it:
        await it.enlist_all()
        train, collector = it.services.learner.train, it.sequencer._collector
        collect, place = collector.collect, 0

        async def train_without_one(member: Any, order: Any) -> Any:
            if order.step == 1:
                await it.supervisor.expel(server(it, "rollout-1"), "silent for 12 s")
            return await train(member, order)

        async def collect_with_it(order: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal place
            if (order.step, place) == (2, 0):
                place = len(it.services.calls)
                await it.enlist("rollout-1", MemberKind.ROLLOUT, RolloutState.STALE)
                assert server(it, "rollout-1").state is RolloutState.ASLEEP
            return await collect(order, *arguments, **options)

        it.services.learner.train = train_without_one  # type: ignore[method-assign]
        collector.collect = collect_with_it  # type: ignore[method-assign]
        # Prompts of version 1 wait for it: else the step may end before it has the weights.
        it.may_answer = lambda: (
            "train 1" not in it.services.calls or "commit rollout-1 1" in it.services.calls
        )
        await it.go()
        told = [call for call in it.services.calls[place:] if "rollout-1" in call]
        assert told[:6] == [
            "wake rollout-1 weights",
            "wake rollout-1 kv_cache",
            "describe rollout-1",
            "join rollout-1 e3 at 1",
            "receive rollout-1 v1 e3",
            "commit rollout-1 1",
        ]
        assert [e["servers"] for e in it.events() if e["event"] == "newcomers"] == [["rollout-1"]]
        assert it.breaches() == []


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_learner_that_does_not_free_its_memory_holds_up_nobody_once_it_is_gone(
    is_lost: bool, tmp_path: Path
) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()

        async def free(member: Any, parts: Any, engine_bytes: int) -> FreedMemory:
            if is_lost:
                await it.supervisor.expel(member, "killed")
                raise PeerLostError("learner is gone", peer="learner")
            raise DeadlineError(phase="TURN", peer="learner", seconds=1, hint="")

        it.services.learner.free = free  # type: ignore[method-assign]
        if is_lost:
            await it.turns.take(Turn.ROLLOUT)
            assert "wake rollout-0 kv_cache" in it.services.calls
        else:
            with pytest.raises(DeadlineError):
                await it.turns.take(Turn.ROLLOUT)


async def test_a_learner_that_loads_has_no_memory_to_give(tmp_path: Path) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist("learner", MemberKind.LEARNER, LearnerState.LOADING)
        await it.turns.take(Turn.PUSH)
        assert it.services.calls == []


async def test_after_a_restart_of_the_controller_no_engine_starts_beside_a_step_that_still_trains(
    tmp_path: Path,
) -> None:
    async with run(tmp_path, **TURNS) as it:
        await it.enlist_all()
        await it.turns.take(Turn.LEARNER)
    async with run(tmp_path, **TURNS) as again:
        await again.enlist("rollout-2", MemberKind.ROLLOUT, RolloutState.JOINING)
        assert not again.turns.may_start(server(again, "rollout-2")), "no learner has told what it does"
        await again.enlist("learner", MemberKind.LEARNER, LearnerState.TRAINING)
        assert not again.turns.may_start(server(again, "rollout-2"))
        await again.enlist("learner", MemberKind.LEARNER, LearnerState.LOADING, incarnation="b")
        assert again.turns.may_start(server(again, "rollout-2"))
