"""Calls of a remote service that wait for their turn: merged up to a size, and apart after an error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.errors import PeerLostError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.reward.remote.merging import CallRequest, Merger, Results
from paceline.reward.remote.parts import CallItems
from paceline.reward.remote.scorer import RemoteScorer, RemoteScorerOptions
from support.reward_servers import OddServer, serving


def items(*names: str, response: str = "a") -> list[ScoreItem]:
    return [ScoreItem(trajectory_id=name, prompt="", response=response, ground_truth="") for name in names]


def request(*names: str, step: int = 1, until: float = 9.0, response: str = "a", **part: bool) -> CallRequest:
    placed = list(enumerate(items(*names, response=response)))
    return CallRequest(part=CallItems(items=placed, **part), run_id="r", step=step, until=until)


class Service:
    """Holds each call until it is let go; records which items came together."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.untils: list[float] = []
        self.most_at_once = self.num_ended = self._at_once = 0
        self.error: Exception | None = None
        self._may_answer = asyncio.Semaphore(0)

    async def make(self, asked: Sequence[ScoreItem], of: CallRequest) -> Results:
        self.calls.append([item.trajectory_id for item in asked])
        self.untils.append(of.until)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await self._may_answer.acquire()
        finally:
            self._at_once -= 1
            self.num_ended += 1
        if self.error is not None:
            raise self.error
        return [
            ScoreResult(trajectory_id=item.trajectory_id, reward=float(item.trajectory_id)) for item in asked
        ]

    def let_go(self, count: int = 100) -> None:
        for _ in range(count):
            self._may_answer.release()


def merger(service: Service, **options: int) -> Merger:
    return Merger(service.make, **({"concurrency": 1, "max_items": 4, "max_chars": 1000} | options))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def ask(of: Merger, *requests: CallRequest) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(of.ask(each)) for each in requests]


async def test_what_waits_goes_together_up_to_the_size_and_each_gets_its_own_results() -> None:
    service = Service()
    asked = ask(
        merger(service),
        request("1"),
        request("2", until=5.0),
        request("3", "4"),
        request("5", "6"),
        request("7"),
    )
    await settle()
    assert service.calls == [["1"]]  # nobody waits for others while a turn is free
    service.let_go()
    answers = await asyncio.gather(*asked)
    assert service.calls == [["1"], ["2", "3", "4", "7"], ["5", "6"]]
    assert service.untils == [9.0, 5.0, 9.0]
    assert [[result.reward for result in answer.results] for answer in answers] == [
        [1.0], [2.0], [3.0, 4.0], [5.0, 6.0], [7.0],
    ]  # fmt: skip
    assert [answer.was_merged for answer in answers] == [False, True, True, False, True]


async def test_while_turns_are_free_each_request_is_a_call() -> None:
    service = Service()
    asked = ask(merger(service, concurrency=3), *(request(str(number)) for number in range(7)))
    await settle()
    assert service.calls == [["0"], ["1"], ["2"]]
    service.let_go()
    await asyncio.gather(*asked)
    assert service.calls[3:] == [["3", "4", "5", "6"]]
    assert service.most_at_once == 3


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (request("3", step=2), {}),
        (request("3", is_cut=True), {}),
        (request("3", is_alone=True), {}),
        (request("2"), {}),  # the same trajectory, delivered again
        (request("3", response="x" * 60), {"max_chars": 50}),
        (request("3"), {"max_items": 0}),
        (request("3", "4", "5", "6"), {}),
    ],
    ids=["another step", "cut", "alone", "the same", "too long", "never", "too many"],
)
@pytest.mark.parametrize("comes_first", [True, False])
async def test_what_does_not_go_together_stays_apart(
    other: CallRequest, options: dict[str, int], comes_first: bool
) -> None:
    service = Service()
    both = [other, request("2")] if comes_first else [request("2"), other]
    asked = ask(merger(service, **options), request("1"), *both)
    service.let_go()
    answers = await asyncio.gather(*asked)
    assert len(service.calls) == 3
    assert not any(answer.was_merged for answer in answers)


async def test_an_error_is_that_of_all_and_says_that_others_were_in_the_call() -> None:
    service = Service()
    service.error = PeerLostError("gone", peer="judge")
    asked = ask(merger(service), request("1"), request("2"), request("3"))
    service.let_go()
    answers = await asyncio.gather(*asked)
    assert [type(answer.results) for answer in answers] == [PeerLostError] * 3
    assert [answer.was_merged for answer in answers] == [False, True, True]


async def test_a_defect_reaches_everyone_who_waits() -> None:
    service = Service()
    service.error = ZeroDivisionError()
    asked = ask(merger(service), request("1"), request("2"), request("3"))
    service.let_go()
    assert [type(end) for end in await asyncio.gather(*asked, return_exceptions=True)] == [
        ZeroDivisionError
    ] * 3


async def test_who_goes_away_takes_nobody_along() -> None:
    service = Service()
    merging = merger(service)
    first, queued, second, third = ask(merging, *(request(name) for name in "1234"))
    await settle()
    queued.cancel()
    await settle()
    service.let_go(1)
    await settle()
    assert service.calls == [["1"], ["3", "4"]]
    second.cancel()
    await settle()
    assert service.num_ended == 1
    third.cancel()  # the last one
    await settle()
    assert service.num_ended == 2
    assert (await first).results[0].reward == 1.0
    last = ask(merging, request("5"))
    service.let_go()
    assert (await last[0]).results[0].reward == 5.0  # turns were given back


async def test_closing_ends_what_is_under_way_and_what_waits() -> None:
    service = Service()
    merging = merger(service)
    asked = ask(merging, request("1"), request("2"))
    await settle()
    await merging.close()
    for answer in await asyncio.gather(*asked):
        assert isinstance(answer.results, RewardError)
        assert answer.results.kind is RewardErrorKind.UNAVAILABLE
    assert service.calls == [["1"]]


async def deliver(remote: RemoteScorer, *deliveries: list[ScoreItem]) -> list[str]:
    scored = await asyncio.gather(*(remote.score(each, run_id="r", step=1) for each in deliveries))
    return [
        score.error[0].value if score.error else str(score.reward) for scores in scored for score in scores
    ]


def options(address: str, **given: Any) -> RemoteScorerOptions:
    return RemoteScorerOptions(
        **({"name": "judge", "address": address, "concurrency": 1, "timeout_s": 30.0} | given)
    )


async def test_small_deliveries_become_few_calls_of_a_service_that_takes_one_at_a_time() -> None:
    server = OddServer("counting")
    async with serving(server) as address:
        remote = RemoteScorer(options(address, max_items_per_call=8))
        await remote.start()
        values = await deliver(remote, *(items(f"t{number}") for number in range(17)))
        await remote.close()
    assert values == ["1.0"] * 17
    assert sorted(map(len, server.calls)) == [1, 8, 8]
    assert server.most_at_once == 1


@pytest.mark.parametrize(
    ("mode", "bad", "kind"), [("refuse_bad", "bad", "raised"), ("hang_on_slow", "slow", "timeout")]
)
async def test_a_bad_item_does_not_hurt_those_of_other_deliveries(mode: str, bad: str, kind: str) -> None:
    timeout_s = 3.0 if kind == "timeout" else 30.0
    server = OddServer(mode)
    async with serving(server) as address:
        remote = RemoteScorer(options(address, timeout_s=timeout_s))
        await remote.start()
        deliveries = [items("t0"), items("t1"), items("t2", response=bad), items("t3")]
        values = await deliver(remote, *deliveries)
        await remote.close()
    assert values == ["1.0", "1.0", kind, "1.0"]
    assert ["t1", "t2", "t3"] in server.calls
    assert ["t3"] in server.calls


async def test_where_calls_are_never_repeated_none_are_merged() -> None:
    server = OddServer("refuse_bad")
    async with serving(server) as address:
        remote = RemoteScorer(options(address, retry_for_s=0.0))
        await remote.start()
        values = await deliver(remote, items("t0"), items("t1", response="bad"), items("t2"))
        await remote.close()
    assert values == ["1.0", "raised", "1.0"]
    assert server.calls == [["t0"], ["t1"], ["t2"]]
