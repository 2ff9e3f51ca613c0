"""`paceline`: the command line. Each sub-command is a module that is imported only when it is used."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import importlib
import os
import select
import sys
from collections.abc import Sequence
from types import ModuleType

from paceline.core.errors import EXIT_FAILED, EXIT_GIVEN, GIVEN_ERRORS, PacelineError
from paceline.service.imports import without_collections
from paceline.service.output import write_whole_lines

# A shell's code of a program that SIGPIPE ended.
_EXIT_UNREAD = 141
# Commands by the package of paceline.cli.commands that holds their module; a - in a name is a _ there.
_ROOMS: dict[str, dict[str, str]] = {
    "start": {
        "train": "train a model; starts all services on this machine",
        "up": "train over several hosts; starts their services through ssh",
        "redis": "serve Redis over TLS, for services on several hosts",
        "sft": "train a starting model on prompt/answer pairs",
        "rm": "train a reward model on pairs of answers",
        "dpo": "train a policy on pairs of answers (DPO, IPO, SimPO, KTO)",
        "eval": "answer held-out prompts with a model or a checkpoint, and measure the answers",
        "chaos": "train under faults, then check what the run has written",
    },
    "prepare": {
        "init": "write a commented configuration from a few flags or questions",
        "examples": "write the examples, lock files and docs that the wheel brings",
        "convert-config": "write a configuration of verl or TRL as ours",
        "check": "validate configuration, data and model without starting anything",
        "plan": "compare the layouts that a run may have on GPUs, with an estimate of their steps",
        "doctor": "report what this machine offers and lacks",
        "hosts": "prepare several hosts for a run: certificates, model and HOSTS.yaml",
        "certs": "make certificates, tokens and the Redis user, with which services prove who they are",
        "reward": "score a response, or the samples of a prompt, with a reward function",
    },
    "running": {
        "status": "show what a run is doing",
        "stop": "end a run after the step in progress, with a checkpoint",
        "rollout": "take a rollout server out of a run",
        "health": "ask a service whether it serves; for health checks of containers",
    },
    "results": {
        "report": "write the report of a run, one HTML page",
        "ui": "show runs in a browser, while they train",
        "verify": "check what a run has written against what Paceline promises",
        "export": "write a checkpoint as a safetensors folder",
        "profile": "join the recorded steps of a run with its services' spans, for Perfetto",
        "track": "send what a past run has written to experiment trackers",
    },
}
_MODULES = dict.fromkeys(("sft", "rm", "dpo"), "tuning")
COMMANDS = {name: summary for commands in _ROOMS.values() for name, summary in commands.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns its exit code: 0 for success, 1 for a failure, 2 for unusable input."""
    if arguments is None:
        write_whole_lines()
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments), is_process=arguments is None)
    except BrokenPipeError:
        if _is_output_read():
            raise
        return _EXIT_UNREAD
    finally:
        with contextlib.suppress(BrokenPipeError):
            print(end="", flush=True)
        if not _is_output_read():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _is_output_read() -> bool:
    """Returns False if the output is a pipe whose reader, for example `head`, has ended."""
    poller = select.poll()
    poller.register(1, 0)
    return not poller.poll(0)


def _main(words: list[str], *, is_process: bool) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Post-training of language models with reinforcement learning.",
        epilog="\n".join(["commands:", *(f"  {name:14} {summary}" for name, summary in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        choices=COMMANDS,
        metavar="COMMAND",
        help="one of the commands below; `paceline COMMAND --help` describes it",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else "; `paceline --help` lists them"
        parser.error(f"{words[0]} is not a command{meant}")
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_GIVEN
    name = parser.parse_args(words[:1]).command
    if name == "train" and is_process:
        from paceline.launch.processes import fork_server

        with fork_server.running():
            return _run_installed(name, words[1:])
    return _run_installed(name, words[1:])


def _run_installed(name: str, words: Sequence[str]) -> int:
    try:
        return _run(name, words)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package == "paceline":
            raise
        print(
            f"paceline {name}: the package {package} is not installed in this environment; `paceline doctor` "
            "says what else a run needs, and how to install it",
            file=sys.stderr,
        )
        return EXIT_GIVEN


def command_module(name: str) -> ModuleType:
    """Returns the module with the sub-command's `add_arguments` and `run`."""
    room = next(room for room, commands in _ROOMS.items() if name in commands)
    module = _MODULES.get(name, name.replace("-", "_"))
    return importlib.import_module(f"paceline.cli.commands.{room}.{module}")


def _run(name: str, words: Sequence[str]) -> int:
    with without_collections():
        command = command_module(name)
    summary = COMMANDS[name]
    command_parser = argparse.ArgumentParser(
        prog=f"paceline {name}", description=f"{summary[0].upper()}{summary[1:]}."
    )
    command.add_arguments(command_parser)
    # Intermixed, so that overrides may come before and after options.
    options = command_parser.parse_intermixed_args(list(words))
    try:
        code: int = command.run(options)
    except PacelineError as error:
        print(f"paceline {name}: {error}", file=sys.stderr)
        return EXIT_GIVEN if isinstance(error, GIVEN_ERRORS) else EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    finally:
        if "grpc" in sys.modules:
            # Channels over TLS that are still open delay the interpreter's exit by two seconds.
            gc.collect()
    return code


class _Version(argparse.Action):
    """Looks the version up only on request, because that takes as long as the rest of a command's start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from paceline.service.packages import own_version

        print(f"paceline {own_version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
