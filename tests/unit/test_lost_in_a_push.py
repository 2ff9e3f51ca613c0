"""A rollout server dies in a push and no other notices, as over NCCL: only it is expelled."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.fleet.membership import Health, Member
from paceline.controller.weights.epoch import Epochs
from paceline.controller.weights.push import WeightPush
from paceline.core.errors import PeerLostError
from paceline.core.members import MemberKind
from paceline.weights.receipt import PushReceipt
from paceline.weights.transport.rendezvous import Abandonment, abandon, open_store
from support.fake_fleet import FakeLearner, FakeRollout, FakeServices

CONFIG = {
    "data": {"train_files": "t.jsonl"},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 1},
}
DEADLINE_S = 5.0


class SilentServices(FakeServices):
    """Members that are not lost wait for those that are until they are told, or until the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()
        self.freeze: set[str] = set()
        self.learner, self.rollout = SilentLearner(self), SilentRollout(self)

    async def wait_for_the_lost(self) -> None:
        if self.lose or self.freeze:
            await asyncio.wait_for(self.told.wait(), DEADLINE_S)
            raise PeerLostError("called off", peer=next(iter(self.lose | self.freeze)))

    def push(self, fleet: Fleet, *, term: int = 0) -> WeightPush:
        learner: Any = self.learner
        rollout: Any = self.rollout
        epochs = Epochs(parse(RunConfig, CONFIG), learner, rollout, fleet.expel, fleet.gone, term=term)
        return WeightPush(epochs, learner, rollout)


class SilentLearner(FakeLearner):
    services: SilentServices

    async def abandon(self, member: Member, *, epoch: int, lost: str) -> None:
        await super().abandon(member, epoch=epoch, lost=lost)
        self.services.told.set()

    async def publish(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        await self.services.wait_for_the_lost()
        return await super().publish(member, epoch=epoch, version=version)


class SilentRollout(FakeRollout):
    services: SilentServices

    async def join(self, member: Member, *, epoch: int, spec: bytes, rank_offset: int) -> None:
        await super().join(member, epoch=epoch, spec=spec, rank_offset=rank_offset)
        if member.member_id in self.services.lose:
            raise PeerLostError("went away", peer=member.member_id)
        if epoch == 1:
            await self.services.wait_for_the_lost()

    async def receive(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        if member.member_id in self.services.freeze:
            await asyncio.Event().wait()
        if member.member_id not in self.services.lose:
            await self.services.wait_for_the_lost()
        return await super().receive(member, epoch=epoch, version=version)


def member(kind: MemberKind, name: str) -> Member:
    return Member(kind=kind, member_id=name, incarnation=name, address="a:1", num_ranks=1, last_heard=0.0)


class Fleet:
    """The members that were expelled, and the tasks that wait for that."""

    def __init__(self) -> None:
        self.expelled: list[str] = []
        self._changed = asyncio.Condition()

    async def expel(self, lost: Member, reason: str) -> None:
        async with self._changed:
            if lost.usable:
                lost.health, lost.failure = Health.DEAD, reason
                self.expelled.append(lost.member_id)
            self._changed.notify_all()

    async def gone(self, member: Member) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not member.usable)


async def test_who_joins_is_freed_when_another_dies_meanwhile() -> None:
    services, fleet = SilentServices(), Fleet()
    push = services.push(fleet)
    servers = [member(MemberKind.ROLLOUT, f"rollout-{number}") for number in range(3)]
    services.lose = {"rollout-1"}
    async with asyncio.timeout(DEADLINE_S / 2):
        await push.epochs.form(member(MemberKind.LEARNER, "learner-0"), servers)
    assert fleet.expelled == ["rollout-1"]
    assert services.calls.count("abandon e1 for rollout-1") == 1
    assert [call for call in services.calls if call.endswith(("e2 at 1", "e2 at 2"))] == [
        "join rollout-0 e2 at 1",
        "join rollout-2 e2 at 2",
    ]


async def formed() -> tuple[SilentServices, Fleet, WeightPush, list[Member]]:
    services, fleet = SilentServices(), Fleet()
    push = services.push(fleet)
    servers = [member(MemberKind.ROLLOUT, f"rollout-{number}") for number in range(3)]
    await push.epochs.form(member(MemberKind.LEARNER, "learner-0"), servers)
    return services, fleet, push, servers


async def test_newcomers_get_their_weights_while_the_others_work_and_all_meet_again_later() -> None:
    services, fleet, push, servers = await formed()
    learner, newcomers = push_learner(), [member(MemberKind.ROLLOUT, "rollout-9")]
    services.calls.clear()
    await push.epochs.form(learner, newcomers)
    candidate = await push.transfer(0)
    assert candidate is not None
    await push.commit(candidate)
    old = {call.split()[0] for call in services.calls if call.split()[1] in {m.member_id for m in servers}}
    assert old == {"leave"}
    assert [call for call in services.calls if call.startswith(("join", "publish", "receive", "commit"))] == [
        "join learner-0 e2",
        "join rollout-9 e2 at 1",
        "publish v0 e2",
        "receive rollout-9 v0 e2",
        "commit rollout-9 0",
    ]
    services.calls.clear()
    await push.epochs.form(learner, [*servers, *newcomers])
    assert await push.transfer(1) is not None
    assert services.calls.count("join rollout-9 e3 at 4") == 1
    assert fleet.expelled == []


async def test_epochs_of_a_later_controller_have_greater_numbers() -> None:
    """They would meet at keys that the learner's store still has of the earlier ones."""
    numbers = []
    for term in (1, 2):
        services, fleet = SilentServices(), Fleet()
        epochs = services.push(fleet, term=term).epochs
        for _ in range(2):
            await epochs.form(push_learner(), [member(MemberKind.ROLLOUT, "rollout-0")])
            assert epochs.current is not None
            numbers.append(epochs.current.number)
    assert numbers == [1_000_001, 1_000_002, 2_000_001, 2_000_002]


def push_learner() -> Member:
    return member(MemberKind.LEARNER, "learner-0")


async def test_the_others_are_freed_at_once_and_only_the_lost_one_is_put_out() -> None:
    services, fleet, push, servers = await formed()
    services.lose = {"rollout-1"}
    began = time.monotonic()
    assert await push.transfer(1) is None
    assert time.monotonic() - began < DEADLINE_S / 2
    assert fleet.expelled == ["rollout-1"]
    assert services.calls.count("abandon e1 for rollout-1") == 1

    services.lose = set()
    await push.epochs.form(
        member(MemberKind.LEARNER, "learner-0"), [server for server in servers if server.usable]
    )
    candidate = await push.transfer(1)
    assert candidate is not None
    assert candidate.policy.version == 1
    await push.commit(candidate)
    assert "commit rollout-2 1" in services.calls


async def test_a_server_that_freezes_holds_the_others_up_until_its_silence_is_noticed() -> None:
    """Its connections stay up, so that no call breaks; the supervisor expels it."""
    services, fleet, push, servers = await formed()
    services.freeze = {"rollout-1"}
    pushing = asyncio.create_task(push.transfer(1))
    await asyncio.sleep(0.05)
    assert not pushing.done()
    await fleet.expel(servers[1], "silent for 12.0 s")
    async with asyncio.timeout(DEADLINE_S / 2):
        assert await pushing is None
    assert fleet.expelled == ["rollout-1"]
    assert services.calls.count("abandon e1 for rollout-1") == 1


def test_the_ranks_of_the_epoch_hear_of_it_and_no_others() -> None:
    store = open_store("127.0.0.1", 10.0)
    epochs = {number: Abandonment(store, number) for number in (3, 4)}
    for waiting in epochs.values():
        waiting.check("weight push")
    abandon("127.0.0.1", store.port, epoch=3, lost="rollout-1", timeout_s=10.0)
    time.sleep(0.15)
    epochs[4].check("weight push")
    with pytest.raises(PeerLostError, match="weight push: called off, since rollout-1 went away") as caught:
        epochs[3].check("weight push")
    assert caught.value.peer == "rollout-1"


def test_it_is_asked_only_now_and_then() -> None:
    store = open_store("127.0.0.1", 10.0)
    waiting = Abandonment(store, 5)
    abandon("127.0.0.1", store.port, epoch=5, lost="rollout-0", timeout_s=10.0)
    waiting.rest()
    waiting.check("weight push")
    time.sleep(0.15)
    with pytest.raises(PeerLostError):
        waiting.check("weight push")
