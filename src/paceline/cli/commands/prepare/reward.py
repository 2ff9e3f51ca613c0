"""`paceline reward`: scores a response, or the samples of a prompt, as a reward service would."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

import yaml

from paceline.core.errors import ConfigError, RewardError
from paceline.core.scoring import ScoreItem

if TYPE_CHECKING:
    from paceline.reward.scoring.scores import Score

_IMPORT_S = 30.0
_OWN_FIELDS = ("prompt", "data_source")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "function", metavar="FUNCTION", help="a built-in, `module:function`, or `path/to/file.py:function`"
    )
    parser.add_argument("response", metavar="RESPONSE", help="the model's answer")
    parser.add_argument("ground_truth", metavar="GROUND_TRUTH", help="the expected answer")
    parser.add_argument(
        "extra", nargs="*", default=[], metavar="key=value", help="further arguments of the function"
    )
    parser.add_argument(
        "--group",
        action="store_true",
        help="the function scores the samples of a prompt together (group: true)",
    )
    parser.add_argument(
        "--sample",
        action="append",
        default=[],
        metavar="RESPONSE",
        help="with --group: another answer to the same prompt; may be repeated",
    )
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="key=value",
        help="a column of the row, such as `prompt` or `data_source`; may be repeated",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="deadline of the call (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints a line per response: its value, and its components if the function returns several.

    Raises:
        ConfigError: the function cannot be called, or an argument cannot be read.
        RewardError: the error that a run would record. If only some samples of a group have a value, it says
            how many have none.
    """
    if args.sample and not args.group:
        raise ConfigError("--sample adds an answer for a function that scores groups: add --group")
    items = _items(args)
    scores = asyncio.run(_score(args, items))
    errors = [score.error for score in scores if score.error is not None]
    if len(errors) == len(scores):
        kind, message = errors[0]
        raise RewardError(f"{kind.value}: {message}", kind=kind)
    for score in scores:
        print(_line(score))
    if errors:
        raise RewardError(f"{len(errors)} of {len(scores)} samples have no reward", kind=errors[0][0])
    return 0


def _items(args: argparse.Namespace) -> list[ScoreItem]:
    columns = dict(_pair(word) for word in args.column)
    # The value is plain text, in which a colon has no meaning.
    own = {name: text for name, _, text in (word.partition("=") for word in args.column)}
    return [
        ScoreItem(
            trajectory_id=f"sample-{number}",
            prompt=own.get("prompt", ""),
            response=response,
            ground_truth=args.ground_truth,
            data_source=own.get("data_source", ""),
            extra={name: value for name, value in columns.items() if name not in _OWN_FIELDS},
            group="prompt" if args.group else "",
        )
        for number, response in enumerate([args.response, *args.sample])
    ]


async def _score(args: argparse.Namespace, items: list[ScoreItem]) -> list[Score]:
    from paceline.reward.functions.pool import FunctionPool
    from paceline.reward.functions.spec import FunctionSpec
    from paceline.reward.scoring.shape import Shape
    from paceline.service.children.process import ChildLimits

    spec = FunctionSpec(
        name=args.function.rpartition(":")[2],
        reference=args.function,
        shape=Shape(group=args.group),
        arguments=dict(_pair(word) for word in args.extra),
    )
    limits = ChildLimits(start_s=_IMPORT_S)
    async with FunctionPool([spec], num_processes=1, timeout_s=args.timeout, limits=limits) as pool:
        return await pool.score(items)


def _line(score: Score) -> object:
    if score.error is not None:
        kind, message = score.error
        return f"{kind.value}: {message}"
    return dict(score.components) if len(score.components) > 1 else score.reward


def _pair(word: str) -> tuple[str, object]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"{word!r} must look like key=value")
    return key, yaml.safe_load(value)
