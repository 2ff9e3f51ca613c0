"""The SDK: a reward server and a client, over real gRPC."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import ConfigError, DeadlineError, PacelineError, PeerLostError, RewardError
from paceline.sdk import RewardClient, RewardServer, ScoreItem, serve_reward
from paceline.sdk.function import version_of
from support.reward_servers import OddServer, serving

ROOT = Path(__file__).resolve().parents[2]


def items(*responses: str, **extra: object) -> list[ScoreItem]:
    return [
        ScoreItem(
            trajectory_id=f"t{index}",
            prompt="p",
            response=response,
            ground_truth="truth",
            data_source="source",
            extra=extra,
        )
        for index, response in enumerate(responses)
    ]


def judge(
    response: str, ground_truth: str, *, prompt: str, data_source: str, level: int, **extra: object
) -> object:
    match response:
        case "raise":
            raise KeyError("x")
        case "exit":
            sys.exit(3)
        case "stop":
            raise StopIteration
        case "nan":
            return math.nan
        case "dict":
            return {"score": 0.25, "length": 3}
    assert (ground_truth, prompt, data_source, extra) == ("truth", "p", "source", {"tags": ["a", None]})
    return float(level)


async def test_one_result_for_each_item_whatever_the_function_does() -> None:
    async with RewardServer(judge) as server, RewardClient(server.address) as client:
        results = await client.score(
            items("fine", "raise", "dict", "nan", "exit", "stop", level=3, tags=["a", None])
        )
    assert [result.trajectory_id for result in results] == [f"t{index}" for index in range(6)]
    assert [result.reward for result in results] == [3.0, None, 0.25, None, None, None]
    assert [result.error for result in results] == [
        None,
        "raised: judge raised KeyError: 'x'",
        None,
        "not_finite: judge returned nan",
        "raised: judge raised RuntimeError: the function raised SystemExit: 3",
        "raised: judge raised RuntimeError: the function raised StopIteration",
    ]
    assert results[2].components == {"length": 3.0}


async def test_a_missing_column_is_named() -> None:
    async with RewardServer(judge) as server, RewardClient(server.address) as client:
        results = await client.score(items("fine"))
    assert results[0].error is not None
    assert results[0].error.startswith("raised: judge needs level, which the item does not have")


async def test_plain_and_async_functions_work_side_by_side() -> None:
    together, together_async, running, most = threading.Barrier(8, timeout=120), asyncio.Barrier(8), 0, 0

    def enter() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)

    def leave() -> None:
        nonlocal running
        with lock:
            running -= 1

    lock = threading.Lock()

    def sleeps(response: str, ground_truth: str) -> float:
        enter()
        together.wait()  # breaks where fewer than eight run at once
        leave()
        return 1.0

    async def waits(response: str, ground_truth: str) -> float:
        enter()
        async with asyncio.timeout(120):
            await together_async.wait()
        leave()
        return 2.0

    for function, reward in ((sleeps, 1.0), (waits, 2.0)):
        async with RewardServer(function, max_concurrent=8) as server, RewardClient(server.address) as client:
            results = await client.score(items(*["a"] * 16))
            assert [result.reward for result in results] == [reward] * 16
            assert most == 8  # two rounds of eight, not one of sixteen


async def test_batches_go_to_the_function_whole() -> None:
    seen: list[int] = []

    def model(batch: list[ScoreItem]) -> object:
        seen.append(len(batch))
        match batch[0].response:
            case "short":
                return [1.0]
            case "text":
                return "12"
            case "raise":
                raise RuntimeError("out of memory")
        return [float(len(item.response)) if item.response else {"x": 1.0} for item in batch]

    async with RewardServer(model, batch=True) as server, RewardClient(server.address) as client:
        results = await client.score(items("aa", "b", ""))
        assert [result.reward for result in results] == [2.0, 1.0, None]
        assert results[2].error is not None
        assert "put its value under" in results[2].error
        for response, sentence in (
            ("short", "wrong_count: model returned 1 values for 2 items"),
            ("text", "wrong_count: model returned 2 values"),
            ("raise", "raised: model raised RuntimeError: out of memory"),
        ):
            results = await client.score(items(response, "b"))
            assert all(sentence in (result.error or "") for result in results), (response, results)
    assert seen == [3, 2, 2, 2]


async def test_the_client_checks_what_it_gets() -> None:
    server = OddServer("too_few")
    async with serving(server) as address, RewardClient(address) as client:
        with pytest.raises(RewardError, match="answered 1 results to 2 items"):
            await client.score(items("a", "b"))
        server.mode = "nan"
        with pytest.raises(PacelineError, match="reward is nan"):
            await client.score(items("a"))
        server.mode = "hang"
        with pytest.raises(DeadlineError, match=r"within 0\.2 s"):
            await client.score(items("a"), timeout_s=0.2)
    async with RewardClient("127.0.0.1:1") as client:
        with pytest.raises(PeerLostError, match="cannot be reached"):
            await client.score(items("a"), timeout_s=30)


async def test_the_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_REWARD_TOKEN", "secret")
    async with RewardServer(lambda response, truth: 1.0) as server:
        async with RewardClient(server.address) as client:
            assert (await client.score(items("a")))[0].reward == 1.0
        async with RewardClient(server.address, token="wrong") as client:
            with pytest.raises(ConfigError, match="refused the token"):
                await client.score(items("a"))
    monkeypatch.delenv("PACELINE_REWARD_TOKEN")
    with pytest.raises(ConfigError, match="without a token"):
        await RewardServer(lambda response, truth: 1.0, host="0.0.0.0").start()


def test_a_function_of_another_form_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="must take the response and the ground truth by position"):
        serve_reward(lambda response: 1.0, port=0)


def test_the_example_runs_and_ends_on_sigterm(tmp_path: Path) -> None:
    example = ROOT / "examples" / "reward_server" / "server.py"
    code_lines = [line for line in example.read_text().splitlines() if line.strip()]
    assert len(code_lines) <= 10
    environment = {
        **os.environ,
        "PORT": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with subprocess.Popen(
        [sys.executable, str(example)], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        try:
            first = process.stderr.readline()
            assert first.startswith("reward server on 127.0.0.1:")

            async def ask() -> float | None:
                async with RewardClient(first.split()[-1]) as client:
                    (result,) = await client.score(items("so it is truth"))
                    assert result.components == {"right": 1.0}
                    return result.reward

            assert asyncio.run(ask()) == 1 / (1 + 14 / 1000)
        finally:
            process.terminate()
        assert process.wait(timeout=120) == 0


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    code = (
        "import sys, json, paceline.sdk;"
        "heavy = ('torch', 'transformers', 'vllm', 'redis', 'pyarrow');"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout) == []


async def test_a_call_that_hangs_is_given_up_and_health_says_when_no_more_can() -> None:
    released = threading.Event()

    def hangs(response: str, ground_truth: str) -> float:
        if response == "hang":
            released.wait(60)
        return 1.0

    async with (
        RewardServer(hangs, max_concurrent=2, timeout_s=2.5) as server,
        RewardClient(server.address) as client,
    ):
        results = await client.score(items("hang", "a", "a"))
        assert [result.reward for result in results] == [None, 1.0, 1.0]
        assert results[0].error == "timeout: hangs raised TimeoutError: not done within 2.5 s"
        assert await healthy(server.address)
        await client.score(items("hang"))
        assert not await healthy(server.address)
        (result,) = await client.score(items("a"))
        assert result.error is not None
        assert result.error.startswith("unavailable: hangs raised ConnectionError: 2 calls of the function")
    released.set()


async def healthy(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=30)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_an_async_function_that_blocks_or_exits_harms_its_item_alone() -> None:
    released = threading.Event()

    async def odd(response: str, ground_truth: str) -> float:
        match response:
            case "block":
                released.wait(60)
            case "exit":
                sys.exit(4)
            case "slow":
                await asyncio.sleep(30)
        return 1.0

    async with (
        RewardServer(odd, max_concurrent=4, timeout_s=2.5) as server,
        RewardClient(server.address) as client,
    ):
        results = await client.score(items("exit", "slow", "a"))
        assert [result.error for result in results] == [
            "raised: odd raised RuntimeError: the function raised SystemExit: 4",
            "timeout: odd raised TimeoutError",
            None,
        ]
        blocked = asyncio.create_task(client.score(items("block")))
        assert await healthy(server.address)  # the server's own loop goes on
        ((result,),) = await asyncio.gather(blocked)
        assert result.error is not None
        assert result.error.startswith(
            "timeout: odd raised TimeoutError: not done within 2.5 s, and it blocks"
        )
        assert [result.reward for result in await client.score(items("a", "a"))] == [1.0, 1.0]
    released.set()


async def test_an_async_function_keeps_its_loop_between_calls() -> None:
    loops = set()

    async def function(response: str, ground_truth: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 1.0

    async with RewardServer(function) as server, RewardClient(server.address) as client:
        for _ in range(3):
            await client.score(items("a", "b"))
    assert len(loops) == 1


def test_a_functions_version_is_that_of_its_own_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/add-a-reward.md says what has to be given a version by hand."""
    (tmp_path / "versioned_helper.py").write_text(
        "import functools\n"
        "def logged(f):\n"
        "    @functools.wraps(f)\n"
        "    def call(*given):\n"
        "        return f(*given)\n"
        "    return call\n"
    )
    (tmp_path / "versioned_reward.py").write_text(
        "import functools, versioned_helper\n"
        "def f(response, truth): return 1.0\n"
        "class Scorer:\n"
        "    def __call__(self, response, truth): return 1.0\n"
        "decorated = versioned_helper.logged(f)\n"
        "partial = functools.partial(f)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("versioned_reward")
    forms = {
        "f": module.f,
        "object": module.Scorer(),
        "decorated": module.decorated,
        "partial": module.partial,
    }

    def changed(file: str) -> set[str]:
        before = {name: version_of(form) for name, form in forms.items()}
        assert all(before.values())
        with (tmp_path / file).open("a") as text:
            text.write("# changed\n")
        return {name for name, form in forms.items() if version_of(form) != before[name]}

    assert changed("versioned_reward.py") == {"f", "object"}
    assert changed("versioned_helper.py") == {"decorated"}


async def test_arrays_are_values() -> None:
    def batch(given: list[ScoreItem]) -> object:
        return np.arange(len(given), dtype=np.float32)

    def single(response: str, ground_truth: str) -> object:
        return {"score": np.float32(0.5), "mean": np.ones(3).mean(), "one": np.array(1.0)}

    async with RewardServer(batch, batch=True) as server, RewardClient(server.address) as client:
        assert [result.reward for result in await client.score(items("a", "b"))] == [0.0, 1.0]
    async with RewardServer(single) as server, RewardClient(server.address) as client:
        (result,) = await client.score(items("a"))
        assert (result.reward, result.components) == (0.5, {"mean": 1.0, "one": 1.0})


def test_a_server_whose_function_hangs_ends_soon_after_sigterm(tmp_path: Path) -> None:
    program = (
        "import threading\nfrom paceline.sdk import serve_reward\n"
        "def hangs(response, ground_truth):\n    threading.Event().wait()\n"
        "serve_reward(hangs, port=0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]

        async def ask() -> None:
            async with RewardClient(address) as client:
                with pytest.raises(DeadlineError):
                    await client.score(items("a"), timeout_s=0.5)

        asyncio.run(ask())
        process.terminate()
        assert process.wait(timeout=120) == 0
