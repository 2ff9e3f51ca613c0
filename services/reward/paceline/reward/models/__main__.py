"""`python -m paceline.reward.models PATH --port 50061`, or `--attach HOST:PORT --name rm`."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.config.load import load
from paceline.config.reward import NUMBER
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, PacelineError, exit_code
from paceline.core.scoring import ScoreItem
from paceline.reward.judge.question import read_prompt_file
from paceline.reward.models.deadline import Bounded, or_end
from paceline.reward.models.generative import GenerativeModel
from paceline.reward.models.model import ModelOptions
from paceline.reward.models.pooling import PoolingModel
from paceline.reward.models.process import ProcessModel
from paceline.reward.models.sequence import SequenceModel
from paceline.reward.models.version import folder_version
from paceline.sdk import attach_reward, serve_reward
from paceline.service.process import die_with_parent

_LoadedModel = type[SequenceModel] | type[ProcessModel] | type[GenerativeModel] | type[PoolingModel]
_ENGINES: Mapping[str, Mapping[str, _LoadedModel]] = {
    "transformers": {
        "sequence_classification": SequenceModel,
        "process": ProcessModel,
        "generative": GenerativeModel,
    },
    "vllm": {"sequence_classification": PoolingModel},
}
"""Loads a model, by engine and kind."""


def main(arguments: list[str] | None = None) -> int:
    """Serves a reward model, or attaches it to a run; returns the exit code."""
    args = _parse(arguments)
    if args.ready_file is not None:
        args.ready_file.unlink(missing_ok=True)  # left by a killed predecessor
    die_with_parent()
    try:
        if args.config is not None:
            _take_from(args.config, args)
        options = ModelOptions(**{option.name: getattr(args, option.name) for option in fields(ModelOptions)})
        with or_end(args.load_timeout):
            loaded: Callable[[list[ScoreItem]], list[Any]] = _ENGINES[args.engine][args.kind](options)
        model, version = Bounded(loaded, args.timeout), _version(options)
        if args.attach:
            attach_reward(
                model,
                address=args.attach,
                name=args.name,
                batch=True,
                version=version,
                ready_file=args.ready_file,
                every_address=args.every_address,
            )
        else:
            serve_reward(model, host=args.host, port=args.port, batch=True, version=version)
    except PacelineError as error:
        print(f"fatal: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


def _version(options: ModelOptions) -> str:
    """Returns a digest of the folder and, for a judge, of its prompt and its answer's pattern."""
    version = folder_version(Path(options.path))
    if not options.prompt_file:
        return version
    question = read_prompt_file(options.prompt_file)
    asked = [question, options.pattern, dict(options.words), options.max_tokens, options.dtype]
    return hashlib.blake2b(json.dumps([version, *asked]).encode(), digest_size=8).hexdigest()


def _words(text: str) -> dict[str, float]:
    """Parses grades by word.

    Raises:
        argparse.ArgumentTypeError: the text is no JSON object of numbers.
    """
    try:
        return {str(word): float(value) for word, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no JSON object of numbers, such as {{"yes": 1}}'
        ) from None


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line; options that do not go together end the process with a message."""
    parser = argparse.ArgumentParser(prog="python -m paceline.reward.models", description=__doc__)
    parser.add_argument("path", nargs="?", help="folder with the model: one label, or a language model")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the run's configuration, in place of path and the model's options; --name is an entry of its "
        "reward.models",
    )
    parser.add_argument(
        "--kind",
        default="sequence_classification",
        choices=_ENGINES["transformers"],
        help="default: %(default)s",
    )
    parser.add_argument("--engine", default="transformers", choices=_ENGINES, help="default: %(default)s")
    parser.add_argument("--step-separator", default="\n", help="process: what ends a step (default: newline)")
    parser.add_argument(
        "--prompt-file", default="", metavar="FILE", help="generative: its prompt, with {response}"
    )
    parser.add_argument(
        "--pattern", default=NUMBER, help="generative: finds the grade (default: %(default)s)"
    )
    parser.add_argument(
        "--words", type=_words, default={}, metavar="JSON", help='generative: grades of words, {"yes": 1}'
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="generative: longest answer")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="serve for an entry of reward.services; 0: any free port")
    where.add_argument("--attach", metavar="HOST:PORT", nargs="+", help="attach to a run's reward services")
    parser.add_argument(
        "--every-address",
        action="store_true",
        help="--attach: attach to each address of HOST, looked up again every five seconds",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--name", default="rm", help="entry of reward.attached (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="torch device, such as cuda:0 (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-batch-tokens", type=int, default=16384, help="default: %(default)s")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds that a call may take before the process ends (default: %(default)s)",
    )
    parser.add_argument(
        "--load-timeout",
        type=float,
        default=600.0,
        help="seconds that loading may take before the process ends (default: %(default)s)",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="--attach: file that is written every two seconds while the model is attached, then removed",
    )
    args = parser.parse_args(arguments)
    _refuse_what_clashes(parser, args)
    return args


def _refuse_what_clashes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the process with a sentence about options that do not go together."""
    if (args.path is None) is (args.config is None):
        parser.error("give either the path of a model or --config")
    if args.config is None and (args.kind == "generative") is (not args.prompt_file):
        parser.error("--kind generative and --prompt-file go together")
    kinds = _ENGINES[args.engine]
    if args.kind not in kinds:
        parser.error(f"--engine {args.engine} goes with --kind {' or '.join(kinds)}")
    if args.every_address and not args.attach:
        parser.error("--every-address goes with --attach")
    if args.ready_file is not None and not args.attach:
        parser.error("--ready-file goes with --attach; with --port, use the health check: paceline health")


def _take_from(file: str, args: argparse.Namespace) -> None:
    """Takes the options from the run's configuration; "cuda" is the first GPU that this process sees.

    Raises:
        ConfigError: the file cannot be read, or has no model of this name.
    """
    models = load(RunConfig, Path(file)).reward.models
    model = next((model for model in models if model.name == args.name), None)
    if model is None:
        names = ", ".join(model.name for model in models) or "none"
        raise ConfigError(f"{file} has no model {args.name!r} under reward.models, which names {names}")
    for name in (*(option.name for option in fields(ModelOptions)), "kind", "engine"):
        setattr(args, name, getattr(model, name))
    args.prompt_file, args.device = model.prompt_file or "", "cuda:0" if model.devices else "cpu"
    args.timeout, args.load_timeout = model.timeout_s, model.wait_for_s


if __name__ == "__main__":
    sys.exit(main())
