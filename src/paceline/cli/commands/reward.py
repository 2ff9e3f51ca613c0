"""`paceline reward`: scores one response with a reward function, as the reward service does."""

from __future__ import annotations

import argparse

import yaml

from paceline.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "function", metavar="FUNCTION", help="a built-in, `module:function`, or `path/to/file.py:function`"
    )
    parser.add_argument("response", metavar="RESPONSE", help="the model's answer")
    parser.add_argument("ground_truth", metavar="GROUND_TRUTH", help="the expected answer")
    parser.add_argument("extra", nargs="*", metavar="key=value", help="further arguments of the function")


def run(args: argparse.Namespace) -> int:
    """Prints what the function returns."""
    from paceline.reward.functions import registry

    extra = dict(_pair(word) for word in args.extra)
    function = registry.load(args.function, extra)
    print(function.call(args.response, args.ground_truth, **extra))
    return 0


def _pair(word: str) -> tuple[str, object]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"{word!r} must look like key=value")
    return key, yaml.safe_load(value)
