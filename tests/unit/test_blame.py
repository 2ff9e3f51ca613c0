"""Which rollout servers are expelled when a push fails, by what each member's error names."""

from __future__ import annotations

import pytest

from paceline.controller.fleet.membership import Member
from paceline.controller.weights.blame import at_fault, is_own_failure
from paceline.core.errors import (
    DeadlineError,
    InvalidMessageError,
    ModelError,
    PeerLostError,
    VersionMismatchError,
    WeightSyncError,
)
from paceline.core.members import SOME_MEMBER, LocalPart, MemberKind, Peer, RankRef
from paceline.rollout.engines.answers import engine_died
from paceline.service.grpc.errors import from_metadata, to_metadata
from paceline.weights.transport.rendezvous import Deadline

LEARNER, A, B, C = RankRef(MemberKind.LEARNER, 0), *(RankRef(MemberKind.ROLLOUT, k) for k in range(3))


def member(name: str, kind: MemberKind = MemberKind.ROLLOUT) -> Member:
    return Member(kind=kind, member_id=name, incarnation=name, address="a:1", num_ranks=1, last_heard=0.0)


def lost(peer: Peer) -> PeerLostError:
    return PeerLostError("connection closed", peer=peer)


@pytest.mark.parametrize(
    ("learner", "servers", "expelled"),
    [
        # The learner lost rank 0, which had given up because rank 1 passed nothing on; rank 1 lost the
        # learner then.
        (A, {"a": B, "b": LEARNER, "c": LEARNER}, ["b"]),
        # The learner had sent everything before a relay stalled.
        (None, {"a": B, "b": SOME_MEMBER, "c": A}, ["b"]),
        # Two that lost each other: one of them goes, so that the other can stay.
        (None, {"a": B, "b": A}, ["b"]),
        # The server that the learner names accuses nobody.
        (C, {"a": LEARNER, "b": LEARNER, "c": SOME_MEMBER}, ["c"]),
        # The errors lead to a server that did not fail, or to none at all: nobody is known to be at fault.
        (C, {"a": LEARNER, "b": LEARNER}, []),
        (SOME_MEMBER, {"a": LEARNER}, []),
        (RankRef(MemberKind.ROLLOUT, 7), {"a": LEARNER}, []),
        (SOME_MEMBER, {"a": SOME_MEMBER, "b": SOME_MEMBER, "c": SOME_MEMBER}, []),
        # A server whose own call went unanswered is at fault, whatever the others say.
        (A, {"a": B, "c": "c"}, ["c"]),
        # Over NCCL the others only see that something does not end; the server whose engine hangs says so.
        (SOME_MEMBER, {"a": SOME_MEMBER, "b": LocalPart.ENGINE, "c": SOME_MEMBER}, ["b"]),
        (SOME_MEMBER, {"a": LocalPart.DEVICE, "b": SOME_MEMBER}, ["a"]),
    ],
)
def test_accusations_are_followed(
    learner: Peer | None, servers: dict[str, Peer], expelled: list[str]
) -> None:
    failures = [(member(name), lost(peer)) for name, peer in servers.items()]
    owners = [member(name) for name in "abc"]
    expelled_now = at_fault(failures, lost(learner) if learner else None, owners)
    assert [server.member_id for server, _ in expelled_now] == expelled


def test_an_error_of_another_kind_is_the_members_own() -> None:
    failures = [(member("a"), lost(B)), (member("b"), WeightSyncError("shapes differ"))]
    assert [server.member_id for server, _ in at_fault(failures, None, [])] == ["b"]


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("learner-0", True),
        (LEARNER, True),
        (RankRef(MemberKind.LEARNER), True),
        (LocalPart.DEVICE, True),
        (A, False),
        (SOME_MEMBER, False),
    ],
)
def test_the_learner_is_at_fault_where_its_error_names_itself(peer: Peer, expected: bool) -> None:
    learner = member("learner-0", MemberKind.LEARNER)
    assert is_own_failure(learner, lost(peer)) is expected
    assert is_own_failure(learner, DeadlineError(phase="PUBLISH", peer=peer, seconds=1.0)) is expected


def test_the_learner_is_at_fault_where_it_names_nobody() -> None:
    assert is_own_failure(member("learner-0", MemberKind.LEARNER), WeightSyncError("no memory for staging"))


# Every error that the receiving end raises in a join or a receive, with whether it is the server's own.
_RAISED = {
    "engine does not answer": (DeadlineError(phase="p", peer=LocalPart.ENGINE, seconds=1.0), True),
    "engine died": (engine_died(), True),
    "copies do not end": (Deadline("p", 1.0).error(LocalPart.DEVICE), True),
    "out of memory": (Deadline("p", 1.0).translate(RuntimeError("CUDA out of memory"), LEARNER), True),
    "CUDA error": (Deadline("p", 1.0).translate(RuntimeError("NCCL error: unhandled cuda error"), A), True),
    "another model": (ModelError("TP rank 0: shapes differ"), True),
    "not in a group": (VersionMismatchError("weight group None"), True),
    "bad spec": (InvalidMessageError("weight group spec: x", reason="bad_weight_group"), True),
    "push beside requests": (WeightSyncError("requests were running"), True),
    "transfers do not end": (Deadline("p", 1.0).error(SOME_MEMBER), False),
    "rank did not come": (Deadline("p", 1.0).error(B), False),
    "broken connection": (Deadline("p", 1.0).translate(RuntimeError("connection closed by peer"), B), False),
    "timed out": (Deadline("p", 1.0).translate(RuntimeError("Timed out waiting"), B), False),
    "store is gone": (lost(LEARNER), False),
    "called off for a rank": (lost(B), False),
    "called off for a member": (lost("rollout-1"), False),
}


@pytest.mark.parametrize("case", _RAISED)
def test_each_error_of_the_receiving_end_is_the_servers_own_or_a_peers(case: str) -> None:
    error, own = _RAISED[case]
    server = member("rollout-0")
    assert is_own_failure(server, error) is own
    # Over gRPC too.
    again = from_metadata(to_metadata(error))
    assert again is not None
    assert is_own_failure(server, again) is own
