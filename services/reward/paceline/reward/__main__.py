"""`python -m paceline.reward --controller HOST:PORT --member-id reward-0`."""

from __future__ import annotations

import sys

from paceline.core.members import MemberKind
from paceline.reward.app import RewardApp
from paceline.service.identity.credentials import REWARD_TOKEN
from paceline.service.member.bootstrap import MemberOptions, run_member


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and serves; returns the exit code."""
    options = MemberOptions.parse(
        arguments,
        prog="python -m paceline.reward",
        kind=MemberKind.REWARD,
        description=f"A reward service of a run. {REWARD_TOKEN} holds the token of remote reward services.",
    )
    return run_member(lambda session: RewardApp(session).run(), options, kind=MemberKind.REWARD)


if __name__ == "__main__":
    sys.exit(main())
