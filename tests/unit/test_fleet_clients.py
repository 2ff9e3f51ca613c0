"""Channels to members, over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.controller.fleet.clients import Channels, LearnerClient
from paceline.controller.fleet.membership import Member
from paceline.core.errors import PeerLostError, ProtocolError
from paceline.core.members import MemberKind
from paceline.rpc.v1 import learner_pb2, learner_pb2_grpc
from paceline.service.grpc.fencing import TermFence
from paceline.service.grpc.server import RunningServer, start_server
from paceline.service.identity.credentials import Credentials
from support.sequencer_run import config

SECRET = Credentials(token="secret")


class Learner(learner_pb2_grpc.LearnerServiceServicer):
    """Notes which epochs are left."""

    def __init__(self) -> None:
        self.left: list[int] = []

    async def LeaveWeightGroup(self, request: Any, context: Any) -> Any:
        self.left.append(request.epoch)
        return learner_pb2.LeaveLearnerGroupResponse()


async def serve(servicer: Learner, fence: TermFence) -> RunningServer:
    add = learner_pb2_grpc.add_LearnerServiceServicer_to_server
    return await start_server(add, servicer, credentials=SECRET, fence=fence)


def learner_at(address: str) -> Member:
    return Member(
        kind=MemberKind.LEARNER,
        member_id="learner-0",
        incarnation=address,
        address=address,
        num_ranks=1,
        last_heard=0.0,
    )


async def never(member: Member) -> None:
    """Nobody is lost."""
    await asyncio.Event().wait()


async def test_calls_carry_the_term_and_an_earlier_controller_is_refused() -> None:
    servicer, fence = Learner(), TermFence()
    server = await serve(servicer, fence)
    for term, epoch in ((3, 1), (4, 2), (3, 3)):
        channels = Channels(config(), SECRET, term)
        client = LearnerClient(config(), channels, never)
        if term < fence.highest:
            with pytest.raises(ProtocolError, match="term is 3, .* of term 4"):
                await client.leave(learner_at(server.address), epoch=epoch)
        else:
            await client.leave(learner_at(server.address), epoch=epoch)
        await channels.close()
    assert (servicer.left, fence.highest) == ([1, 2], 4)
    await server.stop(0)


async def test_a_member_at_a_new_address_is_called_there() -> None:
    servicers = Learner(), Learner()
    servers = [await serve(servicer, TermFence()) for servicer in servicers]
    channels = Channels(config(), SECRET, 1)
    client = LearnerClient(config(), channels, never)
    for epoch, server in ((1, servers[0]), (2, servers[1]), (3, servers[1])):
        await client.leave(learner_at(server.address), epoch=epoch)
    assert [servicer.left for servicer in servicers] == [[1], [2, 3]]
    again = learner_at(servers[1].address)
    assert channels.to(again) is channels.to(again)
    await channels.close()
    for server in servers:
        await server.stop(0)


async def test_a_call_ends_as_soon_as_its_member_is_gone() -> None:
    class Frozen(Learner):
        async def LeaveWeightGroup(self, request: Any, context: Any) -> Any:
            await asyncio.Event().wait()

    async def at_once(member: Member) -> None:
        member.failure = "silent for 20 s"

    server = await serve(Frozen(), TermFence())
    channels = Channels(config(), SECRET, 1)
    client = LearnerClient(config(), channels, at_once)
    try:
        async with asyncio.timeout(60.0):
            with pytest.raises(PeerLostError, match="learner-0 is gone: silent for 20 s"):
                await client.leave(learner_at(server.address), epoch=1)
    finally:
        await channels.close()
        await server.stop(0)
