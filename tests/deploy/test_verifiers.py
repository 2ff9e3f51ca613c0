"""Environments of the package `verifiers`, unchanged, in a process with an installation of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.samples.trajectory import RewardContext, sampled_spans
from paceline.rollout.episodes.agents.endpoint import AgentEndpoint
from paceline.rollout.episodes.environment import EnvironmentLostError
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.rollout.episodes.loop import Slot
from paceline.rollout.episodes.recorder import Draw
from paceline.service.identity.credentials import Credentials
from support.episodes import END, Script, call, episodes, group, ids, text

ROOT = Path(__file__).parents[2]
V1 = "from verifiers.v1 import SingleAgentEnvConfig"
PYTHON = os.environ.get("PACELINE_TEST_VERIFIERS", sys.executable)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def need(imports: str, packages: str) -> None:
    """Skips the test if the library, or this release of it, is not there."""
    if subprocess.run([PYTHON, "-c", imports], check=False, capture_output=True, timeout=240).returncode:
        pytest.skip(
            f"needs a Python with `pip install paceline-sdk {packages}`; "
            "PACELINE_TEST_VERIFIERS names its interpreter"
        )


@contextlib.asynccontextmanager
async def serving(
    script: str, *arguments: str, imports: str, packages: str
) -> AsyncIterator[tuple[str, dict[str, Any], asyncio.subprocess.Process]]:
    """The address of an environment of the package, its rows by split, and its process."""
    await asyncio.to_thread(need, imports, packages)
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        str(ROOT / "tests/support" / script),
        *arguments,
        env=ENVIRONMENT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 240))
        yield ready["address"], ready["rows"], process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def classic(name: str) -> contextlib.AbstractAsyncContextManager[Any]:
    """A classic environment, served."""
    return serving(
        "verifiers_server.py",
        name,
        imports="import verifiers.clients, reasoning_gym",
        packages="'verifiers>=0.1.14,<0.4' reasoning-gym",
    )


def v1(*arguments: str) -> contextlib.AbstractAsyncContextManager[Any]:
    """An environment of `verifiers.v1`, served."""
    return serving("verifiers_v1.py", *arguments, imports=V1, packages="'verifiers>=0.3'")


async def play(address: str, row: dict[str, Any], engine: Script, **changes: Any) -> Draw:
    """An episode of a row of the environment, from the rollout server's side."""
    endpoint = AgentEndpoint(host="127.0.0.1", tls=None)
    await endpoint.start()
    remote = RemoteEnvironment(
        RemoteEnvironmentOptions(
            address=address, call_s=10, lease_s=30, credentials=Credentials(token="secret"), run_s=20
        )
    )
    await remote.start()
    context = RewardContext(
        ground_truth=row["ground_truth"],
        data_source=row["data_source"],
        extra={name: row[name] for name in ("example_id", "info", "task") if name in row},
    )
    try:
        drawing = episodes(engine, remote, retries=0, endpoint=endpoint, **changes)
        asked = replace(group(), messages=tuple(row["prompt"]), context=context)
        [drawn] = await drawing.draw(asked, "0", Slot)
        return drawn
    finally:
        await remote.close()
        await endpoint.close()


@pytest.mark.timeout(900)
async def test_an_environment_of_the_package_grades_what_was_sampled() -> None:
    async with classic("arithmetic") as (address, rows, _):
        assert [len(rows["train"]), len(rows["val"])] == [3, 2]
        row = rows["train"][0]
        question = row["prompt"][-1]["content"]
        right = str(eval(re.sub(r"[^0-9+*/() -]", "", question)))
        for answer, reward in ((f"<answer>{right}</answer>", 1.0), ("<answer>77777</answer>", 0.01)):
            drawn = await play(address, row, Script(answer), max_prompt_tokens=1000)
            assert drawn.token_ids.tolist() == [*ids(answer), END]
            assert question in text(drawn.prompt_token_ids.tolist())
            assert drawn.episode is not None
            assert (drawn.episode.stop_reason, drawn.episode.num_turns) == ("finished", 1)
            assert drawn.episode.reward == pytest.approx(reward, abs=0.01)
            assert drawn.episode.components["check_answer_reward_func"] == drawn.episode.reward


@pytest.mark.timeout(900)
async def test_tools_of_the_package_and_a_limit_of_the_run() -> None:
    async with classic("sums") as (address, rows, _):
        [row] = rows["train"]
        made, said = call("add", '{"a": 1, "b": 2}'), "It is 3"
        drawn = await play(address, row, Script(made, said))
        spans = [drawn.token_ids[a:b].tolist() for a, b in sampled_spans(drawn.mask)]
        assert spans == [[*ids(made), END], [*ids(said), END]]
        assert drawn.segment_starts == ()
        assert "\n3\n" in text(drawn.token_ids[len(spans[0]) : -len(spans[1])].tolist())
        assert drawn.episode is not None
        assert (drawn.episode.stop_reason, drawn.episode.reward) == ("finished", 1.0)
        assert drawn.episode.num_tool_calls == 1

        cut = await play(address, row, Script(made), max_turns=2)
        assert cut.episode is not None
        assert (cut.episode.stop_reason, cut.episode.reward, cut.episode.num_turns) == ("max_turns", 0.0, 2)


@pytest.mark.timeout(900)
async def test_an_environment_of_v1_is_played_by_its_harness_and_graded_by_its_task() -> None:
    async with v1() as (address, rows, process):
        assert [len(rows["train"]), rows["val"]] == [2, []]
        row = rows["train"][0]
        assert [message["content"] for message in row["prompt"]] == ["Add.", "1+2?"]
        made = call("add", "{}")
        for said, reward in (("It is 3", 2.0), ("It is 4", 0.0)):
            drawn = await play(address, row, Script(made, said), max_prompt_tokens=1000)
            spans = [drawn.token_ids[a:b].tolist() for a, b in sampled_spans(drawn.mask)]
            assert spans == [[*ids(made), END], [*ids(said), END]]
            assert drawn.segment_starts == ()
            assert "1+2?" in text(drawn.prompt_token_ids.tolist())
            assert drawn.episode is not None
            assert (drawn.episode.stop_reason, drawn.episode.reward) == ("finished", reward)
            assert drawn.episode.components == {"right": reward, "answers": 2.0}
        other = await play(address, rows["train"][1], Script("It is 7"), max_prompt_tokens=1000)
        assert other.episode is not None
        assert other.episode.reward == 2.0

        process.stdin.close()
        left = json.loads(await asyncio.wait_for(process.stdout.readline(), 240))
        assert left == {"variables": [], "clients": 0}


@pytest.mark.timeout(900)
async def test_an_episode_of_v1_that_a_limit_ends_is_kept_and_one_that_breaks_is_lost() -> None:
    async with v1() as (address, rows, _):
        row = rows["train"][0]
        cut = await play(address, row, Script(call("add", "{}")), max_prompt_tokens=1000, max_turns=2)
        assert cut.episode is not None
        assert (cut.episode.stop_reason, cut.episode.reward, cut.episode.num_turns) == ("max_turns", 0.0, 2)
        with pytest.raises(EnvironmentLostError, match="the harness broke"):
            await play(address, row, Script("Break."), max_prompt_tokens=1000)


@pytest.mark.timeout(900)
def test_environments_of_v1_that_one_reward_does_not_fit_are_refused() -> None:
    need(V1, "'verifiers>=0.3'")
    command = [PYTHON, str(ROOT / "tests/support/verifiers_v1.py"), "refusals"]
    said = subprocess.run(
        command, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=240
    ).stdout
    nobody, again, stranger, endless = json.loads(said)
    assert nobody.startswith("SingleAgentEnv has 0 agents that ask the policy")
    assert again.startswith("agent.retries.max_retries is 2: ")
    assert stranger.startswith("object has neither run_rollout")
    assert endless.startswith("Sums has no end; set environment.taskset to a part of it")
