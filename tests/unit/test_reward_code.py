"""Programs that a model wrote are scored by their tests, and harm nobody but their own item."""

from __future__ import annotations

import asyncio
import importlib
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from paceline.config.reward import CodeConfig
from paceline.core.errors import ConfigError, EnvironmentLackError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.reward.code import scorer as code_scorer
from paceline.reward.code.scorer import CodeScorer
from paceline.reward.code.tests import CodeTest, code_of
from paceline.service.confinement.confined import CommandResult, Ending, why_not_confined

PROBLEM = asyncio.run(why_not_confined())
confines = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


@pytest.fixture
async def scorer() -> AsyncIterator[CodeScorer]:
    scorer = CodeScorer(CodeConfig(name="tests", test_timeout_s=60.0))
    await scorer.start()
    yield scorer
    await scorer.close()


def item(response: str, ground_truth: str) -> ScoreItem:
    return ScoreItem(trajectory_id="t", prompt="", response=response, ground_truth=ground_truth)


CALLS = '{"calls": ["add(1, 2)", "add(-1, 1)"], "results": [3, 0]}'
PRINTS = '{"inputs": ["1 2\\n", "3 4"], "outputs": ["3", "7\\n"]}'
CHEATS = "import os\nprint(3, flush=True)\nos._exit(0)"


@confines
@pytest.mark.parametrize(
    ("response", "ground_truth", "reward", "passed"),
    [
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", CALLS, 1.0, 1.0),
        ("def add(a, b):\n    return 3", CALLS, 0.0, 0.5),
        (CHEATS, CALLS, 0.0, 0.5),
        ("a, b = map(int, input().split())\nprint(a + b)", PRINTS, 1.0, 1.0),
        ("print(3)", PRINTS, 0.0, 0.5),
        ("def add(", CALLS, 0.0, 0.0),
        (
            "First:\n```\nprint(3)\n```\nBetter:\n```python\nprint(sum(map(int, input().split())))\n```",
            PRINTS,
            1,
            1,
        ),
        ("print(sum(map(int, input().split())), flush=True)\nexit(1)", PRINTS, 0.0, 0.0),
    ],
)
async def test_a_program_is_scored_by_its_tests(
    scorer: CodeScorer, response: str, ground_truth: str, reward: float, passed: float
) -> None:
    (score,) = await scorer.score([item(response, ground_truth)])
    assert (score.reward, score.components) == (reward, {"tests": reward, "tests/passed": passed})


@confines
async def test_other_languages_and_ground_truths_that_hold_no_tests() -> None:
    scorer = CodeScorer(CodeConfig(name="tests", command=("/bin/sh", "{file}"), file="p.sh", weight=0.5))
    await scorer.start()
    scores = await scorer.score([item("read a b; echo $((a + b))", PRINTS), item("echo 1", "42")])
    assert scores[0].reward == 0.5
    assert scores[1].error is not None
    assert scores[1].error[0].value == "wrong_type"
    assert "the ground truth must be a JSON object" in scores[1].error[1]


@confines
@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(120)",
        "with open(1, 'w') as f:\n    f.write('3')\nprint(3)",
        "import os\nprint('[' * 100000, flush=True)\nos._exit(0)",
        "import os\nprint('9' * 100000, flush=True)\nos._exit(0)",
        "import os\nprint('{\"a\":' * 20000, flush=True)\nos._exit(0)",
        "import os\nos.write(1, bytes(range(256)))\nos._exit(0)",
    ],
)
async def test_no_program_ends_the_service(scorer: CodeScorer, program: str) -> None:
    """Each fails its test, like any other, and the next item has its reward."""
    asked = '{"calls": ["f()"], "results": [3]}'
    right = "def f():\n    return 3"
    scores = await scorer.score([item(program, asked), item(right, asked)])
    assert [(score.reward, score.error) for score in scores] == [(0.0, None), (1.0, None)]


@confines
async def test_hostile_programs_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what `benchmarks/hostile_programs.py` draws for the record."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    hostile_programs = importlib.import_module("hostile_programs")
    source = random.Random(4)
    drawn = [hostile_programs.draw(source) for _ in range(20)]
    record = await hostile_programs.score(drawn, seconds=8.0)
    assert record.wrong(drawn) == []
    assert len(record.endings) == 20
    assert {hostile.reward for hostile in drawn} == {0.0, 1.0, None}


@confines
async def test_an_items_error_is_its_own_whatever_its_class(
    scorer: CodeScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = code_scorer.run_confined
    faults: dict[str, BaseException] = {
        "lack": EnvironmentLackError("code cannot be confined"),
        "files": OSError(24, "Too many open files"),
        "depth": RecursionError("maximum recursion depth exceeded"),
        "memory": MemoryError(),
    }

    async def run(command: Any) -> CommandResult:
        (program,) = command.files.values()
        if program in faults:
            raise faults[program]
        return await kept(command)

    monkeypatch.setattr(code_scorer, "run_confined", run)
    scores = await scorer.score([item(word, PRINTS) for word in (*faults, "print(3)")])
    assert [score.error_kind for score in scores] == [
        RewardErrorKind.UNAVAILABLE,
        RewardErrorKind.UNAVAILABLE,
        RewardErrorKind.RAISED,
        RewardErrorKind.RAISED,
        None,
    ]
    assert scores[4].reward == 0.0
    faults["stop"] = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await scorer.score([item("stop", PRINTS)])


async def test_what_is_read_for_a_score_is_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ground truth, response and output may have megabytes, and heartbeats do not wait for them."""
    threads: dict[str, str] = {}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            threads[name] = threading.current_thread().name
            return function(*arguments)

        return call

    async def run(command: object) -> CommandResult:
        return CommandResult(ending=Ending.EXITED, code=0, stdout=b"3", stderr=b"")

    monkeypatch.setattr(code_scorer, "run_confined", run)
    monkeypatch.setattr(code_scorer, "tests_of", noted("ground truth", code_scorer.tests_of))
    monkeypatch.setattr(code_scorer, "code_of", noted("response", code_scorer.code_of))
    monkeypatch.setattr(CodeTest, "passes", noted("output", CodeTest.passes))
    monkeypatch.setattr(code_scorer, "why_not_confined", AsyncMock(return_value=""))
    scorer = CodeScorer(CodeConfig(name="tests"))
    await scorer.start()
    await scorer.score([item("print(3)", PRINTS)])
    assert sorted(threads) == ["ground truth", "output", "response"]
    assert threading.current_thread().name not in threads.values()


@confines
async def test_a_command_that_is_no_program_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"the command /usr/bin/missing /tmp/program.py cannot be started"):
        await CodeScorer(CodeConfig(name="tests", command=("/usr/bin/missing", "{file}"))).start()


async def test_a_machine_that_cannot_confine_refuses_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(command: object) -> CommandResult:
        raise EnvironmentLackError("code cannot be confined")

    monkeypatch.setattr("paceline.service.confinement.confined.run_confined", run)
    with pytest.raises(ConfigError, match="reward.code 'tests': code cannot be confined"):
        await CodeScorer(CodeConfig(name="tests")).start()


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("no fence", "no fence"),
        ("```\na\n```", "a\n"),
        ("```python \r\na\n```", "a\n"),
        ("x ```py\na\n``` y ```\nb\n```", "b\n"),
        ("````c++\na```", "a"),
        ("```two words\na\n```\nb\n```", "b\n"),
        ("```\na\n```\n```python\ncut off", "a\n"),
        ("``` ```\na```", "a"),
        ("```", "```"),
    ],
)
def test_the_last_fenced_block_is_the_program(response: str, code: str) -> None:
    assert code_of(response) == code


@pytest.mark.parametrize("part", ["`", "```", "``` ", "```\n", "```x y\n", " ", "\n", "```" + " " * 9 + "x "])
def test_a_response_is_read_in_linear_time(part: str) -> None:
    """In quadratic time, 4 MB would take hours, and this test's own limit would end it."""
    response = "```py\nfirst```" + part * (4_000_000 // len(part)) + " x y\n"
    assert code_of(response) in response


@pytest.mark.parametrize("stdout", ["[" * 100_000, '{"a":' * 100_000, "1" * 100_000, "\ud800", ""])
def test_output_that_is_no_result_fails_its_test(stdout: str) -> None:
    assert CodeTest(stdin="", expected=1, is_json=True).passes(stdout) is False
