"""`python -m paceline.reward.models PATH --port 50061`, or `--attach HOST:PORT --name rm`."""

from __future__ import annotations

import argparse
import sys

from paceline.core.errors import PacelineError, exit_code
from paceline.reward.models.sequence import SequenceModel, SequenceModelOptions
from paceline.sdk import attach_reward, serve_reward


def main(arguments: list[str] | None = None) -> int:
    """Serves a reward model, or attaches it to a run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.reward.models", description=__doc__)
    parser.add_argument("path", help="folder with a model for sequence classification with one label")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="serve for an entry of reward.services; 0: any free port")
    where.add_argument("--attach", metavar="HOST:PORT", help="attach to a run's reward service")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: %(default)s)")
    parser.add_argument("--name", default="rm", help="entry of reward.attached (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="torch's name, cuda:0 say (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-batch-tokens", type=int, default=16384, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        model = SequenceModel(
            SequenceModelOptions(
                path=args.path,
                device=args.device,
                dtype=args.dtype,
                max_batch_tokens=args.max_batch_tokens,
            )
        )
        if args.attach:
            attach_reward(model, address=args.attach, name=args.name, batch=True)
        else:
            serve_reward(model, host=args.host, port=args.port, batch=True)
    except PacelineError as error:
        print(f"fatal: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
