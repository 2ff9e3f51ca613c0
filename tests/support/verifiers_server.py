"""Serves environments of the installed `verifiers`; prints its address and its rows.

python verifiers_server.py arithmetic: of the package, over `reasoning_gym`. sums: its `ToolEnv` with a tool.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any

import verifiers
from datasets import Dataset

from paceline.sdk import EnvironmentServer
from paceline.sdk.adapters import verifiers_environment, verifiers_rows


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def environment_named(name: str) -> Any:
    if name == "arithmetic":
        from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

        return ReasoningGymEnv("basic_arithmetic", num_train_examples=3, num_eval_examples=2, seed=1)

    def right(completion: Any, answer: str, **_: Any) -> float:
        return float(completion[-1]["content"] == answer)

    rows = [{"question": "1+2?", "answer": "It is 3"}]
    rubric = verifiers.Rubric(funcs=[right])
    return verifiers.ToolEnv(tools=[add], max_turns=4, dataset=Dataset.from_list(rows), rubric=rubric)


async def main() -> None:
    environment = environment_named(sys.argv[1])
    tasks = partial(verifiers_rows, environment)
    async with EnvironmentServer(verifiers_environment(environment), token="secret", tasks=tasks) as server:
        rows = {split: list(tasks(split)) for split in ("train", "val")}
        print(json.dumps({"address": server.address, "rows": rows}), flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
