"""The adapter for environments of `verifiers.v1`, over a stand-in for the library that tests/deploy has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import types
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace as Record
from typing import Any, ClassVar

import pytest

from paceline.core.errors import ConfigError
from paceline.sdk.adapters import verifiers_environment, verifiers_rows
from paceline.sdk.environment import Outcome


@dataclass
class Message:
    role: str
    content: str


class Data:
    """What a task says; `model_fields` as pydantic has it."""

    model_fields: ClassVar = {"prompt": Record(exclude=None)}

    def __init__(self, prompt: Any = "1+2?", system_prompt: str | None = None) -> None:
        self.prompt, self.system_prompt = prompt, system_prompt

    def model_dump_json(self) -> str:
        return json.dumps({"prompt": self.prompt})

    @classmethod
    def model_validate_json(cls, text: str) -> Data:
        return cls(**json.loads(text))


@dataclass
class Task:
    data: Data
    config: Any = None

    @classmethod
    def data_type(cls) -> type[Data]:
        return Data


@dataclass
class Taskset:
    tasks: list[Task] = field(default_factory=lambda: [Task(Data())])
    INFINITE = False

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    @classmethod
    def task_type(cls) -> type[Task]:
        return Task


def role(*, client: object = None, max_retries: int = 0) -> Record:
    return Record(client=client, retries=Record(max_retries=max_retries))


def trace(name: str = "agent", **said: Any) -> Record:
    defaults: dict[str, Any] = {"errors": [], "rewards": {}, "metrics": {}, "reward": 0.0}
    return Record(agent=Record(name=name), **(defaults | said))


class Environment:
    """Events in the order in which they happened."""

    def __init__(self, *traces: Record, ok: bool = True, **roles: Record) -> None:
        self.roles = roles or {"agent": role()}
        config = {"env_id": "sums", "agent_harnesses": lambda: self.roles, "taskset": Record(task="config")}
        self.config = Record(**config, **self.roles)
        self.taskset: Any = Taskset()
        self.episode = Record(traces=traces, errors=[], ok=ok)
        self.events: list[Any] = []
        self.breaks = 0
        self._interception: object = "shared"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.events.append("enter")
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("no tool server")
        await asyncio.sleep(0)
        try:
            yield
        finally:
            self.events.append("exit")

    async def run_episode(self, task: Task, context: Record) -> Record:
        token = os.environ[context.client.api_key_var]
        self.events.append((task.data.prompt, task.config, context.client.base_url, token, context.model))
        await asyncio.sleep(0)
        return self.episode


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "verifiers": {},
        "verifiers.v1": {},
        "verifiers.v1.clients": {"EvalClientConfig": Record, "ModelContext": Record},
        "verifiers.v1.dialects": {},
        "verifiers.v1.dialects.chat": {"message_to_wire": vars},
        "verifiers.v1.types": {
            "SystemMessage": lambda content: Message("system", content),
            "UserMessage": lambda content: Message("user", content),
        },
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


async def played(make: Any, row: dict[str, Any], token: str = "t") -> Outcome:
    environment = make()
    await environment.open(row, task_seed=1, episode_seed=2)
    assert await environment.run(base_url="http://policy.example/v1", token=token, model="m") == ""
    outcome = await environment.close("finished")
    assert isinstance(outcome, Outcome)
    return outcome


def test_rows_are_what_a_task_says_and_what_its_prompt_is() -> None:
    inner = Environment()
    inner.taskset.tasks = [Task(Data(system_prompt="Add.")), Task(Data(prompt=None))]
    first, second = verifiers_rows(inner)
    assert first == {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2?"}],
        "ground_truth": "",
        "data_source": "sums",
        "task": '{"prompt": "1+2?"}',
    }
    assert second["prompt"] == [{"role": "user", "content": ""}]
    assert list(verifiers_rows(inner, "val")) == []


async def test_episodes_share_what_the_library_serves_and_have_a_key_each() -> None:
    rewards = {"right": Record(value=2.0), "skipped": None}
    inner = Environment(trace(reward=2.0, rewards=rewards, metrics={"answers": 1.0, "other": None}))
    [row] = verifiers_rows(inner)
    make = verifiers_environment(inner)
    assert make.__name__ == "sums"
    before = dict(os.environ)
    outcomes = await asyncio.gather(played(make, row, "one"), played(make, row, "two"))
    assert [(one.reward, one.components) for one in outcomes] == [(2.0, {"answers": 1.0, "right": 2.0})] * 2
    asked = [("1+2?", "config", "http://policy.example/v1", token, "m") for token in ("one", "two")]
    assert inner.events == ["enter", *asked]
    assert (dict(os.environ), inner._interception) == (before, None)


async def test_a_library_that_does_not_start_loses_the_attempt_and_is_started_again() -> None:
    inner = Environment(trace(reward=1.0))
    inner.breaks = 1
    [row] = verifiers_rows(inner)
    make = verifiers_environment(inner)
    with pytest.raises(RuntimeError, match="no tool server"):
        await played(make, row)
    assert (await played(make, row)).reward == 1.0
    assert inner.events[:2] == ["enter", "enter"]


async def test_what_a_limit_ends_is_kept_and_what_breaks_is_not() -> None:
    def failed(said: str) -> Environment:
        return Environment(trace(errors=[Record(type="ModelError", message=said)]), ok=False)

    row = {"task": "{}"}
    assert (await played(verifiers_environment(failed("this episode is over: max_turns")), row)).reward == 0.0
    with pytest.raises(RuntimeError, match="the episode failed: ModelError: no luck"):
        await played(verifiers_environment(failed("no luck")), row)
    several = Environment(trace(), trace(), trace("judge"), agent=role(), judge=role(client="its own"))
    with pytest.raises(RuntimeError, match="agent ran 2 times in one episode"):
        await played(verifiers_environment(several), row)
    with pytest.raises(ValueError, match=r"data.extra_keys: \[task\]"):
        await played(verifiers_environment(Environment(trace())), {})


def test_environments_that_one_reward_or_rows_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Environment has 2 agents that ask the policy \(solver, judge\)"):
        verifiers_environment(Environment(solver=role(), judge=role()))
    with pytest.raises(ConfigError, match="agent.retries.max_retries is 2: "):
        verifiers_environment(Environment(agent=role(max_retries=2)))
    endless = Environment()
    endless.taskset.INFINITE = True
    with pytest.raises(ConfigError, match="Taskset has no end"):
        list(verifiers_rows(endless))
    endless.taskset.bounded = True
    assert len(list(verifiers_rows(endless))) == 1


def test_a_task_that_cannot_be_written_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Data.model_fields, "answer", Record(exclude=True))
    with pytest.raises(ConfigError, match="Data leaves answer out of what it writes"):
        list(verifiers_rows(Environment()))
