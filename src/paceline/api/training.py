"""Training as a loop over finished steps: a `paceline train` of its own, which ends with the loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from paceline.api.callbacks import Callback, Training
from paceline.api.step import Step
from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.core.errors import EXIT_GIVEN, ConfigError, PacelineError
from paceline.runs import run_dir as run_dirs
from paceline.service.process import DIE_WITH_PARENT, PARENT_PID

_COMMAND = (sys.executable, "-m", "paceline.cli.main", "train", "--json")
# It has closed its output by then.
_EXIT_S = 60.0
_STOPPED = 128 + signal.SIGINT

Say = Callable[[str], object]


def train(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    callbacks: Sequence[Callback] = (),
    say: Say | None = print,
) -> Iterator[Step]:
    """Starts the services, yields each finished step, and stops all in order.

    The run does not wait for the loop's body. Leaving the loop ends the run after the step in progress, with
    a checkpoint; so does KeyboardInterrupt, and a second one ends it at once. The same call goes on with it.

    Args:
        config: a file, or the same tree as a mapping.
        overrides: "dotted.key=value", as on the command line.
        callbacks: called in their order before and after each step.
        say: gets notes for people, and what happens at the start.

    Raises:
        ConfigError: the run cannot be started, or it is finished.
        PacelineError: the run ended with an error.
    """
    with ExitStack() as stack:
        path = stack.enter_context(_as_file(config)) if isinstance(config, Mapping) else config
        run_dir = run_dirs.folder_of(load(RunConfig, path, overrides)).resolve()
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = stack.enter_context(
            subprocess.Popen(
                [*_COMMAND, str(path), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, DIE_WITH_PARENT: "1", PARENT_PID: str(os.getpid())},
                # A terminal's Ctrl-C reaches this process alone, which passes it on.
                start_new_session=True,
            )
        )
        tell: Say = say or (lambda text: None)
        training = Training(run_dir, process)
        try:
            for event in _events(process):
                if event["event"] == "step":
                    step = Step(number=event["step"], metrics=event["metrics"], run_dir=run_dir)
                    for callback in callbacks:
                        callback.after_step(step, training)
                    yield step
                elif event["event"] == "begin":
                    for callback in callbacks:
                        callback.before_step(event["step"], training)
                elif event["event"] in ("milestone", "note"):
                    tell(event["text"])
        except BaseException:
            _end(process, tell)
            raise
        code = process.wait(_EXIT_S)
        if code and not (training.stopping and code == _STOPPED):
            raise _error(code, errors)


@contextmanager
def _as_file(config: Mapping[str, Any]) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(dict(config), file)
        file.flush()
        yield file.name


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def _end(process: subprocess.Popen[str], tell: Say) -> None:
    """Has the run end after its step, at the second KeyboardInterrupt at once, and waits for it."""
    process.send_signal(signal.SIGINT)
    while True:
        try:
            # It must not block on a pipe that nobody reads.
            for event in _events(process):
                if event["event"] == "note":
                    tell(event["text"])
            process.wait(_EXIT_S)
            return
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)


def _error(code: int, errors: IO[str]) -> PacelineError:
    errors.seek(0)
    said = errors.read().strip().rpartition("paceline train: ")[2]
    message = said or f"`paceline train` ended with exit code {code}"
    return ConfigError(message) if code == EXIT_GIVEN else PacelineError(message)
