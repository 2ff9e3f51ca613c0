"""`python -m paceline.rollout --controller HOST:PORT --member-id rollout-0`."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from paceline.rollout.app import Options, RolloutApp
from paceline.rollout.engines.processes import end_all_children
from paceline.service.runtime import ServiceContext, run_service


def main(argv: list[str] | None = None) -> int:
    """Reads the command line and serves; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="paceline.rollout", description="A rollout server: a vLLM engine behind a mailbox."
    )
    parser.add_argument(
        "--controller", required=True, metavar="HOST:PORT", help="where the run's controller listens"
    )
    parser.add_argument("--member-id", required=True, help="this server's name in the run, say rollout-0")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    arguments = parser.parse_args(argv)
    options = Options(
        controller=arguments.controller,
        member_id=arguments.member_id,
        host=arguments.host,
        port=arguments.port,
    )

    async def serve(context: ServiceContext) -> None:
        await RolloutApp(context, options).run()

    return run_service(serve, name=options.member_id)


# The engine's processes import this module again: without the guard each would start a service of its own.
if __name__ == "__main__":
    code = main()
    end_all_children()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: a thread that is still starting an engine which nobody wants any more would hold the
    # interpreter's end.
    os._exit(code)
