"""`paceline reward`: scores one response with a reward function, as the reward service does."""

from __future__ import annotations

import argparse
import asyncio

import yaml

from paceline.core.errors import ConfigError

_IMPORT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "function", metavar="FUNCTION", help="a built-in, `module:function`, or `path/to/file.py:function`"
    )
    parser.add_argument("response", metavar="RESPONSE", help="the model's answer")
    parser.add_argument("ground_truth", metavar="GROUND_TRUTH", help="the expected answer")
    parser.add_argument("extra", nargs="*", metavar="key=value", help="further arguments of the function")
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="of the call (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the value, with its components if there are others; raises what a run would record."""
    return asyncio.run(_score(args))


async def _score(args: argparse.Namespace) -> int:
    from paceline.core.errors import RewardError
    from paceline.core.scoring import ScoreItem
    from paceline.reward.functions.pool import FunctionPool
    from paceline.reward.functions.spec import FunctionSpec
    from paceline.service.children.process import ChildLimits

    extra = dict(_pair(word) for word in args.extra)
    name = args.function.rpartition(":")[2]
    spec = FunctionSpec(name=name, reference=args.function, arguments=extra)
    limits = ChildLimits(start_s=_IMPORT_S)
    pool = FunctionPool([spec], num_processes=1, timeout_s=args.timeout, limits=limits)
    async with pool:
        item = ScoreItem(
            trajectory_id="item", prompt="", response=args.response, ground_truth=args.ground_truth
        )
        (score,) = await pool.score([item])
    if score.error is not None:
        kind, message = score.error
        raise RewardError(f"{kind.value}: {message}", kind=kind)
    print(dict(score.components) if len(score.components) > 1 else score.reward)
    return 0


def _pair(word: str) -> tuple[str, object]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"{word!r} must look like key=value")
    return key, yaml.safe_load(value)
