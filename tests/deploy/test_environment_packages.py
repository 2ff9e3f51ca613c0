"""Adapters with the packages themselves, where they are installed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from paceline.core.samples.chat import Message, ToolCall
from paceline.sdk.adapters import nemo_gym_environment, textarena_environment
from paceline.sdk.environment import Outcome
from paceline.sizing.machine import free_port

ROOT = Path(__file__).parents[2]
NEMO_GYM = os.environ.get("PACELINE_TEST_NEMO_GYM")


async def test_a_game_of_textarena() -> None:
    library = pytest.importorskip("textarena", reason="pip install textarena")
    environment = textarena_environment(lambda: library.make("GuessTheNumber-v0-raw"))()
    opened = await environment.open({}, task_seed=5, episode_seed=1)
    assert "the number between 1 and 20" in opened.text
    low, high, hints = 1, 20, []
    while True:
        guess = (low + high) // 2
        said = await environment.step(Message(role="assistant", content=f"[{guess}]"))
        if said.done:
            break
        hints.append(said.text)
        low, high = (guess + 1, high) if "higher" in said.text else (low, guess - 1)
    assert said.done == "game_over"
    assert all(hint.startswith("The target number is ") for hint in hints)
    assert (await environment.close("game_over")).reward == 1.0


def test_tasks_of_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    from paceline.core.errors import ConfigError
    from paceline.sdk.adapters import reasoning_gym

    for task in ("leg_counting", "basic_arithmetic", "countdown"):
        for row in reasoning_gym.rows(task, size=3, seed=1):
            kept = {"data_source": task, "entry": row["entry"]}
            right = f"<answer>{row['ground_truth']}</answer>"
            assert reasoning_gym.score(right, row["ground_truth"], **kept) == 1.0
            assert reasoning_gym.score("<answer>-777</answer>", row["ground_truth"], **kept) < 0.5
    with pytest.raises(ConfigError, match="more than JSON can hold"):
        list(reasoning_gym.rows("rearc", size=1, seed=1))


@pytest.mark.timeout(300)
def test_a_resources_server_of_nemo_gym() -> None:
    if NEMO_GYM is None:
        pytest.skip("PACELINE_TEST_NEMO_GYM names an interpreter with nemo-gym, which needs Python 3.13.14")
    port = free_port()
    script = ROOT / "tests/support/nemo_gym_server.py"
    with subprocess.Popen([NEMO_GYM, str(script), str(port)]) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(f"{url}/reverify_mode", server)
            assert asyncio.run(_weather(url, "get_weather")).reward == 1.0
            assert asyncio.run(_weather(url)).reward == 0.0
        finally:
            server.terminate()


async def _weather(url: str, *tools: str) -> Outcome:
    """An episode of the package's example, which is graded by whether its tool was called."""
    request = (
        '{"responses_create_params": {"input": "SF?", "tools": [{"type": "function", "name": "get_weather", '
        '"strict": true, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]}}'
    )
    environment = nemo_gym_environment(url)()
    await environment.open({"request": request}, task_seed=0, episode_seed=0)
    for name in tools:
        call = ToolCall(call_id="c", name=name, arguments={"city": "SF"})
        said = await environment.step(Message(role="assistant", content="", tool_calls=(call,)))
        assert "The weather in SF is cold." in said.messages[0].content
    await environment.step(Message(role="assistant", content="Cold."))
    return await environment.close("answered")


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail("the server has ended")
