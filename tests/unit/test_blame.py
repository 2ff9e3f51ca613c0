"""Which rollout servers are expelled when a push fails, by what each member's error names."""

from __future__ import annotations

import pytest

from paceline.controller.fleet.membership import Member
from paceline.controller.weights.blame import at_fault, is_learner_lost
from paceline.core.errors import DeadlineError, PeerLostError, WeightSyncError
from paceline.core.members import MemberKind, Peer, RankRef

LEARNER, A, B, C = RankRef(MemberKind.LEARNER, 0), *(RankRef(MemberKind.ROLLOUT, k) for k in range(3))
GROUP = "some member of the weight group"


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
        (None, {"a": B, "b": GROUP, "c": A}, ["b"]),
        # Two that lost each other: one of them goes, so that the other can stay.
        (None, {"a": B, "b": A}, ["b"]),
        # The server that the learner names accuses nobody.
        (C, {"a": LEARNER, "b": LEARNER, "c": GROUP}, ["c"]),
        # The errors lead to a server that did not fail, or to none at all.
        (C, {"a": LEARNER, "b": LEARNER}, ["a", "b"]),
        (GROUP, {"a": LEARNER}, ["a"]),
        (RankRef(MemberKind.ROLLOUT, 7), {"a": LEARNER}, ["a"]),
        # A server whose own call went unanswered is at fault, whatever the others say.
        (A, {"a": B, "c": "c"}, ["c"]),
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
    [("learner-0", True), (LEARNER, True), (RankRef(MemberKind.LEARNER), True), (A, False), (GROUP, False)],
)
def test_the_learner_is_lost_where_its_error_names_itself(peer: Peer, expected: bool) -> None:
    learner = member("learner-0", MemberKind.LEARNER)
    assert is_learner_lost(learner, lost(peer)) is expected
    assert is_learner_lost(learner, DeadlineError(phase="PUBLISH", peer=peer, seconds=1.0)) is expected
