"""Scoring the samples of a prompt together: by functions, servers and clients, and through the mailbox."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.broker import Mailbox, Outgoing, names
from paceline.config.reward import (
    AttachedConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardServiceConfig,
)
from paceline.core.attached_clients.attachment import Leave
from paceline.core.errors import ConfigError, InvalidMessageError, RewardErrorKind
from paceline.core.samples.trajectory import GroupRefusal, ScoredHeader
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.attached.scorer import AttachedScorer
from paceline.reward.attached.servicer import GatewayServicer
from paceline.reward.consumer import Consumer, ConsumerOptions
from paceline.reward.functions.pool import FunctionPool
from paceline.reward.functions.registry import load
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.scores import Score, failed
from paceline.reward.scoring.shape import Shape
from paceline.reward.weighted_sum import WeightedSum
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.sdk import RewardAttachment, RewardServer
from paceline.service.grpc.server import start_server
from paceline.wire import (
    decode_scored,
    decode_trajectory_header,
    decode_trajectory_headers,
    encode_trajectory_group,
)
from support import cli_configs
from support.group_functions import rank
from support.memory_broker import MemoryBroker
from support.reward_servers import OddServer, serving
from support.trajectories import finished_sample

FUNCTIONS = "support.group_functions"
GROUP = Shape(group=True)
ROOT = Path(__file__).parents[2]


def items(groups: dict[str, Sequence[str]]) -> list[ScoreItem]:
    return [
        ScoreItem(trajectory_id=f"{group}{place}", prompt="", response=response, ground_truth="", group=group)
        for group, responses in groups.items()
        for place, response in enumerate(responses)
    ]


def kinds(scores: Sequence[Score]) -> list[object]:
    return [score.error[0].value if score.error else score.reward for score in scores]


def pool(name: str = "rank", **options: Any) -> FunctionPool:
    spec = FunctionSpec(name=name, reference=f"{FUNCTIONS}:{name}", shape=GROUP, arguments=options)
    return FunctionPool([spec], num_processes=1, timeout_s=4.0)


# --- functions


async def test_a_function_ranks_the_samples_of_each_prompt_by_themselves() -> None:
    async with pool() as functions:
        given = items({"a": ["xxx", "x"], "b": ["xxxx", "xxx", "xx"]})
        mixed = [given[place] for place in (2, 0, 3, 1, 4)]
        assert kinds(await functions.score(mixed)) == [2.0, 1.0, 1.0, 0.0, 0.0]
        alone = [
            ScoreItem(trajectory_id=f"t{n}", prompt="", response="x" * n, ground_truth="") for n in (1, 2)
        ]
        assert kinds(await functions.score(alone)) == [0.0, 0.0]


async def test_a_function_sees_which_set_the_samples_belong_to() -> None:
    function = FunctionSpec(name="of_set", reference=f"{FUNCTIONS}:is_of_set", shape=GROUP)
    async with FunctionPool([function], num_processes=1, timeout_s=20.0) as functions:
        given = [
            replace(item, val_set="hard" if item.group == "a" else "") for item in items({"a": "x", "b": "x"})
        ]
        assert [score.reward for score in await functions.score(given)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [
        (["nan", "x"], ["not_finite", 0.0]),
        (["raise", "x"], ["raised", "raised"]),
        (["short", "x"], ["wrong_count", "wrong_count"]),
        (["hang", "x"], ["timeout", "timeout"]),
        (["exit", "x"], ["crashed", "crashed"]),
    ],
)
async def test_a_member_or_a_group_that_fails_takes_no_other_group_along(
    bad: list[str], outcome: list[object]
) -> None:
    async with pool() as functions:
        scores = await functions.score(items({"a": ["xx", "x"], "b": bad, "c": ["x", "xx"]}))
    assert kinds(scores) == [1.0, 0.0, *outcome, 0.0, 1.0]


async def test_functions_of_both_forms_add_up_and_a_failed_one_may_count_as_nothing() -> None:
    config = RewardConfig(
        functions=(
            RewardFunctionConfig(name="support.reward_functions:length", weight=0.5),
            RewardFunctionConfig(name=f"{FUNCTIONS}:rank", group=True, weight=10.0, required=False),
            RewardFunctionConfig(name=f"{FUNCTIONS}:scaled", group=True, kwargs={"factor": 0.25}),
        )
    )
    total = WeightedSum.configured(ScorerSettings(config=config))
    await total.start()
    scores = await total.score(items({"a": ["xx", "x"], "b": ["raise", "x", "x"]}))
    await total.close()
    assert kinds(scores) == [1.0 + 10.0 + 0.5, 0.5 + 0.5, 2.5 + 0.75, 0.5 + 0.75, 0.5 + 0.75]
    assert scores[0].components == {"length": 2.0, "rank": 1.0, "rank/failed": 0.0, "scaled": 0.5}
    assert scores[2].components == {"length": 5.0, "rank/failed": 1.0, "scaled": 0.75}


async def test_the_example_ranks_right_answers_by_length() -> None:
    spec = FunctionSpec(
        name="f", reference=f"{ROOT}/examples/arithmetic/ranking.py:shortest_right", shape=GROUP
    )
    texts = ["so it is 12", "12", "it is 12", "13", "00 12 12"]
    given = [
        ScoreItem(trajectory_id=str(n), prompt="", response=text, ground_truth="12", group="g")
        for n, text in enumerate(texts)
    ]
    async with FunctionPool([spec], num_processes=1, timeout_s=10.0) as functions:
        assert kinds(await functions.score(given)) == [0.5, 1.0, 0.75, 0.0, 0.75]


@pytest.mark.parametrize(
    ("reference", "arguments", "sentence"),
    [
        ("gsm8k", {}, "the built-in 'gsm8k' scores single responses: remove group: true"),
        (f"{FUNCTIONS}:scaled", {}, "needs factor: name them under kwargs"),
        (f"{FUNCTIONS}:scaled", {"factr": 1}, "has no argument 'factr'; it has factor"),
        (f"{FUNCTIONS}:without_items", {"factor": 1}, "must take the items of a group by position"),
        (f"{FUNCTIONS}:ScoreItem", {}, "is a class: name a function or an instance"),
    ],
)
def test_what_cannot_score_groups_is_refused(
    reference: str, arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(reference, arguments, group=True)


# --- services


@asynccontextmanager
async def remote(address: str, **options: Any) -> AsyncIterator[RemoteScorer]:
    settings = {"name": "judge", "address": address, "shape": GROUP, "timeout_s": 30.0, "retry_for_s": 30.0}
    scorer = RemoteScorer(RemoteScorerOptions(**(settings | options)))
    await scorer.start()
    yield scorer
    await scorer.close()


GROUPING = reward_pb2.RewardDescription(contract=2, groups=True)


async def test_a_server_of_the_sdk_is_called_once_for_each_prompt() -> None:
    async with RewardServer(rank, group=True) as server, remote(server.address) as scorer:
        scores = await scorer.score(items({"a": ["xxx", "x"], "b": ["xx"], "c": ["nan", "x", "xx"]}))
        assert kinds(scores) == [1.0, 0.0, 0.0, "not_finite", 0.0, 1.0]
        assert kinds(await scorer.score(items({"a": ["x", "raise"], "b": ["x", "xx"]}))) == [
            "raised", "raised", 0.0, 1.0,
        ]  # fmt: skip


async def test_calls_are_cut_between_groups_only() -> None:
    server = OddServer(description=GROUPING)
    given = items({"a": ["x"] * 3, "b": ["x"] * 2, "c": ["x"] * 4, "d": ["x"]})
    async with serving(server) as address:
        async with remote(address, max_items_per_call=4) as scorer:
            assert kinds(await scorer.score(given)) == [1.0] * 10
        groups = [sorted({name[0] for name in call}) for call in server.calls]
        assert sorted(groups) == [["a"], ["b"], ["c"], ["d"]]
        server.calls.clear()
        async with remote(address, max_items_per_call=5) as scorer:
            await scorer.score(given)
        assert sorted(map(len, server.calls)) == [5, 5]
        server.calls.clear()
        async with remote(address, max_items_per_call=3) as scorer:
            scores = await scorer.score(given)
    assert kinds(scores) == [1.0] * 5 + ["wrong_type"] * 4 + [1.0]
    assert scores[5].error is not None
    assert "a group of 4 items does not fit into max_items_per_call=3" in scores[5].error[1]
    assert max(map(len, server.calls)) <= 3


async def test_a_group_that_the_service_refuses_fails_alone_and_is_never_split() -> None:
    server = OddServer("refuse_bad", description=GROUPING)
    given = items({name: ["x", "x", "bad" if name == "c" else "x"] for name in "abcdef"})
    async with serving(server) as address, remote(address) as scorer:
        scores = await scorer.score(given)
    assert kinds(scores) == [1.0] * 6 + ["raised"] * 3 + [1.0] * 9
    for call in server.calls:
        assert all(sum(name[0] == group for name in call) in (0, 3) for group in "abcdef")


async def test_both_sides_must_mean_groups() -> None:
    for description, shape, sentence in (
        (None, GROUP, "does not score the samples of a prompt together"),
        (reward_pb2.RewardDescription(contract=2), GROUP, "serve_reward(f, group=True)"),
        (GROUPING, Shape(), "scores the samples of a prompt together: write group: true"),
    ):
        server = OddServer(description=description)
        async with serving(server) as address, remote(address, shape=shape) as scorer:
            (score,) = await scorer.score(items({"a": ["x"]}))
        assert server.calls == []
        assert score.error is not None
        assert sentence in score.error[1]


async def test_a_scorer_of_single_items_does_not_see_groups() -> None:
    seen: list[str] = []

    class Recording(OddServer):
        async def Score(self, request: Any, context: Any) -> Any:
            seen.extend(item.group for item in request.items)
            return await super().Score(request, context)

    async with serving(Recording()) as address:
        config = RewardConfig(services=(RewardServiceConfig(name="judge", address=address),))
        total = WeightedSum.configured(ScorerSettings(config=config))
        await total.start()
        await total.score(items({"a": ["x", "xx"]}))
        await total.close()
    assert seen == ["", ""]


# --- attached clients


@asynccontextmanager
async def gateway(**config: Any) -> AsyncIterator[tuple[AttachedScorer, str]]:
    scorer = AttachedScorer(AttachedConfig(name="judge", group=True, **config), timeout_s=30.0)
    await scorer.start()
    servicer = GatewayServicer()
    servicer.gateways = {"judge": scorer.gateway}
    server = await start_server(reward_pb2_grpc.add_RewardGatewayServicer_to_server, servicer, port=0)
    try:
        yield scorer, server.address
    finally:
        await scorer.gateway.close(Leave(reason="over", for_good=True))
        await server.stop(grace_s=0)


async def test_an_attached_client_gets_whole_groups() -> None:
    async with gateway() as (scorer, address):
        client = asyncio.create_task(
            RewardAttachment(rank, address=address, name="judge", group=True, max_concurrent=2).run()
        )
        given = items({"a": ["xxx", "x"], "b": ["xx"], "c": ["nan", "x", "xx"], "d": ["raise", "x"]})
        scores = await scorer.score(given)
        assert kinds(scores) == [1.0, 0.0, 0.0, "not_finite", 0.0, 1.0, "raised", "raised"]
    async with asyncio.timeout(120):
        await client


async def test_a_group_goes_to_another_client_as_one_when_its_client_is_lost() -> None:
    started, sizes = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def slow(given: list[ScoreItem]) -> list[float]:
        loop.call_soon_threadsafe(started.set)
        import time

        time.sleep(1.0)
        return [9.0] * len(given)

    def quick(given: list[ScoreItem]) -> list[float]:
        sizes.append(len(given))
        return [1.0] * len(given)

    async with gateway() as (scorer, address):
        first = asyncio.create_task(RewardAttachment(slow, address=address, name="judge", group=True).run())
        scoring = asyncio.create_task(scorer.score(items({"a": ["x", "xx", "xxx"]})))
        async with asyncio.timeout(120):
            await started.wait()
        first.cancel()
        await asyncio.wait({first}, timeout=120)
        second = asyncio.create_task(RewardAttachment(quick, address=address, name="judge", group=True).run())
        assert kinds(await scoring) == [1.0, 1.0, 1.0]
        assert sizes == [3]
    async with asyncio.timeout(120):
        await second


async def test_a_client_that_scores_items_is_told_that_it_gets_groups() -> None:
    async with gateway() as (_, address):
        with pytest.raises(ConfigError, match="attach with group=True, or remove group: true"):
            await RewardAttachment(lambda response, truth: 1.0, address=address, name="judge").run()


def result(name: str, reward: float = 1.0) -> ScoreResult:
    return ScoreResult(trajectory_id=name, reward=reward)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((result("a1", 5.0), result("a0", 4.0)), [4.0, 5.0]),
        ((result("a0", math.nan), result("a1")), ["not_finite", 1.0]),
        ((result("a0"),), ["wrong_count"] * 2),
        ((result("a0"), result("a0")), ["wrong_count"] * 2),
        ((result("a0"), result("b0")), ["wrong_count"] * 2),
        (result("a0"), ["wrong_count"] * 2),
    ],
)
async def test_answers_to_a_group_are_one_for_each_item(answer: Any, expected: list[object]) -> None:
    class Answering(RewardAttachment):
        async def _answer(self, task: Any) -> Any:
            return answer

    async with gateway() as (scorer, address):
        client = asyncio.create_task(Answering(rank, address=address, name="judge", group=True).run())
        assert kinds(await scorer.score(items({"a": ["x", "xx"]}))) == expected
    async with asyncio.timeout(120):
        await client


# --- the mailbox


RUN = "run-1"


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(96 + token) for token in token_ids)


class Recorder:
    """Scores by the number of siblings; times out for a response `slow` as often as `times` says."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str]]] = []
        self.times = 0
        self.asked = asyncio.Event()
        self.wait: asyncio.Event | None = None

    async def score(self, given: Sequence[ScoreItem], *, run_id: str, step: int) -> list[Score]:
        self.calls.append([(item.group, item.response) for item in given])
        self.asked.set()
        if self.wait is not None:
            await self.wait.wait()
        return [self._score(item, given) for item in given]

    def _score(self, item: ScoreItem, given: Sequence[ScoreItem]) -> Score:
        if item.response == "slow" and self.times:
            self.times -= 1
            return failed(item.trajectory_id, RewardErrorKind.TIMEOUT, "too slow")
        if item.response == "bad":
            return failed(item.trajectory_id, RewardErrorKind.RAISED, "bad")
        siblings = sum(other.group == item.group for other in given)
        return Score(trajectory_id=item.trajectory_id, reward=float(siblings))


def group_message(prompt_id: int, *responses: str) -> Outgoing:
    samples = [
        finished_sample(RUN, prompt_id, [ord(letter) - 96 for letter in word], sample_index=index)
        for index, word in enumerate(responses)
    ]
    headers = [decode_trajectory_header(sample.payload) for sample in samples]
    blobs = {key: blob for sample in samples for key, blob in sample.blobs.items()}
    return Outgoing(stream=samples[0].stream, payload=encode_trajectory_group(headers), blobs=blobs)


class Bench:
    def __init__(self) -> None:
        self.broker, self.scorer = MemoryBroker(), Recorder()

    @asynccontextmanager
    async def working(self, member_id: str = "reward-0", **options: Any) -> AsyncIterator[None]:
        settings = ConsumerOptions(run_id=RUN, member_id=member_id, **options)
        consumer = Consumer(
            broker=self.broker,
            scorer=self.scorer,
            tokenizer=Letters(),
            options=settings,  # type: ignore[arg-type]
        )
        task = asyncio.create_task(consumer.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def answers(self, count: int) -> list[ScoredHeader | GroupRefusal]:
        read: list[ScoredHeader | GroupRefusal] = []
        async with Mailbox(self.broker, names.scored(RUN), names.CONTROLLER_GROUP, "controller") as box:
            async with asyncio.timeout(120):
                while len(read) < count:
                    entries = await box.take()
                    read += [decode_scored(entry.payload) for entry in entries]
                    await box.done(entries)
            await asyncio.sleep(0.05)
            assert await box.take(block_s=0.05) == []
        return read

    async def outcomes(self, count: int) -> dict[str, object]:
        headers = [answer for answer in await self.answers(count) if isinstance(answer, ScoredHeader)]
        return {
            str(header.trajectory_id): header.reward_error[0] if header.reward_error else header.reward
            for header in headers
        }


async def test_a_group_is_scored_in_one_call_whatever_the_deliveries_hold() -> None:
    bench = Bench()
    await bench.broker.append(
        [group_message(1, "a", "b", "c"), finished_sample(RUN, 9, [1]), group_message(2, "a")]
    )
    async with bench.working(max_entries=1):
        outcomes = await bench.outcomes(5)
    assert outcomes == {
        "train:4:1:0": 3.0, "train:4:1:1": 3.0, "train:4:1:2": 3.0, "train:4:9:0": 1.0, "train:4:2:0": 1.0,
    }  # fmt: skip
    assert [{group for group, _ in call} for call in bench.scorer.calls] == [
        {"train:4:1"},
        {""},
        {"train:4:2"},
    ]


async def test_a_member_that_failed_for_now_has_its_group_scored_again_as_one() -> None:
    bench = Bench()
    bench.scorer.times = 1
    await bench.broker.append([group_message(1, "a", "slow"), group_message(2, "b", "bad")])
    async with bench.working():
        outcomes = await bench.outcomes(4)
    assert outcomes == {
        "train:4:1:0": 2.0, "train:4:1:1": 2.0, "train:4:2:0": 2.0, "train:4:2:1": "raised",
    }  # fmt: skip
    assert [[word for _, word in call] for call in bench.scorer.calls] == [
        ["a", "slow", "b", "bad"], ["a", "slow"],
    ]  # fmt: skip


async def test_a_member_that_fails_for_good_leaves_its_siblings_their_scores() -> None:
    bench = Bench()
    bench.scorer.times = 9
    await bench.broker.append([group_message(1, "a", "slow", "b")])
    async with bench.working(max_deliveries=2):
        outcomes = await bench.outcomes(3)
    assert outcomes == {"train:4:1:0": 3.0, "train:4:1:1": "timeout", "train:4:1:2": 3.0}
    assert len(bench.scorer.calls) == 2


async def test_a_group_whose_service_died_is_scored_as_one_by_another() -> None:
    bench = Bench()
    bench.scorer.wait = asyncio.Event()
    await bench.broker.append([group_message(1, "a", "b", "c")])
    async with bench.working("reward-0", lease_s=0.5):
        async with asyncio.timeout(120):
            await bench.scorer.asked.wait()
    bench.scorer.wait = None
    async with bench.working("reward-1", lease_s=0.5):
        outcomes = await bench.outcomes(3)
    assert set(outcomes.values()) == {3.0}
    assert [len(call) for call in bench.scorer.calls] == [3, 3]


async def test_a_member_that_cannot_be_read_leaves_its_siblings_their_scores() -> None:
    bench = Bench()
    message = group_message(1, "a", "b")
    blobs = dict(list((message.blobs or {}).items())[1:])
    await bench.broker.append([Outgoing(stream=message.stream, payload=message.payload, blobs=blobs)])
    async with bench.working():
        outcomes = await bench.outcomes(2)
    assert outcomes == {"train:4:1:0": "lost", "train:4:1:1": 1.0}


async def test_a_group_of_which_a_header_cannot_be_read_is_refused_with_its_prompt() -> None:
    first, other = (decode_trajectory_header(finished_sample(RUN, prompt, [1]).payload) for prompt in (1, 2))
    mixed = encode_trajectory_group([first, other])
    with pytest.raises(InvalidMessageError, match="one of another group, or one twice"):
        decode_trajectory_headers(mixed)
    with pytest.raises(InvalidMessageError, match="one of another group, or one twice"):
        decode_trajectory_headers(encode_trajectory_group([first, first]))
    bench = Bench()
    await bench.broker.append([Outgoing(stream=names.trajectories(RUN), payload=mixed)])
    async with bench.working():
        (refusal,) = await bench.answers(1)
    assert isinstance(refusal, GroupRefusal)
    assert (refusal.prompt_id, refusal.reason) == (1, "inconsistent")


# --- the configuration


def test_groups_that_do_not_fit_into_a_call_are_refused() -> None:
    service = {"name": "judge", "address": "a:1", "group": True, "max_items_per_call": 8}
    assert cli_configs.config(reward={"services": [service]}, rollout={"n": 8}).reward.has_groups
    for rollout in ({"n": 9}, {"n": 4, "val": {"n": 9}}):
        with pytest.raises(ConfigError, match="max_items_per_call=8 is below .* raise it to 9"):
            cli_configs.config(reward={"services": [service]}, rollout=rollout)
    with pytest.raises(ConfigError, match="group: true and cache_size=5"):
        cli_configs.config(reward={"services": [service | {"cache_size": 5}]}, rollout={"n": 8})
