"""Groups of learner ranks for tests: one in this process, or several processes that run one function."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.sizing.machine import free_port
from support.forked import Forked

WAIT_S = 300.0
"""How long a rank waits for the others; on a busy machine one of them may import torch for a minute."""


@contextmanager
def alone() -> Iterator[Any]:
    """A group of one in this process."""
    import torch

    from paceline.learner.distributed.ranks import RankEnvironment, form_group, leave_group, open_store

    environment = RankEnvironment.read({})
    ranks = form_group(environment, open_store(environment, WAIT_S), torch.device("cpu"), WAIT_S)
    try:
        yield ranks
    finally:
        leave_group()


def run_ranks(
    function: str,
    world_size: int,
    *arguments: str,
    context: int = 1,
    fsdp_size: int | None = None,
    expert: int = 1,
    timeout_s: float = 600,
) -> list[Any]:
    """Runs MODULE:FUNCTION(ranks, *arguments) in every rank's process; returns their results, by rank.

    `context` of the ranks have the same rows, `fsdp_size` share one copy of the parameters, and `expert` have
    different experts.
    """
    port = free_port()
    started = []
    for rank in range(world_size):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        sizes = json.dumps({"context": context, "fsdp_size": fsdp_size, "expert": expert})
        command = ["-m", "support.learner_ranks", function, sizes, *arguments]
        started.append(Forked(command, env=env, stdout=subprocess.PIPE))
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [process.returncode for process in started] == [0] * world_size
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    """One rank."""
    import torch

    from paceline.learner.distributed.ranks import RankEnvironment, form_group, leave_group, open_store

    module, _, name = sys.argv[1].partition(":")
    environment = RankEnvironment.read()
    store, sizes = open_store(environment, WAIT_S), json.loads(sys.argv[2])
    ranks = form_group(environment, store, torch.device("cpu"), WAIT_S, **sizes)
    result = getattr(importlib.import_module(module), name)(ranks, *sys.argv[3:])
    leave_group()
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
