"""`python -m paceline.controller --config run.yaml --run-dir DIR [dotted.key=value ...]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.controller.app import Options, serve
from paceline.service.addresses import add_address_arguments
from paceline.service.member.runtime import run_service


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs the controller; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.controller", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="configuration of the run (YAML)")
    parser.add_argument(
        "overrides", nargs="*", metavar="dotted.key=value", help="override a value of the configuration"
    )
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="folder for metrics, journal, checkpoints"
    )
    add_address_arguments(parser)
    parser.add_argument("--port", type=int, help="port to listen on; default: service.controller_port")
    parser.add_argument("--address-file", type=Path, help="file to write host:port to once listening")
    args = parser.parse_intermixed_args(arguments)
    given = {**vars(args), "overrides": tuple(args.overrides), "run_dir": args.run_dir.resolve()}
    options = Options(**given)
    return run_service(lambda context: serve(context, options), name="controller")


if __name__ == "__main__":
    sys.exit(main())
