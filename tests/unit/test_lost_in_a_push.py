"""A rollout server dies in a push and no other notices, as over NCCL: only it is expelled."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.fleet.membership import Health, Member
from paceline.controller.weights.epoch import Epochs
from paceline.controller.weights.push import WeightPush
from paceline.core.errors import DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import SOME_MEMBER, LocalPart, MemberKind
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.receipt import PushReceipt
from paceline.weights.transport.rendezvous import Abandonment, abandon, open_store
from support.fake_fleet import FakeLearner, FakeRollout, FakeServices

CONFIG = {
    "data": {"train_files": "t.jsonl"},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 1},
}
DEADLINE_S = 400.0


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
    services.version = 1
    await push.epochs.form(learner, [*servers, *newcomers])
    assert await push.transfer(1) is not None
    assert services.calls.count("join rollout-9 e3 at 4") == 1
    assert fleet.expelled == []


class OddRollout(SilentRollout):
    """Members named odd run a model with a wider tensor; those named alien one with other tensors."""

    async def describe(self, member: Member) -> tuple[RankLayout, ...]:
        [usual] = await super().describe(member)
        if member.member_id.startswith("odd"):
            part = TensorSlice(name="w", global_shape=(3,), box=Box.full((3,)), param="w", offset=(0,))
            return (RankLayout(dtype="float32", slices=(part,)),)
        if member.member_id.startswith("alien"):
            return (replace(usual, slices=(replace(usual.slices[0], name="v"),)),)
        if member.member_id.startswith("half"):
            return (replace(usual, dtype="bfloat16"),)
        return (usual,)


async def test_a_server_with_another_model_is_put_out_for_that_before_anybody_joins() -> None:
    services, fleet = SilentServices(), Fleet()
    services.rollout = OddRollout(services)
    epochs = services.push(fleet).epochs
    servers = [member(MemberKind.ROLLOUT, name) for name in ("rollout-0", "odd-1", "alien-2", "half-3")]
    await epochs.form(push_learner(), servers)
    assert fleet.expelled == ["odd-1", "alien-2", "half-3"]
    common = "ModelError: it does not run the learner's model: "
    assert [server.failure for server in servers[1:]] == [
        common + "w: it needs shape (3,), the learner holds (2,)",
        common + "it needs v of shape (2,), which the learner does not hold",
        common + "its rank 0 keeps bfloat16 parameters, model.dtype is float32",
    ]
    assert [call for call in services.calls if call.startswith("join")] == [
        "join learner-0 e1",
        "join rollout-0 e1 at 1",
    ]
    with pytest.raises(
        PeerLostError, match=r"odd-9: it does not .* w: it needs shape \(3,\).* No rollout server"
    ):
        await epochs.form(push_learner(), [member(MemberKind.ROLLOUT, "odd-9")])


class BlindServices(SilentServices):
    """Every receive fails without naming anybody, as over NCCL where something does not end."""

    def __init__(self, hung: str | None = None) -> None:
        super().__init__()
        self.hung = hung
        self.rollout = BlindRollout(self)
        self.learner = BlindLearner(self)


class BlindLearner(SilentLearner):
    async def publish(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        raise DeadlineError(phase="push", peer=SOME_MEMBER, seconds=1.0)


class BlindRollout(SilentRollout):
    services: BlindServices

    async def receive(self, member: Member, *, epoch: int, version: int) -> PushReceipt:
        peer = LocalPart.ENGINE if member.member_id == self.services.hung else SOME_MEMBER
        raise DeadlineError(phase="push", peer=peer, seconds=1.0)


async def test_only_the_server_whose_engine_hangs_is_put_out() -> None:
    services, fleet = BlindServices("rollout-1"), Fleet()
    push = services.push(fleet)
    servers = [member(MemberKind.ROLLOUT, f"rollout-{number}") for number in range(3)]
    await push.epochs.form(push_learner(), servers)
    assert await push.transfer(1) is None
    assert fleet.expelled == ["rollout-1"]


async def test_nobody_is_put_out_for_a_failure_without_a_cause_until_it_repeats() -> None:
    services, fleet = BlindServices(), Fleet()
    push = services.push(fleet)
    servers = [member(MemberKind.ROLLOUT, f"rollout-{number}") for number in range(3)]
    await push.epochs.form(push_learner(), servers)
    assert await push.transfer(1) is None
    assert fleet.expelled == []
    await push.epochs.form(push_learner(), servers)
    assert await push.transfer(1) is None
    assert fleet.expelled == ["rollout-0", "rollout-1", "rollout-2"]


class BareLearner(SilentLearner):
    async def join(self, member: Member, *, epoch: int, spec: bytes) -> None:
        await super().join(member, epoch=epoch, spec=spec)
        raise WeightSyncError("learner rank 0 has no memory for 512 MiB of staging")


class BareRollout(SilentRollout):
    async def join(self, member: Member, *, epoch: int, spec: bytes, rank_offset: int) -> None:
        await asyncio.wait_for(self.services.told.wait(), DEADLINE_S)
        raise PeerLostError("called off", peer="learner-0")


async def test_what_fails_on_the_learner_alone_frees_the_servers_and_is_not_their_fault() -> None:
    services, fleet = SilentServices(), Fleet()
    services.learner, services.rollout = BareLearner(services), BareRollout(services)
    epochs = services.push(fleet).epochs
    with pytest.raises(WeightSyncError, match="no memory for 512 MiB"):
        await epochs.form(push_learner(), [member(MemberKind.ROLLOUT, f"rollout-{n}") for n in range(2)])
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
    services.lose, services.version = {"rollout-1"}, 1
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


async def test_a_server_that_registered_again_is_not_called_as_the_one_that_was_taken_for_dead() -> None:
    """The same process; a call to its old registration would fail at once, and it would be put out again."""
    services, fleet = SilentServices(), Fleet()
    push = services.push(fleet)
    learner, server = member(MemberKind.LEARNER, "learner-0"), member(MemberKind.ROLLOUT, "rollout-0")
    await push.epochs.form(learner, [server])
    assert push.epochs.fits(learner, [server])
    await fleet.expel(server, "silent for 12.1 s")
    assert not push.epochs.fits(learner, [member(MemberKind.ROLLOUT, "rollout-0")])


def test_the_ranks_of_the_epoch_hear_of_it_and_no_others() -> None:
    store = open_store("127.0.0.1", 120.0)
    epochs = {number: Abandonment(store, number) for number in (3, 4)}
    for waiting in epochs.values():
        waiting.check("weight push")
    abandon("127.0.0.1", store.port, epoch=3, lost="rollout-1", timeout_s=120.0)
    time.sleep(0.15)
    epochs[4].check("weight push")
    with pytest.raises(PeerLostError, match="weight push: cancelled, since rollout-1 went away") as caught:
        epochs[3].check("weight push")
    assert caught.value.peer == "rollout-1"


def test_it_is_asked_only_now_and_then() -> None:
    store = open_store("127.0.0.1", 120.0)
    waiting = Abandonment(store, 5)
    abandon("127.0.0.1", store.port, epoch=5, lost="rollout-0", timeout_s=120.0)
    waiting.rest()
    waiting.check("weight push")
    time.sleep(0.15)
    with pytest.raises(PeerLostError):
        waiting.check("weight push")
