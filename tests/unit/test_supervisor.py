"""The supervisor: who is waited for, how long, and who stays out of pushes after failures in a row."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.controller.events import EventHub
from paceline.controller.fleet.clients import while_alive
from paceline.controller.fleet.membership import Fleet, Member
from paceline.controller.fleet.quarantine import Quarantine
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.journal import Journal
from paceline.core.errors import DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import LearnerState, MemberKind, MemberState, RolloutState
from support.clocks import ManualClock

KINDS = {"learner-0": MemberKind.LEARNER, "reward-0": MemberKind.REWARD}


class Bench:
    """A supervisor whose clock the test sets, and members that say what the test says."""

    def __init__(self, folder: Path) -> None:
        self.clock, events = ManualClock(), EventHub()
        self.notices: list[str] = []
        events.notice = self.notices.append  # type: ignore[method-assign]
        self.journal = Journal(folder / "events.jsonl", self.clock)
        fleet = Fleet(self.clock, suspect_after_s=5, dead_after_s=12)
        self.supervisor = Supervisor(fleet, self.journal, events, self.clock)

    async def join(self, member_id: str, state: MemberState, incarnation: str = "a") -> Member:
        fleet = self.supervisor.fleet
        await self.supervisor.apply(
            fleet.register(
                kind=KINDS.get(member_id, MemberKind.ROLLOUT),
                member_id=member_id,
                incarnation=incarnation,
                address="h:1",
                num_ranks=1,
                state=state,
            )
        )
        member = fleet.get(member_id)
        assert member is not None
        return member

    async def fail(self, member: Member, reason: str, *, is_final: bool) -> None:
        _, changes = self.supervisor.fleet.heartbeat(
            member.member_id,
            member.incarnation,
            state=None,
            policy=None,
            in_flight=0,
            failure=reason,
            is_final=is_final,
        )
        await self.supervisor.apply(changes)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.journal.close()


async def test_a_lost_learner_is_waited_for_until_its_weights_are_loaded(bench: Bench) -> None:
    old = await bench.join("learner-0", LearnerState.READY)
    assert await bench.supervisor.learner_ready(20) is old
    assert bench.notices == ["learner-0 is registered", "learner-0 is ready"]
    await bench.fail(old, "out of memory", is_final=False)
    waiting = asyncio.create_task(bench.supervisor.learner_ready(20))
    await asyncio.sleep(0.02)
    assert bench.notices[-1] == "waiting up to 20 s for the learner (learner-0: out of memory)"
    new = await bench.join("learner-0", LearnerState.LOADING, "b")
    await asyncio.sleep(0.02)
    assert not waiting.done()
    _, changes = bench.supervisor.fleet.heartbeat(
        "learner-0", "b", state=LearnerState.READY, policy=None, in_flight=0
    )
    await bench.supervisor.apply(changes)
    assert await waiting is new


async def test_who_does_not_come_back_is_named_with_seconds_and_the_setting(bench: Bench) -> None:
    await bench.fail(await bench.join("rollout-0", RolloutState.SERVING), "CUDA error", is_final=False)
    with pytest.raises(DeadlineError) as caught:
        await bench.supervisor.rollouts_ready(0.05)
    assert str(caught.value) == (
        "FORMING: no answer from 1 rollout server(s) within 0.05 s; last failures: rollout-0: CUDA error; "
        "see the logs, or raise service.recovery_timeout_s"
    )
    with pytest.raises(DeadlineError, match="the reward service within 0.05 s; see the logs"):
        await bench.supervisor.reward_ready(0.05)


async def test_a_failure_that_a_restart_cannot_mend_ends_the_wait_at_once(bench: Bench) -> None:
    learner = await bench.join("learner-0", LearnerState.LOADING)
    waiting = asyncio.create_task(bench.supervisor.learner_ready(60))
    await asyncio.sleep(0.02)
    await bench.fail(learner, "no tokenizer in m", is_final=True)
    with pytest.raises(PeerLostError, match="learner-0: no tokenizer in m"):
        await asyncio.wait_for(waiting, 120)
    await bench.join("learner-0", LearnerState.READY, "b")
    await bench.supervisor.learner_ready(20)


async def test_a_final_failure_of_a_server_that_is_not_needed_ends_nothing(bench: Bench) -> None:
    await bench.fail(await bench.join("rollout-0", RolloutState.STALE), "no such engine", is_final=True)
    serving = await bench.join("rollout-1", RolloutState.STALE)
    assert await bench.supervisor.rollouts_ready(0.05) == [serving]


async def test_a_call_ends_when_another_incarnation_takes_the_members_place(bench: Bench) -> None:
    """Its host is frozen: the connection stays up, and the deadline of a training step is an hour."""
    old = await bench.join("learner-0", LearnerState.TRAINING)
    calling = asyncio.create_task(while_alive(old, asyncio.sleep(3600), bench.supervisor.gone))
    await asyncio.sleep(0.02)
    assert not calling.done()
    await bench.join("learner-0", LearnerState.LOADING, "b")
    with pytest.raises(
        PeerLostError, match="learner-0 is gone: another incarnation took its place"
    ) as caught:
        await asyncio.wait_for(calling, 120)
    assert caught.value.peer == "learner-0"


async def test_three_failed_pushes_in_a_row_keep_a_server_out_of_the_group(bench: Bench) -> None:
    good = await bench.join("rollout-1", RolloutState.STALE)
    for incarnation in "abc":
        bad = await bench.join("rollout-0", RolloutState.STALE, incarnation)
        assert bench.supervisor.rollouts == [bad, good]
        await bench.supervisor.expel(bad, "WeightSyncError: tensor w differs")
    bad = await bench.join("rollout-0", RolloutState.STALE, "d")
    assert bench.supervisor.rollouts == [good]
    assert (
        "rollout-0 failed 3 pushes in a row: it gets no weights for 30 s "
        "(last: WeightSyncError: tensor w differs)"
    ) in bench.notices

    supervising = asyncio.create_task(bench.supervisor.supervise())
    await asyncio.sleep(0.02)
    assert bench.supervisor.rollouts == [good]
    bench.clock.advance(30)
    async with asyncio.timeout(120):
        while bad not in bench.supervisor.rollouts:  # noqa: ASYNC110 - the supervisor has no event for it
            await asyncio.sleep(0.02)
    assert bench.notices[-1] == "rollout-0 is out of quarantine: the next push tries it again"
    supervising.cancel()
    await asyncio.wait([supervising])


async def test_the_last_server_too_is_kept_out_and_waited_for(bench: Bench) -> None:
    for incarnation in "abc":
        await bench.supervisor.expel(await bench.join("rollout-0", RolloutState.STALE, incarnation), "x")
    await bench.join("rollout-0", RolloutState.STALE, "d")
    with pytest.raises(DeadlineError, match=r"1 rollout server\(s\) within 0.05 s"):
        await bench.supervisor.rollouts_ready(0.05)


REFUSAL = "ModelError: TP rank 0: the engine keeps parameters of types {'float8_e4m3fn': 'w'}"


async def refuse(bench: Bench, member_id: str, *reasons: str) -> None:
    for number, reason in enumerate(reasons):
        member = await bench.join(member_id, RolloutState.STALE, str(number))
        await bench.supervisor.expel(member, reason)
    await bench.join(member_id, RolloutState.STALE, "last")


async def test_a_refusal_of_all_servers_three_times_in_a_row_ends_the_wait_at_once(bench: Bench) -> None:
    await refuse(bench, "rollout-0", "PeerLostError: gone", *[REFUSAL] * 3)
    await refuse(bench, "rollout-1", *["WeightSyncError: TP rank 0: IndexError: 2"] * 3)
    with pytest.raises(
        WeightSyncError, match=r"each refused three pushes: rollout-0: ModelError.*; rollout-1: .*IndexError"
    ):
        await bench.supervisor.rollouts_ready(60)


@pytest.mark.parametrize(
    "reasons",
    [
        [REFUSAL] * 2 + ["WeightSyncError: TP rank 0: no memory"],
        ["PeerLostError: the engine has died"] * 3,
        ["DeadlineError: nobody came"] * 3,
    ],
)
async def test_other_failures_are_waited_out(bench: Bench, reasons: list[str]) -> None:
    await refuse(bench, "rollout-0", *reasons)
    with pytest.raises(DeadlineError):
        await bench.supervisor.rollouts_ready(0.05)


async def test_refusals_are_waited_out_where_a_server_has_served_or_another_may(bench: Bench) -> None:
    await refuse(bench, "rollout-0", *[REFUSAL] * 3)
    other = await bench.join("rollout-1", RolloutState.JOINING)
    with pytest.raises(DeadlineError):
        await bench.supervisor.rollouts_ready(0.05)
    await bench.join("rollout-1", RolloutState.SERVING, "b")
    await refuse(bench, other.member_id, *[REFUSAL] * 3)
    with pytest.raises(DeadlineError):
        await bench.supervisor.rollouts_ready(0.05)


async def test_a_server_that_serves_begins_with_a_clean_record(bench: Bench) -> None:
    for incarnation in "ab":
        await bench.supervisor.expel(await bench.join("rollout-0", RolloutState.STALE, incarnation), "x")
    member = await bench.join("rollout-0", RolloutState.SERVING, "c")
    await bench.supervisor.expel(member, "x")
    member = await bench.join("rollout-0", RolloutState.STALE, "d")
    assert bench.supervisor.rollouts == [member]


def test_the_time_in_quarantine_doubles_up_to_ten_minutes() -> None:
    clock = ManualClock()
    quarantine = Quarantine(clock)
    seconds = []
    for _ in range(9):
        seconds.append(quarantine.failed("rollout-0", "x"))
        clock.advance(seconds[-1])
        assert quarantine.release() == (["rollout-0"] if seconds[-1] else [])
        assert not quarantine.holds("rollout-0")
    assert seconds == [0, 0, 30, 60, 120, 240, 480, 600, 600]
    quarantine.succeeded("rollout-0")
    assert quarantine.failed("rollout-0", "x") == 0
    assert quarantine.failed("rollout-1", "x") == 0


async def test_only_those_who_wait_for_a_member_that_ends_are_woken(bench: Bench) -> None:
    """In a push one task waits for each server; what one server reports must not wake all of them."""
    members = [await bench.join(f"rollout-{number}", RolloutState.STALE) for number in range(3)]
    woken: list[str] = []

    async def wait(member: Member) -> None:
        await bench.supervisor.gone(member)
        woken.append(member.member_id)

    tasks = [asyncio.create_task(wait(member)) for member in members]
    await asyncio.sleep(0)
    await bench.join("rollout-3", RolloutState.STALE)
    await asyncio.sleep(0)
    assert woken == []
    await bench.fail(members[1], "lost its GPU", is_final=False)
    await bench.join("rollout-4", RolloutState.STALE)  # before the task of rollout-1 has run
    async with asyncio.timeout(60):
        await tasks[1]
        await bench.supervisor.gone(members[1])
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    await bench.fail(members[0], "lost its GPU", is_final=False)
    await bench.join("rollout-1", RolloutState.STALE, incarnation="b")
    await bench.fail(members[2], "lost its GPU", is_final=False)
    async with asyncio.timeout(60):
        await tasks[2]
    assert woken == ["rollout-1", "rollout-2"]
