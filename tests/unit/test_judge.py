"""A judge behind an OpenAI-compatible address: what it is asked, how its answer is read, and its faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.config.reward import JudgeConfig, RewardConfig
from paceline.core.errors import ConfigError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.reward.judge.question import GradePattern, JudgePrompt
from paceline.reward.judge.scorer import JudgeScorer
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.scoring.shaped import Shaped
from support.clocks import ManualClock

PROMPT = "Is {response} right for {prompt}? The truth is {ground_truth}; {level}, {unknown}. Grade:"


def item(response: str, number: int = 0, **extra: object) -> ScoreItem:
    return ScoreItem(
        trajectory_id=f"t{number}", prompt="2 + 2", response=response, ground_truth="4", extra=extra
    )


class Judge:
    """Answers each call as `say` does: the content, or a status with a body; records the calls."""

    def __init__(self, say: Callable[[int, str], str | tuple[int, str]]) -> None:
        self.say, self.calls, self.headers = say, [], []
        self.most_at_once = self._at_once = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    int(x.split(":")[1]) for x in head.splitlines() if "ontent-" in x and "ength" in x
                )
                body = json.loads(await reader.readexactly(length))
                self.headers.append(head)
                self.calls.append(body)
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                await asyncio.sleep(0.02)
                self._at_once -= 1
                said = self.say(len(self.calls), body["messages"][0]["content"])
                status, text = (
                    said
                    if isinstance(said, tuple)
                    else (200, json.dumps({"choices": [{"message": {"content": said}}]}))
                )
                data = text.encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def judged(
    say: Callable[[int, str], Any], tmp_path: Path, **options: object
) -> AsyncIterator[tuple[Judge, JudgeScorer]]:
    judge = Judge(say)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    async with await asyncio.start_server(judge.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        tree = {
            "name": "judge",
            "address": f"http://127.0.0.1:{port}/v1",
            "model": "m",
            "prompt_file": str(tmp_path / "prompt.txt"),
            **options,
        }
        scorer = JudgeScorer(JudgeConfig.model_validate(tree))
        await scorer.start()
        try:
            yield judge, scorer
        finally:
            await scorer.close()


async def test_it_is_asked_about_the_item_and_its_last_number_counts(tmp_path: Path) -> None:
    async with judged(lambda *_: "7 of 10? No: 0.5", tmp_path, weight=2.0, max_tokens=9) as (judge, scorer):
        (score,) = await scorer.score([item("four", level="easy")])
    assert (score.reward, dict(score.components)) == (1.0, {"judge": 0.5})
    assert judge.calls == [
        {
            "model": "m",
            "messages": [
                {
                    "role": "user",
                    "content": "Is four right for 2 + 2? The truth is 4; easy, {unknown}. Grade:",
                }
            ],
            "max_tokens": 9,
            "temperature": 0.0,
        }
    ]


async def test_an_answer_that_comes_byte_by_byte_has_one_deadline(tmp_path: Path) -> None:
    enough, gone = asyncio.Event(), asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not enough.is_set():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.close()
            await writer.wait_closed()
        gone.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        (tmp_path / "prompt.txt").write_text(PROMPT)
        scorer = JudgeScorer(
            JudgeConfig(
                name="j",
                address=f"http://127.0.0.1:{port}/v1",
                model="m",
                prompt_file=str(tmp_path / "prompt.txt"),
                timeout_s=0.3,
                attempts=1,
            )
        )
        await scorer.start()
        try:
            async with asyncio.timeout(120):
                (score,) = await scorer.score([item("four")])
        finally:
            enough.set()
            await scorer.close()
            await gone.wait()
    assert score.error == (RewardErrorKind.TIMEOUT, "j: no answer within 0.3 s")


def test_a_response_cannot_fill_in_places_of_its_own() -> None:
    assert JudgePrompt("{response}").about(item("{ground_truth}")) == "{ground_truth}"
    with pytest.raises(ConfigError, match=r"has no \{response\}"):
        JudgePrompt("{prompt}")


@pytest.mark.parametrize(
    ("pattern", "answer", "grade"),
    [
        (r"(-?\d+(?:\.\d+)?)", "3, then -2.5.", -2.5),
        (r"\b(yes|no)\b", "No. no. yes", 1.0),
        (r"\b(YES|NO)\b", "YES, NO", 0.0),
    ],
)
def test_the_grade_is_that_of_the_last_match(pattern: str, answer: str, grade: float) -> None:
    assert GradePattern(pattern, {"yes": 1.0, "no": 0.0}).of(answer) == grade


def test_an_answer_without_a_grade_is_the_items_error() -> None:
    with pytest.raises(RewardError, match="no grade: 'I cannot say'") as error:
        GradePattern(r"(\d+)", {}).of("I cannot say")
    assert error.value.kind is RewardErrorKind.WRONG_TYPE
    with pytest.raises(ConfigError, match="no group"):
        GradePattern(r"\d+", {})
    with pytest.raises(ConfigError, match="not a regular expression"):
        GradePattern(r"(", {})


@pytest.mark.parametrize(
    ("said", "kind", "num_calls"),
    [
        ((503, "busy"), RewardErrorKind.UNAVAILABLE, 3),
        ((429, "slow down"), RewardErrorKind.UNAVAILABLE, 3),
        ((400, "no such model"), RewardErrorKind.RAISED, 1),
        ((200, "{"), RewardErrorKind.WRONG_TYPE, 1),
        ((200, '{"choices": []}'), RewardErrorKind.WRONG_TYPE, 1),
        ((200, "[" * 100_000), RewardErrorKind.WRONG_TYPE, 1),
        ((200, "x" * (5 << 20)), RewardErrorKind.WRONG_TYPE, 1),
        ((302, ""), RewardErrorKind.RAISED, 1),
        ("no number", RewardErrorKind.WRONG_TYPE, 1),
        ("1" * 400, RewardErrorKind.NOT_FINITE, 1),
    ],
)
async def test_what_a_judge_may_answer(
    said: Any, kind: RewardErrorKind, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.reward.judge.scorer._FIRST_PAUSE_S", 0.01)

    def say(_: int, question: str) -> Any:
        return "1" if "Is good" in question else said

    async with judged(say, tmp_path, attempts=3) as (judge, scorer):
        good, bad = await scorer.score([item("good"), item("bad", 1)])
    assert good.reward == 1.0
    assert bad.error_kind is kind, bad.error
    assert len(judge.calls) == 1 + num_calls


async def test_a_busy_judge_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.reward.judge.scorer._FIRST_PAUSE_S", 0.01)
    async with judged(lambda n, _: (503, "") if n < 3 else "1", tmp_path) as (judge, scorer):
        (score,) = await scorer.score([item("4")])
    assert (score.reward, len(judge.calls)) == (1.0, 3)


async def test_a_judge_that_hangs_or_is_away_costs_its_items_alone(tmp_path: Path) -> None:
    async with judged(lambda *_: "1", tmp_path, timeout_s=0.01, attempts=1) as (_, scorer):
        (late,) = await scorer.score([item("4")])
    assert late.error == (RewardErrorKind.TIMEOUT, "judge: no answer within 0.01 s")
    async with judged(lambda *_: "1", tmp_path, attempts=1) as (_, scorer):
        pass
    await scorer.start()
    (away,) = await scorer.score([item("4")])
    assert away.error_kind is RewardErrorKind.UNAVAILABLE
    await scorer.close()
    with pytest.raises(RewardError, match="not running"):
        await scorer.score([item("4")])


async def test_calls_are_bounded_at_once(tmp_path: Path) -> None:
    async with judged(lambda *_: "1", tmp_path, concurrency=2) as (judge, scorer):
        await scorer.score([item("4", number) for number in range(6)])
        assert judge.most_at_once == 2


async def test_calls_begin_evenly_where_they_are_bounded_per_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    clock = ManualClock(now=100.0)
    async with judged(lambda *_: "1", tmp_path, per_minute=120.0) as (judge, scorer):
        monkeypatch.setattr("paceline.reward.judge.scorer.time", clock)
        monkeypatch.setattr(scorer, "_wait", lambda seconds: pauses.append(seconds) or asyncio.sleep(0))
        await scorer.score([item("4", number) for number in range(4)])
        assert len(judge.calls) == 4
        assert pauses == [0.5, 1.0, 1.5]
        clock.advance(60.0)  # a time without calls is nothing to make up for
        await scorer.score([item("4", number) for number in range(3)])
    assert pauses[3:] == [0.5, 1.0]


async def test_the_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="takes its key from JUDGE_KEY, which is not set"):
        async with judged(lambda *_: "1", tmp_path, key_env="JUDGE_KEY"):
            pass
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    async with judged(lambda *_: "1", tmp_path, key_env="JUDGE_KEY") as (judge, scorer):
        await scorer.score([item("4")])
    assert "authorization: bearer s3cret" in judge.headers[0].lower()


async def test_what_comes_again_is_not_asked_again(tmp_path: Path) -> None:
    """Unless it failed; a configured judge is cached by what it sees, not by who the item is."""
    async with judged(lambda n, _: "none" if n == 1 else str(n), tmp_path, cache_size=2) as (judge, bare):
        tree = bare._config.model_dump()
        config = RewardConfig.model_validate({"judges": [tree]})
        (configured,) = JudgeScorer.configured(ScorerSettings(config=config))
        scorer = Shaped(configured)
        await scorer.start()
        try:
            (first,) = await scorer.score([item("a")])
            assert first.error_kind is RewardErrorKind.WRONG_TYPE
            again = await scorer.score([item("a"), item("a", 1), item("b", 2)])
            assert [score.trajectory_id for score in again] == ["t0", "t1", "t2"]
            assert again[0].reward == again[1].reward
            await scorer.score([item("a", 9), item("b", 8)])
            assert len(judge.calls) == 3
            await scorer.score([item("a", level="hard"), item("c")])  # another row; the oldest scores go
            assert len(judge.calls) == 5
            await scorer.score([item("b")])
            assert len(judge.calls) == 6
        finally:
            await scorer.close()
