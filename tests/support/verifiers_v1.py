"""An environment of `verifiers.v1`, and what the adapter says of it: `python verifiers_v1.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

from paceline.core.errors import ConfigError
from paceline.sdk.adapters import verifiers_environment


class Sums(vf.Taskset[vf.Task, vf.TasksetConfig]):
    """The library finds it by the name of this module."""

    def load(self) -> Iterator[vf.Task]:
        """One task."""
        yield vf.Task(vf.TaskData(prompt="1+2?"))


__all__ = ["Sums"]

if __name__ == "__main__":
    taskset = vf.TasksetConfig(id=Path(__file__).stem)
    try:
        verifiers_environment(vf.load_environment(vf.SingleAgentEnvConfig(taskset=taskset)))
    except ConfigError as error:
        print(error)
