"""A `paceline train` process that a script starts, reads line by line, and ends when its block ends."""

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
from typing import Any, Self

import yaml

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.core.errors import EXIT_GIVEN, ConfigError, PacelineError
from paceline.runs import run_dir as run_dirs
from paceline.service.process import DIE_WITH_PARENT, PARENT_PID

_COMMAND = (sys.executable, "-m", "paceline.cli.main", "train", "--json")
# The process has closed its output by then.
_EXIT_S = 60.0
_STOPPED = 128 + signal.SIGINT


class TrainProcess:
    """One run, as a context manager: starts the run; when the block is left, ends it after its step.

    Args:
        config: a file, or the same tree as a mapping.
        overrides: "dotted.key=value", as on the command line.
        environment: variables in addition to those of this process.

    Attributes:
        process: the process that was started.

    Raises:
        ConfigError: the configuration cannot be run.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        overrides: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._config, self._overrides, self._environment = config, overrides, environment or {}
        self.run_dir: Path
        self.process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            config = self._config
            path = stack.enter_context(_as_file(config)) if isinstance(config, Mapping) else config
            self.run_dir = run_dirs.folder_of(load(RunConfig, path, self._overrides)).resolve()
            self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            self.process = stack.enter_context(
                subprocess.Popen(
                    [*_COMMAND, str(path), *self._overrides],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                    env={
                        **os.environ,
                        **self._environment,
                        DIE_WITH_PARENT: "1",
                        PARENT_PID: str(os.getpid()),
                    },
                    # A terminal's Ctrl-C reaches only this process, which passes it on.
                    start_new_session=True,
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the end of the process, which the block has seen or caused."""
        self._stack.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields the events of the process until it closes its output."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def interrupt(self) -> None:
        """Ends the run after the step in progress, with a checkpoint; a second call ends it at once."""
        self.process.send_signal(signal.SIGINT)

    def end(self, tell: Callable[[str], object]) -> None:
        """Interrupts the run and waits; passes notes to `tell`. A KeyboardInterrupt ends the run at once."""
        self.interrupt()
        while True:
            try:
                # The process must not block on a pipe that nobody reads.
                for event in self.events():
                    if event["event"] == "note":
                        tell(event["text"])
                self.process.wait(_EXIT_S)
                return
            except KeyboardInterrupt:
                self.interrupt()

    def check(self, *, may_stop: bool) -> None:
        """Raises the error with which the run ended; with `may_stop`, an interrupt is not an error.

        Raises:
            ConfigError: the run cannot be started, or it is finished.
            PacelineError: the run ended with an error.
        """
        code = self.process.wait(_EXIT_S)
        if not code or (may_stop and code == _STOPPED):
            return
        self._errors.seek(0)
        said = self._errors.read().strip().rpartition("paceline train: ")[2]
        message = said or f"`paceline train` ended with exit code {code}"
        raise ConfigError(message) if code == EXIT_GIVEN else PacelineError(message)


@contextmanager
def _as_file(config: Mapping[str, Any]) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(dict(config), file)
        file.flush()
        yield file.name
