"""`python -m paceline.rollout --controller HOST:PORT --member-id rollout-0`."""

from __future__ import annotations

import logging
import os
import sys

from paceline.core.members import MemberKind
from paceline.rollout.app import RolloutApp
from paceline.rollout.engines import loading
from paceline.rollout.engines.processes import end_all_children
from paceline.service.member.bootstrap import MemberOptions, run_member


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and serves; returns the exit code."""
    options = MemberOptions.parse(
        arguments,
        prog="python -m paceline.rollout",
        kind=MemberKind.ROLLOUT,
        description="A rollout server of a run: an inference engine behind a mailbox.",
    )
    loading.begin()
    return run_member(lambda session: RolloutApp(session).run(), options, kind=MemberKind.ROLLOUT)


# The engine's processes import this module again; without this condition each would start a service.
if __name__ == "__main__":
    code = main()
    end_all_children()
    logging.shutdown()
    sys.stdout.flush()
    # sys.exit would wait for a thread that is still starting an unwanted engine.
    os._exit(code)
