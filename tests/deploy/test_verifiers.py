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

from paceline.core.trajectory import RewardContext, sampled_spans
from paceline.rollout.episodes.desk import Desk
from paceline.rollout.episodes.loop import Slot
from paceline.rollout.episodes.recorder import Draw
from paceline.rollout.episodes.remote import RemoteEnvironment, RemoteOptions
from paceline.service.credentials import Credentials
from support.episodes import END, Script, call, episodes, group, ids, text

ROOT = Path(__file__).parents[2]
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
async def serving(name: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The address of an environment of the package, and its rows by split."""
    await asyncio.to_thread(
        need, "import verifiers.clients, reasoning_gym", "'verifiers>=0.1.14,<0.4' reasoning-gym"
    )
    script = str(ROOT / "tests/support/verifiers_server.py")
    process = await asyncio.create_subprocess_exec(
        PYTHON, script, name, env=ENVIRONMENT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 240))
        yield ready["address"], ready["rows"]
    finally:
        process.terminate()
        await process.wait()


async def play(address: str, row: dict[str, Any], engine: Script, **changes: Any) -> Draw:
    """An episode of a row of the environment, from the rollout server's side."""
    desk = Desk(host="127.0.0.1", tls=None)
    await desk.start()
    remote = RemoteEnvironment(
        RemoteOptions(
            address=address, call_s=10, lease_s=30, credentials=Credentials(token="secret"), run_s=20
        )
    )
    await remote.start()
    context = RewardContext(
        ground_truth=row["ground_truth"],
        data_source=row["data_source"],
        extra={"example_id": row["example_id"], "info": row["info"]},
    )
    try:
        drawing = episodes(engine, remote, retries=0, desk=desk, **changes)
        asked = replace(group(), messages=tuple(row["prompt"]), context=context)
        [drawn] = await drawing.draw(asked, "0", Slot)
        return drawn
    finally:
        await remote.close()
        await desk.close()


@pytest.mark.timeout(900)
async def test_an_environment_of_the_package_grades_what_was_sampled() -> None:
    async with serving("arithmetic") as (address, rows):
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
    async with serving("sums") as (address, rows):
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
def test_environments_of_v1_are_refused_with_the_releases_that_are_taken() -> None:
    need("from verifiers.v1 import SingleAgentEnvConfig", "'verifiers>=0.3'")
    command = [PYTHON, str(ROOT / "tests/support/verifiers_v1.py")]
    said = subprocess.run(
        command, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=240
    ).stdout
    assert said.startswith(
        "SingleAgentEnv has no run_rollout: the adapter takes the classic environments of "
    )
    assert "verifiers 0.1 to 0.3, not those of verifiers.v1, which are all that 0.4 has" in said
