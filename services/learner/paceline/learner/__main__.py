"""`python -m paceline.learner`: a rank of the learner group, started with torchrun's environment."""

from __future__ import annotations

import logging
import os
import sys

from paceline.core.members import MemberKind
from paceline.service.imports import without_collections
from paceline.service.member.bootstrap import MemberOptions, run_member
from paceline.storage.cache import keep_kernels

# Both must be set before torch is imported. Without expandable segments, micro-batches of changing length
# left 25 of 77 GiB free in pieces too small for the next tensor, and an update of 7B on four H100s ran out of
# memory.
keep_kernels()
if "PYTORCH_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

with without_collections():
    from paceline.learner.app import LearnerApp, run_follower
    from paceline.learner.distributed.ranks import RankEnvironment


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and the rank's environment and serves; returns the exit code."""
    options = MemberOptions.parse(
        arguments,
        prog="python -m paceline.learner",
        kind=MemberKind.LEARNER,
        description="One rank of a run's learner: FSDP2 training behind gRPC. Only rank 0 listens.",
    )
    environment = RankEnvironment.read()
    if environment.rank > 0:
        return run_follower(environment, options.host_of_data)
    return run_member(
        lambda session: LearnerApp(session, environment).run(),
        options,
        kind=MemberKind.LEARNER,
        num_ranks=environment.world_size,
    )


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # sys.exit would wait for a thread that hangs in a collective because a rank is lost.
    os._exit(code)
