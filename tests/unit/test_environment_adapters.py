"""Environments of other libraries: gym-like ones, results with attributes, the tools of MCP servers."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import Message, ToolCall
from paceline.sdk import Environment, Outcome
from paceline.sdk.adapters import mcp
from paceline.sdk.adapters.gym import gym_environment
from paceline.sdk.adapters.mcp import mcp_environment
from paceline.sdk.adapters.verifiers import verifiers_environment, verifiers_rows


class Corridor:
    """Gymnasium's interface: go right until the end."""

    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self.place, self.length = 0, 2 + (seed or 0) % 3
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += action
        return self.place, -0.5 + 2 * (self.place >= self.length), self.place >= self.length, False, {}

    def close(self) -> None:
        Corridor.closed += 1


@dataclass
class Result:
    observation: str
    reward: float | None = None
    done: bool = False


class Client:
    """A client of OpenEnv 0.10: awaitables for a loop, but in a thread it starts another one that stays."""

    async def __aenter__(self) -> Client:
        return self

    def reset(self, **kwargs: Any) -> Any:
        return self._dispatch(Result(f"seed {kwargs['seed']}"))

    def step(self, action: dict[str, str]) -> Any:
        return self._dispatch(Result(action["message"], 1.5, action["message"] == "stop"))

    def close(self) -> Any:
        return self._dispatch(None)

    def _dispatch(self, result: Any) -> Any:
        asyncio.get_running_loop()  # raises in a thread
        return Answer(result)


class Answer:
    """An awaitable that is no coroutine."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __await__(self) -> Generator[None, None, Any]:
        yield
        return self.result


class Echo:
    """OpenEnv's interface, async."""

    async def reset(self) -> Result:
        return Result("say x")

    async def step(self, action: str) -> Result:
        return Result(f"you said {action}", float(action == "x"), action == "x")


async def play(make: Callable[[], Environment], *said: str) -> tuple[list[str], list[str], Outcome]:
    """Texts and reasons of an episode, and what it was worth."""
    environment = make()
    opened = await environment.open({}, task_seed=4, episode_seed=9)
    seen = [await environment.step(Message(role="assistant", content=text)) for text in said]
    outcome = await environment.close("")
    await environment.release()
    return [opened.text, *(one.text for one in seen)], [one.done for one in seen], outcome


async def test_an_environment_with_five_values() -> None:
    Corridor.closed = 0
    make = gym_environment(Corridor, to_action=int, to_text="at {}".format)
    texts, done, outcome = await play(make, "1", " 1 ", "1")
    assert texts == ["at 0", "at 1", "at 2", "at 3"]
    assert done == ["", "", "terminated"]
    assert (outcome.reward, outcome.components) == (0.5, {"steps": 3.0})
    assert Corridor.closed == 1
    assert (await play(make, "left"))[1] == ["no_action"]


async def test_results_with_attributes() -> None:
    texts, done, outcome = await play(gym_environment(Echo), "y", "x ")
    assert texts == ["say x", "you said y", "you said x"]
    assert (done, outcome.reward) == (["", "terminated"], 1.0)


async def test_a_client_that_is_plain_in_threads_and_async_in_a_loop() -> None:
    make = gym_environment(Client, to_action=lambda text: {"message": text})
    texts, done, outcome = await play(make, "go", "stop")
    assert texts == ["seed 4", "go", "stop"]
    assert (done, outcome.reward) == (["", "terminated"], 3.0)


def calls(*made: tuple[str, dict[str, object]]) -> Message:
    return Message(
        role="assistant",
        content="",
        tool_calls=tuple(ToolCall(call_id=str(i), name=n, arguments=a) for i, (n, a) in enumerate(made)),
    )


@pytest.fixture
def server() -> Any:
    library = pytest.importorskip("mcp.server.mcpserver", reason="pip install 'mcp>=2'")
    made = library.MCPServer("calculator")

    @made.tool()
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    @made.tool()
    def fail() -> str:
        """Fails."""
        raise ValueError("no luck")

    return made


async def test_the_tools_of_an_mcp_server(server: Any) -> None:
    environment = mcp_environment(server, timeout_s=60.0)()
    async with asyncio.timeout(60):
        await environment.open({}, task_seed=0, episode_seed=0)
        assert environment.tools["add"][0].parameters["required"] == ["a", "b"]
        said = await environment.step(
            calls(("add", {"a": 1, "b": 2}), ("add", {"a": 1}), ("fly", {}), ("fail", {}))
        )
        texts = [message.content for message in said.messages]
        assert texts[0] == "3"
        assert texts[1] == "error: add needs the argument 'b'; it has a, b"
        assert texts[2].startswith("error: there is no tool 'fly'; there are add, fail")
        assert texts[3].startswith("error: RuntimeError: Error executing tool fail")
        assert said.done == ""
        assert (await environment.step(calls())).done == "answered"
        assert (await environment.close("answered")).reward is None
        await environment.release()


async def test_an_mcp_server_that_is_not_there() -> None:
    environment = mcp_environment("http://127.0.0.1:1/mcp")()
    with pytest.raises(Exception, match=r".+"):
        await environment.open({}, task_seed=0, episode_seed=0)
    await environment.release()


async def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mcp", None)
    environment = mcp.mcp_environment("http://127.0.0.1:1/mcp")()
    with pytest.raises(ConfigError, match="needs the package mcp"):
        await environment.open({}, task_seed=0, episode_seed=0)
    await environment.release()


class Played:
    """An environment of `verifiers` as far as the adapter sees it; tests/deploy has the library itself."""

    requires_group_rollouts = False

    def __init__(self, **outcome: Any) -> None:
        self.outcome, self.asked = outcome, []  # type: ignore[var-annotated]

    async def run_rollout(self, asked: Any, client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        self.asked.append((asked, client.base_url.host, model, sampling_args))
        return self.outcome

    def build_dataset(self) -> list[dict[str, Any]]:
        said = [{"role": "user", "content": "1+2?", "tool_calls": None}]
        return [{"prompt": said, "answer": "3", "example_id": 7, "info": {"level": 1}}]

    def build_eval_dataset(self) -> None: ...


@pytest.fixture
def _verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("verifiers.clients")
    library.OpenAIChatCompletionsClient = lambda client: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.clients", library)


async def rolled_out(inner: Played, task: Any) -> Outcome:
    environment = verifiers_environment(inner)()
    await environment.open(task, task_seed=1, episode_seed=2)
    assert await environment.run(base_url="http://policy.example/v1", token="t", model="m") == ""
    return await environment.close("finished")


@pytest.mark.usefixtures("_verifiers")
async def test_an_environment_of_verifiers() -> None:
    inner = Played(reward=0.5, metrics={"right": 1})
    [row] = verifiers_rows(inner)
    assert list(verifiers_rows(inner, "val")) == []
    extra = {"example_id": row["example_id"], "info": row["info"]}
    outcome = await rolled_out(
        inner, {"messages": row["prompt"], "ground_truth": row["ground_truth"], **extra}
    )
    assert (outcome.reward, outcome.components) == (0.5, {"right": 1.0})
    prompt = [{"role": "user", "content": "1+2?"}]
    given = {"prompt": prompt, "answer": "3", "example_id": 7, "info": '{"level": 1}'}
    assert inner.asked == [(given, "policy.example", "m", {})]


@pytest.mark.usefixtures("_verifiers")
async def test_a_rollout_of_verifiers_that_failed() -> None:
    task = {"messages": [], "ground_truth": ""}
    over = Played(reward=0.25, metrics=None, error={"error_chain_repr": "this episode is over: max_turns"})
    assert (await rolled_out(over, task)).reward == 0.25
    with pytest.raises(RuntimeError, match="the rollout failed: .*no luck"):
        await rolled_out(Played(reward=0.0, error={"error": "no luck"}), task)


def test_environments_of_verifiers_that_cannot_be_taken() -> None:
    compared = Played()
    compared.requires_group_rollouts = True
    with pytest.raises(ConfigError, match="grades the samples of a prompt together"):
        verifiers_environment(compared)
    with pytest.raises(
        ConfigError, match=r"object has neither run_rollout, .* nor run_episode and a taskset"
    ):
        verifiers_environment(object())
