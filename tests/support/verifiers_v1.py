"""Serves an environment of `verifiers.v1`; prints its address and rows, and at its end what is left of it.

python verifiers_v1.py: sums, whose harness says what a tool says as long as an answer calls it. refusals:
what the adapter says of environments that it does not take. The library finds taskset and harness by the name
of this module.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.clients import EvalClient
from verifiers.v1.runtimes import ProgramResult

from paceline.core.errors import ConfigError
from paceline.sdk import EnvironmentServer
from paceline.sdk.adapters import verifiers_environment, verifiers_rows

NAME = Path(__file__).stem


class SumData(vf.TaskData):
    """A sum and what it comes to."""

    total: int


class Sum(vf.Task[SumData]):
    """Graded by the last answer."""

    @vf.reward(weight=2.0)
    async def right(self, trace: Any) -> float:
        """Twice as much as it says, by its weight."""
        return float(trace.last_reply == f"It is {self.data.total}")

    @vf.metric
    async def answers(self, trace: Any) -> float:
        """How many answers there were."""
        return float(trace.num_turns)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    """Two sums."""

    def load(self) -> Iterator[Sum]:
        """The tasks."""
        for a in (1, 5):
            data = SumData(prompt=f"{a}+2?", system_prompt="Add.", total=a + 2)
            yield Sum(data, self.config.task)


class Asks(vf.Harness[vf.HarnessConfig]):
    """In the process of the library: as long as an answer has calls, it says what the tool says."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Asks."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[{"type": "function", "function": tool}]
                )
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if said.content == "Break.":
                    raise ValueError("the harness broke")
                if not said.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": "3"} for call in said.tool_calls
                ]


__all__ = ["Asks", "Sums"]


def load(**agent: Any) -> Any:
    """The environment, as a user of the library makes it."""
    config = {"taskset": {"id": NAME}, "agent": {"runtime": {"type": "subprocess"}, **agent}}
    return vf.load_environment(vf.SingleAgentEnvConfig.model_validate(config))


def refusals() -> Iterator[str]:
    """What the adapter says of environments that it does not take."""
    for environment in (
        load(client={"type": "eval", "base_url": "http://127.0.0.1:1"}),
        load(retries={"max_retries": 2}),
        object(),
    ):
        try:
            verifiers_environment(environment)
        except ConfigError as error:
            yield str(error)
    endless = load()
    endless.taskset.INFINITE = True
    try:
        list(verifiers_rows(endless))
    except ConfigError as error:
        yield str(error)


async def serve() -> None:
    """Until the standard input ends."""
    environment = load()
    tasks = partial(verifiers_rows, environment)
    async with EnvironmentServer(verifiers_environment(environment), token="secret", tasks=tasks) as server:
        rows = {split: list(tasks(split)) for split in ("train", "val")}
        print(json.dumps({"address": server.address, "rows": rows}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        left = {
            "variables": [name for name in os.environ if name.startswith("PACELINE_API_KEY")],
            "clients": sum(
                isinstance(one, EvalClient) and not one.client.is_closed for one in gc.get_objects()
            ),
        }
        print(json.dumps(left), flush=True)


if __name__ == "__main__":
    # What the library imports by this name is this module.
    sys.modules[NAME] = sys.modules["__main__"]
    if sys.argv[1:] == ["refusals"]:
        print(json.dumps(list(refusals())))
    else:
        asyncio.run(serve())
