"""The SmolLM2 example: which prompts are held out, what its reward pays, and how it shows the calculator."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.config.load import load
from paceline.config.run import RunConfig
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
