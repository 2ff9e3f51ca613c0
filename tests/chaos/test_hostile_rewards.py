"""Functions and services that do their worst: the item at fault has a typed error, the others their rewards.

Each row of the tables in benchmarks/journal/hostile.md is one of these tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from paceline.core.errors import InvalidMessageError
from paceline.core.scoring import ScoreItem
from paceline.reward.functions.pool import FunctionPool
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from paceline.reward.scoring.scores import Score
from paceline.reward.servicer import RewardServicer
from paceline.rpc.v1 import reward_pb2
from paceline.sdk import RewardServer
from paceline.service.children.process import ChildLimits
from support.reward_servers import OddServer, serving

DOCS = Path(__file__).parents[2] / "benchmarks" / "journal" / "hostile.md"
OBEDIENT = FunctionSpec(name="f", reference="support.reward_functions:obedient")
# What hangs hangs for an hour; the others are for a machine that has much to do.
TIMEOUT_S, PATIENCE_S, SOON_S = 2.0, 120.0, 300.0
GROWTH_MIB = 700
COLUMNS_MIB = 300


def items(*responses: str, **extra: object) -> list[ScoreItem]:
    return [
        ScoreItem(trajectory_id=f"t{index}", prompt="", response=response, ground_truth="", extra=extra)
        for index, response in enumerate(responses)
    ]


def outcome(score: Score) -> str:
    return score.error[0].value if score.error else "scored"


# Orders of support.reward_functions.obedient, and what the item gets.
FUNCTIONS = {
    "raise": "raised",
    "hang": "timeout",
    "return:nan": "not_finite",
    "return:huge": "not_finite",
    "keys": "wrong_type",
    "exit": "crashed",
    "kill": "crashed",
    "segfault": "crashed",
    "fork": "scored",
    "double_fork": "crashed",
    "double_fork:hang": "timeout",
    "eat": "crashed",
    "endless": "timeout",
    "close": "crashed",
    "recurse": "raised",
    "junk:row": "crashed",
    "forge:int": "crashed",
    "forge:inf": "crashed",
    "forge:nan": "crashed",
    "forge:past": "crashed",
    "forge:maps": "crashed",
    "future": "timeout",
}


@pytest.mark.parametrize("order", FUNCTIONS)
async def test_a_function(order: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    pid_file = tmp_path / "pid"
    limits = ChildLimits(memory_bytes=2 << 30)
    # What a fork holds open shows only at the deadline that its process has ended.
    timeout_s = TIMEOUT_S if order == "double_fork" else _patience_s(FUNCTIONS[order])
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=timeout_s, limits=limits) as pool:
        scores = await pool.score(items("fine", order, "fine", pid_file=str(pid_file)))
        assert [outcome(score) for score in scores] == ["scored", FUNCTIONS[order], "scored"]
        assert [outcome(score) for score in await pool.score(items("fine"))] == ["scored"]
    if pid_file.exists():
        assert is_gone(int(pid_file.read_text()))
    assert len(capfd.readouterr().err) < 2 << 20
    assert time.monotonic() - started < SOON_S


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for is a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_function_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_TOKEN", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    limits = ChildLimits(pass_env=["JUDGE_KEY"])
    names = ("PACELINE_TOKEN", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY", "PATH")
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=5, limits=limits) as pool:
        scores = await pool.score(items(*(f"environment:{name}" for name in names)))
    assert [score.reward for score in scores] == [0.0, 0.0, 1.0, 1.0]


# --- services


Answer = Callable[[bytes, Any], Awaitable[bytes]]


def results(request: bytes, *, ids: Callable[[list[str]], list[str]] = list) -> reward_pb2.ScoreResponse:
    asked = [item.trajectory_id for item in reward_pb2.ScoreRequest.FromString(request).items]
    return reward_pb2.ScoreResponse(
        results=[reward_pb2.ScoreResult(trajectory_id=name, reward=1.0) for name in ids(asked)]
    )


def answers(ids: Callable[[list[str]], list[str]]) -> Answer:
    async def answer(request: bytes, context: Any) -> bytes:
        return results(request, ids=ids).SerializeToString()

    return answer


def raw(make: Callable[[bytes], bytes]) -> Answer:
    async def answer(request: bytes, context: Any) -> bytes:
        return make(request)

    return answer


def refuses(code: grpc.StatusCode, details: str, body: bytes = b"") -> Answer:
    async def answer(request: bytes, context: Any) -> bytes:
        metadata = (("paceline-error-bin", body),) if body else ()
        await context.abort(code, details, trailing_metadata=metadata)
        raise AssertionError

    return answer


async def _hang(request: bytes, context: Any) -> bytes:
    await asyncio.sleep(3600)
    return b""


NESTED = b"[" * 3000 + b"]" * 3000
SURROGATE = json.dumps({"class": "PacelineError", "message": "half \ud800", "fields": {}}).encode()
EMPTY_RESULT = b"\x0a\x00"
SERVICES: dict[str, tuple[Answer, str]] = {
    "garbage": (raw(lambda request: b"\xff" * 1000), "raised"),
    "a truncated answer": (raw(lambda request: results(request).SerializeToString()[:-3]), "raised"),
    "half of the results": (answers(lambda ids: ids[:1]), "wrong_count"),
    "results of other items": (answers(lambda ids: [f"x{name}" for name in ids]), "wrong_count"),
    "results twice": (answers(lambda ids: ids + ids), "wrong_count"),
    "the same result for all": (answers(lambda ids: ids[:1] * len(ids)), "wrong_count"),
    "10^6 results": (raw(lambda request: EMPTY_RESULT * 10**6), "wrong_count"),
    "100 MB": (raw(lambda request: b"\0" * 100_000_000), "raised"),
    "nested metadata": (refuses(grpc.StatusCode.INTERNAL, "no", NESTED), "raised"),
    "surrogates in metadata": (refuses(grpc.StatusCode.INTERNAL, "no", SURROGATE), "raised"),
    "an old contract": (refuses(grpc.StatusCode.UNIMPLEMENTED, "no such method"), "raised"),
    "a wrong token": (refuses(grpc.StatusCode.UNAUTHENTICATED, "who are you"), "raised"),
    "hang": (_hang, "timeout"),
}
LATER = reward_pb2.RewardDescription(contract=99).SerializeToString()
SOURCES = b"\x08\x02" + b"\x1a\x00" * 10**6
DESCRIPTIONS: dict[str, tuple[Answer, str]] = {
    "garbage as its description": (raw(lambda request: b"\xff" * 1000), "raised"),
    "a later contract": (raw(lambda request: LATER), "raised"),
    "10^6 data sources": (raw(lambda request: SOURCES), "raised"),
    "no description, and hangs": (_hang, "timeout"),
}


@asynccontextmanager
async def service(answer: Answer, describe: Answer | None = None) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    handler: Any = grpc.unary_unary_rpc_method_handler
    methods = {"Score": handler(answer)} | ({} if describe is None else {"Describe": handler(describe)})
    handlers = grpc.method_handlers_generic_handler("paceline.rpc.v1.RewardService", methods)
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def asked(address: str, *, timeout_s: float = TIMEOUT_S) -> list[str]:
    options = RemoteScorerOptions(name="judge", address=address, timeout_s=timeout_s, retry_for_s=0.0)
    remote = RemoteScorer(options)
    await remote.start()
    try:
        scores = await remote.score(items("a", "b"))
        assert [score.trajectory_id for score in scores] == ["t0", "t1"]
        assert all(score.error and score.error[1].encode() for score in scores)
        return [outcome(score) for score in scores]
    finally:
        await remote.close()


def _patience_s(kind: str) -> float:
    """Only what is to run out of time has little of it: a busy machine takes seconds for what raises."""
    return TIMEOUT_S if kind == "timeout" else PATIENCE_S


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service(name: str) -> None:
    answer, kind = SERVICES[name]
    process = psutil.Process(os.getpid())
    started, before = time.monotonic(), process.memory_info().rss
    async with service(answer) as address:
        assert await asked(address, timeout_s=_patience_s(kind)) == [kind] * 2
    assert time.monotonic() - started < SOON_S
    assert (process.memory_info().rss - before) >> 20 < GROWTH_MIB


@pytest.mark.parametrize("name", DESCRIPTIONS)
async def test_a_service_that_says_what_it_is(name: str) -> None:
    describe, kind = DESCRIPTIONS[name]
    started = time.monotonic()
    async with service(answers(list), describe) as address:
        assert await asked(address, timeout_s=_patience_s(kind)) == [kind] * 2
    assert time.monotonic() - started < SOON_S


async def _drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        for number in range(1000):
            writer.write(bytes([number % 7]))
            await writer.drain()
            await asyncio.sleep(0.01)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def _tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x15\x03\x03\x00\x02\x02\x46")  # what a TLS server says to plain text
    writer.close()


CONNECTIONS = {"drips byte by byte": _drips, "resets": _resets, "speaks TLS to plain text": _tls}


@pytest.mark.parametrize("name", CONNECTIONS)
async def test_a_connection(name: str) -> None:
    server = await asyncio.start_server(CONNECTIONS[name], "127.0.0.1", 0)
    started = time.monotonic()
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert set(await asked(f"127.0.0.1:{port}")) <= {"unavailable", "timeout"}
    assert time.monotonic() - started < SOON_S


async def test_others_of_the_run_are_scored_meanwhile() -> None:
    """A service that hangs costs a second one nothing."""
    hangs = asyncio.Event()

    async def hang(request: bytes, context: Any) -> bytes:
        hangs.set()
        return await _hang(request, context)

    async with service(hang) as hanging, serving(OddServer()) as good:
        hanging_call = asyncio.create_task(asked(hanging, timeout_s=60.0))
        await asyncio.wait_for(hangs.wait(), 30)
        remote = RemoteScorer(RemoteScorerOptions(name="good", address=good, timeout_s=50.0))
        await remote.start()
        assert [outcome(score) for score in await remote.score(items("a", "b"))] == ["scored"] * 2
        await remote.close()
        assert not hanging_call.done()
        hanging_call.cancel()
        await asyncio.wait([hanging_call])


def columns(text: str, *, count: int = 1) -> bytes:
    """A call whose items have this text as their further columns."""
    items = [reward_pb2.ScoreItem(trajectory_id=f"t{index}", extra_json=text) for index in range(count)]
    return reward_pb2.ScoreRequest(items=items).SerializeToString()


def many(value: str, count: int) -> str:
    return '{"a": [' + ",".join([value] * count) + "]}"


# The call, and what the caller is told.
COLUMNS: dict[str, tuple[Callable[[], bytes], str]] = {
    "60 MB of text": (
        lambda: columns(many(f'"{"x" * 60_000_000}"', 1)),
        "60000011 bytes of JSON, at most 16777216",
    ),
    "10^5 brackets": (lambda: columns("[" * 10**5), "at most 8 levels"),
    "60 MB of empty mappings": (
        lambda: columns(many("{}", 5_000_000), count=4),
        "10000001 values in lists and mappings, at most 1048576",
    ),
    "60 MB of strings": (
        lambda: columns(many('""', 5_000_000), count=4),
        "5000001 values in lists and mappings, at most 1048576",
    ),
    "10^6 mappings over 100 items": (
        lambda: columns(many("{}", 10_000), count=100),
        "over 1048576 values in extra_json of all items",
    ),
    "10^6 items, with nothing in it": (lambda: columns("", count=10**6), "1000000 items, at most 65536"),
}


@pytest.mark.parametrize("name", COLUMNS)
async def test_a_caller_with_a_token(name: str) -> None:
    """In a server of the SDK."""
    make, told = COLUMNS[name]
    process = psutil.Process(os.getpid())
    message = make()
    async with (
        RewardServer(lambda response, ground_truth: 1.0) as server,
        grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        score = channel.unary_unary("/paceline.rpc.v1.RewardService/Score")
        assert len((await ask(score, columns("{}"))).results) == 1
        before = process.memory_info().rss
        with pytest.raises(grpc.aio.AioRpcError, match=told) as caught:
            await score(message)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (process.memory_info().rss - before) >> 20 < COLUMNS_MIB
        assert len((await ask(score, columns("{}"))).results) == 1


async def test_the_reward_service_has_the_same_limits() -> None:
    make, told = COLUMNS["10^6 mappings over 100 items"]
    servicer = RewardServicer()
    servicer.scorer = FunctionPool(
        [OBEDIENT], num_processes=1, timeout_s=5
    )  # not started: no item gets there
    with pytest.raises(InvalidMessageError, match=told):
        await servicer.Score(reward_pb2.ScoreRequest.FromString(make()), None)


async def ask(score: Any, message: bytes) -> reward_pb2.ScoreResponse:
    return reward_pb2.ScoreResponse.FromString(await score(message))


def test_the_document_has_every_row() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Hostile rewards\n")[2].partition("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if line.startswith("|")]
    said = {row[0].strip("`"): row[1].strip("`") for row in rows}
    wanted = FUNCTIONS | {name: kind for name, (_, kind) in (SERVICES | DESCRIPTIONS).items()}
    assert {name: said.get(name) for name in wanted} == wanted
    assert set(CONNECTIONS) <= said.keys()
    assert set(COLUMNS) <= said.keys()
