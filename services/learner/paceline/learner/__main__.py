"""`python -m paceline.learner`: one rank of the learner group, started once per rank with torchrun's environment."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from paceline.learner.app import LearnerApp, Options, run_follower
from paceline.learner.distributed.ranks import RankEnvironment
from paceline.service.runtime import ServiceContext, run_service


def main(argv: list[str] | None = None) -> int:
    """Reads the command line and the rank's environment and serves; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="paceline.learner", description="One rank of the learner: FSDP2 training behind gRPC."
    )
    parser.add_argument(
        "--controller", required=True, metavar="HOST:PORT", help="where the run's controller listens"
    )
    parser.add_argument("--member-id", required=True, help="the group's name in the run, say learner-0")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address that rank 0 listens on (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=0, help="port that rank 0 listens on; 0: any free one")
    arguments = parser.parse_args(argv)
    options = Options(
        controller=arguments.controller,
        member_id=arguments.member_id,
        host=arguments.host,
        port=arguments.port,
    )
    environment = RankEnvironment.read()
    if environment.rank > 0:
        return run_follower(environment)

    async def serve(context: ServiceContext) -> None:
        await LearnerApp(context, options, environment).run()

    return run_service(serve, name=options.member_id)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: a thread that waits in a collective for a rank that is gone would hold the interpreter's end.
    os._exit(code)
