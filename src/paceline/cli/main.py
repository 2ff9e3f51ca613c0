"""`paceline`: the command line; each sub-command is a module of its own, imported when it is used."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from paceline.core.errors import PacelineError, exit_code

# name: (module, help)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train", "train a model: starts all services on this machine"),
    "check": ("check", "validate configuration, data and model without starting anything"),
    "doctor": ("doctor", "say what this machine offers and lacks"),
    "status": ("status", "ask a running controller what it is doing"),
    "sft": ("sft", "train a starting model on prompt/answer pairs"),
    "export": ("export", "write a checkpoint as a safetensors folder"),
    "report": ("report", "write a run as one HTML page"),
    "reward": ("reward", "score one response with a reward function"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns its exit code: 0 well, 1 failed, 2 what the user gave or the machine has cannot be used."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Post-training of language models with reinforcement learning.",
        epilog="\n".join(["commands:", *(f"  {name:8} {told}" for name, (_, told) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND", help="what to do; COMMAND --help tells more"
    )
    name = parser.parse_args(words[:1]).command
    module, told = COMMANDS[name]
    command = importlib.import_module(f"paceline.cli.commands.{module}")
    command_parser = argparse.ArgumentParser(prog=f"paceline {name}", description=told)
    command.add_arguments(command_parser)
    # Intermixed: overrides may stand before and after options.
    options = command_parser.parse_intermixed_args(words[1:])
    try:
        code: int = command.run(options)
    except PacelineError as error:
        print(f"paceline {name}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
