"""An environment of one turn that owns the rows of two data files: `python -m support.owned_rows TRAIN VAL`.

It listens at any free port, says where on standard error, and says there too which rows are asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.data.rows import Row, read_rows
from paceline.sdk import Environment, Message, Observation, Outcome, serve_environment

START_S = 120.0


class OneTurn(Environment):
    """Ends at the first answer and adds nothing to its reward; a component says which row was played."""

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        self.number = float(task["number"])
        return Observation()

    async def step(self, action: Message) -> Observation:
        return Observation(done="over")

    async def close(self, stop_reason: str) -> Outcome:
        return Outcome(reward=0.0, components={"row": self.number})


def owned(file: str) -> list[Row]:
    """The rows of a data file, each with its number."""
    return [{**row, "number": number} for number, row in enumerate(read_rows([file]))]


@contextlib.contextmanager
def serving(files: Mapping[str, Path], log: Path) -> Iterator[str]:
    """The address of the environment in a process of its own; `log` gets what it says."""
    command = [sys.executable, "-m", "support.owned_rows", str(files["train"]), str(files["val"])]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with log.open("w") as said:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=said)
    try:
        deadline = time.monotonic() + START_S
        while not (address := re.search(r"environment server on (\S+)\n", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield address[1]
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Serves until a signal."""
    files = dict(zip(("train", "val"), sys.argv[1:], strict=True))

    def rows(split: str) -> list[Row]:
        print(f"asked for {split}", file=sys.stderr, flush=True)
        return owned(files[split])

    serve_environment(OneTurn, port=0, token="secret", max_episodes=1024, tasks=rows)


if __name__ == "__main__":
    main()
