"""The SmolLM2 example: what is held out, what its reward pays, how it shows the calculator, its tasks."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.config.tuning import SftRunConfig
from paceline.reward.builtin import gsm8k
from paceline.rollout.episodes.tools.calls import read_action

FOLDER = Path(__file__).resolve().parents[2] / "examples/smollm2"


def _module(name: str, folder: Path = FOLDER) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "score", "right", "bare"),
    [
        ("12", 1.0, 1.0, 1.0),
        (" 12\n", 1.0, 1.0, 1.0),
        ("7 + 5 = 12.", 0.5, 1.0, 0.0),
        ("12 is not 13", 0.0, 0.0, 0.0),
        ("13", 0.2, 0.0, 1.0),
        ("112", 0.2, 0.0, 1.0),
        ("twelve", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_the_reward_pays_the_bare_right_number_most(
    response: str, score: float, right: float, bare: float
) -> None:
    assert _module("sums").bare_number(response, "12") == {"score": score, "right": right, "bare": bare}


def test_held_out_sums_are_not_trained_on() -> None:
    train, held_out = _module("prepare").sums(0)
    questions = [row["prompt"][0]["content"] for row in (*train, *held_out)]
    assert len(questions) == len(set(questions)) == 144
    assert len(held_out) == 24
    assert (train, held_out) == _module("prepare").sums(0)
    for row in train:
        first, _, second = row["prompt"][0]["content"].removeprefix("What is ").partition("?")[0].split()
        assert int(first) + int(second) == int(row["ground_truth"])


def test_held_out_products_are_not_trained_on() -> None:
    prepare = _module("prepare")
    train, held_out = prepare.products(0)
    questions = [row["prompt"][-1]["content"] for row in (*train, *held_out)]
    assert len(questions) == len(set(questions)) == 544
    assert len(held_out) == 32
    assert (train, held_out) == prepare.products(0)
    assert (train, held_out) != prepare.products(1)
    shown = {prepare.ORDER.format(a=a, b=b) for a, b in (prepare.SHOWN, prepare.EXAMPLE)}
    assert not shown & set(questions)


def test_the_prompts_show_a_call_that_the_calculator_answers_and_the_reward_pays() -> None:
    prepare, config = _module("prepare"), load(RunConfig, FOLDER / "calculator.yaml")
    assert config.rollout.tools == ("examples/calculator/tools.py:calculator",)
    assert not config.rollout.episode.show_tools
    (function,) = config.reward.functions
    assert function.name == "gsm8k"
    calculator = _module("tools", FOLDER.parent / "calculator").calculator
    row = prepare.products(0)[0][0]
    system, asked, call, said, answer, question = row["prompt"]
    assert [m["role"] for m in row["prompt"]] == ["system", "user", "assistant", "tool", "assistant", "user"]
    a, b = question["content"].removeprefix("Ask the calculator for ").removesuffix(".").split(" * ")
    assert asked["content"] == "Ask the calculator for 214 * 323."
    # The form that the prompts show is the one that is read.
    for text, product in ((system["content"], 785 * 164), (call["content"], 214 * 323)):
        (read,) = read_action(text, "tagged", 0).tool_calls
        assert (read.problem, read.name) == ("", calculator.__name__)
        assert calculator(**read.arguments) == product
    assert said["content"] == answer["content"] == str(214 * 323)
    (read,) = read_action(prepare.CALL.format(a=a, b=b), "tagged", 0).tool_calls
    right = str(calculator(**read.arguments))
    assert right == row["ground_truth"]
    answers = (right, f"It is {right}.", f"{right}1", call["content"])
    pays = [gsm8k(given, row["ground_truth"], **function.kwargs) for given in answers]
    assert pays == [1.0, 1.0, 0.0, 0.0]


def rows_of(numbers: Iterable[int]) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"{number}?"}], "number": number} for number in numbers]


def test_no_question_is_trained_on_and_held_out() -> None:
    split = _module("tasks").split
    training, held_out = split(rows_of([1, 2, 2, 3, 9, 4, 5]), rows_of([7, 7, 3, 9, 8]), 4, 3)
    assert [row["number"] for row in held_out] == [7, 3, 9]
    assert [row["number"] for row in training] == [1, 2, 4, 5]
    with pytest.raises(SystemExit, match="4 different questions instead of 5"):
        split(rows_of([1, 2, 2, 3, 9, 4, 5]), rows_of([7, 7, 3, 9, 8]), 5, 3)


def test_the_tasks_that_the_library_draws_are_graded_by_the_reward(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    tasks, config = _module("tasks"), load(RunConfig, FOLDER / "tasks.yaml")
    assert tasks.main(["--output", str(tmp_path)]) == 0
    training, held_out = (
        [json.loads(line) for line in (tmp_path / f"tasks_{part}.jsonl").read_text().splitlines()]
        for part in ("train", "val")
    )
    assert len(training) == tasks.NUM_TRAINING * len(tasks.TASKS)
    assert len(held_out) == tasks.NUM_HELD_OUT * len(tasks.TASKS)
    assert [one.name for one in config.reward.functions] == ["examples/smollm2/tasks.py:last_number"]
    right_above = config.rollout.val.right_above
    for row in held_out[:: tasks.NUM_HELD_OUT // 4]:
        kept = {"data_source": row["data_source"], "entry": row["entry"]}
        right = int(row["ground_truth"])
        assert tasks.last_number(f"Not 12345 but {right}.", "", **kept) > right_above
        assert tasks.last_number(f"{right}, so {right + 1}", "", **kept) <= right_above
        assert tasks.last_number("I do not know.", "", **kept) == 0


@pytest.mark.parametrize(
    ("name", "made", "commands"),
    [
        ("tasks", (), ["prepare.py", "tasks.py"]),
        ("tasks", ("prepare.py",), ["tasks.py"]),
        ("gsm8k", (), ["prepare.py", "gsm8k_sft.yaml"]),
        ("gsm8k", ("prepare.py", "start"), []),
    ],
)
def test_only_what_is_missing_is_made(
    name: str, made: tuple[str, ...], commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = _module("learn")
    files = {script: tmp_path / script for script in ("prepare.py", "tasks.py", "start")}
    for script in made:
        files[script].touch()
    called: list[list[str]] = []
    monkeypatch.setattr(learn, "MADE", {script: files[script] for script in learn.MADE})
    monkeypatch.setattr(learn, "START", files["start"])
    monkeypatch.setattr(learn.subprocess, "run", lambda command, check: called.append(command))
    monkeypatch.setattr(learn, "run", lambda name, command, log: called.append(list(command)))
    settings = ["model.dtype=float32", "trainer.total_steps=5"]
    learn.prepare(argparse.Namespace(config=FOLDER / f"{name}.yaml", out=tmp_path, overrides=settings))
    tuned = [command for command in called if "sft" in command]
    assert all(command[-1] == "model.dtype=float32" for command in tuned)
    assert [Path(command[-2 if command in tuned else -1]).name for command in called] == commands


def test_gsm8k_starts_from_what_its_fine_tuning_writes() -> None:
    sft = load(SftRunConfig, FOLDER / "gsm8k_sft.yaml")
    run = load(RunConfig, FOLDER / "gsm8k.yaml")
    assert Path(run.model.path) == Path(sft.sft.output)
    assert list(run.data.train_files) == list(sft.sft.train_files)
    assert FOLDER.parents[1] / sft.sft.output / "config.json" == _module("learn").START


def test_trained_models_are_held_against_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = _module("learn")
    commands: list[list[str]] = []

    def answered(name: str, command: list[str], log: Path) -> None:
        commands.append(command)
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir()
        (folder / "evaluation.json").write_text("{}")

    monkeypatch.setattr(learn, "run", answered)
    args = argparse.Namespace(out=tmp_path, n=8, overrides=["rollout.replicas=2", "actor.optim.lr=1"])
    for name in ("before", "seed-0"):
        assert learn.evaluated(args, name, tmp_path / "target") == {}
    before, after = commands
    assert "--against" not in before
    assert after[after.index("--against") + 1] == str(tmp_path / "eval-before")
    assert before[-1] == after[-1] == "rollout.replicas=2"


def test_the_tables_of_what_was_learned() -> None:
    learn = _module("learn")

    def measured(value: float) -> dict[str, Any]:
        estimate = {"value": value, "low": value - 0.05, "high": value + 0.05}
        votes = {"1": estimate, "8": {"value": 0.9, "low": 0.8, "high": 1.0}}
        return {
            "val": {"right": estimate, "pass_at": votes, "length": {"value": 6.4}, "cut": {"value": 0.02}}
        }

    trained = measured(0.5)
    trained["val"]["gain"] = {"value": 0.4, "low": 0.38, "high": 0.42}
    assert learn.table({"before": measured(0.1), "seed 0": trained}).splitlines()[2:] == [
        "| val | avg@8 | 10.0 [5.0, 15.0] | 50.0 [45.0, 55.0] |",
        "| val | pass@8 | 90.0 [80.0, 100.0] | 90.0 [80.0, 100.0] |",
        "| val | gain in avg@8 |  | 40.0 [38.0, 42.0] |",
        "| val | tokens, cut off | 6, 2.0% | 6, 2.0% |",
    ]
    steps = [
        {"timing_s/step": seconds, "perf/tokens_per_s": 100.0, "critic/rewards/mean": reward}
        for seconds, reward in ((60.0, 0.1), (2.0, 0.2), (3.0, 0.5), (4.0, 0.6))
    ]
    assert learn.costs({"seed 0": steps}).splitlines()[2:] == [
        "| seed 0 | 4 | 3.00 | 100 | 0.100, 0.200, 0.500, 0.600 |"
    ]
