"""The reward service as a process: a fake controller, a real Redis, real child processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.broker import Broker, Mailbox, names, open_broker
from paceline.broker.redis.redis_server import RedisServer
from paceline.core.attached_clients.attachment import Hello, Leave, Welcome
from paceline.core.samples.trajectory import ScoredHeader
from paceline.core.scoring import ScoreItem
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.sdk import RewardClient
from paceline.service.grpc import channels
from paceline.service.identity.credentials import Credentials
from paceline.service.member.run_directory import write_run_id
from paceline.wire import decode_scored
from paceline.wire.calls.attachment import SCORER_MESSAGES
from support.closing import closing_all
from support.fake_controller import FakeController, serve
from support.forked import Forked
from support.training_rewards import letters
from support.trajectories import finished_sample

RUN = "run-1"
TOKEN = "a secret of the run"
WORDS = ["<pad>", "<|end|>", "####", "18", "19", "hang", "exit", "so"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of eight words and nothing else."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|end|>").save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def broker(redis_server: RedisServer) -> AsyncIterator[Broker]:
    async with closing_all() as closing:
        broker = closing(open_broker(redis_server.url))
        yield broker
        await broker.purge(names.prefix(RUN))


@asynccontextmanager
async def service(
    tmp_path: Path,
    model: Path,
    broker_url: str,
    reward: dict[str, object],
    val_sets: dict[str, object] | None = None,
) -> AsyncIterator[tuple[FakeController, Forked]]:
    config = {
        "data": {"train_files": "none.jsonl", "val_sets": val_sets or {}},
        "model": {"path": str(model)},
        "reward": reward,
        "trainer": {"total_steps": 1},
        "actor": {"ppo_mini_batch_size": 64},
    }
    controller = FakeController(json.dumps(config), RUN)
    controller.broker_url, controller.run_dir = broker_url, str(tmp_path)
    write_run_id(tmp_path, RUN)
    server = await serve(controller, token=TOKEN)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = Forked(
        ["-m", "paceline.reward", "--controller", server.address, "--member-id", "reward-0"],
        env={**os.environ, "PACELINE_TOKEN": TOKEN, "PYTHONPATH": path, "PACELINE_DIE_WITH_PARENT": "1"},
    )
    try:
        yield controller, process
    finally:
        process.kill()
        process.wait()
        await server.stop(grace_s=0)


async def scored(broker: Broker, count: int) -> list[ScoredHeader]:
    headers: list[ScoredHeader] = []
    async with Mailbox(broker, names.scored(RUN), names.CONTROLLER_GROUP, "controller") as box:
        async with asyncio.timeout(60):
            while len(headers) < count:
                entries = await box.take()
                headers += [decode_scored(entry.payload) for entry in entries]
                await box.done(entries)
    return sorted(headers, key=lambda header: header.trajectory_id)


def tokens(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_the_process_scores_survives_its_functions_and_leaves_in_order(
    tmp_path: Path, model: Path, redis_server: RedisServer, broker: Broker
) -> None:
    reward: dict[str, object] = {
        "functions": [{"name": "gsm8k"}, {"name": "support.reward_functions:obedient", "weight": 0.5}],
        "timeout_s": 4.0,
        "max_deliveries": 2,
    }
    samples = ["so #### 18 <|end|>", "#### 19", "hang", "exit", "18"]
    await broker.append(
        [
            finished_sample(
                RUN, index, tokens(text), ground_truth="18", traceparent=f"00-{1:032x}-{2:016x}-01"
            )
            for index, text in enumerate(samples)
        ]
    )
    async with service(tmp_path, model, redis_server.url, reward) as (controller, process):
        headers = await scored(broker, len(samples))
        assert [header.reward for header in headers] == [1.5, 0.5, None, None, 0.5]
        assert headers[0].components == {"gsm8k": 1.0, "obedient": 1.0}
        assert await broker.get_blobs([headers[0].text_key]) == [b"so #### 18"]
        assert [header.reward_error and header.reward_error[0] for header in headers] == [
            None,
            None,
            "timeout",
            "crashed",
            None,
        ]
        await controller.reported("serving")
        registration = controller.registrations[0]
        async with RewardClient(registration.address, token=TOKEN) as client:
            item = ScoreItem(trajectory_id="t", prompt="", response="#### 18", ground_truth="18")
            assert [result.reward for result in await client.score([item])] == [1.5]
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(process.wait) == 0
        assert controller.calls[-1] == "leave stopped"
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert any(span["name"] == "reward.score" and f"{1:032x}" in json.dumps(span) for span in spans)
    assert (
        await broker.reclaim(
            names.trajectories(RUN), names.REWARD_GROUP, "test", min_idle_s=0.0, max_entries=10
        )
        == []
    )


@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_the_end_of_the_run_ends_the_process(
    tmp_path: Path, model: Path, redis_server: RedisServer, broker: Broker
) -> None:
    reward: dict[str, object] = {"functions": [{"name": "exact_match"}]}
    async with service(tmp_path, model, redis_server.url, reward) as (controller, process):
        await controller.reported("serving")
        controller.run_over = True
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(process.wait) == 0


@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_a_function_that_is_not_there_is_told_to_the_controller(
    tmp_path: Path, model: Path, redis_server: RedisServer, broker: Broker
) -> None:
    reward: dict[str, object] = {"functions": [{"name": "gsm9k"}]}
    async with service(tmp_path, model, redis_server.url, reward) as (controller, process):
        async with asyncio.timeout(90):
            assert await asyncio.to_thread(process.wait) == 2
        failure = next(beat.failure for beat in controller.heartbeats if beat.failure)
        assert failure.startswith("there is no built-in reward function 'gsm9k': write exact_match")


@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_a_set_has_its_own_reward_for_answers_and_for_callers(
    tmp_path: Path, model: Path, redis_server: RedisServer, broker: Broker
) -> None:
    (tmp_path / "own.py").write_text(
        "def count(response, ground_truth):\n    return len(response.split()) + 0.5\n"
    )
    hard: dict[str, object] = {"files": "none.jsonl", "reward": f"{tmp_path}/own.py:count"}
    await broker.append(
        [
            finished_sample(RUN, index, tokens("so #### 18"), ground_truth="18", val_set=name)
            for index, name in enumerate(("", "hard", "easy"))
        ]
    )
    sets = {"hard": hard, "easy": "none.jsonl"}
    async with service(tmp_path, model, redis_server.url, {"functions": [{"name": "gsm8k"}]}, sets) as it:
        controller, process = it
        headers = await scored(broker, 3)
        assert [header.reward for header in headers] == [1.0, 3.5, 1.0]
        assert [header.components for header in headers] == [{"gsm8k": 1.0}, {"count": 3.5}, {"gsm8k": 1.0}]
        await controller.reported("serving")
        async with RewardClient(controller.registrations[0].address, token=TOKEN) as client:
            item = ScoreItem(
                trajectory_id="t", prompt="", response="#### 18", ground_truth="18", val_set="hard"
            )
            assert [result.reward for result in await client.score([item])] == [2.5]
        controller.run_over = True
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(process.wait) == 0


@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_a_sets_reward_that_is_not_there_is_told_with_the_set(
    tmp_path: Path, model: Path, redis_server: RedisServer, broker: Broker
) -> None:
    sets: dict[str, object] = {"hard": {"files": "none.jsonl", "reward": "gsm9k"}}
    async with service(tmp_path, model, redis_server.url, {"functions": [{"name": "gsm8k"}]}, sets) as it:
        controller, process = it
        async with asyncio.timeout(90):
            assert await asyncio.to_thread(process.wait) == 2
        failure = next(beat.failure for beat in controller.heartbeats if beat.failure)
        assert failure.startswith("data.val_sets.hard.reward: there is no built-in reward function 'gsm9k'")


@asynccontextmanager
async def client(address: str, scored: Path) -> AsyncIterator[Forked]:
    """A process that scores as `support.training_rewards.letters` does."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = ["-m", "support.attached_client", address, str(scored)]
    environment = {**os.environ, "PACELINE_REWARD_TOKEN": TOKEN, "PYTHONPATH": path}
    process = Forked(command, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size >= 3


@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_clients_attach_one_is_killed_one_comes_and_every_item_has_the_score_of_the_function(
    tmp_path: Path, model: Path, redis_server: RedisServer, broker: Broker
) -> None:
    reward: dict[str, object] = {"attached": [{"name": "letters", "timeout_s": 60.0}]}
    texts = ["so #### 18 <|end|>", "#### 19", "so so", "18 so 19"] * 4
    samples: list[str] = []
    async with service(tmp_path, model, redis_server.url, reward) as (controller, process):
        await controller.reported("serving")
        address = controller.registrations[0].address
        lives, killed, late = (tmp_path / name for name in ("lives", "killed", "late"))

        async def feed_until_it_scores(path: Path) -> None:
            """There is always something to score, however long the client takes to come."""
            async with asyncio.timeout(90):
                while not is_written(path):
                    more = enumerate(texts, len(samples))
                    await broker.append([finished_sample(RUN, index, tokens(text)) for index, text in more])
                    samples.extend(texts)
                    await asyncio.sleep(0.1)

        async with client(address, lives) as first, client(address, killed) as second:
            await feed_until_it_scores(killed)
            second.kill()
            async with client(address, late) as third:
                await feed_until_it_scores(late)
                headers = await scored(broker, len(samples))
                controller.run_over = True
                async with asyncio.timeout(60):
                    assert [await asyncio.to_thread(each.wait) for each in (first, third, process)] == [0] * 3
        expected = [letters(text.replace(" <|end|>", ""), "") for text in samples]
        assert [header.reward for header in headers] == [values["score"] for values in expected]
        assert [header.components["letters/length"] for header in headers] == [
            values["length"] for values in expected
        ]
        assert await asyncio.to_thread(second.wait) < 0


@pytest.mark.redis
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_run_over", [False, True])
async def test_clients_hear_whether_the_run_is_over_or_this_service_alone(
    tmp_path: Path, model: Path, redis_server: RedisServer, broker: Broker, *, is_run_over: bool
) -> None:
    """After a service's own end they attach again, to its successor."""
    reward: dict[str, object] = {"attached": [{"name": "letters"}]}
    left = asyncio.Event()

    async def says() -> AsyncIterator[reward_pb2.ScorerMessage]:
        yield SCORER_MESSAGES.client_to_proto(Hello(name="letters", client="test", window=1))
        await left.wait()

    async with service(tmp_path, model, redis_server.url, reward) as (controller, process):
        await controller.reported("serving")
        channel = channels.connect(controller.registrations[0].address, credentials=Credentials(token=TOKEN))
        attach = reward_pb2_grpc.RewardGatewayStub(channel).Attach
        hears = channels.duplex(attach, says(), phase="ATTACH", peer="reward-0")
        async with asyncio.timeout(60):
            assert isinstance(SCORER_MESSAGES.server_from_proto(await anext(hears)), Welcome)
            if is_run_over:
                controller.run_over = True
            else:
                process.send_signal(signal.SIGTERM)
            leave = SCORER_MESSAGES.server_from_proto(await anext(hears))
            left.set()
            assert isinstance(leave, Leave)
            assert leave.for_good is is_run_over
            assert await asyncio.to_thread(process.wait) == 0
        await channel.close()
